"""Digests of the weights sent to an engine, tensor by tensor, to compare with what it holds."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_rl.engines.base import Engine
from lightning_rl.engines.lora import is_adapter
from lightning_rl.engines.push import HeldDigests
from lightning_rl.errors import WrongWeightsError
from lightning_rl.run.digest import Digester

_log = logging.getLogger(__name__)


class SentWeights:
    """Digests of the weights last sent to an engine, in the dtype that it holds them in.

    Weights are digested while they pass, so that sharded ones are gathered only once. For weights
    that a push leaves out, such as a LoRA's base or frozen ones, the last digests remain.

    Args:
        clock: times digesting and comparing, as stage ``digests``.
    """

    def __init__(self, clock: Callable[[str], AbstractContextManager[None]] | None = None) -> None:
        self.digests: dict[str, str] = {}
        self.version = -1
        self._before: tuple[int, dict[str, str]] = (-1, {})  # what the push before had brought
        self._coming: tuple[int, Digester] | None = None  # the push that goes on, and its version
        self._clock = clock or nullcontext
        self._said: set[str] = set()

    def begin(self, engine: Engine, version: int) -> None:
        """Begin a push to an engine."""
        self._coming = version, Digester()
        self._dtype = getattr(torch, engine.dtype)
        # Whoever merges adapters does so in float32.
        self._dtype_of_adapters = self._dtype if engine.takes_adapters else torch.float32

    def note(self, name: str, weight: Tensor) -> None:
        """Digest a weight of the push."""
        assert self._coming is not None
        with self._clock("digests"):
            dtype = self._dtype_of_adapters if is_adapter(name) else self._dtype
            self._coming[1].add(name, weight.detach().to(dtype))

    def end(self) -> None:
        """Record the digests: all weights of the push have passed."""
        assert self._coming is not None
        with self._clock("digests"):
            (version, digester), self._coming = self._coming, None
            if version != self.version:
                self._before = self.version, self.digests
            self.version, self.digests = version, self.digests | digester.digests()

    def require_held(self, ask: Callable[[Sequence[str]], list[HeldDigests]]) -> int:
        """Check that an engine holds what it was sent; return how many tensors were compared.

        Args:
            ask: returns what the engine's processes hold under these names.

        Raises:
            WrongWeightsError: names the process, the first tensor that differs, and what it holds
                instead if that is known.
        """
        with self._clock("digests"):
            everyone = ask(list(self.digests))
            compared = 0
            for held_digests in everyone:
                held = held_digests.digests
                wrong = [n for n, sent in self.digests.items() if held.get(n, sent) != sent]
                if wrong:
                    raise self._error(held_digests, wrong)
                compared += len(self.digests.keys() & held.keys())
            self._say_what_is_unread(everyone)
        return compared

    def _error(self, held_digests: HeldDigests, wrong: list[str]) -> WrongWeightsError:
        name, others = wrong[0], f" and {len(wrong) - 1} others" if len(wrong) > 1 else ""
        held, (version, before) = held_digests.digests[name], self._before
        instead = "matches no weight sent"
        if held == before.get(name):
            instead = f"is that of version {version}"
        elif same := [n for n, sent in self.digests.items() if sent == held]:
            instead = f"is that of {same[0]!r}"
        return WrongWeightsError(
            f"after the push of version {self.version}, {held_digests.holder} holds another "
            f"{name!r}{others} than was sent: digest {held}, not {self.digests[name]}, {instead}. "
            "No token was sampled from it. Resume the run to push again; if that fails too, try "
            "another transport or engine. If every push fails, the engine may store this model's "
            "weights in another order: WeightSync(digests=False) leaves the check to the probe"
        )

    def _say_what_is_unread(self, everyone: list[HeldDigests]) -> None:
        """Warn once per reason about tensors that cannot be compared."""
        unread = (h.unread[name] for h in everyone for name in h.unread.keys() - h.digests.keys())
        reasons = Counter(unread)
        if not everyone:
            reasons["this engine cannot say what it holds"] = len(self.digests)
        for why, count in reasons.items():
            if why not in self._said:
                _log.warning("digests do not compare %d tensors in the engine: %s", count, why)
        self._said |= reasons.keys()
