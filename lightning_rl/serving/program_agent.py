"""ProgramAgent: any command as an agent; ScriptAgent: a Python script whose imports are shared."""

import asyncio
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.base import within
from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.rollout import Rollout
from lightning_rl.serving.agent import SessionAgent
from lightning_rl.serving.programs import Launcher, ProgramRequest
from lightning_rl.serving.results import Ending, last_result
from lightning_rl.serving.session import Session
from lightning_rl.serving.variables import NO_PROXY, passed_on, require_set
from lightning_rl.vision.messages import as_sent


@configurable
class ProgramAgent(SessionAgent):
    """Runs a command for each rollout, which calls its models at an endpoint on this machine.

    The program finds the endpoint in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, or
    ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``, and gets its task as JSON on standard input
    (``/dev/stdin`` if it needs a file): ``{"id": ..., "prompt": ..., "columns": {...}, "seed":
    ...}``, with pictures in the prompt as ``data:`` URLs. The tokens of its calls are recorded
    exactly. Its result is the last line of its output that is a JSON object with a ``reward``,
    ``role_rewards``, ``call_rewards``, ``metrics`` or ``answer``; see docs/agents.md.
    ``rollout.completion`` becomes the transcript of its calls.

    ``finish_reason`` is the last call's, or ``max_seconds``: then the last result so far counts,
    or a reward of 0 if there is none. If the program exits with a status other than 0, prints too
    much, asks no model, or returns an invalid result, its rollout is FAILED with the reason.
    ``rollout.extra["agent_end"]`` is its ending; ``agent/*_share`` are the shares of endings.

    The program, and everything it started, ends with its rollout. An interrupted program runs again
    from the start, and gets the same completions again.

    Args:
        command: program and arguments; a string is run by ``/bin/sh``.
        env: environment variables to set.
        pass_env: names of variables to pass on from the trainer's environment; the program
            otherwise gets only ``KEPT_VARIABLES`` (``PATH``, ``HOME`` and such) and no keys.
        cwd: working directory; None: the trainer's.
        max_seconds: maximum wall time of one program, in seconds; None: no limit.
        max_output_bytes: maximum bytes that it may print.
        max_memory_gb: GiB of address space that each of its processes may map; None: no limit.
        max_concurrency: programs that run at the same time; waiting for a place takes no time
            from ``max_seconds``.
        retries: how often to rerun a program that was killed by a signal.
        own_processes: whether it sees only its own processes, if the machine allows that (else
            there is a warning), so that it cannot read others' keys in ``/proc``. Set False if it
            needs ``sudo`` or the like, which does not work inside unless the trainer is root.
        options: further arguments of ``SessionAgent``.

    Raises:
        ConfigError: for values out of range.
    """

    def __init__(
        self,
        command: list[str] | str,
        env: dict[str, str] | None = None,
        pass_env: list[str] | None = None,
        cwd: str | None = None,
        max_seconds: float | None = 600.0,
        max_output_bytes: int = 2**20,
        max_memory_gb: float | None = None,
        max_concurrency: int = 64,
        retries: int = 1,
        own_processes: bool = True,
        **options: Any,
    ) -> None:
        require_at_least(1, max_output_bytes=max_output_bytes, max_concurrency=max_concurrency)
        require_at_least(0, retries=retries)
        require_at_least(0.01, max_memory_gb=max_memory_gb)
        if not command:
            raise ConfigError("command is empty; name the program to run for each rollout")
        super().__init__(max_seconds=max_seconds, **options)
        self._title = command if isinstance(command, str) else " ".join(command)
        self.command = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        self.env = env or {}
        self.pass_env = pass_env or []
        self.cwd = cwd
        self.max_output_bytes = max_output_bytes
        self.max_memory_gb = max_memory_gb
        self.max_concurrency = max_concurrency
        self.retries = retries
        self.own_processes = own_processes
        self._launcher: Launcher | None = None
        # A semaphore serves one event loop, and a script may use one after the other.
        self._gates: WeakKeyDictionary[Any, asyncio.Semaphore] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        return f"program {self._title!r:.60}"

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._check_places()
        super().configure(tokenizer)

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        async with self._places():
            for _ in range(1 + self.retries):
                ending = await self.attempt(rollout, engine, sampling)
                if ending.kind != "killed":
                    break
        self.conclude(rollout, ending)
        return rollout

    async def play(self, rollout: Rollout, session: Session) -> Ending:
        prompt = rollout.prompt
        task = {
            "id": prompt.id,
            "prompt": as_sent(prompt) if prompt.pictures else prompt.asked,
            "columns": prompt.columns,
            "seed": rollout.seed,
        }
        if self._launcher is None:
            self._launcher = self._make_launcher()
        stdin = json.dumps(task, default=str).encode() + b"\n"
        running = self._launcher.running(self._request(session), stdin, self.max_output_bytes)
        async with running as program:
            ending = await within(self.max_seconds, program.wait(), Ending("timeout"))
        return replace(ending, said=last_result(bytes(program.stdout)))

    def close(self) -> None:
        """Close the launcher of programs and the endpoint; they start again when needed."""
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
        super().close()

    # ---------------------------------------------------------------- inside

    def _request(self, session: Session) -> ProgramRequest:
        memory = self.max_memory_gb
        return ProgramRequest(
            env={
                **self._environment(),
                "OPENAI_BASE_URL": session.base_url,
                "OPENAI_API_KEY": session.api_key,
                "ANTHROPIC_BASE_URL": session.anthropic_url,
                "ANTHROPIC_API_KEY": session.api_key,
                **NO_PROXY,
            },
            command=self.command,
            cwd=self.cwd or ".",
            memory_bytes=None if memory is None else int(memory * 2**30),
        )

    def _places(self) -> asyncio.Semaphore:
        """Return the running loop's semaphore, which limits concurrent programs."""
        loop = asyncio.get_running_loop()
        return self._gates.setdefault(loop, asyncio.Semaphore(self.max_concurrency))

    def _environment(self) -> dict[str, str]:
        return passed_on(self.pass_env) | self.env

    def _make_launcher(self) -> Launcher:
        return Launcher(own_processes=self.own_processes)

    def _check_places(self) -> None:
        if self.cwd is not None and not Path(self.cwd).is_dir():
            raise ConfigError(f"cwd={self.cwd!r} is not a directory; make it, or name another")
        require_set(self.pass_env)
        program = self.command[0]
        # A path is the program's own directory's, a name its PATH's.
        path = os.path.join(self.cwd or ".", program) if os.sep in program else program
        if shutil.which(path, path=self._environment().get("PATH")) is None:
            raise ConfigError(
                f"command {program!r} is not an executable program; give its path, or install it"
            )


@configurable
class ScriptAgent(ProgramAgent):
    """A :class:`ProgramAgent` for a Python script whose imports are made once for all rollouts.

    Its process is forked from one that has imported the ``preload`` modules, which saves each
    rollout the time to start Python and to import them (1.8 of 2 CPU seconds with ``openai``).
    The script itself runs as by ``python SCRIPT``. Preload only modules that start no threads.

    Args:
        script: path of the script.
        arguments: its command-line arguments.
        preload: modules to import beforehand, such as ``openai``.
        python: the interpreter, possibly of another environment; None: the trainer's.
        options: arguments of :class:`ProgramAgent` except ``command``.

    Raises:
        ConfigError: for values out of range; when the first rollout starts, if a module cannot be
            imported.
    """

    def __init__(
        self,
        script: str,
        arguments: list[str] | None = None,
        preload: list[str] | None = None,
        python: str | None = None,
        **options: Any,
    ) -> None:
        self.script = script
        self.arguments = arguments or []
        self.preload = preload or []
        python = sys.executable if python is None else python
        # A path is the trainer's directory's, whatever ``cwd`` is; a name is looked up in PATH.
        self.python = os.path.abspath(python) if os.sep in python else python
        super().__init__([self.python, script, *self.arguments], **options)

    @property
    def name(self) -> str:
        return f"script {self.script!r}"

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        path = Path(self.cwd or ".") / self.script
        if not path.is_file():
            raise ConfigError(
                f"script={self.script!r} is not a file (looked for {path}); correct the path"
            )
        super().configure(tokenizer)

    def _request(self, session: Session) -> ProgramRequest:
        request = super()._request(session)
        return replace(request, command=[], script=self.script, arguments=self.arguments)

    def _make_launcher(self) -> Launcher:
        return Launcher(self.preload, self.python, self._environment(), self.own_processes)
