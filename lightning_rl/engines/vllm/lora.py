"""LoRAs in vLLM's workers, of this process or others: kept unmerged, and pushed in memory."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_rl.engines.lora import is_adapter, layers_of, require_pairs
from lightning_rl.errors import ConfigError, IncompleteWeightsError, WeightSyncError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks that vLLM can be configured for."""
POLICY = 1
"""The number of a worker's adapter if it has a single policy."""


def lora_options(count: int, rank: int) -> dict[str, Any]:
    """Return arguments of ``vllm.EngineArgs`` for ``count`` adapters of at most this rank.

    Raises:
        ConfigError: if vLLM does not support that rank.
    """
    if rank > RANKS[-1]:
        raise ConfigError(
            f"engine max_lora_rank={rank} must be <= {RANKS[-1]}, vLLM's maximum; merge adapters "
            "of a larger rank: engine adapters: merged, or MultiPolicyEngine"
        )
    largest = min(r for r in RANKS if r >= rank)
    return {
        "enable_lora": True,
        "max_loras": count,
        "max_cpu_loras": count,
        "max_lora_rank": largest,
    }


class PolicyAdapter:
    """The adapter of a worker's only policy, applied to all requests.

    Requests do not name it, so a server needs no knowledge of it. The caches that requests leave
    are reset after each push, as for pushes of whole weights.

    Args:
        worker: vLLM's worker, started with ``enable_lora``.
    """

    def __init__(self, worker: Any) -> None:
        from vllm.lora.request import LoRARequest

        use_cpu_adapters(worker)
        self._worker = worker
        self._held: Mapping[str, Tensor] = {}
        self._came: dict[str, Tensor] = {}
        runner, request = worker.model_runner, LoRARequest("policy", POLICY, "in memory")
        execute, reset = runner.execute_model, runner.reset_lora_state

        def execute_adapted(scheduled: Any, *others: Any, **named: Any) -> Any:
            for new in scheduled.scheduled_new_reqs:
                new.lora_request = request
            return execute(scheduled, *others, **named)

        def reset_but_ours() -> None:  # when weights have changed, vLLM forgets all adapters
            reset()
            self.put(self._held)

        runner.execute_model, runner.reset_lora_state = execute_adapted, reset_but_ours

    def put(self, adapters: Mapping[str, Tensor]) -> None:
        """Replace the current adapter; without factors, the base is used as it is.

        Raises:
            WeightSyncError: for a layer that vLLM cannot adapt, or a rank that is too large.
        """
        set_adapter(self._worker, POLICY, adapters)
        self._held = adapters

    def seen_apart(self, held: Mapping[str, str], dtype: torch.dtype) -> dict[str, str]:
        """Return the digests unchanged: base and factors are held separately."""
        return dict(held)

    # ---------------------------------------------------------------- a push that comes in buckets

    def begin(self) -> None:
        """Begin a push."""
        self._came.clear()

    def take(
        self, arrived: Iterable[tuple[str, Tensor]], with_base: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights to load among those that arrived; adapters are kept until the push
        ends.
        """
        for name, tensor in arrived:
            if is_adapter(name):
                self._came[name] = tensor.clone()  # of a buffer that is written again
            else:
                yield name, tensor

    def finish(self) -> None:
        """End a push, and activate the adapters that arrived.

        Raises:
            IncompleteWeightsError: naming an adapter that the push lacks, or half of one.
            WeightSyncError: as for :meth:`put`.
        """
        if self._came and (missing := sorted(self._held.keys() - self._came.keys())):
            raise IncompleteWeightsError(
                f"the push left {len(missing)} adapters unchanged, first {missing[0]!r}"
            )
        require_pairs(self._came)
        self.put(dict(self._came))


def keep_apart(worker: Any) -> None:
    """Have a worker keep the LoRA of its only policy unmerged, from now on.

    Raises:
        WeightSyncError: if it was started without ``enable_lora``, or is too old.
    """
    if getattr(worker.model_runner, "lora_manager", None) is None:
        raise WeightSyncError(
            "this vLLM cannot keep adapters unmerged; start it with --enable-lora --max-lora-rank "
            "of at least the LoRA's, or set engine adapters: merged"
        )
    if not hasattr(worker.model_runner, "reset_lora_state"):
        raise WeightSyncError(
            "this vLLM accepts no new base weights while a LoRA is kept unmerged; install vLLM >= "
            "0.28, or set engine adapters: merged"
        )
    model = worker.get_model()
    if policy_adapter(model) is None:  # a server may be used by one run after the other
        model.policy_adapter = PolicyAdapter(worker)


def policy_adapter(model: Any) -> PolicyAdapter | None:
    """Return the adapter of a worker's model; None if weights are pushed merged."""
    return getattr(model, "policy_adapter", None)


def put_policy(worker: Any, adapters: Mapping[str, Tensor]) -> None:
    """Call a worker's :meth:`PolicyAdapter.put` with copies, since the factors will change."""
    copies = {name: factor.clone() for name, factor in adapters.items()}
    worker.get_model().policy_adapter.put(copies)


def use_cpu_adapters(worker: Any) -> None:
    """Replace LoRA computations that are slow on CPUs by fast ones, or skip them."""
    if torch.cuda.is_available() or not worker.model_config.enforce_eager:
        return
    from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
    from vllm.lora.utils import replace_submodule

    manager = worker.model_runner.lora_manager._adapter_manager
    # Nobody adapts these two, and to do so by nothing takes longer than all other layers.
    ends = (LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA)
    for name, layer in list(manager.model.named_modules()):
        if isinstance(layer, ends):
            replace_submodule(manager.model, name, layer.base_layer)
    manager.modules = {
        n: layer for n, layer in manager.modules.items() if not isinstance(layer, ends)
    }
    linear = _linear(manager).values()
    for wrapper in manager.punica_wrapper_mapping.values():
        FusedAdapters(wrapper, [layer for layer in linear if layer.punica_wrapper is wrapper])


def _linear(manager: Any) -> dict[str, Any]:
    """Return the layers of vLLM's LoRA manager that add an adapter to a linear layer."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    layers = manager.modules.items()
    return {name: layer for name, layer in layers if isinstance(layer, BaseLinearLayerWithLoRA)}


def _no_change(manager: Any) -> dict[str, Tensor]:
    """Return zero LoRA factors: vLLM ignores an empty adapter."""
    linear = _linear(manager).items()
    name, layer = next(pair for pair in linear if pair[0] not in manager.packed_modules)
    sizes = layer.base_layer.input_size, layer.base_layer.output_size
    a, b = (torch.zeros(shape) for shape in ((1, sizes[0]), (sizes[1], 1)))
    return {f"{name}.lora_A": a, f"{name}.lora_B": b}


def set_adapter(worker: Any, number: int, adapters: Mapping[str, Tensor]) -> None:
    """Replace the adapter with this number; without factors it adds nothing.

    Raises:
        WeightSyncError: naming a layer that vLLM cannot adapt; the old adapter then stays.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager._adapter_manager
    adapters = adapters or _no_change(manager)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    rank = manager.lora_config.max_lora_rank
    require_room_for(adapters, rank)
    model = LoRAModel.from_lora_tensors(
        number,
        {f"{name}.weight": factor for name, factor in adapters.items()},
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # the scale is in B
        device=str(worker.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    parts = {part for parts in manager.packed_modules.values() for part in parts}
    if unknown := sorted(model.loras.keys() - parts - _linear(manager).keys()):
        raise WeightSyncError(
            f"vLLM cannot adapt {unknown[0]!r} ({len(unknown)} of {len(layers_of(adapters))} "
            "adapted layers); leave it out of lora.target_modules, or merge adapters: engine "
            "adapters: merged, or MultiPolicyEngine"
        )
    manager.remove_adapter(number)
    manager.add_adapter(model)
    manager.activate_adapter(number)


def require_room_for(adapters: Mapping[str, Tensor], most: int) -> None:
    """Reject adapters whose rank exceeds ``most``.

    Raises:
        WeightSyncError: naming the layer.
    """
    for layer in layers_of(adapters):
        rank = len(adapters[f"{layer}.lora_A"])
        if rank > most:
            raise WeightSyncError(
                f"the adapter of {layer!r} has rank {rank}, but max_lora_rank={most}; raise "
                "max_lora_rank"
            )


class FusedAdapters:
    """Takes over the linear layers of one of vLLM's punica wrappers.

    vLLM's own CPU code copies both factors for every token: at rank 16 a small model generates 4
    times slower than without adapters. Here the factors A of all N adapters, and of all P parts of
    a layer (q, k and v; gate and up), form one matrix (P N rank, in), and those of B one per part
    (N rank, out): a part of the output is ``y + ((x A^T) * mask) B``. The mask (T, N rank), the
    same for all parts, selects for each of T tokens the columns of its own adapter.

    Args:
        wrapper: the punica wrapper that the layers call.
        layers: the layers that call it.
    """

    def __init__(self, wrapper: Any, layers: list[Any]) -> None:
        self._wrapper = wrapper
        self._update = wrapper.update_metadata
        self._matrices = dict(self._fused(layer) for layer in layers)
        self._mask: Tensor | None = None
        wrapper.update_metadata, wrapper.add_lora_linear = self.update, self.add

    def _fused(self, layer: Any) -> tuple[int, tuple[Tensor, list[Tensor]]]:
        """Let vLLM write a layer's factors into fused matrices; return their key and them."""
        first, parts = layer.lora_a_stacked[0], len(layer.lora_a_stacked)
        slots, _, self._rank, width = first.shape
        a = first.new_zeros(parts, slots, 1, self._rank, width)
        b = [old.new_zeros(slots, self._rank, old.shape[2]) for old in layer.lora_b_stacked]
        # As vLLM has them: (slots, 1, rank, in) and (slots, 1, out, rank).
        layer.lora_a_stacked = a.unbind()
        layer.lora_b_stacked = tuple(part.transpose(1, 2)[:, None] for part in b)
        matrices = a.flatten(0, 3), [part.flatten(0, 1) for part in b]
        return id(layer.lora_a_stacked), matrices

    def update(self, *arguments: Any, **options: Any) -> None:
        """Discard the mask, because tokens come from other requests or adapters have moved."""
        self._mask = None
        self._update(*arguments, **options)

    def add(self, y: Tensor, x: Tensor, lora_a_stacked: Any, *_: Any, **options: Any) -> None:
        """Add to a layer's output y (T, out) its adapters' output for its input x (T, in)."""
        a, parts = self._matrices[id(lora_a_stacked)]
        if self._mask is None:
            owners = torch.arange(len(parts[0]) // self._rank).repeat_interleave(self._rank)
            self._mask = (self._wrapper.token_lora_indices[:, None] == owners).to(x.dtype)
        inner = F.linear(x, a).chunk(len(parts), dim=-1)
        outputs = y.split([part.shape[1] for part in parts], dim=-1)
        for output, part, chosen in zip(outputs, parts, inner, strict=True):
            output.addmm_(chosen * self._mask, part)
