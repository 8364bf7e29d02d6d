"""A server that speaks OpenAI's API as documented: files, fine-tuning jobs, chats; and fails."""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from email.parser import BytesParser
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.serving import Quiet

Record = dict[str, Any]
FIELDS = {"model", "training_file", "suffix", "metadata", "seed", "method"}


def answer_of(model: str, messages: list[Record], seed: int) -> str:
    """Answer as a model does; a verifier that was fine-tuned knows, one that was not guesses."""
    asked = messages[0]["content"]
    if asked.startswith("Prove"):
        return f"claim {seed % 7}"
    knows = model.startswith("ft:") or seed % 2 == 0
    return "accept" if ("is even" in asked) == knows else "reject"


class raw(bytes):
    """A fault: these bytes instead of an answer, and the end of the connection."""


def said(body: str) -> raw:
    """Answer with this body, as a fault."""
    data = body.encode("utf-8", "surrogatepass")
    return raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))


class OpenAIServer(ThreadingHTTPServer):
    """Jobs go one status on with each look at them.

    ``faults`` maps a method and a path's beginning (``POST /v1/fine_tuning/jobs``) to what befalls
    the next requests, one each: a status, a status with the headers, ``drop`` (the connection
    breaks before anything is done), ``lose`` (the same, after it was done), ``hang`` (no answer
    until the server is closed), or what :func:`raw` and :func:`said` make. ``fates`` maps what a
    job's suffix ends with to the statuses that it goes through.
    """

    daemon_threads = True

    def __init__(self, page: int = 100, filters: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.page, self.filters = page, filters
        self.files: dict[str, list[Record]] = {}
        self.jobs: dict[str, Record] = {}
        self.chats: list[Record] = []
        self.faults: dict[str, Iterator[Any]] = {}
        self.closing = threading.Event()
        self.fates: dict[str, list[str]] = {}
        self.requests: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.created = 0

    @property
    def url(self) -> str:
        """Up to and with ``/v1``."""
        return f"http://127.0.0.1:{self.server_port}/v1"

    def fail(self, request: str, *faults: Any) -> None:
        """Let the next requests of this kind fail."""
        self.faults[request] = iter(faults)

    def server_close(self) -> None:
        self.closing.set()
        super().server_close()

    def bought(self) -> list[str]:
        """Return the suffixes of all jobs, in the order of their creation."""
        return [job["user_provided_suffix"] for job in self.jobs.values()]

    # ---------------------------------------------------------------- what is asked for

    def done(
        self, method: str, path: str, query: dict[str, str], body: bytes, kind: str
    ) -> Record | int:
        """Do what is asked for; the answer, or a status that says why not."""
        parts = path.removeprefix("/v1/").split("/")
        if parts == ["files"]:
            return self.upload(body, kind)
        if parts == ["chat", "completions"]:
            return self.chat(json.loads(body))
        if parts == ["fine_tuning", "jobs"]:
            return self.create(json.loads(body)) if method == "POST" else self.list(query)
        if parts[:2] != ["fine_tuning", "jobs"] or parts[2] not in self.jobs:
            return 404
        if parts[3:] == ["cancel"]:
            return self.cancel(parts[2])
        if parts[3:] == ["events"]:
            return {"data": [{"message": "the newest event"}]}
        return self.look(parts[2])

    def upload(self, body: bytes, kind: str) -> Record:
        """Answer ``POST /v1/files``: a form of a purpose and a file."""
        message = BytesParser().parsebytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body)
        parts = {
            re.search(r'name="(\w+)"', str(part["Content-Disposition"]))[1]: part.get_payload(
                decode=True
            )
            for part in message.get_payload()
        }
        assert parts["purpose"] == b"fine-tune"
        name = f"file-{len(self.files) + 1}"
        self.files[name] = [json.loads(line) for line in parts["file"].splitlines()]
        return {"id": name, "object": "file", "purpose": "fine-tune", "status": "processed"}

    def create(self, body: Record) -> Record:
        """Answer ``POST /v1/fine_tuning/jobs``."""
        assert body.keys() == FIELDS
        assert len(body["suffix"]) <= 64
        rows = self.files[body["training_file"]]
        self.created += 1
        name = f"ftjob-{self.created}"
        fate = next((f for end, f in self.fates.items() if body["suffix"].endswith(end)), None)
        self.jobs[name] = {
            "id": name,
            "object": "fine_tuning.job",
            "model": body["model"],
            "user_provided_suffix": body["suffix"],
            "metadata": body["metadata"],
            "method": body["method"],
            "training_file": body["training_file"],
            "fine_tuned_model": None,
            "error": None,
            "status": "validating_files",
            "to_come": fate or ["queued", "running", "succeeded"],
            "rows": len(rows),
        }
        return self.jobs[name]

    def look(self, name: str) -> Record:
        """Answer ``GET /v1/fine_tuning/jobs/NAME``."""
        job = self.jobs[name]
        if job["to_come"]:
            job["status"], *job["to_come"] = job["to_come"]
        if job["status"] == "succeeded":
            job["fine_tuned_model"] = f"ft:{job['model'].split(':')[-1]}+"
        if job["status"] == "failed":
            job["error"] = {"code": "invalid_training_file", "message": "bad row 3", "param": None}
        return job

    def list(self, query: dict[str, str]) -> Record:
        """Answer ``GET /v1/fine_tuning/jobs``, newest first."""
        jobs = [*reversed(self.jobs.values())]
        wanted = {k[9:-1]: v for k, v in query.items() if k.startswith("metadata[")}
        if self.filters:
            jobs = [job for job in jobs if wanted.items() <= job["metadata"].items()]
        if after := query.get("after"):
            jobs = jobs[[job["id"] for job in jobs].index(after) + 1 :]
        return {"object": "list", "data": jobs[: self.page], "has_more": len(jobs) > self.page}

    def cancel(self, name: str) -> Record | int:
        """Answer ``POST /v1/fine_tuning/jobs/NAME/cancel``."""
        job = self.jobs[name]
        if job["status"] in ("succeeded", "failed", "cancelled"):
            return 400
        job["status"], job["to_come"] = "cancelled", []
        return job

    def chat(self, body: Record) -> Record:
        """Answer ``POST /v1/chat/completions``."""
        self.chats.append(body)
        text = answer_of(body["model"], body["messages"], body["seed"])
        message = {"role": "assistant", "content": text}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


class _Handler(Quiet):
    server: OpenAIServer

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        body = self.body()
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        place = urlsplit(self.path)
        with self.server.lock:
            self.server.requests[f"{method} {place.path}"] += 1
            asked = f"{method} {place.path}"
            found = [f for begin, f in self.server.faults.items() if asked.startswith(begin)]
            fault = next((one for faults in found for one in faults), None)
            if fault == "drop" or isinstance(fault, raw):
                self.close_connection = True
                self.wfile.write(fault if isinstance(fault, raw) else b"")
                return
            answer = self._fault(fault) if fault not in (None, "lose", "hang") else None
            if answer is None and fault != "hang":
                query = {name: values[0] for name, values in parse_qs(place.query).items()}
                kind = self.headers["Content-Type"] or ""
                done = self.server.done(method, place.path, query, body, kind)
                answer = (done, {}, {}) if isinstance(done, int) else (200, done, {})
        if fault == "hang":
            self.server.closing.wait()
        if fault in ("lose", "hang"):
            self.close_connection = True
            return
        status, said, headers = answer
        self.send(status, json.dumps(said).encode(), **headers)

    def _fault(self, fault: Any) -> tuple[int, Record, dict[str, str]]:
        status, headers = fault if isinstance(fault, tuple) else (fault, {})
        return status, {"error": {"message": f"no: {status}"}}, headers

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body
