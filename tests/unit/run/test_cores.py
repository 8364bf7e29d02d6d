"""Threads of several training processes: a share of the cores each, unless the user chose."""

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lightning_rl.run import cores
from lightning_rl.run.cores import beside_engine, share_cores
from lightning_rl.run.loop import run_async, runtime


@pytest.fixture
def machine(monkeypatch):
    """Processes on a machine of so many cores; ``given`` is the user's OMP_NUM_THREADS."""
    threads = [torch.get_num_threads()]
    said: list[str] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "64")  # as Lightning sets it, who sees all cores
    monkeypatch.setattr(torch, "set_num_threads", lambda count: threads.append(count))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(cores, "rank_zero_info", said.append)
    monkeypatch.setattr(cores, "rank_zero_warn", said.append)

    def start(processes: int, of_cores: int, given: str | None = None, device: str = "cpu"):
        monkeypatch.setattr(cores, "world_size", lambda: processes)
        monkeypatch.setattr(cores, "usable_cores", lambda: of_cores)
        monkeypatch.setattr(cores, "_GIVEN", given)
        if given is not None:
            threads.append(int(given))
        strategy = SimpleNamespace(root_device=torch.device(device))
        share_cores(SimpleNamespace(num_devices=processes, strategy=strategy))
        return threads[-1], said

    return start


@pytest.mark.parametrize(
    ("processes", "of_cores", "threads"),
    [(2, 2, "1 thread"), (2, 8, "4 threads"), (3, 8, "2 threads")],
)
def test_cores_are_shared_out(machine, processes, of_cores, threads):
    assert machine(processes, of_cores) == (
        int(threads.split()[0]),
        [f"{processes} processes of {threads} each, on {of_cores} cores"],
    )
    assert os.environ["OMP_NUM_THREADS"] == threads.split()[0]


def test_one_process_stays_as_it_is(machine):
    assert machine(1, 4) == (torch.get_num_threads(), [])
    assert os.environ["OMP_NUM_THREADS"] == "64"


def test_what_the_user_chose_stays_and_too_much_is_said(machine):
    assert machine(2, 8, given="1") == (1, ["2 processes of 1 thread each, on 8 cores"])
    threads, said = machine(2, 2, given="2")
    assert threads == 2
    assert said[-1].startswith("OMP_NUM_THREADS=2 in each of trainer.devices=2 processes: 4 thre")
    assert said[-1].endswith("unset it, or set it to 1")


def test_more_processes_than_cores_is_said(machine):
    _, said = machine(4, 2)
    assert said[-1].startswith("trainer.devices=4 processes share 2 cores")
    assert said[-1].endswith("lower it to 2")


def test_processes_that_compute_on_gpus_may_have_more(machine):
    _, said = machine(4, 2, device="cuda")
    assert said == ["4 processes of 1 thread each, on 2 cores"]


def test_an_engine_in_the_process_has_its_share_beside_the_trainer():
    def of_both():
        return run_async(runtime.in_engine_thread(torch.get_num_threads)), torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for chosen, shares in ((None, (2, 2)), (1, (1, 3)), (9, (3, 1))):
            with beside_engine(chosen):
                assert of_both() == shares
            assert of_both() == (4, 4)
        torch.set_num_threads(1)
        with beside_engine(None):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
        run_async(runtime.in_engine_thread(partial(torch.set_num_threads, before)))
