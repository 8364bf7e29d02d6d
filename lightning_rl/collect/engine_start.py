"""Starts an engine for a run, as long as the run's longest request, where that is known."""

import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rl.agents.base import Agent
from lightning_rl.collect.tasks import Task
from lightning_rl.engines.base import Engine, drives_engine
from lightning_rl.models.model_files import positions_in
from lightning_rl.run.processes import dist
from lightning_rl.run.processes.dist import announced


class EngineStart:
    """Starts an engine on the ranks that drive it, from a folder without weights.

    ``agents`` and ``rewards`` are those of the tasks, each once, which are closed with the engine.

    Args:
        engine: the engine.
        tasks: the tasks whose requests it answers.
        agent: one more agent, such as the tasks' default.
    """

    def __init__(self, engine: Engine, tasks: Sequence[Task], agent: Agent) -> None:
        self.engine = engine
        self.tasks = tasks
        agents = (agent, *(task.agent for task in tasks))
        self.agents = list({id(one): one for one in agents}.values())
        self.rewards = list(dict.fromkeys(task.rewards for task in tasks))
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self, save: Callable[[str], None], trust_remote_code: bool) -> None:
        """Start the engine unless it runs, and limit the tasks' prompts to what its maximum length
        leaves beside completions.

        Args:
            save: writes configuration and tokenizer into a folder.
            trust_remote_code: whether the engine may run code that comes with the model.

        Raises:
            ConfigError: naming the prompt set whose completions leave no room.
            EngineError: if it does not start.
        """
        engine, length = self.engine, 0
        with dist.every_rank():
            if drives_engine(engine):
                if not engine.running:
                    self._folder = tempfile.TemporaryDirectory(prefix="lightning_rl_")
                    save(self._folder.name)
                    engine.trust_remote_code = trust_remote_code
                    configure_for_requests(engine, self.tasks, Path(self._folder.name))
                    with announced(engine.starting):
                        engine.start(Path(self._folder.name))
                length = engine.max_length
        length = dist.from_rank_zero(length)
        for task in self.tasks:
            task.prompts.bound(task.room_within(length))

    def close(self) -> None:
        """Close the agents, the engine and the rewards, and remove the folder."""
        for agent in self.agents:
            agent.close()
        self.engine.close()
        for rewards in self.rewards:
            rewards.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def configure_for_requests(engine: Engine, tasks: Sequence[Task], model_dir: Path) -> None:
    """Tell an engine, before it starts from ``model_dir``, how long the tasks' requests get."""
    trusted = engine.trust_remote_code
    engine.configure_length(cache(partial(_longest_request, tasks, model_dir, trusted)))


def _longest_request(tasks: Sequence[Task], model_dir: Path, trusted: bool) -> int | None:
    """Return the tokens of the longest request, None if it is not known, and report which."""

    def as_much_as_fits(why: str) -> None:
        rank_zero_info(f"the engine's length is as much as fits into its KV cache, since {why}")

    found = []
    for task in tasks:
        if not task.agent.within_max_tokens:
            as_much_as_fits(f"requests of {type(task.agent).__name__} grow by turns")
            return None
        longest = task.prompts.longest()
        if longest is None:
            as_much_as_fits(f"{task.prompts!r} is not measured without max_prompt_tokens")
            return None
        # A push is probed with two tokens, whatever max_tokens is.
        found.append((longest + max(2, task.sampling.max_tokens), longest))
    tokens, longest = max(found)
    positions = positions_in(model_dir, trusted)
    if positions is not None and tokens > positions:
        as_much_as_fits(f"the longest prompt has {longest} tokens, the model {positions}")
        return None
    rank_zero_info(
        f"the engine's length is {tokens} tokens: the longest prompt has {longest}, a completion "
        f"up to {tokens - longest}"
    )
    return tokens
