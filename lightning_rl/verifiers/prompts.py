"""The tasks of a verifiers environment, as prompts."""

import json
import tempfile
from collections.abc import Iterable
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.errors import DataError, require_at_least
from lightning_rl.rollout import Message
from lightning_rl.run.loop.background import run_async
from lightning_rl.verifiers.hosting import Hosting
from lightning_rl.verifiers.worker import WorkerError
from lightning_rl.verifiers.workers import workers_of


@configurable
class VerifiersPrompts(PromptDataset):
    """The tasks of an environment for verifiers from 0.4 on, for :class:`VerifiersAgent`.

    The prompt is the task's system prompt and prompt, or the task's name if the environment speaks
    first. The column ``task`` holds the whole task.

    Args:
        environment: the taskset's id: the name of an installed package.
        python: the interpreter it is installed for, or the directory of its virtual environment.
        options: the environment's configuration, as in verifiers' ``[env]`` block.
        env: environment variables to set for it.
        pass_env: names of variables to pass on from the trainer's environment, such as keys.
        skip: number of tasks to skip at the beginning.
        limit: maximum number of tasks; None: all of a finite taskset.
        prompt_options: options of :class:`PromptDataset`.

    Raises:
        ConfigError: for values out of range, or an environment that cannot be hosted.
    """

    def __init__(
        self,
        environment: str,
        python: str,
        options: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        pass_env: list[str] | None = None,
        skip: int = 0,
        limit: int | None = None,
        **prompt_options: Any,
    ) -> None:
        require_at_least(0, skip=skip)
        require_at_least(1, limit=limit)
        super().__init__(**prompt_options)
        self.hosting = Hosting(environment, python, options or {}, env or {}, tuple(pass_env or ()))
        self.skip = skip
        self.limit = limit

    def __repr__(self) -> str:
        return f"VerifiersPrompts({self.hosting.environment!r})"

    def read(self) -> Iterable[tuple[str, Any]]:
        with tempfile.NamedTemporaryFile(encoding="utf-8", mode="r") as file:
            wanted = {"skip": self.skip, "limit": self.limit, "to": file.name}
            try:
                run_async(workers_of(self.hosting).ask(list=wanted))
            except WorkerError as error:
                raise DataError(f"{self!r} gives no tasks: {error}") from error
            for number, task in enumerate(map(json.loads, file), self.skip):
                yield f"{self!r}: task {number}", {self.prompt_column: shown(task), "task": task}


def shown(task: dict[str, Any]) -> str | list[Message]:
    """Return what the model reads first, as far as the task specifies it."""
    prompt, system = task.get("prompt"), task.get("system_prompt")
    if not prompt:
        return str(task.get("name") or task.get("id") or f"task {task.get('idx')}")
    chat = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*chat, {"role": "user", "content": prompt}]
    # Without the fields that are not set.
    given = [{name: value for name, value in m.items() if value is not None} for m in prompt]
    return [*chat, *({"content": "", **message} for message in given)]
