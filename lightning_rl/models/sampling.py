"""The distribution that a token was sampled from, to score the token under it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.data.batch import token_rows
from lightning_rl.models.logit_map import LogitMap


@dataclass(frozen=True)
class Penalties:
    """Penalties that engines applied to the logits from which M tokens were sampled.

    Token i follows ``input_ids[begin[i]:end[i]]``, in which the tokens from ``turn[i]`` on were
    written in its own turn; those before are the engine's prompt. ``input_ids`` is (T,), all others
    (M,).
    """

    input_ids: Tensor
    begin: Tensor
    turn: Tensor
    end: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    def rows(self, part: slice) -> "Penalties":
        """Return the penalties of a subset of the M tokens."""
        names = ("begin", "turn", "end", "repetition", "presence", "frequency")
        return replace(self, **{name: getattr(self, name)[part] for name in names})

    def apply(self, logits: Tensor) -> Tensor:
        """Change logits (M, V) in place; returns the slope (M, V), d changed / d logits.

        As vLLM: those of all tokens seen, prompt included, are divided by ``repetition`` if
        positive, else multiplied (Keskar et al. 2019, CTRL, section 4.1); then ``frequency`` is
        subtracted for each time that a token was written, and ``presence`` once.
        """
        seen, counts = self._seen(logits.shape[1])
        repetition = self.repetition[:, None]
        slope = torch.where(logits > 0, 1 / repetition, repetition).masked_fill_(~seen, 1.0)
        # Divided, not multiplied by the slope: so both sides round alike.
        changed = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits.copy_(torch.where(seen, changed, logits))
        logits -= self.frequency[:, None] * counts
        logits -= self.presence[:, None] * (counts > 0)
        return slope

    def _seen(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Return which tokens (M, V) precede each token, and how often its turn wrote them."""
        width = max(1, int((self.end - self.begin).max()))
        places = self.begin[:, None] + torch.arange(width, device=self.begin.device)
        before = places < self.end[:, None]
        ids = self.input_ids[places.clamp(max=len(self.input_ids) - 1)]
        # One more column takes what is not in a token's own past.
        seen = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
        seen.scatter_(1, ids.where(before, vocabulary), True)
        written = (before & (places >= self.turn[:, None])).float()
        counts = written.new_zeros(len(ids), vocabulary + 1)
        counts.scatter_add_(1, ids, written)
        return seen[:, :-1], counts[:, :-1]


def penalties_of(micro_batch: TensorDict, live: Tensor) -> Penalties | None:
    """Return the penalties of a micro-batch's tokens ``live`` (M,); None if there are none."""
    if "turn_start" not in micro_batch["tokens"]:
        return None
    rows, tokens, length = (
        token_rows(micro_batch)[live],
        micro_batch["tokens"],
        micro_batch["rollouts", "length"],
    )
    begin = (length.cumsum(0) - length)[rows]
    rollouts = micro_batch["rollouts"][rows]
    return Penalties(
        tokens["input_ids"],
        begin,
        begin + tokens["turn_start"][live],
        live,
        rollouts["repetition_penalty"],
        rollouts["presence_penalty"],
        rollouts["frequency_penalty"],
    )


CUT = -1e9
"""The logit of tokens that could not be sampled: finite, as 0 x inf is nan in an entropy."""


@dataclass(frozen=True)
class SampledBy:
    """Sampling settings of M tokens: columns (M, 1), None if no token has that setting.

    ``no_end`` is True where the ``ends`` (E,) could not be sampled. ``logit_map`` is the model's;
    None: its logits are the products of its output head.
    """

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    no_end: Tensor | None
    ends: Tensor
    penalties: Penalties | None
    logit_map: LogitMap | None = None

    @property
    def is_plain(self) -> bool:
        """True if no setting but the temperature is in use."""
        settings = (self.top_k, self.top_p, self.min_p, self.no_end, self.penalties)
        return all(setting is None for setting in settings)

    def rows(self, part: slice) -> "SampledBy":
        """Return the settings of a subset of the M tokens."""
        cut = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _WHOLE}
        penalties = None if self.penalties is None else self.penalties.rows(part)
        cut = {name: None if column is None else column[part] for name, column in cut.items()}
        return SampledBy(**cut, ends=self.ends, penalties=penalties, logit_map=self.logit_map)


_WHOLE = ("ends", "penalties", "logit_map")


def settings_in_use(rollouts: TensorDict) -> tuple[bool, bool]:
    """Tell whether any of ``rollouts``, on the CPU, used top-k or top-p, and whether any min-p."""
    cuts = (rollouts["top_k"] > 0) | (rollouts["top_p"] < 1)
    samples = rollouts["temperature"] > 0  # engines cut nothing where they take the likeliest
    min_p = rollouts.get("min_p", None)
    return bool((cuts & samples).any()), min_p is not None and bool((min_p * samples).any())


def sampled_by(
    targets: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    no_end: Tensor | None,
    ends: Sequence[int],
    min_p: Tensor | None = None,
    penalties: Penalties | None = None,
    logit_map: LogitMap | None = None,
) -> SampledBy:
    """Return the settings of the targets (M,) for ``sampled_logits``, without ineffective ones."""
    # Engines cut nothing where they take the likeliest.
    samples = temperature > 0
    if top_k is not None and top_p is not None:
        top_k, top_p = top_k.where(samples, 0), top_p.where(samples, 1.0)
        if not bool(((top_k > 0) | (top_p < 1)).any()):
            top_k = top_p = None
    if min_p is not None:
        min_p = min_p.where(samples, 0.0)[:, None] if bool(min_p.any()) else None
    end_ids = torch.tensor([] if no_end is None else ends, dtype=torch.long, device="cpu")
    end_ids = end_ids.to(targets.device, non_blocking=True)
    if no_end is not None:
        # If one occurs all the same, in a rollout from elsewhere, none was left out.
        no_end = (no_end & ~torch.isin(targets, end_ids))[:, None] if end_ids.numel() else None
    return SampledBy(
        # Sampled at temperature τ, so score at τ too, else ratios start away from 1.
        torch.where(samples, temperature, 1.0)[:, None],
        None if top_k is None else top_k.float()[:, None],
        None if top_p is None else top_p.float()[:, None],
        min_p,
        no_end,
        end_ids,
        penalties,
        logit_map,
    )


def at_least_float32(values: Tensor) -> Tensor:
    """Convert 16-bit values to float32; return others unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def sampled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, by: SampledBy
) -> tuple[Tensor, Tensor | None]:
    """Logits (m, V), float32 at least, of the distribution that was sampled from; all of one dtype.

    In the order of the engines: the model's own map, penalties, end tokens where none could be,
    temperature, min-p, top-k, top-p. Also returns their slope, (m, V) or (1, 1), in the products of
    the output head, but for the temperature; None: 1.
    """
    logits = at_least_float32(nn.functional.linear(hidden, weight, bias))
    slope = None if by.logit_map is None else by.logit_map.apply(logits)
    if by.penalties is not None:
        penalized = by.penalties.apply(logits)
        slope = penalized if slope is None else penalized.mul_(slope)
    scaled = logits.div_(by.temperature)
    if by.no_end is not None:
        scaled[:, by.ends] = scaled[:, by.ends].masked_fill(by.no_end, CUT)
    cut = _cut(scaled, by)
    if cut is None:
        return scaled, slope
    # Rounding may put a sampled token just outside of the trainer's own nucleus: keep it, since it
    # was sampled.
    cut.scatter_(-1, targets[:, None], False)
    return scaled.masked_fill_(cut, CUT), slope


def _cut(scaled: Tensor, by: SampledBy) -> Tensor | None:
    """Return where (m, V) min-p, then top-k and top-p among the rest, exclude a token."""
    unlikely = None
    if by.min_p is not None:
        probs = scaled.softmax(-1)
        unlikely = probs < probs.amax(-1, keepdim=True) * by.min_p
    if by.top_k is None or by.top_p is None:
        return unlikely
    if unlikely is None:
        return _outside(scaled, by.top_k, by.top_p)
    return unlikely | _outside(scaled.masked_fill(unlikely, CUT), by.top_k, by.top_p)


def _outside(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return where (m, V) top-k, then top-p among the rest, exclude a token; both are (m, 1)."""
    ordered, order = scaled.sort(-1)
    vocabulary = scaled.shape[1]
    # Engines keep what ties with the k-th, which in bfloat16 is common.
    kth = ordered.gather(-1, (vocabulary - top_k.long()).clamp(0, vocabulary - 1))
    outside = (ordered < kth) & (top_k > 0)
    probs = ordered.masked_fill(outside, -torch.inf).softmax(-1)
    # Summed from the unlikeliest up, as vLLM does: so both round alike at the nucleus' boundary.
    outside |= probs.cumsum(-1) <= 1 - top_p
    outside[:, -1] = False  # the likeliest stays, however small top_p is
    return torch.zeros_like(outside).scatter_(-1, order, outside)
