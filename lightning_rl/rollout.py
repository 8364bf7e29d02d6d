"""The records of a run: prompts, and the rollouts sampled from them."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Message = dict[str, Any]
"""One chat message: ``{"role": ..., "content": ...}``."""


def own(value: Any) -> Any:
    """Copy lists and dictionaries at any depth; other values in them are shared."""
    if type(value) is list:
        return [own(item) for item in value]
    if type(value) is dict:
        return {name: own(item) for name, item in value.items()}
    return value


_SCALARS = {int, float, bool, str, bytes, type(None)}


def primitives(value: Any) -> Any:
    """Convert a record as ``dataclasses.asdict`` does, but without a call per token.

    An interrupted run writes all of its rollouts, of which it may have 100,000.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is list:
        scalars = _SCALARS.issuperset(map(type, value))
        return value.copy() if scalars else [primitives(item) for item in value]
    if kind is dict:
        return {name: primitives(item) for name, item in value.items()}
    if kind is tuple:
        return tuple(primitives(item) for item in value)
    names = getattr(kind, "__dataclass_fields__", ())
    return {n: primitives(getattr(value, n)) for n in names} if names else deepcopy(value)


def of_whole_characters(value: Any) -> Any:
    """Replace lone surrogates by U+FFFD in texts, at any depth of lists and dictionaries.

    Neither files nor tokenizers accept a lone surrogate, which is half of a character.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [of_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {name: of_whole_characters(item) for name, item in value.items()}
    return value


class RolloutStatus(StrEnum):
    """The stage of a rollout's life; each status is counted and logged."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"
    ARCHIVED = "archived"
    EXPIRED = "expired"
    SKIPPED = "skipped"


@dataclass(slots=True, unsafe_hash=True)  # not frozen, as Prompt
class Picture:
    """A picture as it was given: the bytes of a PNG, JPEG, WebP or GIF file, and its size.

    ``digest`` is the SHA-256 of ``data`` in hex; equal digests are the same picture. ``width`` and
    ``height`` are in pixels. :mod:`lightning_rl.vision` reads, checks and decodes pictures.
    """

    digest: str
    width: int = field(compare=False)
    height: int = field(compare=False)
    data: bytes = field(repr=False, compare=False)


class Placed(NamedTuple):
    """A picture, and the index of the first of its placeholders among a text's tokens."""

    start: int
    picture: Picture


@dataclass(slots=True)  # not frozen: Lightning refuses such in what predict_step returns
class Prompt:
    """One dataset row, tokenised once.

    ``prompt`` is what the user wrote (text or chat messages), ``token_ids`` what the model reads,
    ``columns`` the row's other fields, which rewards receive by name. ``set`` is the name of the
    prompt set it was drawn from, if a run has several; ids are unique within a set. ``pictures``
    are in order: each stands in ``token_ids`` as as many placeholders as the model reads for
    it, from its index in ``places`` on. ``begun`` is the beginning of the model's turn where the
    row's chat ends in one: ``token_ids`` end with it, ``prompt`` is the chat before it, and a
    rollout's ``completion`` begins with it.
    """

    id: str
    prompt: str | list[Message]
    token_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)
    set: str = ""
    pictures: list[Picture] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    begun: str = ""

    def __post_init__(self) -> None:
        self.pictures = _pictures(self.pictures)

    @property
    def asked(self) -> Any:
        """The prompt as the row has it, with the turn that is begun."""
        if isinstance(self.prompt, str) or not self.begun:
            return self.prompt
        return [*self.prompt, {"role": "assistant", "content": self.begun}]

    def copy(self) -> "Prompt":
        """Return an equal prompt with its own lists and dictionaries, so that it can be changed
        safely.

        Texts, pictures and other values in them are shared, so a copy takes little time and memory.
        """
        values = {each.name: own(getattr(self, each.name)) for each in fields(self)}
        return Prompt(**values)

    @property
    def placed(self) -> list[Placed]:
        """The prompt's pictures with their places."""
        return _placed(self.places, self.pictures)

    @property
    def key(self) -> str:
        """Identifies the prompt among those of all sets."""
        return f"{self.set}/{self.id}" if self.set else self.id


@dataclass(slots=True)
class SamplingDistribution:
    """The distribution that tokens are sampled from: every setting needed to score under it.

    The defaults change nothing. :class:`~lightning_rl.engines.sampling.Sampling` documents each
    setting, and what else a request asks for.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0

    @property
    def penalizes(self) -> bool:
        """True if tokens already written change the probability of the next one."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


SAMPLED_BY = tuple(f.name for f in fields(SamplingDistribution))
"""Names of the settings that change the sampling distribution."""


@dataclass(slots=True)
class Call:
    """One model call within a rollout: ``token_ids[start:stop]`` of a row are its completion.

    Its prompt is the row's prompt and ``token_ids[:start]``. ``reward`` is this call's own reward,
    a part of the rollout's reward and not in addition to it; None if nobody gave one. ``state``
    names the state the call was made in, if an environment told it: calls of a group in equal
    states are comparable. ``scorable`` is False if the output was constrained to a form that
    scoring cannot reproduce: its tokens have no loss. ``asked`` is False for a call of an
    interrupted attempt until it is requested again. ``tool_choice`` is the request's: ``auto``,
    ``none``, ``required``, or the name of the one tool to call; None if it offered no tools.
    """

    row: int
    start: int
    stop: int
    seed: int = 0
    finish_reason: str = "stop"
    reward: float | None = None
    state: str | None = None
    scorable: bool = True
    asked: bool = True
    tool_choice: str | None = None


@dataclass(slots=True)
class Fork:
    """The point where a rollout branched off from another of its group, with the same
    ``sample_index``.

    The first ``calls`` calls are the other's, token by token. What follows is the ``number``-th
    continuation from there; the seeds of its requests are derived from ``seed``.
    """

    calls: int
    number: int
    seed: int


@dataclass(slots=True)
class Row:
    """Tokens that continue one prompt: scored in one pass, and trained on.

    The other lists have one entry per token after the prompt: ``loss_mask`` is True where the
    model wrote it (False where it was given, e.g. by an environment), ``logprobs`` are the engine's
    (0.0 where the token was given), and ``versions`` the version of the weights that wrote it (-1
    where it was given). ``role`` is the policy that wrote the row. ``sampling`` is None if the
    row has the rollout's. ``routed_experts`` are those to which an engine routed its first
    tokens, including the prompt's (:mod:`lightning_rl.data.routing`); empty: not recorded.
    ``teacher_logprobs`` are a teacher's for the tokens after the prompt
    (:mod:`lightning_rl.data.teacher_logprobs`); empty: no teacher has looked.
    ``compared_with`` holds numbers that a group's plan compares the row with, by name: columns of a
    batch, such as a ``baseline``.
    ``pictures`` are all of the row in order, those of its prompt first; ``places`` say where each
    begins, counted from the start of the prompt.
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    role: str = ""
    sampling: SamplingDistribution | None = None
    routed_experts: str = ""
    pictures: list[Picture] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    teacher_logprobs: str = ""
    compared_with: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pictures = _pictures(self.pictures)

    @classmethod
    def of(cls, prompt: Prompt) -> "Row":
        """Return a row that continues a prompt; it has no tokens yet."""
        return cls(prompt.token_ids, pictures=list(prompt.pictures), places=list(prompt.places))

    @property
    def length(self) -> int:
        """Number of tokens, including the prompt's."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def placed(self) -> list[Placed]:
        """The row's pictures with their places."""
        return _placed(self.places, self.pictures)

    def append_written(
        self, token_ids: list[int], logprobs: list[float], versions: list[int], loss: bool = True
    ) -> None:
        """Append tokens that the model wrote; without ``loss`` they are not trained on."""
        self.token_ids += token_ids
        self.loss_mask += [loss] * len(token_ids)
        self.logprobs += logprobs
        self.versions += versions

    def append_given(self, token_ids: Sequence[int], placed: Sequence[Placed] = ()) -> None:
        """Append tokens that the model reads but did not write, maybe with pictures among them.

        ``placed`` counts from the first of these tokens.
        """
        for start, picture in placed:
            self.places.append(self.length + start)
            self.pictures.append(picture)
        self.token_ids += token_ids
        self.loss_mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [-1] * len(token_ids)


@dataclass(slots=True)
class Rollout:
    """One trajectory of tokens. Text is only ever decoded from it, never encoded.

    ``rows`` hold the tokens. The first row continues the prompt, and may have no tokens; an agent
    that starts over in between, with a shorter history or in another role, adds further rows.
    ``sampling`` is the distribution the tokens were sampled from, unless a row has its own.
    ``calls`` are the model calls in order; if none were recorded, each stretch of tokens that a
    model wrote is one (:meth:`model_calls`). ``fork`` is where the rollout branched off; None if it
    began with its prompt. ``dropped`` counts tokens that a model wrote for it but that are not, or
    no longer, in its rows. ``demonstration`` marks a given completion to imitate.
    ``structured`` marks output constrained to a form that scoring cannot reproduce.

    ``environment_reward`` is what an environment paid, for rewards to use. ``reward_parts`` are the
    scores of the reward functions by name, and their parts as ``name/part``; ``reward_weights`` are
    the weights of those functions in ``reward``. ``role_rewards`` are the rewards of roles whose
    reward differs from the rollout's. ``extra`` and ``logged`` come from
    reward functions and agents: ``extra`` has one value per column for this rollout (such as
    ``session_id``, or ``tools``, the schemas that its models were offered), ``logged`` numbers for
    the whole group. ``trained`` is False for a rollout that a group's plan only compares others
    with (:class:`~lightning_rl.data.plans.GroupPlan`).
    """

    prompt: Prompt
    group_id: str
    sample_index: int
    seed: int
    sampling: SamplingDistribution = field(default_factory=SamplingDistribution)
    rows: list[Row] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    fork: Fork | None = None
    completion: str | list[Message] = ""
    status: RolloutStatus = RolloutStatus.INIT
    finish_reason: str | None = None
    error: str | None = None
    reward: float | None = None
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    reward_weights: dict[str, float] = field(default_factory=dict)
    role_rewards: dict[str, float] = field(default_factory=dict)
    environment_reward: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    dropped: int = 0
    demonstration: bool = False
    structured: bool = False
    trained: bool = True

    def __post_init__(self) -> None:
        if not self.rows:
            self.rows = [Row.of(self.prompt)]

    @property
    def token_ids(self) -> list[int]:
        """The tokens after the prompts of all rows, row by row; :class:`Row` appends tokens."""
        return _joined([row.token_ids for row in self.rows])

    @property
    def loss_mask(self) -> list[bool]:
        """For each token in ``token_ids``, True if the model wrote it and it is trained on."""
        return _joined([row.loss_mask for row in self.rows])

    @property
    def logprobs(self) -> list[float]:
        """The engine's logprob of each token in ``token_ids``."""
        return _joined([row.logprobs for row in self.rows])

    @property
    def versions(self) -> list[int]:
        """The version of the weights that wrote each token in ``token_ids``."""
        return _joined([row.versions for row in self.rows])

    @property
    def length(self) -> int:
        """Number of tokens after the prompts of all rows, written or given."""
        return sum(len(row.token_ids) for row in self.rows)

    def shared(self) -> list[int]:
        """Return how many tokens of each row precede the fork."""
        counts = [0] * len(self.rows)
        if self.fork is not None:
            for call in self.model_calls()[: self.fork.calls]:
                counts[call.row] = max(counts[call.row], call.stop)
        return counts

    def own_rows(self) -> list[Row]:
        """Return all rows, with tokens before the fork excluded from the loss."""
        if self.fork is None:
            return self.rows
        return [
            replace(row, loss_mask=[False] * count + row.loss_mask[count:])
            for row, count in zip(self.rows, self.shared(), strict=True)
        ]

    def written_versions(self) -> list[int]:
        """Return the weight versions of the tokens that are trained on, row by row."""
        pairs = zip(self.versions, self.loss_mask, strict=True)
        return [version for version, mine in pairs if mine]

    def prompt_of(self, call: Call) -> list[int]:
        """Return the tokens that a call was asked to continue."""
        row = self.rows[call.row]
        return row.prompt_ids + row.token_ids[: call.start]

    def pictures_of(self, call: Call) -> list[Placed]:
        """Return the pictures among the tokens that a call was asked to continue."""
        read = self.read_by(call)
        return [one for one in self.rows[call.row].placed if one.start < read]

    def read_by(self, call: Call) -> int:
        """Return how many tokens a call was asked to continue."""
        return len(self.rows[call.row].prompt_ids) + call.start

    def model_calls(self) -> list[Call]:
        """Return the recorded model calls, or else the stretches that a model wrote."""
        if self.calls:
            return self.calls
        calls = []
        for index, row in enumerate(self.rows):
            begin = 0
            for mine, run in groupby(row.loss_mask):
                end = begin + sum(1 for _ in run)
                if mine:
                    calls.append(Call(index, begin, end))
                begin = end
        return calls

    def reward_of(self, role: str) -> float:
        """Return a role's reward; 0 if it was not graded."""
        return self.role_rewards.get(role, 0.0 if self.reward is None else self.reward)

    @property
    def id(self) -> str:
        """Unique within a run: the group's id, the sample's place in it, and where it branched.

        ``.../1+2.0`` is the first continuation of ``.../1`` after two of its calls.
        """
        fork = "" if self.fork is None else f"+{self.fork.calls}.{self.fork.number}"
        return f"{self.group_id}/{self.sample_index}{fork}"

    @property
    def own_seed(self) -> int:
        """The base seed of the rollout's own tokens, those after its fork."""
        return self.seed if self.fork is None else self.fork.seed

    @property
    def completed(self) -> bool:
        """True if it is completely written, whether graded or not."""
        return self.status is RolloutStatus.COMPLETED

    @property
    def graded(self) -> bool:
        """True if it is completed, has a reward, and is trained on and counted."""
        return self.completed and self.reward is not None and self.trained

    def fail(self, error: str) -> None:
        """Mark the rollout as FAILED for this reason; it keeps tokens as far as its lists agree."""
        self.status, self.error = RolloutStatus.FAILED, error
        self.reward = self.finish_reason = None
        for row in self.rows:
            columns: list[list[Any]] = [row.token_ids, row.loss_mask, row.logprobs, row.versions]
            length = min(map(len, columns))
            for column in columns:
                del column[length:]
            whole = [one for one in row.placed if one.start < row.length]
            row.places, row.pictures = [start for start, _ in whole], [one for _, one in whole]
        self.calls = [c for c in self.calls if c.stop <= len(self.rows[c.row].token_ids)]

    def clear(self) -> None:
        """Reset the rollout to INIT, with nothing written; its previous tokens count as dropped."""
        self.dropped += sum(self.loss_mask)
        self.rows, self.calls, self.role_rewards = [Row.of(self.prompt)], [], {}
        self.completion, self.environment_reward = "", None
        self.status, self.finish_reason = RolloutStatus.INIT, None

    def to_dict(self) -> dict[str, Any]:
        """Convert to primitives, which survive JSON and ``torch.load(weights_only=True)``."""
        record: dict[str, Any] = primitives(self)
        record["status"] = self.status.value
        prompt_ids = record["prompt"]["token_ids"]
        for row in record["rows"]:
            if row["prompt_ids"] == prompt_ids:
                row["prompt_ids"] = prompt_ids  # the same list, which pickle writes once
        return record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "Rollout":
        """Inverse of :meth:`to_dict`."""
        values = _known(cls, record)
        values["prompt"] = Prompt(**record["prompt"])
        values["status"] = RolloutStatus(record["status"])
        values["sampling"] = _made(SamplingDistribution, record.get("sampling", {}))
        values["rows"] = [Row(**_known(Row, row)) for row in record.get("rows", ())]
        for row in values["rows"]:
            row.sampling = _made(SamplingDistribution, row.sampling)
        values["calls"] = [Call(**_known(Call, call)) for call in record.get("calls", ())]
        values["fork"] = _made(Fork, record.get("fork"))
        return cls(**values)


def _pictures(given: Sequence[Picture | dict[str, Any]]) -> list[Picture]:
    """Build pictures, some of which may be given as records."""
    return [one if isinstance(one, Picture) else Picture(**one) for one in given]


def _placed(places: Sequence[int], pictures: Sequence[Picture]) -> list[Placed]:
    return [Placed(*pair) for pair in zip(places, pictures, strict=True)]


def _made(kind: Callable[..., T], record: dict[str, Any] | None) -> T | None:
    return None if record is None else kind(**record)


def _joined(lists: list[list[T]]) -> list[T]:
    """The lists concatenated; a single one unchanged."""
    return lists[0] if len(lists) == 1 else list(chain.from_iterable(lists))


def _known(kind: type, record: dict[str, Any]) -> dict[str, Any]:
    """Keep a record's entries that are fields of the dataclass; it may have others."""
    names = {f.name for f in fields(kind)}
    return {key: value for key, value in record.items() if key in names}


Group = list[Rollout]
"""The rollouts sampled from one prompt."""


def last_text(completion: str | Sequence[Message]) -> str:
    """Return text as it is, and chat messages as the text of the last one."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def answer_in(completion: str | Sequence[Message], opened_thought: bool = False) -> str | None:
    """Return the last message's text after its thought; None if the thought did not end.

    A thought ends with ``</think>``. It begins with ``<think>``, or with the text itself if the
    chat template has opened it (``opened_thought``).
    """
    _, ended, answer = last_text(completion).rpartition("</think>")
    return None if not ended and (opened_thought or "<think>" in answer) else answer


def as_text(content: str | Sequence[Message]) -> str:
    """Return text as it is, and chat messages as ``role: content`` lines."""
    if isinstance(content, str):
        return content
    return "\n".join(f"{m.get('role')}: {said_in(m.get('content'))}" for m in content)


def said_in(content: Any) -> Any:
    """Return a message's content; of content parts, the joined texts, with ``[image]`` for
    pictures.
    """
    if not isinstance(content, list):
        return content
    parts = [part if isinstance(part, dict) else {"text": part} for part in content]
    return "".join(str(p["text"]) if "text" in p else f"[{p.get('type')}]" for p in parts)
