"""Routing: records which experts the routers of a mixture choose, or replays given choices."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rl.data.routing import UNKNOWN
from lightning_rl.errors import ConfigError
from lightning_rl.models.attention.unpacked import Lines


class Weighing(NamedTuple):
    """Functions that routers apply to logits (S, E), in float32.

    ``probs`` gives all experts' probabilities (S, E), which sum to one; ``gates`` the weights
    (S, K) of the chosen experts (S, K).
    """

    probs: Callable[[Tensor], Tensor]
    gates: Callable[[Tensor, Tensor], Tensor]


class RouterOutputs(NamedTuple):
    """Statistics of L routers with E experts that each chose K of them for a pass's S tokens.

    ``probs`` (L, E): means of their probabilities, with a gradient if it is wanted; with a sigmoid
    for scores, each expert's share of them (DeepSeek-AI 2024, arXiv 2412.19437, eq. 19). ``load``
    (L, E): the share of tokens that an expert got. ``entropy`` (L,): the mean of the routers', in
    nats. ``otherwise`` (): share of tokens for which any router would have chosen another set of
    experts than was replayed. ``experts`` (S, L, K).
    """

    probs: Tensor
    load: Tensor
    entropy: Tensor
    otherwise: Tensor
    experts: Tensor


def joined(parts: Sequence[RouterOutputs], counts: bool) -> RouterOutputs:
    """Return the statistics of several passes' tokens together; without ``counts``, of none."""
    some = [part for part in parts if len(part.experts)] if counts else []
    if not some:
        *statistics, experts = parts[0]
        return RouterOutputs._make([*map(torch.zeros_like, statistics), experts[:0]])
    sizes = torch.tensor([len(part.experts) for part in some], device=some[0].load.device)
    shares = (sizes / sizes.sum()).to(some[0].load.dtype)
    *columns, chosen = zip(*some, strict=True)
    means = [torch.tensordot(shares, torch.stack(column), 1) for column in columns]
    return RouterOutputs._make([*means, torch.cat(chosen)])


class Routing:
    """The routers of a model, by layer number, in order.

    Each forward pass runs between :meth:`begin` and :meth:`router_outputs`. Replayed choices stay
    until the next pass begins, since a backward pass may recompute this one.
    """

    balanced = False
    """Whether a loss needs the gradient of ``probs``."""

    def __init__(self, routers: dict[int, nn.Module], weighing: Weighing) -> None:
        self._weighing, self._layers = weighing, list(routers)
        self._replayed: Tensor | None = None
        self._listening = False
        self._lines: Lines | None = None
        self._passed: list[tuple[Tensor, Tensor, Tensor]] = []
        for layer, router in enumerate(routers.values()):
            router.register_forward_hook(partial(self._choose, layer))

    def begin(self, replayed: Tensor | None = None, lines: Lines | None = None) -> None:
        """Begin a pass over S tokens with these experts (S, L, K); None: the routers choose.

        Experts may also cover all layers of the model, as in vLLM. ``lines`` say which tokens the
        routers see, and where the S tokens are among them; None: the S tokens themselves.

        Raises:
            ConfigError: if the experts are for another number of layers.
        """
        if replayed is not None and replayed.shape[1] != len(self._layers):
            if replayed.shape[1] <= self._layers[-1]:
                raise ConfigError(
                    f"routed experts of {replayed.shape[1]} layers cannot be replayed by "
                    f"{len(self._layers)} routers; were they recorded with another model?"
                )
            replayed = replayed[:, self._layers]
        if replayed is not None and lines is not None:
            replayed = replayed[lines.source.flatten()]
        self._lines = lines
        self._replayed, self._listening, self._passed = replayed, True, []

    def chosen(self) -> Tensor:
        """Return the experts (S, L, K), int16, chosen in the finished pass."""
        return torch.stack([chosen for _, chosen, _ in self._end()], 1).short()

    def router_outputs(self, own: Tensor | None = None) -> RouterOutputs:
        """Return the routers' statistics of the finished pass, over the tokens that ``own`` (S,)
        flags; None: over all.
        """
        passed = self._end()
        if own is not None:
            passed = [(logits[own], chosen[own], other[own]) for logits, chosen, other in passed]
        experts = torch.stack([chosen for _, chosen, _ in passed], 1)
        with torch.set_grad_enabled(self.balanced and torch.is_grad_enabled()):
            of_layers = [self._weighing.probs(logits) for logits, _, _ in passed]
            probs = torch.stack([each.mean(0) for each in of_layers])
        with torch.no_grad():
            entropy = torch.stack([torch.special.entr(p).sum(-1).mean() for p in of_layers])
            own = torch.stack([chosen for _, _, chosen in passed], 1)
            others = own.sort(-1).values != experts.sort(-1).values
            counts = torch.zeros_like(probs)
            places = experts.transpose(0, 1).flatten(1)
            counts.scatter_add_(1, places, torch.ones_like(places, dtype=counts.dtype))
        return RouterOutputs(
            probs,
            counts / len(experts),
            entropy,
            others.flatten(1).any(1).float().mean(),
            experts.short(),
        )

    def _end(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """End a pass; return each layer's logits, the experts used, and the router's own choice."""
        passed, self._passed, self._listening = self._passed, [], False
        if self._lines is None:
            return passed
        place = self._lines.place
        return [(logits[place], chosen[place], own[place]) for logits, chosen, own in passed]

    @torch.compiler.disable
    def _choose(self, layer: int, router: nn.Module, inputs: Any, output: Any) -> Any:
        logits, weights, own = output
        chosen = own
        if self._replayed is not None:
            given = self._replayed[:, layer].long()
            chosen = torch.where(given == UNKNOWN, own, given)
            weights = self._weighing.gates(logits, chosen).to(weights.dtype)
        if self._listening:
            self._passed.append((logits, chosen, own))
        return logits, weights, chosen


def routing_of(lm: PreTrainedModel) -> Routing | None:
    """Return the routers of a model; None if it has none, or their weighting is not supported.

    Supported are routers that return logits, weights and experts, with weights that are softmax
    probabilities or sigmoids, or their shares among the chosen ones, possibly scaled.
    """
    routers = _routers(lm)
    kinds = {type(router) for router in routers.values()}
    weighing = _weighing_of(kinds.pop(), lm.config.get_text_config()) if kinds else None
    return None if weighing is None else Routing(routers, weighing)


def require_routing(lm: PreTrainedModel) -> Routing:
    """Return the routers of a model.

    Raises:
        ConfigError: if it has none, or they are not supported.
    """
    result = routing_of(lm)
    if result is None:
        raise ConfigError(
            f"{type(lm).__name__} has no routers whose choice of experts can be recorded or "
            "replayed; use a mixture such as Qwen3-MoE, GLM-4.5 or Mixtral, or leave routing out"
        )
    return result


def _routers(lm: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the routers by layer number, taken from their names."""
    recorded = getattr(lm.base_model, "_can_record_outputs", None) or {}
    kind = getattr(recorded.get("router_logits"), "target_class", None)
    if kind is None or kind is nn.Linear:  # which gives logits alone: what is chosen is not heard
        return {}
    found = {name: part for name, part in lm.named_modules() if isinstance(part, kind)}
    numbers = (next(int(part) for part in name.split(".") if part.isdigit()) for name in found)
    return dict(zip(numbers, found.values(), strict=True))


def _weighing_of(kind: Callable[[Any], nn.Module], config: Any) -> Weighing | None:
    """Find how routers of this kind weight experts, by testing one with random weights."""
    with torch.random.fork_rng([]), torch.device("cpu"), torch.no_grad():
        router = kind(config).float()
        for parameter in router.parameters():
            nn.init.normal_(parameter, std=0.1)
        states = torch.randn(16, config.hidden_size, dtype=torch.float32, device="cpu")
        # Some are given what is added to scores before the choice, and not to weights.
        _, *biases = signature(router.forward).parameters
        try:
            output = router(states, *(torch.zeros((), device="cpu") for _ in biases))
        except (TypeError, ValueError):  # they are called with something else
            return None
    if not (isinstance(output, tuple) and len(output) == 3):
        return None
    logits, weights, chosen = output
    if logits.dim() != 2 or weights.shape != chosen.shape or chosen.is_floating_point():
        return None
    scale = next((float(getattr(router, name)) for name in _SCALES if hasattr(router, name)), 1.0)
    for probs, scores in ((_softmax, _softmax), (_affinities, _sigmoid)):
        for shared in (False, True):
            gates = partial(_gates, scores, shared, scale)
            if torch.allclose(gates(logits, chosen), weights.float(), rtol=1e-4, atol=1e-6):
                return Weighing(probs, gates)
    return None


_SCALES = ("routed_scaling_factor", "router_scaling_factor")
"""Names in transformers' configurations for the factor of routers' weights."""


def _softmax(logits: Tensor) -> Tensor:
    return logits.float().softmax(-1)


def _sigmoid(logits: Tensor) -> Tensor:
    return logits.float().sigmoid()


def _affinities(logits: Tensor) -> Tensor:
    scores = _sigmoid(logits)
    return scores / scores.sum(-1, keepdim=True)


def _gates(
    scores: Callable[[Tensor], Tensor], shared: bool, scale: float, logits: Tensor, chosen: Tensor
) -> Tensor:
    """Return weights of the chosen experts, bit-equal to transformers' for the same choices."""
    weights = scores(logits).gather(-1, chosen)
    if shared:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale
