"""vLLM with one base in memory and a LoRA for each of several policies."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.adapters import AdapterEngine, layers_of, require_adapters
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.engines.vllm_adapters_cpu import FusedAdapters
from lightning_rl.engines.vllm_held import held_adapter
from lightning_rl.engines.vllm_local import VLLMLocal
from lightning_rl.engines.vllm_settings import EngineSettings
from lightning_rl.errors import ConfigError, EngineError, WeightSyncError, require_at_least


@configurable
class VLLMAdapters(AdapterEngine, VLLMLocal):
    """vLLM inside this process for several LoRA policies on one base, which it holds once.

    Requests of all policies are computed in the same steps. A push brings the adapters of one
    policy and touches no other's requests, cache or version; the base comes with the first. With a
    single policy it is :class:`VLLMLocal`, whose settings are its further ones.

    Args:
        max_lora_rank: the largest rank that an adapter may have; memory and time grow with it.

    Raises:
        ConfigError: for a value out of range.
    """

    def __init__(self, max_lora_rank: int = 16, **shared: Any) -> None:
        super().__init__(**shared)
        require_at_least(1, max_lora_rank=max_lora_rank)
        if self.sleep_level == 2:
            raise ConfigError(
                "engine sleep_level=2 would lose the base that VLLMAdapters gets once; use 1"
            )
        self.max_lora_rank = max_lora_rank
        self._served: dict[Engine, Any] = {}  # as vLLM's LoRARequest
        self._pushes = 0

    @property
    def settings(self) -> EngineSettings:
        settings = super().settings
        if not self.policies:
            return settings
        count = len(self.policies)
        lora = {
            "enable_lora": True,
            "max_loras": count,
            "max_cpu_loras": count,
            "max_lora_rank": _rank_of_vllm(self.max_lora_rank),
        }
        return replace(settings, options=settings.options | lora)

    def start(self, model_dir: Path) -> None:
        if self.running:
            return
        self.require_one_base(model_dir)
        super().start(model_dir)
        eager = self._llm.vllm_config.model_config.enforce_eager
        if self.policies and eager and not torch.cuda.is_available():
            self._llm.collective_rpc(_use_cpu_adapters)

    def close(self) -> None:
        super().close()
        self.forget_policies()
        self._served.clear()

    async def generate_as(
        self, policy: str, token_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> Completion:
        return await self._write(self.policies[policy], token_ids, sampling, seed)

    def _adapter_of(self, writer: Engine) -> Any:
        return self._served.get(writer)

    # ---------------------------------------------------------------- weights

    def load_adapters(
        self, policy: str, weights: Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        if self._llm is None:
            raise EngineError("VLLMAdapters is not running; call start() first")
        from vllm.lora.request import LoRARequest

        view = self.policies[policy]
        with self._exclusive, self._on_device():
            self._wake("weights")
            self._begin_update(view)
            adapters, base = self.divided(weights)
            require_adapters(adapters, self._shapes, "VLLMAdapters")
            self._require_room_for(adapters)
            if base is not None:
                self._reload(base)
                self.has_base = True
            number = 1 + list(self.policies).index(policy)
            self._llm.collective_rpc(_set_adapter, args=(number, adapters))
            # Cached prefixes are known by the adapter's name: under another, old ones are not met.
            self._pushes += 1
            name = f"{policy}, push {self._pushes}"
            self._served[view] = LoRARequest(name, number, "in memory")
            _begin_again(self._llm, self._served[view])
            view.version = version

    def adapter_digests(self, policy: str, names: Sequence[str]) -> dict[str, str]:
        adapter = self._served.get(self.policies[policy])
        number = 0 if adapter is None else adapter.lora_int_id
        with self._exclusive, self._on_device():
            self._wake("weights")
            [found] = self._llm.collective_rpc(held_adapter, args=(number, names))
        return dict(found)

    def _require_room_for(self, adapters: Mapping[str, Tensor]) -> None:
        for layer in layers_of(adapters):
            rank = len(adapters[f"{layer}.lora_A"])
            if rank > self.max_lora_rank:
                raise WeightSyncError(
                    f"the adapter of {layer!r} has rank {rank}, VLLMAdapters has room for "
                    f"max_lora_rank={self.max_lora_rank}; raise that"
                )


def _rank_of_vllm(rank: int) -> int:
    """The smallest that vLLM can be told which has room for this one.

    Raises:
        ConfigError: if there is none.
    """
    from vllm.config.lora import MaxLoRARanks

    ranks: tuple[int, ...] = get_args(MaxLoRARanks)
    if rank > max(ranks):
        raise ConfigError(
            f"engine max_lora_rank={rank} must be <= {max(ranks)}, the most that vLLM has room "
            "for; use PolicyEngines, which merges adapters of any rank"
        )
    return min(r for r in ranks if r >= rank)


def _use_cpu_adapters(worker: Any) -> None:
    """Runs in vLLM's worker: let what costs much on a CPU cost little, or nothing."""
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


def _set_adapter(worker: Any, number: int, adapters: Mapping[str, Tensor]) -> None:
    """Runs in vLLM's worker: put an adapter in the place of the one with this number.

    Raises:
        WeightSyncError: naming a layer that vLLM cannot adapt; then the old one stays.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    rank = manager.lora_config.max_lora_rank
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
            "adapted layers); leave it out of lora.target_modules, or use PolicyEngines, which "
            "merges adapters"
        )
    manager.remove_adapter(number)
    manager.add_adapter(model)
    manager.activate_adapter(number)


def _begin_again(llm: Any, adapter: Any) -> None:
    """Let the requests of a ``LoRARequest``'s number go on with it, in vLLM in this process.

    What they have computed so far came from its predecessor, and is computed anew. Others go on.
    """
    scheduler = llm.engine_core.engine_core.scheduler
    own = [
        request
        for request in scheduler.requests.values()
        if request.lora_request.lora_int_id == adapter.lora_int_id
    ]
    now = time.monotonic()
    # As in reset_prefix_cache: the last first, for each goes to the front of those that wait.
    for request in [r for r in reversed(scheduler.running) if r in own]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now, drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    for request in own:
        request.lora_request = adapter
        request.block_hashes.clear()
        request.update_block_hashes()
