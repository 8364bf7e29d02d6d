"""Classes of transformers that vLLM makes its own are as they were after it has started."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from lightning_rl.engines.vllm.classes import transformers_unchanged

PLACE = "vllm.model_executor.models.transformers.base"


class Root:
    def __call__(self):
        return f"{type(self).__name__} of the trainer"


class Model(Root):
    """Stands for a class of transformers."""

    def __init__(self, size):
        self.size = size


class Compiled:
    """Stands for what vLLM adds to its bases."""


def decorate(vllm_model, cls, *, compiled):
    """Decorate as vLLM does: another base, constructor and call, which need its configuration."""
    begin = cls.__init__

    def __init__(self, size):
        if not vllm_model.config:
            raise AssertionError("Current vLLM config is not set")
        begin(self, size)
        self.compiled = compiled

    cls.__bases__ = (*cls.__bases__, Compiled)
    cls.__init__ = __init__
    cls.__call__ = lambda self: f"compiled={self.compiled}"


@pytest.fixture
def base(monkeypatch):
    base = SimpleNamespace(_decorate_cls_for_torch_compile=decorate)
    names = PLACE.split(".")
    for end in range(1, len(names) + 1):
        module = ModuleType(".".join(names[:end]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.Base = base
    return base


def test_a_class_is_given_back_and_vllms_model_keeps_the_changes(base):
    trainers = Model(1)
    before = dict(vars(Model))
    with transformers_unchanged():
        starting = SimpleNamespace(config=True)
        base._decorate_cls_for_torch_compile(starting, Model, compiled="yes")
        vllms = Model(2)
    starting.config = False  # once it has started
    assert base._decorate_cls_for_torch_compile is decorate
    assert dict(vars(Model)) == before
    assert Model.__bases__ == (Root,)
    assert trainers() == Model(3)() == "Model of the trainer"
    assert vllms() == "compiled=yes"
    assert isinstance(vllms, Model)
    assert isinstance(vllms, Compiled)
    assert (vllms.size, type(vllms).__name__) == (2, "Model")


def test_a_class_is_given_back_when_vllm_does_not_start(base):
    def start():
        with transformers_unchanged():
            base._decorate_cls_for_torch_compile(SimpleNamespace(config=True), Model, compiled="")
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        start()
    assert Model.__bases__ == (Root,)
    assert Model(1)() == "Model of the trainer"
