"""MultiPolicyEngine: one engine made of a separate engine for each policy."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine, ReplicaStatus, policy_of
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError, WeightSyncError
from lightning_rl.rollout import Placed


@configurable
class MultiPolicyEngine(Engine):
    """Uses a separate engine for each policy: full models, or adapters merged into their base.

    ``version`` is the run's: the number of iterations whose resulting policies it holds.
    Tokens carry the version of the policy that generated them.

    Args:
        engines: an engine of any class for each policy, by the policy's name.

    Raises:
        ConfigError: for a policy without an engine, or an engine without a policy.
    """

    starting = "an engine starts for each policy"

    def __init__(self, engines: dict[str, Engine]) -> None:
        if not engines:
            raise ConfigError(
                "MultiPolicyEngine(engines={}) has no engine; give one for each policy"
            )
        kinds = {engine.serves_all_ranks for engine in engines.values()}
        if len(kinds) > 1:
            raise ConfigError(
                "MultiPolicyEngine.engines mixes engines that run in each training process with "
                "engines that serve all of them; use one kind"
            )
        self.engines = engines
        self.serves_all_ranks = kinds.pop()
        self.replica_count = sum(engine.replica_count for engine in engines.values())
        self.dtype = self._any.dtype
        caches = [engine.kv_cache_gb for engine in engines.values()]
        self.kv_cache_gb = None if None in caches else sum(filter(None, caches))
        levels = [e.sleep_level for e in engines.values() if e.sleep_level is not None]
        self.sleep_level = max(levels, default=None)
        self._roles: Mapping[str, str] = {}
        self._iteration = -1

    @property
    def version(self) -> int:  # type: ignore[override]
        """The run's version; -1 while any of the engines has none."""
        held = all(engine.version >= 0 for engine in self.engines.values())
        return self._iteration if held else -1

    @property
    def _any(self) -> Engine:
        return next(iter(self.engines.values()))

    # ---------------------------------------------------------------- whose is what

    def serve(self, roles: Mapping[str, str]) -> None:
        names, names_of_engines = set(roles.values()), set(self.engines)
        if names != names_of_engines:
            raise ConfigError(
                f"MultiPolicyEngine.engines are for {', '.join(sorted(names_of_engines))}, but the "
                f"trained policies are {', '.join(sorted(names)) or 'a single one'}; name an "
                "engine for each policy of model.policies"
            )
        self._roles = roles

    def of_role(self, role: str) -> Engine:
        return self.engines[policy_of(role, self._roles)]

    def of_policy(self, name: str) -> Engine:
        if name not in self.engines:
            raise ConfigError(
                f"MultiPolicyEngine.engines has no engine for policy {name!r}, only for "
                f"{', '.join(self.engines)}; add one"
            )
        return self.engines[name]

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        """Generate with the policy that plays the unnamed role."""
        return await self.of_role("").generate(token_ids, sampling, seed)

    async def look(
        self, pictures: Sequence[Placed], token_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> Completion:
        return await self.of_role("").look(pictures, token_ids, sampling, seed)

    def require_sight(self) -> None:
        for engine in self.engines.values():
            engine.require_sight()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise WeightSyncError(
            "MultiPolicyEngine takes the weights of one policy at a time; use of_policy(name)"
        )

    # ---------------------------------------------------------------- all together

    def caught_up(self, iteration: int) -> None:
        self._iteration = iteration

    def configure_dtype(self, dtype: str) -> None:
        for engine in self.engines.values():
            engine.configure_dtype(dtype)
        self.dtype = self._any.dtype

    def configure_head(self, fp32: bool) -> None:
        for engine in self.engines.values():
            engine.configure_head(fp32)

    def configure_routing(self, wanted: bool) -> None:
        for engine in self.engines.values():
            engine.configure_routing(wanted)

    def configure_length(self, longest: Callable[[], int | None]) -> None:
        for engine in self.engines.values():
            engine.configure_length(longest)

    @property
    def precision(self) -> str:
        return self._any.precision

    def memory_here(self, elements: int, card: int) -> tuple[int, int]:
        parts = [engine.memory_here(elements, card) for engine in self.engines.values()]
        return sum(held for held, _ in parts), sum(needed for _, needed in parts)

    def weight_bytes(self, elements: int) -> int:
        return sum(engine.weight_bytes(elements) for engine in self.engines.values())

    def start(self, model_dir: Path) -> None:
        """Start all; a policy with a different model has it in a subfolder with its name."""
        try:
            for name, engine in self.engines.items():
                policy_dir = model_dir / name
                engine.trust_remote_code = self.trust_remote_code
                engine.start(policy_dir if policy_dir.is_dir() else model_dir)
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> bool:
        return all(engine.running for engine in self.engines.values())

    @property
    def max_length(self) -> int:
        return min(engine.max_length for engine in self.engines.values())

    @property
    def in_flight(self) -> int:
        return sum(engine.in_flight for engine in self.engines.values())

    @property
    def cancelled_tokens(self) -> int:
        return sum(engine.cancelled_tokens for engine in self.engines.values())

    @property
    def paused(self) -> bool:
        return any(engine.paused for engine in self.engines.values())

    def replica_states(self) -> list[ReplicaStatus]:
        return [
            replace(state, name=f"{name}: {state.name}")
            for name, engine in self.engines.items()
            for state in engine.replica_states()
        ]

    async def pause(self) -> None:
        await asyncio.gather(*(engine.pause() for engine in self.engines.values()))

    async def resume(self) -> None:
        await asyncio.gather(*(engine.resume() for engine in self.engines.values()))

    def sleep(self) -> None:
        for engine in self.engines.values():
            engine.sleep()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self._iteration = -1
