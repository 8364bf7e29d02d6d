"""Chat templates sent by clients: untrusted programs, rendered in processes with limits."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.templates import TurnTemplate
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Message
from lightning_rl.serving.limits import RequestLimits
from lightning_rl.serving.programs import Launcher, ProgramRequest
from lightning_rl.serving.variables import passed_on

_RENDER = str(Path(__file__).with_name("render_template.py"))
_MEMORY_BYTES = 2**30


class RendererApart:
    """Renders each chat in a separate process, forked from one with the imports already made.

    Args:
        limits: limits of a request; ``max_bytes`` also limits the rendered text.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop that watches the processes; :meth:`render` must not be called from it."""
        self._launcher: Launcher | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Return a chat's text; call it from outside the loop.

        Raises:
            ConfigError: if the template fails, or breaks a limit.
        """
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(
            self._render(template, variables), self.loop
        ).result()

    async def _render(self, template: str, variables: Mapping[str, Any]) -> str:
        if self._launcher is None:
            modules = ["transformers.utils.chat_template_utils"]
            self._launcher = Launcher(modules, sys.executable, passed_on([]))
        request = ProgramRequest(env={}, script=_RENDER, memory_bytes=_MEMORY_BYTES)
        stdin = json.dumps({"template": template, "variables": variables}).encode()
        seconds, most = self.limits.max_seconds, self.limits.max_bytes
        try:
            async with (
                self._launcher.running(request, stdin, most) as program,
                asyncio.timeout(seconds),
            ):
                ending = await program.wait()
        except TimeoutError as error:
            raise ConfigError(
                f"chat_template took more than {seconds:g} s to render; use the model's, or raise "
                "limits.max_seconds"
            ) from error
        if ending.kind == "output":
            raise ConfigError(
                f"chat_template rendered more than {most} bytes; use the model's, or raise "
                "limits.max_bytes"
            )
        if ending.kind != "done":
            raise ConfigError(f"chat_template {ending.reason}")
        return program.stdout.decode()

    def close(self) -> None:
        """End the process from which renderers are forked; it starts again when needed."""
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None


class UntrustedTemplate(TurnTemplate):
    """A :class:`TurnTemplate` from a client.

    Args:
        tokenizer: as for :class:`TurnTemplate`.
        chat_options: as for :class:`TurnTemplate`.
        template: used instead of the tokenizer's.
        apart: renders the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_options: Mapping[str, Any],
        template: str,
        apart: RendererApart,
    ) -> None:
        super().__init__(tokenizer, chat_options)
        self._template = template
        self._apart = apart

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        given = {
            **self.tokenizer.special_tokens_map,
            **self.chat_options,
            **options,
            "conversations": [list(messages)],
            "add_generation_prompt": True,
        }
        return self._apart.render(self._template, given)
