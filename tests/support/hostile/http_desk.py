"""Talk, byte by byte, to an AgentServer with a real engine on the loopback."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from lightning_rl import Prompt, Rollout, Sampling, TransformersEngine
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.serving import AgentServer, RequestLimits, Session
from recipes.sort_digits.prepare import EOS, PAD, make_model, make_tokenizer
from tests.support.hostile.call import Call

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ eos_token }}"
CHAT, TEXT, CLAUDE = "/v1/chat/completions", "/v1/completions", "/v1/messages"
SERVED = "and then it serves: 200"
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "2 + 3?"}], "max_tokens": 2}
_ANSWER_S = 50.0


@dataclass
class Desk:
    """A session, and the server that it is of."""

    server: AgentServer
    session: Session

    def head(self, path: str = CHAT, method: str = "POST", **headers: str) -> bytes:
        """Return a request's first lines, with the session's key; ``x_a`` is the header ``x-a``."""
        given = {"host": "here", "authorization": f"Bearer {self.session.api_key}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in given.items())]
        return "\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1")

    async def send(self, sent: bytes) -> str:
        """Return what comes back until the server closes: status and body."""
        host, port = self.server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(sent)
            async with asyncio.timeout(_ANSWER_S):
                said = await reader.read()
        finally:
            writer.close()
        head, _, body = said.decode().partition("\r\n\r\n")
        return f"{head.partition(' ')[2].partition(' ')[0]} {body}"

    async def post(self, body: Any, path: str = CHAT, **headers: str) -> str:
        """Post a body: bytes or text as they are, else as JSON."""
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        content = content.encode() if isinstance(content, str) else content
        return await self.send(
            self.head(path, content_length=str(len(content)), **headers) + content
        )


Said = Callable[[Desk], Awaitable[str]]


def http_call(
    name: str, say: Said, *says: str, right: bool = False, limits: RequestLimits | None = None
) -> Call:
    """Say something to the server, tell the answer, and ask a good question."""

    def play(folder: Path) -> None:
        answer = asyncio.run(_played(folder, say, limits or RequestLimits()))
        sys.exit(0 if answer.startswith("200") else 1)

    return Call(name, play, (*says, SERVED), right=right)


async def _played(folder: Path, say: Said, limits: RequestLimits) -> str:
    policy, engine = _engine(folder)
    server = AgentServer(policy.tokenizer, limits=limits)
    rollout = Rollout(Prompt("p", "?", [5]), "g", 0, seed=1)
    try:
        async with server.session(rollout, engine, Sampling(max_tokens=8)) as session:
            desk = Desk(server, session)
            answer = await say(desk)
            print(answer[:3000])
            if (await desk.post(GOOD)).startswith("200 {"):
                print(SERVED)
    finally:
        await server.close()
        engine.close()
    return answer


def _engine(folder: Path) -> tuple[Policy, TransformersEngine]:
    """Make a policy and engine of a small model that reads and writes bytes."""
    tokenizer = make_tokenizer([PAD, EOS, *bytes_to_unicode().values()])
    tokenizer.chat_template = TEMPLATE
    model = make_model(vocab_size=512)
    model.config.max_position_embeddings = 1024
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    policy, engine = Policy(str(folder / "model")), TransformersEngine()
    save_skeleton(policy.model, folder / "skeleton")
    engine.start(folder / "skeleton")
    engine.load_weights(policy.named_weights(), version=0)
    return policy, engine
