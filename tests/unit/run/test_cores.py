"""Test threads of several training processes: a share of the cores each, unless the user chose."""

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lightning_rl.run.loop.background import run_async, runtime
from lightning_rl.run.processes import cores
from lightning_rl.run.processes.cores import beside_engine, share_cores


@pytest.fixture
def machine(monkeypatch):
    """Run processes on a machine of so many cores; ``given`` is the user's OMP_NUM_THREADS."""
    threads = [64]  # of torch, and as Lightning sets it, which see all cores
    said: list[str] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: threads.append(count))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(cores, "rank_zero_info", said.append)
    monkeypatch.setattr(cores, "rank_zero_warn", said.append)

    def start(processes: int, of_cores: int, given: str | None = None, device: str = "cpu",
              chosen: int | None = None):  # fmt: skip
        monkeypatch.setattr(cores, "world_size", lambda: processes)
        monkeypatch.setattr(cores, "usable_cores", lambda: of_cores)
        monkeypatch.setattr(cores, "_GIVEN", given)
        if given is not None:
            threads.append(int(given))
        strategy = SimpleNamespace(root_device=torch.device(device))
        share_cores(SimpleNamespace(num_devices=processes, strategy=strategy), chosen)
        return threads[-1], said

    return start


@pytest.mark.parametrize(
    ("processes", "of_cores", "threads"),
    [(2, 2, "1 thread"), (2, 8, "4 threads"), (3, 8, "2 threads")],
)
def test_cores_are_shared_out(machine, processes, of_cores, threads):
    assert machine(processes, of_cores) == (
        int(threads.split()[0]),
        [f"using {processes} processes of {threads} each on {of_cores} cores"],
    )
    assert os.environ["OMP_NUM_THREADS"] == threads.split()[0]


def test_one_process_has_no_more_threads_than_there_are_cores(machine):
    assert machine(1, 128) == (64, [])
    assert os.environ["OMP_NUM_THREADS"] == "64"
    assert machine(1, 4) == (4, [])
    assert os.environ["OMP_NUM_THREADS"] == "4"
    assert machine(1, 8) == (4, [])


def test_a_data_modules_own_number_counts_on_cpus_alone(machine):
    assert machine(2, 8, chosen=1) == (1, ["using 2 processes of 1 thread each on 8 cores"])
    assert machine(1, 8, given="4", chosen=2) == (
        2,
        ["using 2 processes of 1 thread each on 8 cores"],
    )
    assert machine(1, 8, given="4", chosen=2, device="cuda")[0] == 4


def test_a_script_whose_threads_spin_is_told_once(machine, monkeypatch):
    monkeypatch.setattr(cores, "why_slow", lambda: "they spin")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    assert machine(1, 4) == (4, ["they spin"])
    assert machine(1, 4) == (4, ["they spin"])


@pytest.mark.parametrize(
    "quiet", [{"given": "1"}, {"chosen": 1}, {"device": "cuda"}, {"waiting": "GOMP_SPINCOUNT"},
              {"waiting": "OMP_WAIT_POLICY"}]
)  # fmt: skip
def test_one_thread_a_gpu_and_what_the_user_chose_need_no_word(machine, monkeypatch, quiet):
    monkeypatch.setattr(cores, "why_slow", lambda: "they spin")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    if chosen := quiet.get("waiting"):
        monkeypatch.setenv(chosen, "7")
    assert machine(1, 4, **{k: v for k, v in quiet.items() if k != "waiting"})[1] == []


def test_what_the_user_chose_stays_and_too_much_is_said(machine):
    assert machine(2, 8, given="1") == (1, ["using 2 processes of 1 thread each on 8 cores"])
    threads, said = machine(2, 2, given="2")
    assert threads == 2
    assert said[-1].startswith("trainer.devices=2 processes of 2 threads each: 4 threads compete")
    assert said[-1].endswith("set OMP_NUM_THREADS=1")


def test_more_processes_than_cores_is_said(machine):
    _, said = machine(4, 2)
    assert said[-1].startswith("trainer.devices=4 processes share 2 cores")
    assert said[-1].endswith("lower it to 2")


def test_processes_that_compute_on_gpus_may_have_more(machine):
    _, said = machine(4, 2, device="cuda")
    assert said == ["using 4 processes of 1 thread each on 2 cores"]


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
