"""A judge that is known: a server of chat completions with planted opinions, biases and faults."""

import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_ANSWER = re.compile(r"<answer ([A-Z])>\n(.*?)\n</answer \1>", re.DOTALL)
_GRADED = re.compile(r"<answer>\n(.*?)\n</answer>", re.DOTALL)
_CRITERION = re.compile(
    r"^(\d+)\. holds if it has (\w+)(?: \d+ times)? \(0 (?:or|to) (\d+)\)$", re.M
)


@dataclass
class PlantedJudge:
    """Ranks answers by the number that they end with, and counts the words that criteria name.

    A criterion has to read "holds if it has WORD", with "N times" where it has N points.

    Args:
        prefers_first: probability with which it gives the first answer the first place, and all
            others the second; drawn from the question, so equal questions get equal answers.
        prose: answer without numbers.
        structured: know ``response_format``; False: refuse it with status 400.
        gone_after: number of requests after which it breaks all connections.
    """

    prefers_first: float = 0.0
    prose: bool = False
    structured: bool = True
    gone_after: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def answer(self, body: dict[str, Any]) -> str:
        """Return what it says to a request."""
        question = body["messages"][0]["content"]
        if self.prose:
            return "They are all quite good."
        if ranked := dict(_ANSWER.findall(question)):
            found = self._places(question, ranked)
        else:
            said = _GRADED.findall(question)[0].split()
            found = {
                number: min(said.count(word), int(most))
                for number, word, most in _CRITERION.findall(question)
            }
        told = json.dumps(found)
        return (
            told if "response_format" in body else f"It is {{so}}. I think:\n```json\n{told}\n```"
        )

    def _places(self, question: str, ranked: dict[str, str]) -> dict[str, int]:
        if random.Random(question).random() < self.prefers_first:
            return {label: 1 + (place > 0) for place, label in enumerate(ranked)}
        quality = {label: int(text.split()[-1]) for label, text in ranked.items()}
        return {
            label: 1 + sum(other > mine for other in quality.values())
            for label, mine in quality.items()
        }


@contextmanager
def judging(judge: PlantedJudge) -> Iterator[PlantedJudge]:
    """Serve a judge's answers on this machine, in the block; its ``url`` is where."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                judge.bodies.append(body)
                gone = judge.gone_after is not None and len(judge.bodies) > judge.gone_after
            if gone:
                self.close_connection = True
                return
            refused = "response_format" in body and not judge.structured
            choice = {"message": {"role": "assistant", "content": judge.answer(body)}}
            said = {"error": "unknown field"} if refused else {"choices": [choice]}
            text = json.dumps(said).encode()
            self.send_response(400 if refused else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
