"""check --layout: which layouts there are, which is the fastest, and what is said of each."""

from types import SimpleNamespace

import pytest
import torch

from lightning_rl.algos.baselines import ReinforcePlusPlus
from lightning_rl.cli.check import layouts
from lightning_rl.cli.check.layouts import (
    BUDGET_S,
    DeviceLayout,
    candidates,
    fastest,
    in_turns,
    table,
    verdict,
)
from lightning_rl.errors import ConfigError, LightningRLError
from lightning_rl.module import PolicyModule
from tests.support.small_run import data_module

ROW = {"iteration": 2.0, "generate": 1.0, "train": 0.5, "sync": 0.1, "eval": 0.0}


@pytest.mark.parametrize(
    ("cores", "groups", "names"),
    [
        (1, 4, ["1 process, 1 thread"]),
        (2, 32, ["1 process, 1 thread", "1 process, 2 threads", "2 processes, 1 thread each"]),
        (2, 5, ["1 process, 1 thread", "1 process, 2 threads"]),  # 5 groups are not shared evenly
        (
            8,
            12,  # 2, 3, 4 and 6 processes would do
            ["1 process, 1 thread", "1 process, 8 threads", "2 processes, 4 threads each",
             "6 processes, 1 thread each"],
        ),
    ],
)  # fmt: skip
def test_layouts_of_a_machine(cores, groups, names):
    found = layouts.layouts_of(cores, groups)
    assert [layout.name for layout in found] == names
    for layout in found:
        flag, processes = layout.flags
        threads = int(layout.environment["OMP_NUM_THREADS"])
        assert flag == "--trainer.devices"
        assert layout.name.startswith(f"{processes} process")
        assert int(processes) * threads <= cores
        assert groups % int(processes) == 0


def test_a_stream_has_a_thread_for_each_half():
    *_, streamed, two = layouts.layouts_of(2, 32, streams=True)
    assert streamed.name == "1 process, streamed"
    assert streamed.command() == (
        "OMP_NUM_THREADS=1 lightning-rl fit ... --trainer.devices 1 --data.collector "
        "StreamedCollector --data.collector.max_groups_in_flight 16"
    )
    assert two.name == "2 processes, 1 thread each"
    assert not any("StreamedC" in str(found) for found in layouts.layouts_of(1, 32, streams=True))


def test_without_vllm_the_simplest_and_the_widest_are_tried():
    *_, one, threads, two = layouts.layouts_of(2, 32, plain=True)
    assert one.name == "1 process, 1 thread, TransformersEngine"
    assert threads.name == "1 process, 2 threads, TransformersEngine"
    assert two.flags == ("--trainer.devices", "2", "--data.engine", "TransformersEngine")


def test_one_process_needs_no_strategy_of_several():
    alone, _, two = layouts.layouts_of(2, 4, strategy="ddp_find_unused_parameters_true")
    assert alone.flags == ("--trainer.devices", "1", "--trainer.strategy", "auto")
    assert two.flags == ("--trainer.devices", "2")


@pytest.fixture
def built(tiny_model):
    """What a command line would have built, as far as it is looked at."""

    def build(strategy: str = "auto", device: str = "cpu", nodes: int = 1, model=None):
        trainer = SimpleNamespace(
            strategy=SimpleNamespace(root_device=torch.device(device)), num_nodes=nodes
        )
        config = SimpleNamespace(fit=SimpleNamespace(trainer=SimpleNamespace(strategy=strategy)))
        model = model or PolicyModule(str(tiny_model))
        return SimpleNamespace(
            model=model, datamodule=data_module(), trainer=trainer, config=config
        )

    return build


def test_the_layouts_of_a_configuration(tiny_model, built, monkeypatch):
    monkeypatch.setattr(layouts, "usable_cores", lambda: 2)
    assert candidates(built()) == layouts.layouts_of(2, 6, streams=True)
    assert candidates(built("ddp")) == layouts.layouts_of(2, 6, "ddp", streams=True)
    whole = PolicyModule(str(tiny_model), advantage=ReinforcePlusPlus())
    assert candidates(built(model=whole)) == layouts.layouts_of(2, 6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "cuda:0"}, "this run is on cuda:0; leave it out, or add --trainer.accelerator"),
        ({"nodes": 3}, "this run is on 3 machines"),
        ({"strategy": "fsdp"}, "add --trainer.strategy auto, or leave --layout out"),
        ({"model": object()}, "iterations of a PolicyModule and an RLDataModule, not of a object"),
    ],
)
def test_what_cannot_be_laid_out(built, given, message):
    with pytest.raises(ConfigError, match=message):
        candidates(built(**given))


def test_the_command_to_type():
    layout = DeviceLayout("b", ("--data.collector", "a b"), {"OMP_NUM_THREADS": "1", "B": "2"})
    assert layout.command() == "OMP_NUM_THREADS=1 B=2 lightning-rl fit ... --data.collector 'a b'"
    assert DeviceLayout("plain").command() == "lightning-rl fit ..."


def test_what_is_faster_by_noise_is_not_worth_more_processes():
    one, two, three = DeviceLayout("1"), DeviceLayout("2"), DeviceLayout("3")
    assert fastest({one: 1.02, two: 1.0, three: 1.5}) is one
    assert fastest({one: 1.1, two: 1.0, three: 0.99}) is two
    assert fastest({one: 1.1, two: 1.0, three: 0.9}) is three


def test_the_verdict_counts_iterations_without_their_evaluation():
    one, two = DeviceLayout("1 process"), DeviceLayout("2 processes", ("--trainer.devices", "2"))
    evaluated = ROW | {"iteration": 9.0, "eval": 7.5}  # 1.5 by itself
    rows = {"1 process": [ROW, ROW | {"iteration": 4.0}], "2 processes": [evaluated]}
    assert verdict([one, two], rows) == (
        "fastest: 2 processes (2.00 times as fast as 1 process): "
        "`lightning-rl fit ... --trainer.devices 2`"
    )


def test_a_layout_that_does_not_run_is_told_of():
    head, columns, good, bad = table({"one": [ROW, ROW], "two": "config error: too many"})
    assert head == "layouts, in seconds per iteration:"
    assert columns.split() == ["iteration", "generate", "train", "sync", "measured"]
    assert good.split() == ["one", "2", "1", "0.5", "0.1", "2"]
    assert bad == "  two  did not run: config error: too many"
    assert verdict([DeviceLayout("one"), DeviceLayout("two")], {"one": [ROW], "two": "no"}) == (
        "fastest: one: `lightning-rl fit ...`"
    )


def test_a_busy_machine_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(layouts, "usable_cores", lambda: 2)
    monkeypatch.setattr(layouts, "_tried", lambda layout, arguments, file: [ROW])
    monkeypatch.setattr(layouts, "BUDGET_S", 0.0)
    for load, warned in ((0.9, False), (1.1, True)):
        monkeypatch.setattr(layouts.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        lines = layouts.compare([DeviceLayout("one")], [], tmp_path)
        assert any("2 cores had a load of 1.1 before" in line for line in lines) == warned


def test_no_layout_that_runs_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(layouts, "_tried", lambda layout, arguments, file: f"no {layout.name}")
    with pytest.raises(LightningRLError, match="no layout could be measured; a: no a"):
        layouts.compare([DeviceLayout("a"), DeviceLayout("b")], [], tmp_path)


class Clock:
    """Time that passes only while something is measured."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.measured = 0.0, seconds, []

    def __call__(self) -> float:
        return self.now

    def measure(self, layout: DeviceLayout):
        self.now += self.seconds
        self.measured.append(layout.name)
        return "it failed" if layout.name == "bad" else [ROW]


def test_turns_are_taken_as_long_as_they_end_in_time():
    clock = Clock(BUDGET_S / 7)
    found = in_turns([DeviceLayout("a"), DeviceLayout("b")], clock.measure, clock)
    # After three turns six sevenths have passed, and another would end after eight.
    assert clock.measured == ["a", "b"] * 3
    assert found == {"a": [ROW] * 3, "b": [ROW] * 3}


def test_each_is_measured_once_however_long_it_takes():
    clock = Clock(10 * BUDGET_S)
    assert in_turns([DeviceLayout("a"), DeviceLayout("b")], clock.measure, clock) == {
        "a": [ROW],
        "b": [ROW],
    }


def test_what_failed_is_not_tried_again():
    clock = Clock(BUDGET_S / 10)
    found = in_turns([DeviceLayout("bad"), DeviceLayout("good")], clock.measure, clock)
    assert clock.measured.count("bad") == 1
    assert clock.measured.count("good") > 2
    assert found["bad"] == "it failed"
    alone = Clock(0.0)
    assert in_turns([DeviceLayout("bad")], alone.measure, alone) == {"bad": "it failed"}
