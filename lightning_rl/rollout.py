"""The records a run is made of: prompts, and the rollouts sampled from them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""One chat message: ``{"role": ..., "content": ...}``."""


class RolloutStatus(StrEnum):
    """The stage of a rollout's life; each status is counted and logged."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"
    ARCHIVED = "archived"
    EXPIRED = "expired"
    SKIPPED = "skipped"


@dataclass(slots=True)  # not frozen: Lightning refuses such in what predict_step returns
class Prompt:
    """One dataset row, tokenised once.

    ``prompt`` is what the user wrote (text, or chat messages), ``token_ids`` what the model reads,
    ``columns`` the row's other fields, which rewards receive by name.
    """

    id: str
    prompt: str | list[Message]
    token_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)


SAMPLED_BY = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
"""Settings that change what is sampled from: a rollout keeps them, to be scored under the same."""


@dataclass(slots=True)
class Rollout:
    """One trajectory, at the level of tokens. Text is only ever decoded from it, never encoded.

    The per-token lists cover the completion (everything after the prompt) and have equal length C:
    ``loss_mask`` is True for tokens the model wrote (False for an environment's), ``logprobs`` are
    the engine's at the sampling temperature (0.0 where the mask is False) and ``versions`` the
    weight version that wrote each token (-1 where the mask is False). ``expert`` marks a given
    completion to imitate, which no engine wrote. ``environment_reward`` is what an environment
    paid, for rewards to use. ``extra`` and ``logged`` are what reward functions logged: a value
    per column for this rollout, and numbers for all of its group. ``structured``: it was held to a
    form that scoring does not know.
    """

    prompt: Prompt
    group_id: str
    sample_index: int
    seed: int
    temperature: float
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    completion: str | list[Message] = ""
    status: RolloutStatus = RolloutStatus.INIT
    finish_reason: str | None = None
    reward: float | None = None
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_tokens: int = 0
    expert: bool = False
    environment_reward: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    structured: bool = False

    @property
    def id(self) -> str:
        """Unique within a run: the group's id and the sample's place in it."""
        return f"{self.group_id}/{self.sample_index}"

    @property
    def completed(self) -> bool:
        """All of it is written, whether graded or not."""
        return self.status is RolloutStatus.COMPLETED

    @property
    def graded(self) -> bool:
        """Completed, and with a reward: what can be trained on and counted."""
        return self.completed and self.reward is not None

    def fail(self, error: str) -> None:
        """Make it FAILED for this reason. What it has so far stays, where its lists agree."""
        self.status, self.error = RolloutStatus.FAILED, error
        self.reward = self.finish_reason = None
        columns: list[list[Any]]
        columns = [self.token_ids, self.loss_mask, self.logprobs, self.versions]
        length = min(map(len, columns))
        for column in columns:
            del column[length:]

    def clear(self) -> None:
        """Make it INIT again, as if nothing had been written."""
        self.token_ids, self.loss_mask, self.logprobs, self.versions = [], [], [], []
        self.completion, self.environment_reward = "", None
        self.status, self.finish_reason = RolloutStatus.INIT, None

    def to_dict(self) -> dict[str, Any]:
        """Primitives only, so that it survives JSON and ``torch.load(weights_only=True)``."""
        record = asdict(self)
        record["status"] = self.status.value
        return record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "Rollout":
        """Inverse of :meth:`to_dict`."""
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in record.items() if key in known}
        values["prompt"] = Prompt(**record["prompt"])
        values["status"] = RolloutStatus(record["status"])
        return cls(**values)


Group = list[Rollout]
"""The rollouts sampled from one prompt."""


def as_text(content: str | Sequence[Message]) -> str:
    """Text as it is; chat messages as ``role: content`` lines."""
    if isinstance(content, str):
        return content
    return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in content)
