"""Trees of tensors and plain values, such as a checkpoint, as safetensors and JSON.

Unlike a pickle, neither file can name anything to run. Mappings, tuples and numbers that are not
finite have no form of their own in JSON: each is an object with one key, which says what it is.
"""

import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_rl.errors import CheckpointError
from lightning_rl.run.files import strict_json


def write_tree(tree: Any, stem: Path) -> None:
    """Write a tree to ``<stem>.json``, and its tensors to ``<stem>.safetensors``.

    Args:
        tree: mappings, lists, tuples, texts, numbers, None and tensors. Tensors that are the same
            memory, such as tied weights, are written once.
        stem: the path of both files, without their endings.

    Raises:
        CheckpointError: naming a value of another type.
    """
    tensors: dict[str, Tensor] = {}
    text = strict_json.dumps(_Writer(tensors).form(tree, ""))
    stem.with_suffix(".json").write_text(text, encoding="utf-8")
    save_file(tensors, stem.with_suffix(".safetensors"))


def read_tree(stem: Path) -> Any:
    """Read what :func:`write_tree` wrote; nothing in the files is run.

    Raises:
        CheckpointError: if a file is damaged, or not one of these.
    """
    file = stem.with_suffix(".json")
    try:
        tensors = load_file(stem.with_suffix(".safetensors"))
        return _value(strict_json.loads(file.read_bytes()), tensors)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} and {stem.name}.safetensors do not hold a checkpoint ({error}); ask for the "
            "pack again"
        ) from error


class _Writer:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._names: dict[tuple[Any, ...], str] = {}

    def form(self, value: Any, place: str) -> Any:
        """Return the value's form in JSON."""
        if isinstance(value, Tensor):
            return {"tensor": self._name_of(value.detach().cpu(), place)}
        if isinstance(value, dict):
            pairs = [[self.form(k, place), self.form(v, f"{place}.{k}")] for k, v in value.items()]
            return {"mapping": pairs}
        if isinstance(value, list | tuple):
            items = [self.form(item, f"{place}.{index}") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": repr(float(value))}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise CheckpointError(
            f"{place.lstrip('.')} is a {type(value).__name__}, which a pack cannot hold; keep "
            "tensors, numbers, texts and lists or mappings of them in the state"
        )

    def _name_of(self, tensor: Tensor, place: str) -> str:
        layout = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and layout in self._names:
            return self._names[layout]
        name = self._names[layout] = place.lstrip(".")
        # A view would be refused, since its memory is also another's.
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        self._tensors[name] = tensor.contiguous() if whole else tensor.clone().contiguous()
        return name


def _value(form: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(form, list):
        return [_value(item, tensors) for item in form]
    if not isinstance(form, dict):
        return form
    [(kind, inner)] = form.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "mapping":
        return {_value(key, tensors): _value(value, tensors) for key, value in inner}
    if kind == "tuple":
        return tuple(_value(item, tensors) for item in inner)
    if kind == "float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    raise ValueError(f"{kind!r:.40} is no kind of value")
