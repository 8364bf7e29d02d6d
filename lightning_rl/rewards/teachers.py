"""ModelTeacher: another model's logprobs for the tokens of a completion, as a reward."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from math import inf, isnan, nan
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import select
from lightning_rl.data.encoding import PromptEncoder
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.splitting import split_micro_batches
from lightning_rl.data.teacher_logprobs import UNKNOWN, TeacherLogprobs, of_text, to_text
from lightning_rl.errors import ConfigError, DataError, require_at_least
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import (
    Loading,
    device_of,
    dtype_of,
    require_local,
    weight_bytes,
)
from lightning_rl.models.tokenizer import require_rows, require_same_tokens, vocabulary_rows
from lightning_rl.rewards.calling import RewardFailure, Score
from lightning_rl.rollout import Message, Prompt, Rollout, Row, SamplingDistribution

KEPT = 4096
"""Number of texts whose logprobs a teacher remembers."""


class Text(NamedTuple):
    """A row as a teacher reads it: after these ``prompt_ids``, which may hold a hint."""

    row: Row
    prompt_ids: list[int]
    sampling: SamplingDistribution

    @property
    def length(self) -> int:
        """Number of tokens, the prompt's included."""
        return len(self.prompt_ids) + len(self.row.token_ids)

    @property
    def key(self) -> bytes:
        """Equal for texts to which a teacher gives the same logprobs."""
        pictures = [(start, picture.digest) for start, picture in self.row.placed]
        read = self.prompt_ids, self.row.token_ids, self.row.loss_mask, pictures
        return blake2b(repr((read, self.sampling.temperature)).encode()).digest()


class Teacher:
    """Base class of teachers: the texts that they read, their memory, and their score.

    A teacher is a reward function. Its score of a completion is the mean of log q - log p over the
    tokens that the policy wrote, in nats: q is the teacher's probability of a token, p the
    policy's. So it estimates minus the KL per token. It leaves its logprobs in each row
    (:mod:`lightning_rl.data.teacher_logprobs`), for ``Distillation`` and ``TeacherDivergence``.

    Args:
        model: directory or name of the teacher.
        tokenizer: directory or hub name of its tokenizer.
        top_k: how many of the likeliest tokens it tells beside each written one.
        hint: text that only the teacher reads, with columns of the prompt in braces.
    """

    def __init__(self, model: str, tokenizer: str, top_k: int, hint: str | None) -> None:
        require_at_least(0, top_k=top_k)
        self.model, self.tokenizer = model, tokenizer
        self.top_k, self.hint = top_k, hint
        self._encoder: PromptEncoder | None = None
        self._own_rows: int | None = None
        self._known: dict[bytes, str] = {}

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Receive the policy's tokenizer, whose tokens the teacher has to share.

        Rows of a vocabulary that are no token's, which fill it up, may be more or fewer.

        Raises:
            ConfigError: names a token that means another one to the teacher, or that it lacks; or
                if ``top_k`` is more than a vocabulary has.
        """
        self._encoder = PromptEncoder(tokenizer)
        require_same_tokens(self.tokenizer, tokenizer.name_or_path)
        theirs, self._own_rows = (
            vocabulary_rows(self.tokenizer),
            vocabulary_rows(tokenizer.name_or_path),
        )
        if theirs is not None:
            require_rows(self.model, theirs, tokenizer)
        fewest = min(filter(None, (theirs, self._own_rows)), default=self.top_k)
        if self.top_k > fewest:
            raise ConfigError(
                f"{type(self).__name__}(top_k={self.top_k}) must be <= {fewest}, the number of "
                "tokens of the teacher and the policy; 16 is usual"
            )

    def texts(self, rollout: Rollout) -> list[Text]:
        """Return a rollout's rows that have tokens, as the teacher reads them.

        Rows that do not begin with the rollout's prompt get no hint.

        Raises:
            DataError: if the prompt cannot be given the ``hint``.
        """
        asked = rollout.prompt.token_ids
        instead = asked if self.hint is None else self._hinted(rollout.prompt, self.hint)
        result = []
        for row in rollout.rows:
            read = row.prompt_ids
            if read[: len(asked)] == asked:
                read = instead + read[len(asked) :]
            if row.token_ids:
                result.append(Text(row, read, row.sampling or rollout.sampling))
        return result

    def _hinted(self, prompt: Prompt, hint: str) -> list[int]:
        """Return a prompt's tokens with the hint at the end of its last message."""
        try:
            text = hint.format(**prompt.columns)
        except (KeyError, IndexError) as error:
            raise DataError(
                f"prompt {prompt.key!r} has no column {error}, which the teacher's hint names; it "
                f"has {', '.join(prompt.columns) or 'none'}"
            ) from error
        if prompt.pictures or self._encoded(prompt.asked, prompt) != prompt.token_ids:
            raise DataError(
                f"prompt {prompt.key!r} has pictures, tools or other options of its chat template, "
                "which cannot be combined with a teacher's hint; remove hint"
            )
        hinted = replace(prompt, prompt=_with_hint(prompt.prompt, text))
        return self._encoded(hinted.asked, prompt)

    def _encoded(self, text: str | list[Message], prompt: Prompt) -> list[int]:
        assert self._encoder is not None  # rewards are configured before they grade
        where = f"prompt {prompt.key!r}"
        return self._encoder.encode(text, (), lambda: where, prompt.columns).token_ids

    def remember(self, key: bytes, logprobs: TeacherLogprobs) -> str:
        """Keep the logprobs of a text, and forget those of the oldest if there are many."""
        result = self._known[key] = to_text(logprobs)
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return result


def _with_hint(prompt: str | list[Message], hint: str) -> str | list[Message]:
    if isinstance(prompt, str):
        return f"{prompt}\n{hint}\n"
    *before, last = prompt
    return [*before, {**last, "content": f"{last['content']}\n\n{hint}"}]


def scored(texts: Sequence[Text], found: Sequence[str]) -> Score:
    """Put a teacher's logprobs into a rollout's rows, and return its score."""
    gaps: list[float] = []
    for text, encoded in zip(texts, found, strict=True):
        row, logprobs = text.row, of_text(encoded).logprobs.tolist()
        pairs = zip(logprobs, row.logprobs, row.loss_mask, strict=True)
        gaps += [q - p for q, p, written in pairs if written]
        row.teacher_logprobs = encoded
    if any(map(isnan, gaps)):
        return RewardFailure("the teacher's logprobs are NaN; are its weights sound?")
    return sum(gaps) / max(1, len(gaps))


@configurable
class ModelTeacher(Teacher):
    """A teacher in this process: a causal LM with the policy's tokens, read from its files.

    It may be larger, the policy's own initial model with a ``hint`` (self-distillation), or what
    another run has exported. It reads tokens at the temperature that they were sampled with, a
    group's prompt once, and texts that are equal once. It is loaded when the first rollouts are
    graded, on each process.

    Args:
        model: directory or hub name.
        top_k: number of its likeliest tokens to tell for each written one, for
            ``TeacherDivergence``; 0: its logprob of the written token alone.
        hint: text that only the teacher reads, at the end of the prompt's last message, with
            columns of the prompt in braces: ``"The answer is {answer}."``; None: no hint.
        name: name under which its score is logged.
        max_tokens_per_micro_batch: tokens per forward pass, which bounds memory.
        dtype: of its weights: ``float32``, ``bfloat16`` or ``float16``.
        device: where it computes; None: on a GPU if there is one.
        trust_remote_code: run code that comes with the model.
        model_kwargs: further arguments of ``from_pretrained``, such as ``revision``.

    Raises:
        ConfigError: for values out of range, a directory that does not exist, or a model with
            other tokens than the policy's.
    """

    def __init__(
        self,
        model: str,
        top_k: int = 0,
        hint: str | None = None,
        name: str = "teacher",
        max_tokens_per_micro_batch: int = 16_384,
        dtype: str = "float32",
        device: str | None = None,
        trust_remote_code: bool = False,
        model_kwargs: dict[str, Any] | None = None,
    ) -> None:
        require_at_least(1, max_tokens_per_micro_batch=max_tokens_per_micro_batch)
        require_local(model)
        dtype_of("ModelTeacher", dtype)
        super().__init__(model, model, top_k, hint)
        self.__name__ = name
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.dtype = dtype
        self.device = device
        self.loading = Loading(trust_remote_code, model_kwargs or {})
        self._policy: Policy | None = None

    def __call__(self, rollouts: list[Rollout]) -> list[Score]:
        texts = [self.texts(rollout) for rollout in rollouts]
        policy = self._policy = self._policy or self._loaded()
        failed = {index: why for index, t in enumerate(texts) if (why := _unreadable(policy, t))}
        texts = [[] if index in failed else t for index, t in enumerate(texts)]
        keys = [[text.key for text in of_one] for of_one in texts]
        asked = dict(zip(chain(*keys), chain(*texts), strict=True))
        found = {key: self._known[key] for key in asked if key in self._known}
        found |= self._read({key: text for key, text in asked.items() if key not in found})
        return [
            failed.get(index) or scored(of_one, [found[key] for key in of_keys])
            for index, (of_one, of_keys) in enumerate(zip(texts, keys, strict=True))
        ]

    def _read(self, asked: Mapping[bytes, Text]) -> dict[bytes, str]:
        """Read texts in micro-batches, and return and remember their logprobs."""
        policy = self._policy
        assert policy is not None
        keys, texts, result = list(asked), list(asked.values()), {}
        if not texts:
            return {}
        batch = pack_rollouts([_as_rollout(text, place) for place, text in enumerate(texts)])
        for rows in split_micro_batches(
            batch, self.max_tokens_per_micro_batch, filling=policy.filling
        ):
            micro_batch = select(batch, rows)
            live, of_live = policy.likeliest(
                micro_batch.to(policy.lm.device), self.top_k, self._own_rows
            )
            whole = unknown(len(micro_batch["tokens"]), self.top_k)
            for column, values in zip(whole, of_live, strict=True):
                column[live.cpu()] = values.to("cpu", column.dtype)
            begin = 0
            for place in rows.tolist():
                first, end = begin + len(texts[place].prompt_ids), begin + texts[place].length
                of_row = TeacherLogprobs(*(column[first:end] for column in whole))
                result[keys[place]] = self.remember(keys[place], of_row)
                begin = end
        return result

    def _loaded(self) -> Policy:
        policy = Policy(self.model, loading=self.loading).requires_grad_(False)
        for weight in policy.parameters():  # not what positions are computed from
            weight.data = weight.data.to(dtype_of("ModelTeacher", self.dtype))
        return policy.to(device_of(self.device))

    def weight_bytes(self) -> int:
        """Return the bytes of its weights, from the model's configuration alone."""
        return weight_bytes(self.model, self.loading, dtype_of("ModelTeacher", self.dtype))

    def close(self) -> None:
        """Free the model."""
        self._policy = None


def _unreadable(policy: Policy, texts: Sequence[Text]) -> RewardFailure | None:
    """Return why a teacher cannot read a rollout's texts; None if it can."""
    rows = policy.rows
    beyond = [t for text in texts for t in (*text.prompt_ids, *text.row.token_ids) if t >= rows]
    if not beyond:
        return None
    return RewardFailure(
        f"the rollout has token {beyond[0]}, but the teacher has {rows} tokens; it is no text's "
        "token: train the policy to write text first, or lower sampling.temperature"
    )


def _as_rollout(text: Text, place: int) -> Rollout:
    """Return a rollout of one row, as which a text can be packed."""
    row = replace(
        text.row, prompt_ids=text.prompt_ids, routed_experts="", teacher_logprobs="", role=""
    )
    prompt = Prompt(str(place), "", text.prompt_ids)
    return Rollout(prompt, str(place), 0, 0, text.sampling, rows=[row])


def unknown(tokens: int, count: int) -> TeacherLogprobs:
    """Return the logprobs of ``tokens`` tokens that no teacher has read, to be filled in."""
    return TeacherLogprobs(
        torch.full((tokens,), nan, device="cpu"),
        torch.full((tokens, count), UNKNOWN, device="cpu"),
        torch.full((tokens, count), -inf, device="cpu"),
    )
