"""Ready-made rewards: length penalty, the environment's reward, and tests of written programs."""

import re
from collections.abc import Sequence
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.rewards.calling import RewardFailure, Score
from lightning_rl.rewards.pool import Isolated
from lightning_rl.rewards.program_tests import BadTestsError, passes
from lightning_rl.rollout import Message, answer_in

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
class PythonTests(Isolated):
    """1.0 for a completion whose Python program passes all tests of its row, else 0.0.

    The program is the completion's last fenced block (marked python or unmarked), or else the whole
    completion; if there is a thought, only what follows its ``</think>`` counts. Tests are Python,
    such as ``assert add(1, 2) == 3``. They run in a process that the program cannot reach: names
    that they neither define nor import, and that are not built in, refer to the program, and its
    results are compared as plain data. Tests that never use the program, so that none could fail
    them, make the rollout FAILED. Everything runs in a sandbox; see :class:`Isolated` for the
    limits, and docs/rewards.md for what can be tested, and what a sandbox does not prevent.

    Args:
        column: the data set's column of tests: a string, or a list of strings to run in order.
        workers: number of programs that run at the same time; None: one per usable core.
        timeout_s: wall-clock seconds per program; one that takes longer scores 0.0.
        memory_mb: MiB per program; one that needs more scores 0.0.
        sandbox: run without network, sight of other processes, or files to write but its own.

    Raises:
        ConfigError: if values are out of range, or the machine does not allow a sandbox.
    """

    def __init__(
        self,
        column: str = "tests",
        workers: int | None = None,
        timeout_s: float = 5.0,
        memory_mb: int = 512,
        sandbox: bool = True,
    ) -> None:
        super().__init__(RunTests(column), workers, timeout_s, memory_mb, sandbox, fault_score=0.0)

    async def grade_one(self, sample: dict[str, list[Any]]) -> Score:
        score = await super().grade_one(sample)
        if isinstance(score, float) and not 0.0 <= score <= 1.0:
            return RewardFailure(f"its process returned {score!r}; a test result is in [0, 1]")
        return score


class RunTests:
    """Runs tests in this process, and the program under test in a separate interpreter.

    The program has no access to the score, nor to what a test expects.
    """

    def __init__(self, column: str) -> None:
        self.column = column
        self.__name__ = "python_tests"

    def __call__(
        self,
        completions: list[str | list[Message]],
        opened_thoughts: Sequence[bool] | None = None,
        **columns: Any,
    ) -> list[Any]:
        if self.column not in columns:
            raise KeyError(f"the data has no column {self.column!r}; it has {sorted(columns)}")
        opened = opened_thoughts or [False] * len(completions)
        return [
            _score(program_in(completion, in_thought), tests)
            for completion, in_thought, tests in zip(
                completions, opened, columns[self.column], strict=True
            )
        ]


def program_in(completion: str | list[Message], opened_thought: bool = False) -> str:
    """Return the last fenced block after a completion's thought, or all text after the thought.

    A completion that is still in its thought gives "".
    """
    text = answer_in(completion, opened_thought) or ""
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def _score(program: str, tests: str | list[str]) -> Score:
    try:
        return float(passes(program, tests))
    except (SyntaxError, BadTestsError) as error:
        return RewardFailure(f"{type(error).__name__}: {error}")
