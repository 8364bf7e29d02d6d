"""A staged run about even numbers, against an API on the loopback that behaves as one says."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lightning_rl import IterablePrompts, LLMJudge
from lightning_rl.extend import OpenAIJudge
from lightning_rl.games import (
    ChatGroup,
    ExpertIteration,
    Instructions,
    LocalJobs,
    Nip,
    OpenAIChat,
    OpenAIFineTuning,
    StagedTrainer,
    TextScenario,
)
from tests.support.serving import Quiet

CHATS, FILES, JOBS, JOB = "chats", "files", "jobs", "job"
Answer = Callable[[BaseHTTPRequestHandler], object]
"""Answers a request in its own way."""


def body(text: str, status: int = 200, **headers: str) -> Answer:
    """Return an answer with these headers and this text."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        data = text.encode("utf-8", "surrogatepass")
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def raw(data: bytes) -> Answer:
    """Send bytes, and end the connection."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(data)
        handler.close_connection = True

    return answer


def drip(handler: BaseHTTPRequestHandler) -> None:
    """Answer a byte at a time, and never end."""
    handler.send_response(200)
    handler.end_headers()
    gone = threading.Event()
    while not gone.wait(0.05):
        try:
            handler.wfile.write(b" ")
        except OSError:
            return


def flood(handler: BaseHTTPRequestHandler) -> None:
    """Answer without end."""
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b" " * 2**20)
    except OSError:
        return


def reset(handler: BaseHTTPRequestHandler) -> None:
    """Reset the connection."""
    linger = b"\1\0\0\0\0\0\0\0"
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.connection.close()


class API(ThreadingHTTPServer):
    """Does as documented, but where ``otherwise`` says how it answers a kind of request."""

    daemon_threads = True

    def __init__(self, otherwise: dict[str, Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.otherwise = otherwise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that are gone."""


class _Handler(Quiet):
    server: API

    def do_GET(self) -> None:
        kind = JOBS if "/jobs?" in self.path else JOB
        empty = {"data": [], "has_more": False}
        done = {"id": "job-1", "status": "succeeded", "fine_tuned_model": "ft:gpt"}
        self._answer(kind, empty if kind == JOBS else done)

    def do_POST(self) -> None:
        asked = self.body()
        if self.path.endswith("/chat/completions"):
            text = "accept" if b"accept or reject" in asked else "It is."
            said = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
            self._answer(CHATS, said)
        elif self.path.endswith("/files"):
            self._answer(FILES, {"id": "file-1"})
        else:
            self._answer("create", {"id": "job-1", "status": "queued"})

    def _answer(self, kind: str, usual: Any) -> None:
        self.server.otherwise.get(kind, body(json.dumps(usual)))(self)


@contextmanager
def serving(otherwise: dict[str, Answer]) -> Iterator[API]:
    """Serve the API in a thread of its own."""
    api = API(otherwise)
    threading.Thread(target=api.serve_forever, daemon=True).start()
    try:
        yield api
    finally:
        api.shutdown()
        api.server_close()


def trainer(url: str, **options: Any) -> StagedTrainer:
    """Make a trainer of one iteration about four numbers, in ``run``."""
    api: dict[str, Any] = {
        "base_url": url,
        "api_key_env": None,
        "retries": 1,
        "first_wait_s": 0,
        "timeout_s": 2,
    }
    prompts = {
        "prover": Instructions("Is {number} even? Yes."),
        "verifier": Instructions("Is {number} even? accept or reject"),
    }
    rows = [{"number": n, "label": 1} for n in range(4)]
    jobs = OpenAIFineTuning(**api)
    given: dict[str, Any] = {
        "run_dir": "run",
        "protocol": Nip(2),
        "scenario": TextScenario(prompts),
        "train": IterablePrompts(rows),
        "groups": {"all": ChatGroup(["prover", "verifier"], "gpt", OpenAIChat(**api), jobs)},
        "algorithm": ExpertIteration(),
        "test": IterablePrompts(rows),
        "min_rows": 2,
        "poll_s": 0,
        "seed": 1,
    }
    return StagedTrainer(**(given | options))


def against(otherwise: dict[str, Answer], **options: Any) -> Callable[[Path], None]:
    """Run against an API that answers some requests otherwise."""

    def play(folder: Path) -> None:
        with serving(otherwise) as api:
            state = trainer(api.url, **options).fit()
            print("models", state.groups["all"].models)

    return play


def again(otherwise: dict[str, Answer]) -> Callable[[Path], None]:
    """Go on with a run after an outage, against an API that does as documented."""

    def play(folder: Path) -> None:
        try:
            against(otherwise)(folder)
        except Exception as error:
            print(f"first: {type(error).__name__}")
        against({})(folder)

    return play


def damaged(name: str, change: Callable[[str], str], **options: Any) -> Callable[[Path], None]:
    """Finish a run, change one of its files, and go on with it."""

    def play(folder: Path) -> None:
        against({})(folder)
        path = folder / "run" / name
        path.write_text(change(path.read_text()))
        against({}, iterations=2, **options)(folder)

    return play


def put(key: str, value: Any) -> Callable[[str], str]:
    """Put another value at a key of a JSON file."""
    return lambda text: json.dumps(json.loads(text) | {key: value})


def judged(otherwise: dict[str, Answer]) -> Callable[[Path], None]:
    """Grade an answer by a judge of the API, and print what came of it."""

    def play(folder: Path) -> None:
        with serving(otherwise) as api:
            judge = LLMJudge(OpenAIJudge(api.url, "gpt"), retries=1, first_wait_s=0, timeout_s=2)
            [score] = asyncio.run(judge(prompts=["2 + 2?"], completions=["4"]))
            print(type(score).__name__, getattr(score, "reason", score))

    return play


def local(folder: Path) -> LocalJobs:
    """Return local jobs in the folder, with one that has its configuration and nothing else."""
    jobs = LocalJobs()
    jobs.open(folder)
    (folder / "jobs" / "one").mkdir(parents=True)
    (folder / "jobs" / "one" / "config.yaml").write_text("{}")
    return jobs
