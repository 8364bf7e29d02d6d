"""Routing: hears which experts the routers of a mixture choose, or has them choose given ones."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rl.data.routing import UNKNOWN
from lightning_rl.errors import ConfigError

Gates = Callable[[Tensor, Tensor], Tensor]
"""Weights (S, K) of the chosen experts (S, K) by router logits (S, E), in float32."""


class Heard(NamedTuple):
    """What L routers with E experts made of the S tokens of a pass, of which each chose K.

    ``probs`` (L, E): means of their probabilities, with a gradient if it is wanted. ``load``
    (L, E): the share of tokens that an expert got. ``entropy`` (L,): the mean of the routers', in
    nats. ``otherwise`` (): share of tokens for which any router would have chosen another set of
    experts than was replayed. ``experts`` (S, L, K).
    """

    probs: Tensor
    load: Tensor
    entropy: Tensor
    otherwise: Tensor
    experts: Tensor


class Routing:
    """The routers of a model, by the numbers of their layers, in order.

    Each forward pass goes between :meth:`begin` and :meth:`heard`. What is replayed stays until the
    next pass begins, since a backward pass may compute this one again.
    """

    balanced = False
    """True if a loss takes the gradient of ``probs``."""

    def __init__(self, routers: dict[int, nn.Module], gates: Gates) -> None:
        self._gates, self._layers = gates, list(routers)
        self._replayed: Tensor | None = None
        self._listening = False
        self._passed: list[tuple[Tensor, Tensor, Tensor]] = []
        for layer, router in enumerate(routers.values()):
            router.register_forward_hook(partial(self._choose, layer))

    def begin(self, replayed: Tensor | None = None) -> None:
        """A pass over S tokens begins, with these experts (S, L, K); None: the routers' own.

        Experts may also be of all layers of the model, as vLLM has them.

        Raises:
            ConfigError: if they are of another number of layers.
        """
        if replayed is not None and replayed.shape[1] != len(self._layers):
            if replayed.shape[1] <= self._layers[-1]:
                raise ConfigError(
                    f"routed experts of {replayed.shape[1]} layers cannot be replayed by "
                    f"{len(self._layers)} routers; were they recorded with another model?"
                )
            replayed = replayed[:, self._layers]
        self._replayed, self._listening, self._passed = replayed, True, []

    def chosen(self) -> Tensor:
        """The experts (S, L, K), int16, of the pass that is over."""
        return torch.stack([chosen for _, chosen, _ in self._end()], 1).short()

    def heard(self) -> Heard:
        """What the routers made of the pass that is over."""
        passed = self._end()
        experts = torch.stack([chosen for _, chosen, _ in passed], 1)
        with torch.set_grad_enabled(self.balanced and torch.is_grad_enabled()):
            probs = torch.stack([logits.float().softmax(-1).mean(0) for logits, _, _ in passed])
        with torch.no_grad():
            entropy = torch.stack([_entropy(logits) for logits, _, _ in passed])
            own = torch.stack([chosen for _, _, chosen in passed], 1)
            others = own.sort(-1).values != experts.sort(-1).values
            counts = torch.zeros_like(probs)
            places = experts.transpose(0, 1).flatten(1)
            counts.scatter_add_(1, places, torch.ones_like(places, dtype=counts.dtype))
        return Heard(
            probs,
            counts / len(experts),
            entropy,
            others.flatten(1).any(1).float().mean(),
            experts.short(),
        )

    def _end(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each layer: logits, the experts that tokens were sent to, those of the router."""
        passed, self._passed, self._listening = self._passed, [], False
        return passed

    @torch.compiler.disable
    def _choose(self, layer: int, router: nn.Module, inputs: Any, output: Any) -> Any:
        logits, weights, own = output
        chosen = own
        if self._replayed is not None:
            given = self._replayed[:, layer].long()
            chosen = torch.where(given == UNKNOWN, own, given)
            weights = self._gates(logits, chosen).to(weights.dtype)
        if self._listening:
            self._passed.append((logits, chosen, own))
        return logits, weights, chosen


def routing_of(lm: PreTrainedModel) -> Routing | None:
    """The routers of a model; None if it has none, or such as weigh experts in another way.

    Known are those that give logits, weights and experts, the weights being softmax's
    probabilities, or their shares among the chosen ones.
    """
    routers = _routers(lm)
    kinds = {type(router) for router in routers.values()}
    gates = _gates_of(kinds.pop(), lm.config.get_text_config()) if kinds else None
    return None if gates is None else Routing(routers, gates)


def require_routing(lm: PreTrainedModel) -> Routing:
    """The routers of a model.

    Raises:
        ConfigError: if there are none, or they are not known.
    """
    found = routing_of(lm)
    if found is None:
        raise ConfigError(
            f"{type(lm).__name__} has no routers whose choice of experts can be recorded or "
            "replayed; use a mixture such as Qwen3-MoE, Mixtral or OLMoE, or leave routing out"
        )
    return found


def _routers(lm: PreTrainedModel) -> dict[int, nn.Module]:
    """Routers by the numbers of their layers, which are in their names."""
    recorded = getattr(lm.base_model, "_can_record_outputs", None) or {}
    kind = getattr(recorded.get("router_logits"), "target_class", None)
    if kind is None:
        return {}
    found = {name: part for name, part in lm.named_modules() if isinstance(part, kind)}
    numbers = (next(int(part) for part in name.split(".") if part.isdigit()) for name in found)
    return dict(zip(numbers, found.values(), strict=True))


def _gates_of(kind: Callable[[Any], nn.Module], config: Any) -> Gates | None:
    """How such routers weigh what they choose, found out on one with random weights."""
    with torch.random.fork_rng([]), torch.device("cpu"), torch.no_grad():
        router = kind(config).float()
        for parameter in router.parameters():
            nn.init.normal_(parameter, std=0.1)
        states = torch.randn(16, config.hidden_size, dtype=torch.float32, device="cpu")
        output = router(states)
    if not (isinstance(output, tuple) and len(output) == 3):
        return None
    logits, weights, chosen = output
    if logits.dim() != 2 or weights.shape != chosen.shape or chosen.is_floating_point():
        return None
    for gates in (_probabilities, _shares):
        if torch.allclose(gates(logits, chosen), weights.float(), rtol=1e-4, atol=1e-6):
            return gates
    return None


def _entropy(logits: Tensor) -> Tensor:
    """The mean over tokens, (), of logits (S, E)."""
    logprobs = logits.float().log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1).mean()


def _probabilities(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.float().softmax(-1).gather(-1, chosen)


def _shares(logits: Tensor, chosen: Tensor) -> Tensor:
    """In the order of operations of transformers: equal choices have equal weights, to the bit."""
    probs = _probabilities(logits, chosen)
    return probs / probs.sum(-1, keepdim=True)
