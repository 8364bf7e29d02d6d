"""Environments: what answers the model's turns."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from lightning_rl.rollout import Message, Prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer to one turn.

    Args:
        observation: what the model reads next: text, or chat messages; for a chat prompt, text
            becomes one user message. A reply that is ``done`` is not read by anyone, and may leave
            it out.
        reward: paid for this turn; a rollout's ``environment_reward`` is the sum over its turns.
        done: the rollout ends here.
    """

    observation: str | list[Message] = ""
    reward: float = 0.0
    done: bool = False


class Environment(ABC):
    """Answers the turns of one rollout: each rollout gets an object of its own, made from its row.

    Whatever it raises marks that rollout FAILED, with the error kept, and the run goes on. It must
    be deterministic for rollouts that are interrupted and resumed: it is then made anew and asked
    to answer the recorded turns again, and must say the same. Draw at random from
    ``random.Random(prompt.id)``, say.
    """

    def __init__(self, prompt: Prompt) -> None:
        """``prompt.columns`` holds the row's fields; further parameters are settings for YAML."""

    @abstractmethod
    def step(self, turn: str) -> Reply | Awaitable[Reply]:
        """Answer the model's turn (text without special tokens); plain or ``async``.

        All other rollouts wait while a plain one runs, so what waits itself should be ``async``.
        """

    def close(self) -> Any:
        """Free what the rollout used, however it ended; plain or ``async``, called once."""


EnvironmentFactory = Callable[[Prompt], Environment]
"""An environment's class, or any callable that makes one from a prompt."""


async def resolve(value: Any) -> Any:
    """What a plain or an ``async`` method returned."""
    return await value if inspect.isawaitable(value) else value
