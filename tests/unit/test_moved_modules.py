"""Module names that were: what still works, and what says where to look."""

import sys
from importlib import import_module, util
from types import ModuleType

import pytest

from lightning_rl.config.names import MOVED, STILL_IMPORTED


def test_servers_that_are_started_with_the_old_name_find_the_worker(monkeypatch):
    old, new = "lightning_rl.engines.vllm_worker", "lightning_rl.sync.vllm_worker"
    worker = ModuleType(new)  # of the real one, tests/integration/test_vllm_cpu.py
    monkeypatch.setitem(sys.modules, new, worker)
    monkeypatch.delitem(sys.modules, old, raising=False)
    assert import_module(old) is worker is sys.modules.pop(old)


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_leads_to_a_module_that_is_there(old):
    assert util.find_spec(MOVED[old]) is not None
    if old not in STILL_IMPORTED:
        with pytest.raises(ModuleNotFoundError, match=f"{old} is {MOVED[old]} now"):
            import_module(old)


def test_a_name_that_never_was_is_refused_as_python_does():
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        import_module("lightning_rl.engines.nothing")
