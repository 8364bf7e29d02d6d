"""The tasks of an OpenEnv environment, as prompts."""

import asyncio
from collections.abc import Iterable
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.errors import ConfigError, DataError, EpisodeError, require_at_least
from lightning_rl.openenv.running import running
from lightning_rl.openenv.server import OpenEnvServer
from lightning_rl.openenv.session import Session
from lightning_rl.run.loop.background import run_async


@configurable
class OpenEnvPrompts(PromptDataset):
    """Tasks of an environment for OpenEnv, for :class:`OpenEnvAgent`: arguments of its ``reset``.

    Each task is reset once when the prompts are loaded, and the prompt is its first observation.
    The column ``reset`` holds the arguments of ``reset``, ``observation`` the first observation as
    the model reads it; a ``template`` or ``system`` of :class:`PromptDataset` may say more.

    Args:
        server: the environment's server.
        tasks: arguments of ``reset`` for each task, besides the seed; None: one task without any.
        seeds: number of seeds with which each task is played.
        first_seed: the first of them.
        prompt_options: options of :class:`PromptDataset`.

    Raises:
        ConfigError: for values out of range; later if the server cannot be started or reached.
    """

    def __init__(
        self,
        server: OpenEnvServer,
        tasks: list[dict[str, Any]] | None = None,
        seeds: int = 1,
        first_seed: int = 0,
        **prompt_options: Any,
    ) -> None:
        require_at_least(1, seeds=seeds)
        require_at_least(0, first_seed=first_seed)
        super().__init__(**prompt_options)
        self.server = server
        self.tasks = tasks or [{}]
        self.seeds = range(first_seed, first_seed + seeds)

    def __repr__(self) -> str:
        return f"OpenEnvPrompts({self.server!r})"

    def read(self) -> Iterable[tuple[str, Any]]:
        resets = [{**task, "seed": seed} for task in self.tasks for seed in self.seeds]
        for number, row in enumerate(run_async(self._begun(resets))):
            yield f"{self!r}: task {number}", row

    async def _begun(self, resets: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            await running(self.server).here().action_schema()
        except EpisodeError as error:
            raise ConfigError(str(error)) from error
        return await asyncio.gather(*map(self._row, resets))

    async def _row(self, reset: dict[str, Any]) -> dict[str, Any]:
        try:
            async with Session.of(self.server) as session:
                first = await session.begin(reset)
                seen = self.server.shown(first.fields)
        except EpisodeError as error:
            raise DataError(f"{self!r}: reset with {reset} failed: {error}") from error
        if first.done:
            raise DataError(f"{self!r}: reset with {reset} ends at once; leave this task out")
        return {self.prompt_column: seen, "reset": reset, "observation": seen}
