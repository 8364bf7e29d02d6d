"""Test imports during which Python does not look for garbage."""

import gc

import pytest

from lightning_rl.run.garbage_collection import uncollected


def test_nothing_is_collected_inside_and_what_was_made_is_not_looked_at_after(thawed):
    before = gc.get_freeze_count()
    with uncollected():
        assert not gc.isenabled()
        kept = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


def test_a_failed_import_leaves_collection_on():
    with pytest.raises(ModuleNotFoundError), uncollected():
        raise ModuleNotFoundError("no such library")
    assert gc.isenabled()


def test_where_collection_is_off_it_stays_off():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
