"""OpenAIFineTuning: jobs of OpenAI's fine-tuning API, or of a server with the same API."""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_rl.config.arguments import configurable
from lightning_rl.config.schema import one_line
from lightning_rl.games.staged.jobs import FineTuneJobs, JobReport, JobRequest, JobStatus
from lightning_rl.rewards.openai_api import OPENAI_URL, APIRefusal, PatientAPI
from lightning_rl.run.retry import ServerError

_TAG = "lightning_rl"
"""The field of a job's metadata that holds its key."""
_STATUSES = {
    "validating_files": JobStatus.PENDING,
    "queued": JobStatus.PENDING,
    "paused": JobStatus.PENDING,
    "running": JobStatus.RUNNING,
    "succeeded": JobStatus.SUCCEEDED,
    "failed": JobStatus.FAILED,
    "cancelled": JobStatus.CANCELLED,
}
_MOST_PAGES = 200
"""The most pages of a job list that are read, in case a server's list never ends."""


@dataclass(frozen=True)
class _File:
    id: str
    called: ClassVar[str] = "file"


@dataclass(frozen=True)
class _Fault:
    message: str | None = None


@dataclass(frozen=True)
class _Job:
    id: str
    status: str = ""
    fine_tuned_model: str | None = None
    error: _Fault | None = None
    user_provided_suffix: str | None = None
    metadata: dict[str, Any] | None = None
    called: ClassVar[str] = "fine-tuning job"


@dataclass(frozen=True)
class _Jobs:
    data: list[_Job]
    has_more: bool = False
    called: ClassVar[str] = "list of fine-tuning jobs"


@dataclass(frozen=True)
class _Events:
    data: list[_Fault] = field(default_factory=list)
    called: ClassVar[str] = "list of events"


@configurable
class OpenAIFineTuning(FineTuneJobs):
    """Uploads rows and creates jobs, each with a unique suffix, by which it is found again.

    Requests that fail for a passing reason (too many requests, a server's error, a broken
    connection) are repeated after the wait that the server asks for. Before a creation is repeated,
    the job is looked for, as the connection may have broken after it was created.

    Args:
        base_url: the address up to and including ``/v1``.
        api_key_env: name of the environment variable that holds the key, which is read for each
            request and stored nowhere; None: no key.
        hyperparameters: of every job, such as ``n_epochs``; None: the server's choice.
        retries: attempts after the first, for each request.
        timeout_s: seconds per attempt.
        first_wait_s: seconds before the first retry, at most; each further wait is twice as long.

    Raises:
        ConfigError: if a value is out of range.
    """

    def __init__(
        self,
        base_url: str = OPENAI_URL,
        api_key_env: str | None = "OPENAI_API_KEY",
        hyperparameters: dict[str, Any] | None = None,
        retries: int = 8,
        timeout_s: float = 120.0,
        first_wait_s: float = 1.0,
    ) -> None:
        self.api = PatientAPI(base_url, api_key_env, retries, timeout_s, first_wait_s)
        self.hyperparameters = hyperparameters or {}

    async def create(self, request: JobRequest) -> str:
        uploaded: list[str] = []

        async def attempt() -> str:
            if (known := await self._find(request.key)) is not None:
                return known
            if not uploaded:
                uploaded.append(await self._upload(request))
            created = await self.api.post(
                "/fine_tuning/jobs",
                _Job,
                self._body(request, uploaded[0]),
                headers={"Idempotency-Key": request.key},
            )
            return created.id

        return await self.api.retried(attempt)

    async def report(self, job: str) -> JobReport:
        answer = await self.api.retried(lambda: self._look(job))
        status = _STATUSES.get(answer.status)
        if status is None:
            raise APIRefusal(
                f"fine-tuning job {job} has the unknown status {one_line(answer.status, 60)!r}, "
                f"none of {', '.join(_STATUSES)}; check it on the server"
            )
        error = ""
        if status is JobStatus.FAILED:
            why = answer.error.message if answer.error else None
            error = one_line(why or await self._last_event(job))
        # A job that did not succeed may name a model of a step on its way.
        return JobReport(
            status, answer.fine_tuned_model if answer.status == "succeeded" else None, error
        )

    async def cancel(self, job: str) -> None:
        try:
            await self.api.retried(lambda: self.api.post(f"/fine_tuning/jobs/{job}/cancel", _Job))
        except APIRefusal:  # it has come to an end meanwhile, or there is something else the matter
            if not (await self.report(job)).status.over:
                raise

    # ---------------------------------------------------------------- requests

    async def _look(self, job: str) -> _Job:
        answer = await self.api.get(f"/fine_tuning/jobs/{job}", _Job)
        if answer.status == "succeeded" and not answer.fine_tuned_model:
            raise ServerError(
                f"{self.api.base_url}: fine-tuning job {job} succeeded, but the server reports no "
                "model (fine_tuned_model)"
            )
        return answer

    def _body(self, request: JobRequest, file: str) -> dict[str, Any]:
        method = request.training.method
        settings = {"hyperparameters": self.hyperparameters} if self.hyperparameters else {}
        return {
            "model": request.model,
            "training_file": file,
            "suffix": request.key,
            "metadata": {_TAG: request.key},
            "seed": request.seed % 2**31,
            "method": {"type": method, method: settings},
        }

    async def _upload(self, request: JobRequest) -> str:
        import aiohttp

        lines = (json.dumps(row, ensure_ascii=False) for row in request.training.openai_rows())
        form = aiohttp.FormData()
        form.add_field("purpose", "fine-tune")
        text = "".join(f"{line}\n" for line in lines)
        # JSON's own escape for half a character, which UTF-8 cannot hold.
        content = text.encode("utf-8", "backslashreplace")
        form.add_field("file", content, filename=f"{request.key}.jsonl")
        return (await self.api.call("POST", "/files", _File, data=form)).id

    async def _find(self, key: str) -> str | None:
        """Return the id of the job that was created with this key; None if there is none."""
        query = {"limit": "100", f"metadata[{_TAG}]": key}
        for _ in range(_MOST_PAGES):
            page = await self.api.get("/fine_tuning/jobs", _Jobs, **query)
            for job in page.data:  # a server may not know how to filter
                if key in ((job.metadata or {}).get(_TAG), job.user_provided_suffix):
                    return job.id
            if not page.data or not page.has_more:
                return None
            last = page.data[-1].id
            if query.get("after") == last:
                break
            query["after"] = last
        raise APIRefusal(
            f"{self.api.base_url} returns an endless list of fine-tuning jobs (has_more on every "
            f"page), so it is unknown whether {key} was created already; no job was created"
        )

    async def _last_event(self, job: str) -> str:
        """Return the message of a job's latest event."""
        answer = await self.api.retried(
            lambda: self.api.get(f"/fine_tuning/jobs/{job}/events", _Events, limit="1")
        )
        return (answer.data[0].message if answer.data else None) or "the server gave no reason"
