"""Keeps vLLM from changing transformers' classes under the trainer's model.

Models that vLLM has no code of its own for, such as SmolLM3, OLMo 2 and Phi, it computes by
transformers' class, which it changes for its compiler: another base, constructor and call, which
need vLLM's configuration. In one process that is the class of the trainer's model too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def transformers_unchanged() -> Iterator[None]:
    """Give classes back unchanged at the end; vLLM's models get subclasses with the changes."""
    base: Any = import_module("vllm.model_executor.models.transformers.base").Base
    decorate = base._decorate_cls_for_torch_compile
    before: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}
    made: list[Any] = []

    def remembering(vllm_model: Any, cls: Any, *arguments: Any, **named: Any) -> None:
        before.setdefault(cls, (cls.__bases__, dict(vars(cls))))
        decorate(vllm_model, cls, *arguments, **named)
        begin = cls.__init__

        def begin_and_note(model: Any, *arguments: Any, **named: Any) -> None:
            begin(model, *arguments, **named)
            made.append(model)

        cls.__init__ = begin_and_note

    base._decorate_cls_for_torch_compile = remembering
    try:
        yield
    finally:
        base._decorate_cls_for_torch_compile = decorate
        for cls, (bases, names) in before.items():
            changed = _give_back(cls, bases, names)
            for model in (model for model in made if type(model) is cls):
                model.__class__ = changed


def _give_back(cls: Any, bases: tuple[type, ...], names: dict[str, Any]) -> type:
    """Undo the changes of a class; return a subclass that has them."""
    added = [base for base in cls.__bases__ if base not in bases]
    new = {name: value for name, value in vars(cls).items() if names.get(name) is not value}
    cls.__bases__ = bases
    for name in new:
        if name in names:
            setattr(cls, name, names[name])
        else:
            delattr(cls, name)
    changed: type = type(cls)(cls.__name__, (cls, *added), {**new, "__module__": cls.__module__})
    return changed
