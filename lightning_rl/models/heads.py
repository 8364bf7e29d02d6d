"""Policy head (hidden states to token logprobs) and value heads (hidden states to values)."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import pairwise
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from lightning_rl.config.arguments import configurable
from lightning_rl.data.teacher_logprobs import TeacherLogprobs
from lightning_rl.errors import ConfigError
from lightning_rl.models.attention.packed import ATTENTION, PackLayout
from lightning_rl.models.logit_map import LogitMap
from lightning_rl.models.parallel.tensor import TensorRanks, replicate, split
from lightning_rl.models.parallel.vocabulary import WHOLE, Sums, Vocabulary
from lightning_rl.models.pretrained import (
    Loading,
    keep_own_attention,
    model_of,
    skeleton,
    without_weights,
)
from lightning_rl.models.quantized_layers import quantized_layers
from lightning_rl.models.sampling import (
    Penalties,
    SampledBy,
    at_least_float32,
    sampled_by,
    sampled_logits,
)
from lightning_rl.run.warnings import rank_zero_warn
from lightning_rl.vision.reader import attention

# Elements of one chunk of fp32 logits: 64 MiB, whatever the vocabulary.
CHUNK_ELEMENTS = 1 << 24
# On a GPU 512 MiB: a chunk of a large vocabulary is to have rows enough to keep it busy.
CUDA_CHUNK_ELEMENTS = 1 << 27
ALIGNED = 64
"""A chunk's columns begin at multiples of this, for which products in 16 bits are fastest."""


def _chunk_sums(
    states: Tensor,
    matrix: Tensor,
    offset: Tensor | None,
    targets: Tensor,
    by: SampledBy,
    vocabulary: Vocabulary,
) -> Sums:
    """Compute the sums from which a chunk's logprobs (m, N) and entropies (m,) follow."""
    scaled = sampled_logits(states, matrix, offset, targets[:, 0], by)[0]
    top = scaled.amax(-1, keepdim=True)
    exps = (scaled - top).exp_()
    total, picked = exps.sum(-1), vocabulary.pick(scaled, targets)
    return Sums(top.squeeze(-1), total, picked, exps.mul_(scaled).sum(-1))


def _chunk_slopes(
    states: Tensor,
    matrix: Tensor,
    offset: Tensor | None,
    targets: Tensor,
    by: SampledBy,
    vocabulary: Vocabulary,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient (m, V) of a chunk's logits, in the dtype of its states.

    ``grad_logprobs`` is (m, N); ``lse``, ``entropy`` and ``grad_entropy`` are (m, 1).
    """
    scaled, bend = sampled_logits(states, matrix, offset, targets[:, 0], by)
    log_p = scaled.sub_(lse)
    of_all = None if grad_logprobs is None else grad_logprobs.sum(-1, keepdim=True)
    if grad_entropy is None:
        assert of_all is not None  # or autograd would not have come here
        grad = log_p.exp_().mul_(-of_all)
    else:
        probs = log_p.exp()
        slope = log_p.add_(entropy).mul_(grad_entropy)
        if of_all is not None:
            slope.add_(of_all)
        grad = slope.mul_(probs).neg_()
    if grad_logprobs is not None:
        vocabulary.add(grad, targets, grad_logprobs)
    grad = grad.div_(by.temperature)
    return (grad if bend is None else grad.mul_(bend)).to(states.dtype)


class _ChunkedLogprobs(torch.autograd.Function):
    """Logprobs of N targets and the entropy of each state, never holding all logits at once.

    The first target is the sampled token, which settings of sampling look at. Forward computes all
    logits of some states at a time, and backward computes them again: with p = softmax(z / τ) and H
    its entropy, d logprob[t] / dz = (1[t] - p) / τ and dH / dz = -p (log p + H) / τ; times the
    slope of the model's own map of logits and of penalties. If the weight is trained, and no
    setting depends on several logits, backward takes some logits of all states at a time instead:
    each chunk then has the whole gradient of its rows of the weight, and otherwise every chunk
    would be added to the gradient of all rows.
    Products are computed in ``dtype``, to which weights are cast once per pass; autocast, which
    would cast them again for each chunk, is off meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        by: SampledBy,
        dtype: torch.dtype,
        vocabulary: Vocabulary,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        sums = Sums(
            *(torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in Sums._fields)
        )._replace(picked=torch.empty(targets.shape, dtype=wide, device=hidden.device))
        # Detached: what is compiled is the same with and without gradients.
        states, matrix = hidden.detach().to(dtype), weight.detach().to(dtype)
        offset = None if bias is None else bias.to(dtype)
        sums_of = _compiled(_chunk_sums, matrix) if compiled else _chunk_sums
        for part in _chunks(len(states), len(weight), states, compiled):
            with _no_autocast(states):
                chunk = states[part], matrix, offset, targets[part], by.rows(part)
                for column, found in zip(sums, sums_of(*chunk, vocabulary), strict=True):
                    column[part] = found
        sums = vocabulary.merged(sums)
        lse = sums.top + sums.total.log()
        logprobs, entropy = sums.picked - lse[:, None], lse - sums.weighted / sums.total
        ctx.save_for_backward(states, weight, bias, targets, lse, entropy)
        ctx.by, ctx.hidden_dtype, ctx.vocabulary = by, hidden.dtype, vocabulary
        ctx.compiled = compiled
        ctx.set_materialize_grads(False)  # an output without a loss has None, and costs nothing
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        # Autocast's state here is the thread's own: on a GPU not that of the forward pass.
        with _no_autocast(ctx.saved_tensors[0]):
            gradients = _ChunkedLogprobs._gradients(ctx, grad_logprobs, grad_entropy)
        return *gradients, None, None, None, None, None

    @staticmethod
    def _gradients(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        states, weight, bias, targets, lse, entropy = ctx.saved_tensors
        # What is frozen, such as the head of a LoRA-trained model, gets no gradient computed.
        grad_states, grad_weight, grad_bias = (
            torch.zeros_like(x, dtype=dtype) if needed else None
            for x, dtype, needed in zip(
                (states, weight, bias), (lse.dtype, None, None), ctx.needs_input_grad, strict=False
            )
        )
        size, compiled = len(weight), ctx.compiled
        rows_of, columns_of = _chunks(len(states), size, states, compiled), [slice(0, size)]
        if grad_weight is not None and ctx.by.is_plain:
            columns_of = _chunks(size, len(states), states, compiled, ALIGNED)
            rows_of = [slice(0, len(states))]
        for columns in columns_of:
            matrix = weight[columns].to(states.dtype)
            offset = None if bias is None else bias[columns].to(states.dtype)
            slopes_of = _compiled(_chunk_slopes, matrix, 1) if compiled else _chunk_slopes
            within = targets - columns.start
            for rows in rows_of:
                chunk = states[rows], matrix, offset, within[rows], ctx.by.rows(rows)
                of_logprobs = None if grad_logprobs is None else grad_logprobs[rows]
                of_entropy = None if grad_entropy is None else grad_entropy[rows, None]
                known = lse[rows, None], entropy[rows, None], of_logprobs, of_entropy
                grad = slopes_of(*chunk, ctx.vocabulary, *known)
                if grad_states is not None:
                    _add_product(grad_states[rows], grad, matrix)
                if grad_weight is not None:
                    _add_product(grad_weight[columns], grad.T, states[rows])
                if grad_bias is not None:
                    grad_bias[columns] += grad.sum(0)
                del grad  # before there is the next chunk's
        if grad_states is not None:
            grad_states = ctx.vocabulary.summed(grad_states.to(states.dtype)).to(ctx.hidden_dtype)
        return grad_states, grad_weight, grad_bias


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute ``total += left @ right``, without a second tensor of that size if dtypes allow."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:  # chunks are added up in the weight's own dtype
        total += left @ right


def _compiled(
    function: Callable[..., Any], matrix: Tensor, static: int | None = None
) -> Callable[..., Any]:
    """Compile a chunk's computation to few kernels, which read its logits once or twice.

    The size of the ``matrix`` in dimension ``static``, None: in both, is the same in all chunks.
    """
    torch._dynamo.mark_static(matrix, static)
    return _compile(function)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _no_autocast(like: Tensor) -> AbstractContextManager[Any]:
    device = like.device.type
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def chunk_elements(device: torch.device) -> int:
    """Return the number of logits computed at a time on a device."""
    return CUDA_CHUNK_ELEMENTS if device.type == "cuda" else CHUNK_ELEMENTS


def _chunks(
    count: int, each: int, states: Tensor, compiled: bool, multiple: int = 1
) -> list[slice]:
    """Divide ``count`` rows or columns of ``each`` logits evenly into as few chunks as are allowed.

    So no rest of a single row is left, for which it would be compiled anew. Chunks of many rows or
    columns begin at a ``multiple``. Without logits there are none.
    """
    # Where it is compiled, a chunk in 16 bits has no copy in float32, and may have twice the size.
    times = 2 if compiled and states.dtype.itemsize == 2 else 1
    most = max(1, times * chunk_elements(states.device) // max(1, each))
    chunks = ceil(count / most) if each else 0
    step = multiple if count > 8 * multiple * chunks else 1
    bounds = [count * i // chunks // step * step for i in range(chunks)]
    return [slice(*bound) for bound in pairwise([*bounds, count])]


def _logits_dtype(hidden: Tensor, fp32: bool) -> torch.dtype:
    """Return the dtype of the products: float32 if ``fp32``, else autocast's or the states'."""
    if fp32:
        return torch.float32
    device = hidden.device.type
    on = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else hidden.dtype


def token_logprobs(
    hidden: Tensor,
    output: nn.Linear,
    targets: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    no_end: Tensor | None = None,
    ends: Sequence[int] = (),
    min_p: Tensor | None = None,
    penalties: Penalties | None = None,
    fp32: bool = False,
    vocabulary: Vocabulary = WHOLE,
    compiled: bool = False,
    logit_map: LogitMap | None = None,
) -> tuple[Tensor, Tensor]:
    """Return logprobs of ``targets``, and entropies of the sampling distribution; float32, (M,).

    ``hidden`` (M, D) are the states that predict the targets (M,). Of targets (M, N), the logprobs
    have that shape, and the first of the N is what was sampled. ``temperature`` (M,): greedy
    sampling (0) is scored at 1, since its own distribution has no gradient. ``top_k`` (0: all),
    ``top_p`` (1: all) and ``min_p`` (0: all), each (M,), truncate the distribution as the engine
    did; where ``no_end`` (M,) is True, ``ends`` could not be sampled (``min_tokens``). With
    ``fp32``, logits are computed in float32, whatever dtype the states have. ``vocabulary`` is the
    part of the logits that this rank computes. With ``compiled``, ``torch.compile`` fuses the
    computation of a chunk, if no setting but the temperature is in use. ``logit_map`` turns the
    head's products into logits; None: they are the logits.
    """
    each = targets[:, None] if targets.ndim == 1 else targets
    sampled = each[:, 0]
    by = sampled_by(sampled, temperature, top_k, top_p, no_end, ends, min_p, penalties, logit_map)
    by, dtype = vocabulary.settings(by), _logits_dtype(hidden, fp32)
    weight, bias = vocabulary.matrix(output)
    compiled = compiled and by.is_plain
    logprobs, entropy = _ChunkedLogprobs.apply(
        hidden, weight, bias, each, by, dtype, vocabulary, compiled
    )
    return logprobs.view(targets.shape), entropy


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor,
    output: nn.Linear,
    targets: Tensor,
    temperature: Tensor,
    count: int,
    logit_map: LogitMap | None = None,
    rows: int | None = None,
) -> TeacherLogprobs:
    """Return the logprobs of ``targets``, and the ``count`` likeliest tokens of each with theirs.

    ``hidden`` (M, D) are the states that predict the targets (M,), which were sampled with
    ``temperature`` (M,). The likeliest token comes first. Tokens beyond the first ``rows`` of the
    vocabulary, which whoever wrote the targets does not have, are left out.
    """
    weight = output.weight[:rows]
    bias = None if output.bias is None else output.bias[:rows]
    by = sampled_by(targets, temperature, None, None, None, (), logit_map=logit_map)
    wide, shape = torch.promote_types(hidden.dtype, torch.float32), (len(hidden), count)
    result = TeacherLogprobs(
        hidden.new_empty(len(hidden), dtype=wide),
        targets.new_empty(shape),
        hidden.new_empty(shape, dtype=wide),
    )
    for part in _chunks(len(hidden), len(weight), hidden, compiled=False):
        logits, _ = sampled_logits(hidden[part], weight, bias, targets[part], by.rows(part))
        logprobs = logits.log_softmax(-1)
        result.logprobs[part] = logprobs.gather(-1, targets[part, None]).squeeze(-1)
        result.top_logprobs[part], result.ids[part] = logprobs.topk(count)
    return result


class ValueHead(nn.Module, ABC):
    """Predicts the return from each position; built when the policy's body is known."""

    def __init__(self) -> None:
        super().__init__()
        self.body: PreTrainedModel | None = None
        """The head's own transformer body; None: it uses the policy's hidden states."""

    @abstractmethod
    def configure(self, body: PreTrainedModel) -> None:
        """Create the parameters, given the policy's transformer body."""

    def split(self, ranks: TensorRanks) -> None:
        """Prepare the weights for tensor parallelism; by default each rank keeps all of them."""
        replicate(self, ranks)

    @abstractmethod
    def forward(self, hidden: Tensor, layout: PackLayout) -> Tensor:
        """Return values (M,) of the states that predict the live tokens.

        ``hidden`` (S, D) are the last states of this head's ``body``, or of the policy's.
        """


_SCORED = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}
"""Suffixes of architectures of reward models and critics, and the classes that load them."""


def _load_critic(model: str) -> tuple[PreTrainedModel, nn.Linear]:
    """Load a model's body, and a map to one value: its own ``score`` head, or zeros.

    Raises:
        ConfigError: if the model cannot be loaded.
    """
    if without_weights():
        body = skeleton(AutoConfig.from_pretrained(model), Loading(), ATTENTION, AutoModel).train()
        return body, _zero_linear(body)
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        kind = (config.architectures or [""])[0]
        load = next((load for end, load in _SCORED.items() if kind.endswith(end)), AutoModel)
        with torch.device("cpu"):  # transformers needs accelerate to load to another
            found, report = load.from_pretrained(
                model,
                dtype=torch.float32,
                attn_implementation=attention(config, ATTENTION),
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"critic.head model={model!r} cannot be loaded: {error}") from error
    keep_own_attention(found)
    body = found.base_model.to(torch.get_default_device()).train()
    linear = _zero_linear(body)
    score = getattr(found, "score", None)
    lacking = [name for name in report["missing_keys"] if name.startswith("score.")]
    if isinstance(score, nn.Linear) and score.out_features == 1 and not lacking:
        own = {"bias": linear.bias, **score.state_dict()}
        linear.load_state_dict(own)
    elif load is not AutoModel:
        rank_zero_warn(
            f"critic.head model={model!r}: its head is left out, and values begin at 0, because it "
            f"is no `score` head of one label (num_labels={config.num_labels}); save the reward "
            "model with num_labels=1 to begin with what it predicts"
        )
    return body, linear


def _zero_linear(body: PreTrainedModel) -> nn.Linear:
    """Return a linear map to one value, initialised to predict 0."""
    # Of the body's dtype, whatever torch's default is where the head is made.
    linear = nn.Linear(body.config.get_text_config().hidden_size, 1, dtype=body.dtype)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


@configurable
class SharedValueHead(ValueHead):
    """One linear layer on the policy's own hidden states; nearly free.

    Args:
        detach: keep value gradients out of the shared body.
    """

    def __init__(self, detach: bool = False) -> None:
        super().__init__()
        self.detach = detach

    def configure(self, body: PreTrainedModel) -> None:
        self.linear = _zero_linear(body)

    def forward(self, hidden: Tensor, layout: PackLayout) -> Tensor:
        states = hidden[layout.predictors]
        values = self.linear(states.detach() if self.detach else states)
        return at_least_float32(values.squeeze(-1))


@configurable(model=model_of)
class SeparateValueHead(ValueHead):
    """A critic with its own body, which reads the same tokens as the policy's.

    Args:
        model: directory or hub name of the initial model, with the same tokenizer; None: a copy of
            the policy's. A reward model's ``score`` head of one label is used, so values begin at
            its predictions; without one they begin at 0.
    """

    def __init__(self, model: str | None = None) -> None:
        super().__init__()
        self.model = model

    def configure(self, body: PreTrainedModel) -> None:
        if self.model is None and quantized_layers(body):
            raise ConfigError(
                "SeparateValueHead would train a copy of a policy whose weights "
                "lora.quantization packs and freezes; set its model, or use SharedValueHead"
            )
        if self.model is None:
            self.body, self.linear = copy.deepcopy(body), _zero_linear(body)
        else:
            self.body, self.linear = _load_critic(self.model)

    def split(self, ranks: TensorRanks) -> None:
        split(self.body, ranks)
        replicate(self.linear, ranks)

    def forward(self, hidden: Tensor, layout: PackLayout) -> Tensor:
        return at_least_float32(self.linear(hidden[layout.predictors]).squeeze(-1))
