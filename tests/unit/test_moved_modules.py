"""Module names that were: what still works, and what says where to look."""

import sys
from importlib import import_module, util
from types import ModuleType

import pytest

from lightning_rl.config.hints import import_object, named_class
from lightning_rl.config.names import GONE_PACKAGES, MOVED, STILL_IMPORTED
from lightning_rl.errors import ConfigError


def test_servers_that_are_started_with_the_old_name_find_the_worker(monkeypatch):
    old, new = "lightning_rl.engines.vllm_worker", "lightning_rl.sync.vllm_worker"
    worker = ModuleType(new)  # of the real one, tests/integration/test_vllm_cpu.py
    monkeypatch.setitem(sys.modules, new, worker)
    monkeypatch.delitem(sys.modules, old, raising=False)
    assert import_module(old) is worker is sys.modules.pop(old)


def test_no_module_has_moved_twice():
    assert set(MOVED) & set(MOVED.values()) == set()


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_leads_to_a_module_that_is_there(old):
    assert util.find_spec(MOVED[old]) is not None
    if old not in (*STILL_IMPORTED, *GONE_PACKAGES):
        with pytest.raises(ModuleNotFoundError, match=f"{old} is {MOVED[old]} now"):
            import_module(old)


def test_a_package_that_is_gone_says_so_of_what_was_in_it():
    with pytest.raises(
        ModuleNotFoundError, match=r"lightning_rl\.buffer is lightning_rl\.rollouts"
    ):
        from lightning_rl.buffer import ReplayBuffer  # noqa: F401


def test_a_configuration_is_told_the_new_name_of_a_module():
    with pytest.raises(ConfigError, match=r"lightning_rl\.sft is lightning_rl\.offline\.sft now"):
        import_object("lightning_rl.sft.SFTModule")
    with pytest.raises(
        ConfigError, match=r"lightning_rl\.buffer\.samplers is lightning_rl\.collect"
    ):
        named_class("lightning_rl.buffer.samplers.Newest", [object])


def test_a_name_that_never_was_is_refused_as_python_does():
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        import_module("lightning_rl.engines.nothing")
