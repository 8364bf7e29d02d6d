"""VLLMAdapters: vLLM with one base in memory and a LoRA for each of several policies."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.adapters import AdapterEngine, _PolicyView
from lightning_rl.engines.base import Engine
from lightning_rl.engines.lora import require_adapters
from lightning_rl.engines.vllm.held_digests import held_adapter
from lightning_rl.engines.vllm.local import VLLMLocal
from lightning_rl.engines.vllm.lora import (
    lora_options,
    require_room_for,
    set_adapter,
    use_cpu_adapters,
)
from lightning_rl.engines.vllm.settings import EngineSettings
from lightning_rl.errors import ConfigError, EngineError, require_at_least


@configurable
class VLLMAdapters(AdapterEngine, VLLMLocal):
    """vLLM inside this process for several LoRA policies on one base, which it holds once.

    Requests of all policies are computed in the same steps. A push contains the adapters of one
    policy, and leaves the others' requests, cache and version unchanged; the first push also
    contains the base. With a single policy it is a :class:`VLLMLocal`, whose settings it has too.

    Args:
        max_lora_rank: maximum rank of an adapter; memory and time grow with it.

    Raises:
        ConfigError: for a value out of range.
    """

    def __init__(self, max_lora_rank: int = 16, **shared: Any) -> None:
        super().__init__(**shared)
        require_at_least(1, max_lora_rank=max_lora_rank)
        if self.sleep_level == 2:
            raise ConfigError(
                "engine sleep_level=2 would discard the base, which VLLMAdapters receives only "
                "once; use 1"
            )
        self.max_lora_rank = max_lora_rank
        self._served: dict[Engine, Any] = {}  # as vLLM's LoRARequest
        self._pushes = 0

    @property
    def settings(self) -> EngineSettings:
        settings = super().settings
        if not self.policies:
            return settings
        lora = lora_options(len(self.policies), self.max_lora_rank)
        return replace(settings, options=settings.options | lora)

    def start(self, model_dir: Path) -> None:
        if self.running:
            return
        super().start(model_dir)
        if self.policies:
            self._llm.collective_rpc(use_cpu_adapters)

    def close(self) -> None:
        super().close()
        self._served.clear()

    def _adapter_of(self, writer: Engine) -> Any:
        return self._served.get(writer)

    # ---------------------------------------------------------------- weights

    def load_adapters(
        self, view: _PolicyView, weights: Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        if self._llm is None:
            raise EngineError("VLLMAdapters is not running; call start() first")
        from vllm.lora.request import LoRARequest

        with self._exclusive, self._on_device():
            self._wake("weights")
            self._begin_update(view)
            adapters, base = self.divided(weights)
            require_adapters(adapters, self._shapes, "VLLMAdapters")
            require_room_for(adapters, self.max_lora_rank)
            if base is not None:
                self._reload(base)
                self.has_base = True
            number = 1 + list(self.policies).index(view.name)
            self._llm.collective_rpc(set_adapter, args=(number, adapters))
            # Cached prefixes are known by the adapter's name: under another, old ones are not met.
            self._pushes += 1
            name = f"{view.name}, push {self._pushes}"
            self._served[view] = LoRARequest(name, number, "in memory")
            _begin_again(self._llm, self._served[view])
            view.version = version

    def adapter_digests(self, view: _PolicyView, names: Sequence[str]) -> dict[str, str]:
        adapter = self._served.get(view)
        number = 0 if adapter is None else adapter.lora_int_id
        return dict(self._ask_worker(held_adapter, number, names))


def _begin_again(llm: Any, adapter: Any) -> None:
    """Let the requests of one adapter's number continue with its new ``LoRARequest``, in process.

    Their KV cache came from the old adapter, and is recomputed. Other requests continue unchanged.
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
