"""The interface of all generation engines: token ids in, token ids with their logprobs out."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rl.engines.push import HeldDigests
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError, EngineError
from lightning_rl.rollout import Placed
from lightning_rl.run.processes import dist


class RunState(StrEnum):
    """The state of a part of a run.

    ``RUNNING``: it works. ``WAITING``: it waits for another part: the trainer for rollouts or a
    push, the collector for new weights, a replica for the end of a pause or for the weights that
    the others hold. ``STOPPED``: it does nothing: it has not begun, has ended, or is dead.
    """

    RUNNING = "running"
    WAITING = "waiting"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One process of an engine: its name, state, the version of its weights, requests in flight."""

    name: str
    state: RunState
    version: int
    in_flight: int


DTYPES = ("float32", "bfloat16", "float16")


def logprob_tolerance(*precisions: str) -> float:
    """Return the largest expected gap, in nats, of logprobs computed in these precisions."""
    if any(precision not in DTYPES for precision in precisions):
        # Quantized. Measured: in fp8_per_channel 4.6 times as far apart as in bfloat16.
        return 1.0
    # Measured: 1e-6 in float32; at most 2e-2 in bfloat16 on short sequences.
    return 1e-3 if all(precision == "float32" for precision in precisions) else 0.25


def fail(
    future: asyncio.Future[Completion], message: str, cause: BaseException | None = None
) -> None:
    """Raise an EngineError in whoever waits for a completion; any thread may call it."""
    error = EngineError(message)
    error.__cause__ = cause

    def tell() -> None:
        if not future.done():
            future.set_exception(error)

    if not future.get_loop().is_closed():  # else nobody waits
        future.get_loop().call_soon_threadsafe(tell)


class Engine(ABC):
    """Generates completions with a copy of the policy's weights.

    ``version`` is the version of the weights it holds, -1 before the first push; ``dtype`` is what
    it computes in, ``float32`` unless its constructor or ``configure_dtype`` says otherwise;
    ``replica_count`` is the number of processes that share its requests; ``kv_cache_gb`` is the
    size of its KV cache in GiB, None if the engine itself decides.
    """

    version: int = -1
    _cancelled_tokens: int = 0
    dtype: str
    chosen_dtype: str | None = None
    """The constructor's argument; None: the trainer's dtype."""
    kv_cache_gb: float | None = None
    replica_count: int = 1
    starting: ClassVar[str] = ""
    """A message to show while it starts, if that takes long."""
    sleep_level: int | None = None
    """Memory that :meth:`sleep` frees: 1, the cache; 2, the weights too, until a push."""
    serves_all_ranks: bool = False
    """True if one engine, on rank 0, serves all training processes."""
    trust_remote_code: bool = False
    """True if it may run code that comes with the model; set before ``start``."""

    def choose_dtype(self, dtype: str | None) -> None:
        """Set the constructor's dtype; raise a ConfigError if no engine supports it."""
        self.chosen_dtype, self.dtype = dtype, dtype or "float32"
        if self.dtype not in DTYPES:
            raise ConfigError(f"engine dtype={dtype!r} must be float32, bfloat16 or float16")

    def configure_dtype(self, dtype: str) -> None:
        """Use the trainer's dtype, unless one was chosen, or the engine runs already."""
        if self.chosen_dtype is None and not self.running:
            self.dtype = dtype

    def configure_head(self, fp32: bool) -> None:
        """Compute logits in float32 if the trainer does, unless told otherwise, if it can."""

    def configure_routing(self, wanted: bool) -> None:
        """Set, before ``start``, whether completions have to record their ``routed_experts``.

        Raises:
            ConfigError: if they have to, and the engine cannot.
        """
        if wanted:
            raise ConfigError(
                f"engine={type(self).__name__} does not report which experts it routed tokens to, "
                "so they cannot be replayed; use TransformersEngine, VLLMLocal on a GPU, or "
                "routing_replay: OldRouting"
            )

    def configure_lora(self, rank: int | None, obstacle: Callable[[], str | None]) -> None:
        """Learn, after ``configure_dtype``, of the trained LoRA, to keep it unmerged if possible.

        Args:
            rank: the largest rank of its layers; None: all weights are trained.
            obstacle: returns why it has to be merged; None: it need not be.

        Raises:
            ConfigError: if the engine is configured to keep it unmerged, and cannot.
        """

    def configure_length(self, longest: Callable[[], int | None]) -> None:
        """Learn, before ``start``, how long requests get, unless a length was chosen.

        Args:
            longest: returns the tokens of the longest request, prompt and completion together;
                None: it is not known. Engines that need no length do not call it.
        """

    def serve(self, roles: Mapping[str, str]) -> None:
        """Set, before ``start``, which policy plays which role; without any, there is one policy.

        Args:
            roles: names of policies by role.

        Raises:
            ConfigError: for several policies, if the engine can hold only one.
        """
        names = sorted(set(roles.values()))
        if len(names) > 1:
            raise ConfigError(
                f"engine={type(self).__name__} holds the weights of one policy, but {len(names)} "
                f"are trained ({', '.join(names)}); use MultiPolicyEngine, with an engine for "
                "each, or VLLMAdapters if they are LoRAs on one base"
            )

    def of_role(self, role: str) -> "Engine":
        """Return the engine of a role, with the weights and versions of the policy that plays it.

        Raises:
            ConfigError: if no policy does.
        """
        return self

    def of_policy(self, name: str) -> "Engine":
        """Return the engine that holds this policy's weights, to push to or to probe.

        This engine starts, pauses, sleeps and closes it.

        Raises:
            ConfigError: if there is no policy of that name.
        """
        return self

    def caught_up(self, iteration: int) -> None:
        """Record that its policies are the trainer's after so many iterations.

        With several policies, not every one has a new version: they may learn at different times.
        """

    keeps_skipped_weights: ClassVar[bool] = False
    """True if a push may leave out weights that an earlier one contained (``Push.kept``): they stay
    unchanged.
    """

    @property
    def takes_adapters(self) -> bool:
        """True if a push brings a LoRA's factors unmerged, and the base once (``lacks_base``)."""
        return False

    @property
    def lacks_base(self) -> bool:
        """True if it takes adapters, and the next push also has to bring their base."""
        return False

    @property
    def precision(self) -> str:
        """The precision that limits its accuracy: its dtype, or a coarser format of its weights."""
        return self.dtype

    def memory_here(self, elements: int, card: int) -> tuple[int, int]:
        """Return the bytes it holds on the trainer's GPU during training, and when it starts.

        For a GPU of ``card`` bytes and a model of ``elements`` weights. Both are 0 if one engine
        serves all ranks; a cache that grows with the requests is not counted.
        """
        if self.serves_all_ranks:
            return 0, 0
        weights = self.weight_bytes(elements)
        return weights, weights

    def weight_bytes(self, elements: int) -> int:
        """Return the bytes of ``elements`` weights in its dtype."""
        return elements * int(getattr(torch, self.dtype).itemsize)

    @abstractmethod
    def start(self, model_dir: Path) -> None:
        """Build the engine from a directory with configuration and tokenizer, without weights."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """True between ``start`` and ``close``."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Maximum length of prompt and completion together, in tokens."""

    @abstractmethod
    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        """Continue ``token_ids``; the same arguments and weights give the same tokens.

        Raises:
            EngineError: if the engine is closed, holds no weights, or fails.
        """

    async def look(
        self, pictures: Sequence[Placed], token_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> Completion:
        """:meth:`generate` for a text with pictures, each in the place of its placeholders.

        Raises:
            ConfigError: if the engine, or its model, reads no pictures.
            PictureError: if the placeholders are not those of the pictures.
        """
        if pictures:
            self.require_sight()
        return await self.generate(token_ids, sampling, seed)

    def require_sight(self) -> None:
        """Check that it can read pictures, as the trainer's model does; by default it cannot.

        Raises:
            ConfigError: if it cannot; names an engine that can.
        """
        raise ConfigError(
            f"engine={type(self).__name__} does not read pictures, but the model does; use "
            "TransformersEngine"
        )

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load weights under their Hugging Face names, and drop everything cached from old ones.

        They are streamed: an engine that loads them one by one never holds a second copy of all.

        Raises:
            WeightSyncError: if a weight is unknown to the engine, or missing; it then has no valid
                version until the next push.
        """

    def held_digests(self, names: Sequence[str]) -> list[HeldDigests]:
        """Return what each of its processes holds under these names; empty if it cannot tell."""
        return []

    @property
    def in_flight(self) -> int:
        """Number of requests that are not answered yet."""
        return 0

    @property
    def cancelled_tokens(self) -> int:
        """Number of tokens generated for requests that were cancelled, as far as it can tell."""
        return self._cancelled_tokens

    @property
    def paused(self) -> bool:
        """True between :meth:`pause` and :meth:`resume`."""
        return False

    def replica_states(self) -> list[ReplicaStatus]:
        """Return the status of each of its processes; any thread may call it."""
        state = RunState.RUNNING
        if not self.running:
            state = RunState.STOPPED
        elif self.paused or self.version < 0:
            state = RunState.WAITING
        return [ReplicaStatus(type(self).__name__, state, self.version, self.in_flight)]

    async def pause(self) -> None:
        """Stop between two tokens; requests in flight keep their tokens."""

    async def resume(self) -> None:
        """Continue after :meth:`pause`."""

    def sleep(self) -> None:
        """Free as much memory as possible, because the trainer begins to train.

        The next push or request wakes the engine. Without a ``sleep_level``, nothing happens.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything; requests in flight fail with an EngineError. It may be called twice."""

    def require_ready(self) -> None:
        """Raise an EngineError unless the engine runs and holds the trainer's weights."""
        if not self.running:
            raise EngineError(f"{type(self).__name__} is not running; call start() first")
        if self.version < 0:
            raise EngineError(
                f"{type(self).__name__} holds no trained weights yet (version {self.version}); add "
                "the WeightSync callback, or push weights once before collecting"
            )

    def require_room(self, prompt_length: int, sampling: Sampling) -> None:
        """Raise an EngineError unless prompt and longest completion fit into ``max_length``."""
        if prompt_length + sampling.max_tokens > self.max_length:
            raise EngineError(
                f"a prompt of {prompt_length} tokens + max_tokens={sampling.max_tokens} exceeds "
                f"the engine's {self.max_length} tokens; lower max_tokens or max_prompt_tokens, or "
                "raise the engine's max_model_len if the model allows more"
            )


def policy_of(role: str, roles: Mapping[str, str]) -> str:
    """Return the name of the policy that plays a role; ``roles``: names of policies by role.

    Raises:
        ConfigError: if no policy does.
    """
    if role not in roles:
        raise ConfigError(
            f"no policy plays role {role!r}; model.policies play {', '.join(sorted(roles))}: add "
            "it to the roles of one, or have the agent name the role of each call"
        )
    return roles[role]


def drives_engine(engine: Engine) -> bool:
    """Return whether this rank gives work and weights to the engine."""
    return dist.rank() == 0 or not engine.serves_all_ranks
