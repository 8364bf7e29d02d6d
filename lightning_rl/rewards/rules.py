"""Ready-made rewards: length penalty, the environment's reward, and tests of written programs."""

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.rewards.calling import Score
from lightning_rl.rewards.program_judge import ProgramJudge
from lightning_rl.rollout import Message, answer_in
from lightning_rl.run.processes.machine import usable_cores

_FENCE = re.compile(r"^```(?:python|py)?[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@configurable
class OverlongPenalty:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), to be added to another reward.

    0 up to ``max_tokens - buffer`` tokens, then linearly down to -1 at ``max_tokens``, -1 beyond.

    Args:
        max_tokens: length of the full penalty; at most ``sampling.max_tokens``.
        buffer: number of tokens over which the penalty grows.

    Raises:
        ConfigError: unless 0 < buffer <= max_tokens.
    """

    score_range = (-1.0, 0.0)

    def __init__(self, max_tokens: int, buffer: int) -> None:
        if not 0 < buffer <= max_tokens:
            raise ConfigError(
                f"OverlongPenalty(max_tokens={max_tokens}, buffer={buffer}): need 0 < buffer <= "
                "max_tokens"
            )
        self.max_tokens = max_tokens
        self.buffer = buffer
        self.__name__ = "overlong"

    def __call__(self, completion_ids: list[list[int]]) -> list[float]:
        allowed = self.max_tokens - self.buffer
        return [-min(1.0, max(0.0, (len(ids) - allowed) / self.buffer)) for ids in completion_ids]


class EnvironmentReward:
    """The reward from each rollout's environment, summed over its turns.

    Raises:
        ConfigError: when called on rollouts of an agent that has no environment.
    """

    def __init__(self) -> None:
        self.__name__ = "environment"

    def __call__(self, environment_rewards: list[float | None]) -> list[float]:
        if None in environment_rewards:
            raise ConfigError(
                "EnvironmentReward needs an agent with an environment, but this agent has none; "
                "set data.agent, e.g. to MultiTurn, or use another reward"
            )
        return [reward for reward in environment_rewards if reward is not None]


@configurable
class PythonTests:
    """1.0 for a completion whose Python program passes all tests of its row, else 0.0.

    The program is the completion's last fenced block (marked python or unmarked), or else the whole
    completion; if there is a thought, only what follows its ``</think>`` counts. Tests are Python,
    such as ``assert add(1, 2) == 3``, or ``assert output_of("1 2") == "3\\n"`` for what it prints.
    They run in a process that the program cannot reach: names that they neither define nor import,
    and that are not built in, refer to the program, and its results come back as values of exact
    built-in types. Tests that never use the program, so that none could fail
    them, make the rollout FAILED. Each program has a sandbox of its own, made by bubblewrap; see
    docs/rewards.md for what can be tested, and what a sandbox does not prevent.

    Args:
        column: the data set's column of tests: a string, or a list of strings to run in order.
        workers: number of programs that run at the same time; None: one per usable core.
        timeout_s: wall-clock seconds per program; one that takes longer scores 0.0.
        memory_mb: MiB per process of a program, of which Python takes about 30; one that needs more
            scores 0.0.
        sandbox: run without network, sight of other processes, files except those of the system and
            of this Python, or files to write but 64 MiB in memory; False: limits only, which do not
            stop a program that means harm.

    Raises:
        ConfigError: if values are out of range, or the machine does not allow a sandbox.
    """

    score_range = (0.0, 1.0)

    def __init__(
        self,
        column: str = "tests",
        workers: int | None = None,
        timeout_s: float = 5.0,
        memory_mb: int = 512,
        sandbox: bool = True,
    ) -> None:
        require_at_least(1, workers=workers, memory_mb=memory_mb)
        require_at_least(0.001, timeout_s=timeout_s)
        self.column = column
        self.__name__ = "python_tests"
        self.workers = workers or usable_cores()
        self.judge = ProgramJudge(timeout_s, memory_mb, sandbox)
        self._threads: ThreadPoolExecutor | None = None

    async def __call__(
        self,
        completions: Sequence[str | list[Message]],
        opened_thoughts: Sequence[bool] | None = None,
        **columns: Any,
    ) -> list[Score]:
        if self.column not in columns:
            raise KeyError(f"the data has no column {self.column!r}; it has {sorted(columns)}")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix=self.__name__)
        opened = opened_thoughts or [False] * len(completions)
        programs = map(program_in, completions, opened)
        loop = asyncio.get_running_loop()
        judged = [
            loop.run_in_executor(self._threads, self.judge.score, program, tests)
            for program, tests in zip(programs, columns[self.column], strict=True)
        ]
        return await asyncio.gather(*judged)

    def close(self) -> None:
        """Wait for programs that run; grading again is possible."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None


def program_in(completion: str | list[Message], opened_thought: bool = False) -> str:
    """Return the last fenced block after a completion's thought, or all text after the thought.

    A completion that is still in its thought gives "".
    """
    text = answer_in(completion, opened_thought) or ""
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else text
