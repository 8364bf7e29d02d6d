"""Receives pushed weights inside vLLM's processes.

vLLM imports it for ``--worker-extension-cls``. Importing it registers the weight-transfer backend
``lightning_rl``, which loads buckets of weights from a ``WeightReceiver`` through the model's own
loader, which handles fused and tied weights. Adapters are merged before, or kept separately.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from lightning_rl.engines.vllm.cpu import (
    pack_pushed_experts,
    skip_rank_compilation,
    use_cpu_kernels,
)
from lightning_rl.engines.vllm.forms import require_all_loaded, without_head
from lightning_rl.engines.vllm.held_digests import held_weights, watch_conversions
from lightning_rl.engines.vllm.lora import PolicyAdapter, keep_apart, policy_adapter
from lightning_rl.engines.vllm.process import last_line
from lightning_rl.errors import WeightSyncError
from lightning_rl.sync.adapters import Merger
from lightning_rl.sync.stream import WeightReceiver, receiver_of


class WorkerExtension:
    """Methods that vLLM adds to its workers; it imports this module because of this class."""

    def keep_adapters_apart(self) -> None:
        """Keep the LoRA of the only policy separate from the weights."""
        try:
            keep_apart(self)
        except WeightSyncError as error:
            raise _raisable(error) from error

    def held_weights(self: Any, names: Sequence[str]) -> dict[str, Any]:
        """Return what this worker holds under these names of a push."""
        held = held_weights(self, names)
        if isinstance(engine := self.weight_transfer_engine, TransferEngine):
            held["digests"] = engine.seen_apart(held["digests"])
        return held


@dataclass
class TransportInfo(WeightTransferInitInfo):
    """Import path of the transport's class, and the options of its receiver."""

    transport: str
    options: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket, or None after the last.

    ``complete``: the push brings all weights, so none may be missing.
    """

    bucket: dict[str, Any] | None
    complete: bool


class TransferEngine(WeightTransferEngine[TransportInfo, UpdateInfo]):
    """Loads bucket after bucket; the next push repairs one that was interrupted."""

    init_info_cls = TransportInfo
    update_info_cls = UpdateInfo
    _receiver: WeightReceiver | None = None
    _lora: Merger | PolicyAdapter
    _loaded: set[str]
    _reloading = False  # since a push has brought the first weight that is to be loaded
    _owned: dict[int, object]  # by id; held, so that no id is used twice

    def init_transfer_engine(self, init_info: TransportInfo) -> None:
        self.shutdown()
        rank = self.parallel_config.rank
        try:
            self._receiver = receiver_of(
                init_info.transport, self.device, rank, **init_info.options
            )
        except WeightSyncError as error:
            raise _raisable(error) from error
        self._lora = policy_adapter(self.model) or Merger(self.device)
        watch_conversions(self.model, self.model_config.dtype)
        if self.device.type == "cpu" and self.model_config.enforce_eager:
            use_cpu_kernels(self.model)

    def start_weight_update(self) -> None:
        self.finish_weight_update()  # if the push before broke off
        self._loaded, self._owned = set(), {}
        self._lora.begin()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        assert self._receiver is not None
        try:
            if update_info.bucket is not None:
                arrived = self._receiver.fetch(update_info.bucket)
                self._load(self._lora.take(arrived, with_base=update_info.complete))
                return
            self._lora.finish()
            if update_info.complete:
                require_all_loaded(self.model, self._loaded)
        except Exception as error:  # each kind of layer has its own way to fail
            self._receiver.fail()
            raise _raisable(error) from error

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for first in weights:  # of adapters nothing may be left to load
            if not self._reloading:
                initialize_layerwise_reload(self.model)
                self._reloading = True
            self._loaded |= self.model.load_weights(
                without_head(self.model, chain([first], weights))
            )
            self._own_what_waits()

    def _own_what_waits(self) -> None:
        """Copy weights that vLLM keeps for later, because the buffer will be overwritten.

        vLLM loads a layer once all its elements have arrived; one that it pads (an embedding whose
        vocabulary is not a multiple of 64), at the end of the push.
        """
        for layer in self.model.modules():
            for _, call in get_layerwise_info(layer).loaded_weights:
                if id(call) not in self._owned:
                    self._owned[id(call)] = call
                    for name, value in call.arguments.items():
                        if isinstance(value, Tensor) and value.device.type != "meta":
                            call.arguments[name] = value.clone()

    def finish_weight_update(self) -> None:
        if self._reloading:
            finalize_layerwise_reload(self.model, self.model_config)
            self._reloading = False

    def seen_apart(self, held: Mapping[str, str]) -> dict[str, str]:
        """Turn digests of the model's weights into those of base and adapters, if sent apart."""
        return self._lora.seen_apart(held, self.model_config.dtype)

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def _raisable(error: Exception) -> Exception:
    """Return an error whose text names its class, as only the text reaches the trainer."""
    ours = isinstance(error, WeightSyncError)
    kind = type(error).__name__ if ours else WeightSyncError.__name__
    message = str(error) if ours else f"vLLM does not take these weights: {last_line(error)}"
    return RuntimeError(f"{kind}: {message}".replace('"', "'"))


# It warns of each layer that a push leaves as it is; what a push lacks, require_all_loaded names.
logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
WeightTransferEngineFactory.register_engine("lightning_rl", TransferEngine)
if not torch.cuda.is_available():
    skip_rank_compilation()
    pack_pushed_experts()
