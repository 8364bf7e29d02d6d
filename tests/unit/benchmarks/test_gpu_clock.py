"""Test what the checks of a GPU machine measure there, by a CUDA that is made up."""

import warnings

import pytest
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.clock import counted_waits, peak_bytes, used_bytes
from benchmarks.gpu.made import quantiles


@pytest.fixture
def on(tmp_path):
    return lambda device: Bench(device, tmp_path, tmp_path / "record.json")


def test_each_wait_for_the_device_is_counted_with_its_place(on, monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def wait():
        if modes[-1] == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    found = []
    wait()
    with counted_waits(on("cuda"), found):
        for _ in range(2):
            wait()
        warnings.warn("of something else", stacklevel=1)
    wait()
    assert modes[-1] == 0
    assert len(found) == 2
    assert found[0] == found[1]
    assert found[0].startswith("test_gpu_clock.py:")
    found.clear()
    with counted_waits(on("cpu"), found):
        pass
    assert found == []


def test_memory_is_the_devices(on, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 80))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 40)
    assert (used_bytes(on("cuda")), peak_bytes(on("cuda"))) == (50, 40)
    assert (used_bytes(on("cpu")), peak_bytes(on("cpu"))) == (0, None)


def test_quantiles_are_of_absolute_values():
    found = quantiles([-4.0, 0.0, 1.0, -2.0, 3.0])
    assert found["mean"] == 2.0
    assert (found["p50"], found["max"]) == (2.0, 4.0)
    assert found["p90"] == pytest.approx(3.6)  # between the two largest, 0.6 of the way
