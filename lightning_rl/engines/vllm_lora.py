"""In vLLM's workers, of this process or others: LoRAs beside the weights, pushed in memory."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_rl.engines.lora import is_adapter, layers_of, require_pairs
from lightning_rl.engines.vllm_adapters_cpu import FusedAdapters
from lightning_rl.errors import ConfigError, IncompleteWeightsError, WeightSyncError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM can be told to have room for."""
POLICY = 1
"""The number of the adapter that is a worker's only policy."""


def lora_options(count: int, rank: int) -> dict[str, Any]:
    """Arguments of ``vllm.EngineArgs`` for so many adapters of at most this rank.

    Raises:
        ConfigError: if vLLM has no room for that rank.
    """
    if rank > RANKS[-1]:
        raise ConfigError(
            f"engine max_lora_rank={rank} must be <= {RANKS[-1]}, the most that vLLM has room for; "
            "merge adapters of a larger rank: engine adapters: merged, or PolicyEngines"
        )
    largest = min(r for r in RANKS if r >= rank)
    return {
        "enable_lora": True,
        "max_loras": count,
        "max_cpu_loras": count,
        "max_lora_rank": largest,
    }


class PolicyAdapter:
    """The adapter of a worker's only policy: it writes whatever the worker is asked for.

    Requests do not name it, so a server needs to know nothing of it. What they leave in the caches
    is forgotten after each push, as where weights come whole.

    Args:
        worker: vLLM's, started with ``enable_lora``.
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
        """Take the place of the adapter that was there; without factors, weights are whole.

        Raises:
            WeightSyncError: for what vLLM cannot adapt, or a rank that it has no room for.
        """
        set_adapter(self._worker, POLICY, adapters)
        self._held = adapters

    def seen_apart(self, held: Mapping[str, str], dtype: torch.dtype) -> dict[str, str]:
        """Digests as they are: base and factors are held apart."""
        return dict(held)

    # ---------------------------------------------------------------- a push that comes in buckets

    def begin(self) -> None:
        """Begin a push."""
        self._came.clear()

    def take(
        self, arrived: Iterable[tuple[str, Tensor]], with_base: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """What to load of what arrived; adapters are kept until the push ends."""
        for name, tensor in arrived:
            if is_adapter(name):
                self._came[name] = tensor.clone()  # of a buffer that is written again
            else:
                yield name, tensor

    def finish(self) -> None:
        """A push ends.

        Raises:
            IncompleteWeightsError: naming an adapter that it left as it was, or the half of one.
            WeightSyncError: as of :meth:`put`.
        """
        if self._came and (missing := sorted(self._held.keys() - self._came.keys())):
            raise IncompleteWeightsError(
                f"the push left {len(missing)} adapters as they were, first {missing[0]!r}"
            )
        require_pairs(self._came)
        self.put(dict(self._came))


def keep_apart(worker: Any) -> None:
    """Have a worker keep the LoRA of its only policy beside the weights, from now on.

    Raises:
        WeightSyncError: if it was started without ``enable_lora``, or is too old.
    """
    if getattr(worker.model_runner, "lora_manager", None) is None:
        raise WeightSyncError(
            "this vLLM cannot keep adapters apart; start it with --enable-lora --max-lora-rank of "
            "at least the LoRA's, or set engine adapters: merged"
        )
    if not hasattr(worker.model_runner, "reset_lora_state"):
        raise WeightSyncError(
            "this vLLM takes no new base weights while a LoRA is kept beside them; install "
            "vLLM >= 0.28, or set engine adapters: merged"
        )
    model = worker.get_model()
    if policy_adapter(model) is None:  # a server may be used by one run after the other
        model.policy_adapter = PolicyAdapter(worker)


def policy_adapter(model: Any) -> PolicyAdapter | None:
    """Return the adapter of a worker's model; None if weights are pushed merged."""
    return getattr(model, "policy_adapter", None)


def put_policy(worker: Any, adapters: Mapping[str, Tensor]) -> None:
    """:meth:`PolicyAdapter.put` of a worker, of factors that are about to change."""
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
    """Layers of vLLM's LoRA manager that add an adapter to a product with their weight."""
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
    """Put an adapter in the place of the one with this number; without factors it adds nothing.

    Raises:
        WeightSyncError: naming a layer that vLLM cannot adapt; then the old one stays.
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
            "adapters: merged, or PolicyEngines"
        )
    manager.remove_adapter(number)
    manager.add_adapter(model)
    manager.activate_adapter(number)


def require_room_for(adapters: Mapping[str, Tensor], most: int) -> None:
    """Refuse adapters of a larger rank than there is room for.

    Raises:
        WeightSyncError: naming the layer.
    """
    for layer in layers_of(adapters):
        rank = len(adapters[f"{layer}.lora_A"])
        if rank > most:
            raise WeightSyncError(
                f"the adapter of {layer!r} has rank {rank}, vLLM has room for "
                f"max_lora_rank={most}; raise that"
            )
