"""Policy head (hidden states to token logprobs) and value heads (hidden states to values)."""

import copy
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rl.models.attention import PackLayout

# Elements of one chunk of fp32 logits: 64 MiB, whatever the vocabulary.
CHUNK_ELEMENTS = 1 << 24


class _ChunkedLogprobs(torch.autograd.Function):
    """Logprob of each target and entropy of its distribution, never holding all logits at once.

    Backward recomputes each chunk's logits: with p = softmax(z / τ) and H its entropy,
    d logprob[t] / dz = (1[t] - p) / τ and dH / dz = -p (log p + H) / τ.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature):  # type: ignore[no-untyped-def]
        logprobs, entropy, lse = (
            torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        for part in _chunks(len(hidden), weight.shape[0]):
            scaled = _scaled_logits(hidden[part], weight, bias, temperature[part])
            lse[part] = scaled.logsumexp(-1)
            picked = scaled.gather(-1, targets[part, None]).squeeze(-1)
            logprobs[part] = picked - lse[part]
            probs = (scaled - lse[part, None]).exp_()
            entropy[part] = lse[part] - (probs * scaled).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, lse, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        hidden, weight, bias, targets, temperature, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for part in _chunks(len(hidden), weight.shape[0]):
            scaled = _scaled_logits(hidden[part], weight, bias, temperature[part])
            log_p = scaled - lse[part, None]
            g = grad_logprobs[part, None]
            slope = g + grad_entropy[part, None] * (log_p + entropy[part, None])
            grad = log_p.exp_().mul_(slope).neg_()
            grad.scatter_add_(-1, targets[part, None], g)
            grad = (grad / temperature[part, None]).to(hidden.dtype)
            grad_hidden[part] = grad @ weight.to(hidden.dtype)
            grad_weight += (grad.T @ hidden[part]).to(weight.dtype)
            if grad_bias is not None:
                grad_bias += grad.sum(0).to(grad_bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temp: Tensor) -> Tensor:
    logits = nn.functional.linear(
        hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    )
    return logits.float() / temp[:, None]


def token_logprobs(
    hidden: Tensor, output: nn.Linear, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Logprobs of ``targets`` and entropies, float32, both (M,), at the sampling temperature.

    ``hidden`` (M, D) are the states that predict the targets (M,). ``temperature`` (M,): greedy
    sampling (0) is scored at 1, since its own distribution has no gradient.
    """
    # Sampled at temperature τ, so score at τ too, else ratios start away from 1.
    temperature = torch.where(temperature > 0, temperature, 1.0)
    return _ChunkedLogprobs.apply(hidden, output.weight, output.bias, targets, temperature)


class ValueHead(nn.Module, ABC):
    """Predicts the return from each position; built once the policy's body is known."""

    @abstractmethod
    def configure(self, body: PreTrainedModel) -> None:
        """Create the parameters, given the policy's transformer body."""

    @abstractmethod
    def forward(self, hidden: Tensor, layout: PackLayout) -> Tensor:
        """Values (M,) of the states that predict the live tokens; ``hidden`` (S, D)."""


def _zero_linear(body: PreTrainedModel) -> nn.Linear:
    """A linear map to one value that predicts 0 at first: no bias before any evidence."""
    linear = nn.Linear(body.config.get_text_config().hidden_size, 1)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


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
        return self.linear(states.detach() if self.detach else states).squeeze(-1).float()


class SeparateValueHead(ValueHead):
    """A critic with a body of its own, started as a copy of the policy's."""

    def configure(self, body: PreTrainedModel) -> None:
        self.body = copy.deepcopy(body)
        self.linear = _zero_linear(body)

    def forward(self, hidden: Tensor, layout: PackLayout) -> Tensor:
        states = self.body(
            input_ids=layout.input_ids[None],
            position_ids=layout.position_ids[None],
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0, layout.predictors]
        return self.linear(states).squeeze(-1).float()
