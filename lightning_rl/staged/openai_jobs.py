"""OpenAIFineTuning: jobs of OpenAI's fine-tuning API, or of a server that speaks it."""

import json
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.rewards.openai_api import OPENAI_URL, APIRefusal, PatientAPI
from lightning_rl.rewards.remote import ServerError
from lightning_rl.staged.jobs import FineTuneJobs, JobReport, JobRequest, JobStatus

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


@configurable
class OpenAIFineTuning(FineTuneJobs):
    """Uploads rows and creates jobs, each with a suffix of its own, by which it is found again.

    Requests that fail in a way that may pass (too many, a server's error, a broken connection) are
    made again, after the wait that the server asks for. Before a job is asked for again, it is
    looked for: the connection may have broken after it was created.

    Args:
        base_url: up to and with ``/v1``.
        api_key_env: name of the environment variable that holds the key, which is read when asking
            and stored nowhere; None: no key.
        hyperparameters: of every job, such as ``n_epochs``; None: the server's choice.
        retries: attempts after the first, of each request.
        timeout_s: seconds per attempt.
        first_wait_s: seconds before the first retry, at most; each next wait is twice as long.

    Raises:
        ConfigError: for values out of range.
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
                self._body(request, uploaded[0]),
                headers={"Idempotency-Key": request.key},
            )
            return str(_field(created, "id"))

        return await self.api.retried(attempt)

    async def report(self, job: str) -> JobReport:
        told = await self.api.retried(lambda: self.api.get(f"/fine_tuning/jobs/{job}"))
        status = _STATUSES.get(_field(told, "status"))
        if status is None:
            raise APIRefusal(
                f"fine-tune job {job} is {told['status']!r}, none of {', '.join(_STATUSES)}; look "
                "at it where it was made"
            )
        error = ""
        if status is JobStatus.FAILED:
            error = str((told.get("error") or {}).get("message") or await self._last_event(job))
        return JobReport(status, told.get("fine_tuned_model"), error)

    async def cancel(self, job: str) -> None:
        try:
            await self.api.retried(lambda: self.api.post(f"/fine_tuning/jobs/{job}/cancel"))
        except APIRefusal:  # it has come to an end meanwhile, or there is something else the matter
            if not (await self.report(job)).status.over:
                raise

    # ---------------------------------------------------------------- requests

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
        form.add_field("file", text.encode(), filename=f"{request.key}.jsonl")
        return str(_field(await self.api.call("POST", "/files", data=form), "id"))

    async def _find(self, key: str) -> str | None:
        """The id of the job that was created with this key."""
        query = {"limit": "100", f"metadata[{_TAG}]": key}
        while True:
            page = await self.api.get("/fine_tuning/jobs", **query)
            jobs = _field(page, "data")
            for job in jobs:  # a server may not know how to filter
                named = (job.get("metadata") or {}).get(_TAG), job.get("user_provided_suffix")
                if key in named:
                    return str(job["id"])
            if not jobs or not page.get("has_more"):
                return None
            query["after"] = jobs[-1]["id"]

    async def _last_event(self, job: str) -> str:
        """The newest of what a job had to say of itself."""
        events = await self.api.retried(
            lambda: self.api.get(f"/fine_tuning/jobs/{job}/events", limit="1")
        )
        told = events.get("data") or [{}]
        return str(told[0].get("message") or "it does not say why")


def _field(answer: Any, name: str) -> Any:
    if not isinstance(answer, dict) or name not in answer:
        raise ServerError(f"a fine-tuning server's answer has no {name!r}: {answer!r:.200}")
    return answer[name]
