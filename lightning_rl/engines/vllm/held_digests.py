"""Runs in vLLM's workers: digests of the weights they hold, under the names of a push.

vLLM fuses weights (q, k and v; gate and up), pads vocabularies, and converts weights to forms that
only its kernels read: packed on CPUs, or quantized. The first two are undone here. A converted
weight cannot be read back, so its digest is recorded when it is converted. If a conversion is
skipped, the previous conversion's digest reveals it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from lightning_rl.engines.lora import is_adapter
from lightning_rl.engines.vllm.lora import POLICY, policy_adapter
from lightning_rl.run.digest import Digester, digests

_NOTE = "digests_before_conversion"
"""Name of the attribute of vLLM's layers that holds the note."""
_REORDERED = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "llama4")
"""Modules of vLLM's models that permute weights when they load them."""


@dataclass(frozen=True, slots=True)
class _Note:
    """Digests of the parts of a layer's weight before its conversion, and of the converted weight.

    ``converted`` has digests by name, of tensors that can be read and do not change; ``readable``
    is True if the original weight is also available.
    """

    parts: list[str]
    converted: dict[str, str]
    readable: bool


class _UnreadError(Exception):
    """A weight cannot be compared; the message says why."""


def held_weights(worker: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return ``digests`` of the weights under these names, and why others are ``unread``.

    Digests are of weights in the model's dtype, to which a push casts them.
    """
    noted, unread = dict[str, str](), dict[str, str]()
    if policy_adapter(worker.get_model()) is not None:
        factors = [name for name in names if is_adapter(name)]
        noted |= held_adapter(worker, POLICY, factors)
        names = [name for name in names if name not in noted]
    places, digester = _Places(worker.get_model()), Digester()
    for name in names:
        try:
            tensor, note = places.of(name)
        except _UnreadError as error:
            unread[name] = str(error)
            continue
        if tensor is not None:
            digester.add(name, tensor.to(worker.model_config.dtype))
        if note is not None:
            noted[name] = note
    read = digester.digests()
    # An embedding is held twice on CPUs: if the two differ, neither is the answer.
    twice = {n: f"{read[n]} and, packed, {noted[n]}" for n in read.keys() & noted.keys()}
    differing = {name: both for name, both in twice.items() if read[name] != noted[name]}
    return {"digests": noted | read | differing, "unread": unread}


def held_adapter(worker: Any, number: int, names: Sequence[str]) -> dict[str, str]:
    """Return digests of the factors with which an adapter is computed, as far as they exist.

    Args:
        worker: vLLM's worker.
        number: number of the adapter in vLLM.
        names: names of factors, ``X.lora_A`` and ``X.lora_B``.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    if number not in manager.lora_index_to_id:
        return dict.fromkeys(names, "no such adapter")
    slot, own = manager.lora_index_to_id.index(number), manager.get_adapter(number).loras
    wholes = {
        part: (whole, place)
        for whole, parts in manager.packed_modules.items()
        for place, part in enumerate(parts)
    }
    places, digester = _Places(worker.get_model()), Digester()
    for name in names:
        layer, _, end = name.rpartition(".")
        mapped = places.mapped(f"{layer}.weight").removesuffix(".weight")
        part = layer.rpartition(".")[2]
        # vLLM's map fuses too, and packs by the names before that.
        mapped = f"{mapped.rpartition('.')[0]}.{part}"
        whole, place = wholes.get(mapped, (mapped, 0))
        if whole not in manager.modules or whole not in own:
            continue
        factors = own[whole].lora_a
        rank = len(factors[place] if isinstance(factors, list) else factors)
        module = manager.modules[whole]
        stacked = module.lora_a_stacked if end == "lora_A" else module.lora_b_stacked
        factor = stacked[place][slot, 0]  # what is beyond its rank is zero, or it counts, too
        padded = 1 if end == "lora_B" else 0
        used, rest = factor.split([rank, factor.shape[padded] - rank], padded)
        digester.add(name, (factor if rest.any() else used).to(worker.model_config.dtype))
    return digester.digests()


def watch_worker(worker: Any) -> None:
    """Call :func:`watch_conversions` for the worker's model."""
    watch_conversions(worker.get_model(), worker.model_config.dtype)


def watch_conversions(model: Any, dtype: Any) -> None:
    """Record, from now on, the digest of each layer's weight in this dtype when it is converted."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    places = _Places(model)
    for path, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        # A kernel of one's own is an attribute of this name already: watched before.
        watched = "process_weights_after_loading" in vars(method or object)
        if not isinstance(method, QuantizeMethodBase) or watched or not _converts(layer):
            continue
        convert = partial(_convert, method.process_weights_after_loading, places.fuses(path))
        method.process_weights_after_loading = partial(convert, dtype)


def _converts(layer: Any) -> bool:
    """Return True if vLLM converts the weight of this layer after loading."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )
    from vllm.platforms import current_platform

    if not isinstance(layer, LinearBase | VocabParallelEmbedding):
        return False
    plain = isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    return bool(current_platform.is_cpu()) or not plain


def _convert(convert: Any, fused: bool, dtype: Any, layer: Any) -> None:
    """Replace a layer's ``process_weights_after_loading``, recording digests."""
    weight = layer.weight
    done = getattr(layer, "_already_called_process_weights_after_loading", False)
    if done or weight.is_meta or weight.dim() != 2:
        convert(layer)
        return
    setattr(layer, _NOTE, None)  # of a conversion that fails nothing is known
    parts = _parts(layer, weight, fused)
    before = digests((str(n), part.to(dtype)) for n, part in enumerate(parts))
    same = weight.data_ptr(), weight.dtype
    convert(layer)
    readable = same == (layer.weight.data_ptr(), layer.weight.dtype)
    after = {} if readable else digests(_own_tensors(layer))
    setattr(layer, _NOTE, _Note(list(before.values()), after, readable))


def _own_tensors(layer: Any) -> list[tuple[str, Tensor]]:
    own = layer.named_parameters(recurse=False)
    return [(name, tensor) for name, tensor in own if name != "bias" and tensor.numel()]


def _parts(layer: Any, tensor: Tensor, fused: bool) -> list[Tensor]:
    """Return the weights fused in a layer's tensor, without padding."""
    if fused:
        return list(tensor.split(layer.output_partition_sizes))
    if (vocabulary := getattr(layer, "org_vocab_size", None)) is not None:
        return [tensor[:vocabulary]]
    return [tensor]


class _Places:
    """Finds weights of a model by the names of a push."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._reordered = type(model).__module__.rpartition(".")[2] in _REORDERED
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._whole = {  # the fused layer of a part, and which part of it that is
            part: (whole, number)
            for whole, parts in getattr(model, "packed_modules_mapping", {}).items()
            for number, part in enumerate(parts)
            if len(parts) > 1
        }
        self._unchanged: dict[int, bool] = {}  # by the id of a layer

    def mapped(self, name: str) -> str:
        """Return vLLM's name of a weight, or of the weight it is fused into.

        Raises:
            _UnreadError: if there is none.
        """
        mapped = name if self._mapper is None else self._mapper._map_name(name)
        if mapped is None:
            raise _UnreadError("vLLM does not load it")
        return str(mapped)

    def fuses(self, path: str) -> bool:
        """Return True if the layer at ``path`` fuses several weights of a push."""
        name = path.removesuffix(".base_layer").rpartition(".")[2]
        return name in {whole for whole, _ in self._whole.values()}

    def of(self, name: str) -> tuple[Tensor | None, str | None]:
        """Return a weight, if it can be read, and the digest recorded when it was converted.

        Raises:
            _UnreadError: if there is neither.
        """
        if self._reordered:
            raise _UnreadError(f"{type(self._model).__name__} permutes weights when it loads them")
        layer, leaf, number, fused = self._layer(name)
        tensor = getattr(layer, leaf, None)
        if not isinstance(tensor, Tensor):
            raise _UnreadError("vLLM holds no tensor of that name")
        if getattr(layer, "tp_size", 1) > 1:
            raise _UnreadError("vLLM has sharded it over several processes")
        note: _Note | None = getattr(layer, _NOTE, None)
        if leaf != "weight" or not _converts(layer):
            return _parts(layer, tensor, fused)[number], None
        if note is None:
            raise _UnreadError("vLLM converted it before its digest could be recorded")
        part = note.parts[number]
        if not self._is_unchanged(layer, note):
            part += ", and changed since it was converted"
        return _parts(layer, tensor, fused)[number] if note.readable else None, part

    def _layer(self, name: str) -> tuple[Any, str, int, bool]:
        """Return a weight's layer, attribute and part, and whether the layer is fused."""
        path, _, leaf = self.mapped(name).rpartition(".")
        part = name.split(".")[-2] if "." in name else ""
        whole, number = self._whole.get(part, ("", 0))
        fused = f"{path.rpartition('.')[0]}.{whole}"
        if whole and (layer := self._find(fused)) is not None:
            return layer, leaf, number, True
        if (layer := self._find(path)) is None:
            if ".experts." in path:
                raise _UnreadError("vLLM has stacked the experts, in the order of its kernel")
            raise _UnreadError("vLLM has no layer of that name")
        return layer, leaf, 0, False

    def _find(self, path: str) -> Any:
        try:
            layer = self._model.get_submodule(path)
        except AttributeError:
            return None
        return getattr(layer, "base_layer", layer)  # of one that takes adapters

    def _is_unchanged(self, layer: Any, note: _Note) -> bool:
        if id(layer) not in self._unchanged:
            now = digests(_own_tensors(layer)) if note.converted else {}
            self._unchanged[id(layer)] = now == note.converted
        return self._unchanged[id(layer)]
