"""AdapterEngine: one base model in memory, with a LoRA for each of several policies."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_rl.engines.base import Engine, policy_of
from lightning_rl.engines.lora import MERGED, LoRAEngine, is_adapter
from lightning_rl.engines.push import HeldDigests
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError, WeightSyncError
from lightning_rl.rollout import Placed


class AdapterEngine(LoRAEngine):
    """Holds one base and the LoRA of each served policy; with a single policy, its weights.

    A token costs the base's computation and a little for the adapters, whichever policy writes it.
    ``version`` is the run's, while tokens carry their policy's version, as in
    :class:`MultiPolicyEngine`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)  # of the class beside this one
        self.policies: dict[str, _PolicyView] = {}
        """The view of each policy, by name, if there are several."""
        self._roles: Mapping[str, str] = {}

    def serve(self, roles: Mapping[str, str]) -> None:
        if roles == self._roles:
            return
        if self.running:
            raise ConfigError(
                f"{type(self).__name__} is already running, and serves "
                f"{', '.join(self.policies) or 'one policy'}; call close() first"
            )
        names = sorted(set(roles.values()))
        if len(names) > 1 and self.adapters == MERGED:
            raise ConfigError(
                f"engine adapters='merged': {type(self).__name__} serves {', '.join(names)} on one "
                "base, which cannot be merged with several LoRAs; leave it out, or use "
                "MultiPolicyEngine"
            )
        self.policies = {name: _PolicyView(self, name) for name in names} if len(names) > 1 else {}
        self._roles = dict(roles)
        self.lora_rank = None  # what one policy trained

    def of_role(self, role: str) -> Engine:
        if not self.policies:
            return self
        return self.policies[policy_of(role, self._roles)]

    def of_policy(self, name: str) -> Engine:
        if not self.policies:
            return self
        if name not in self.policies:
            raise ConfigError(
                f"{type(self).__name__} has no policy {name!r}; it serves "
                f"{', '.join(self.policies)}"
            )
        return self.policies[name]

    def caught_up(self, iteration: int) -> None:
        if self.policies:
            self.version = iteration

    def start(self, model_dir: Path) -> None:
        """Start; reject policies with other weights, which have a directory of their name."""
        if own := [name for name in self.policies if (model_dir / name).is_dir()]:
            raise ConfigError(
                f"{type(self).__name__} holds one base, but policy {own[0]!r} starts from its own "
                "model; leave out that model, or use MultiPolicyEngine"
            )
        super().start(model_dir)  # type: ignore[safe-super]

    def close(self) -> None:
        super().close()  # type: ignore[safe-super]
        self.has_base = False
        for view in self.policies.values():
            view.version = -1

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        """Generate with the policy that plays the unnamed role."""
        if self.policies:
            return await self.of_role("").generate(token_ids, sampling, seed)
        return await super().generate(token_ids, sampling, seed)  # type: ignore[safe-super]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self.policies:  # of which are they?
            raise WeightSyncError(
                f"{type(self).__name__} takes the weights of one policy at a time; use "
                "of_policy(name)"
            )
        super().load_weights(weights, version)  # type: ignore[safe-super]

    @abstractmethod
    def load_adapters(
        self, view: "_PolicyView", weights: Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        """Load a policy's weights: its adapters, then their base unless it is already loaded."""

    @abstractmethod
    def adapter_digests(self, view: "_PolicyView", names: Sequence[str]) -> dict[str, str]:
        """Return digests of the factors that a policy computes with, under these names."""

    def divided(
        self, weights: Iterable[tuple[str, Tensor]]
    ) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]] | None]:
        """Return the adapters of a push, and the base that it contains; None if it contains none.

        Raises:
            WeightSyncError: if the push contains a second base or no adapters, or if a base is
                missing.
        """
        adapters, base = super().divided(weights)
        if self.policies and not adapters:
            raise WeightSyncError(
                f"the push contains no adapters, but {type(self).__name__} holds one base for "
                "several policies; train a LoRA (set lora), and push it with MemoryTransport"
            )
        if self.policies and self.has_base and base is not None:
            raise WeightSyncError(
                f"{type(self).__name__} already holds a base, which all policies share, but the "
                "push contains another; push adapters alone, or call close() first"
            )
        return adapters, base


def _of_whole(name: str) -> Any:
    """Return an attribute, or a method, that is that of a view's whole engine."""
    return property(lambda view: getattr(view.whole, name))


class _PolicyView(Engine):
    """One policy of an :class:`AdapterEngine`, with its own requests and weights.

    Args:
        whole: the engine, which starts, pauses and closes for all policies.
        name: the policy's name.
    """

    def __init__(self, whole: AdapterEngine, name: str) -> None:
        self.whole: Any = whole
        self.name = name
        self._in_flight = 0

    dtype, precision, running, max_length, paused = map(
        _of_whole, ("dtype", "precision", "running", "max_length", "paused")
    )
    configure_head, configure_routing, start, pause, resume, sleep, close = map(
        _of_whole,
        ("configure_head", "configure_routing", "start", "pause", "resume", "sleep", "close"),
    )

    @property
    def takes_adapters(self) -> bool:
        return True

    @property
    def lacks_base(self) -> bool:
        return not self.whole.has_base

    @property
    def in_flight(self) -> int:
        return self._in_flight

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        return await self.look((), token_ids, sampling, seed)

    async def look(
        self, pictures: Sequence[Placed], token_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> Completion:
        if pictures:
            self.whole.require_sight()
        shown = [pictures] if pictures else []
        self._in_flight += 1
        try:
            return await self.whole._write(self, token_ids, sampling, seed, *shown)
        finally:
            self._in_flight -= 1

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.whole.load_adapters(self, weights, version)

    def held_digests(self, names: Sequence[str]) -> list[HeldDigests]:
        factors = self.whole.adapter_digests(self, [name for name in names if is_adapter(name)])
        whole = self.whole.held_digests([name for name in names if not is_adapter(name)])
        return [
            replace(
                held,
                holder=f"{held.holder} for {self.name!r}",
                digests={**held.digests, **factors},
            )
            for held in whole
        ]
