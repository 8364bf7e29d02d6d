"""Which layout fit takes where none was chosen, from hand-made times."""

import json
from types import SimpleNamespace

import pytest
import torch
from jsonargparse import Namespace

from lightning_rl.cli import fastest, probe
from lightning_rl.cli.fastest import choose, free_layouts, options_as_then, options_of
from lightning_rl.run import layout_cache
from lightning_rl.run.device_layout import layouts_of
from lightning_rl.run.layout_cache import Measured

WITH_VLLM = layouts_of(2, 32, plain=True)
PLAIN = layouts_of(2, 32)


def measured(*iterations: float, of=PLAIN, generate: float = 0.1, thorough: bool = False):
    pairs = zip(of, iterations, strict=False)
    rows = {layout.name: {"iteration": s, "generate": generate} for layout, s in pairs}
    return Measured(rows, thorough)


def test_the_fastest_is_taken_and_the_reason_told():
    chosen, why = choose(PLAIN, measured(1.0, 0.9, 0.5), 28)
    assert chosen is PLAIN[2]
    assert why == "2 processes, 1 thread each: 0.5 s per iteration, 2.00 times 1 process, 1 thread"
    assert options_of(chosen) == ["--trainer.devices", "2", "--threads", "1"]


def test_what_is_faster_by_noise_only_leaves_the_simplest():
    chosen, why = choose(PLAIN, measured(1.02, 1.0, 1.01), 28)
    assert chosen is PLAIN[0]
    assert why.endswith("no slower than others")


@pytest.mark.parametrize("iterations", [28, 100])
def test_vllm_stays_where_it_may_be_faster_and_was_not_measured(iterations):
    known = measured(1.0, 0.9, 0.5, of=WITH_VLLM[3:])  # 0.1 s of an iteration generate
    chosen, why = choose(WITH_VLLM, known, iterations)
    if iterations == 28:  # 2.8 s are less than vLLM takes to start
        assert chosen is WITH_VLLM[5]
        assert options_of(chosen)[2:] == ["--data.engine", "TransformersEngine", "--threads", "1"]
    else:
        assert chosen is None
        assert "with vLLM, which may be faster; lightning-rl check --layout" in why


def test_what_check_measured_counts_for_vllm_too():
    known = measured(1.0, 0.4, 0.9, 1.0, 0.9, 0.5, of=WITH_VLLM, thorough=True)
    chosen, _ = choose(WITH_VLLM, known, 10_000)
    assert chosen is WITH_VLLM[1]


def test_too_little_that_was_measured_changes_nothing():
    assert choose(PLAIN, measured(1.0), 28)[0] is None
    assert choose(PLAIN, Measured({}), 28)[0] is None


def configured(**given):
    """A configuration as far as it is looked at."""
    data = {"engine": None, "groups_per_iteration": 32} | given.pop("data", {})
    trainer = {"devices": "auto"} | given.pop("trainer", {})
    fields = {"threads": None, "layout": "auto", "ckpt_path": None} | given
    return Namespace(
        **fields, data=Namespace(init_args=Namespace(**data)), trainer=Namespace(**trainer)
    )


@pytest.mark.parametrize(
    ("given", "threads", "names"),
    [
        ({}, None, ["1 process, 1 thread", "1 process, 2 threads", "2 processes, 1 thread each"]),
        ({}, "1", ["1 process, 1 thread", "2 processes, 1 thread each"]),
        ({"threads": 2}, "1", ["1 process, 2 threads"]),
        ({"trainer": {"devices": "2"}}, None, ["2 processes, 1 thread each"]),
        ({"trainer": {"devices": 1}}, None, ["1 process, 1 thread", "1 process, 2 threads"]),
    ],
)
def test_what_was_chosen_is_respected(monkeypatch, given, threads, names):
    monkeypatch.setattr(fastest, "usable_cores", lambda: 2)
    engine = {"data": {"engine": Namespace(class_path="lightning_rl.TransformersEngine")}}
    found = free_layouts(configured(**(engine | given)), threads)
    assert [layout.name for layout in found] == names


def test_an_engine_that_is_not_chosen_is_varied_too(monkeypatch):
    monkeypatch.setattr(fastest, "usable_cores", lambda: 2)
    monkeypatch.setattr(fastest, "find_spec", lambda name: object())
    assert free_layouts(configured(), None) == WITH_VLLM


def test_a_run_that_goes_on_keeps_its_layout_but_for_what_is_chosen_now(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    then = {"trainer.devices": 2, "threads": 1, "data.engine": "TransformersEngine"}
    assert options_as_then(configured(), then) == [
        "--trainer.devices", "2", "--threads", "1", "--data.engine", "TransformersEngine",
    ]  # fmt: skip
    chosen = configured(threads=2, trainer={"devices": 1}, data={"engine": Namespace()})
    assert options_as_then(chosen, then) == []
    assert options_as_then(configured(), {"trainer.devices": "auto", "threads": None}) == []
    assert options_as_then(configured(), {}) == []


def test_plain_and_a_launcher_s_processes_look_at_nothing(monkeypatch):
    assert fastest.layout_options(Namespace(layout="plain"), dict) == []
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert fastest.layout_options(Namespace(layout="auto"), dict) == []


@pytest.fixture
def key(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return layout_cache.key_of({"model.model": str(tiny_model)}, "TransformersEngine")


def test_what_was_measured_is_found_again_on_this_machine_only(key, tmp_path, monkeypatch):
    assert layout_cache.read(key) is None
    kept = measured(1.0, 0.5, thorough=True)
    layout_cache.write(key, kept)
    assert layout_cache.read(key) == kept
    [file] = (tmp_path / "cache/lightning_rl/layouts").iterdir()
    assert json.loads(file.read_text())["key"]["cores"] == layout_cache.usable_cores()
    assert layout_cache.read(key | {"cpu": "another"}) is None
    assert layout_cache.read(key | {"versions": {"torch": "0"}}) is None


@pytest.mark.parametrize("text", ["", "[]", '{"seconds": {"a": 1}}', '{"key": 1, "seconds": {}'])
def test_a_damaged_cache_is_told_of_and_measured_anew(key, tmp_path, text):
    layout_cache.write(key, measured(1.0))
    [file] = (tmp_path / "cache/lightning_rl/layouts").iterdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match="is damaged .*: layouts are measured anew"):
        assert layout_cache.read(key) is None


def test_a_cache_that_cannot_be_written_stops_nothing(key, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.warns(UserWarning, match="is not kept for later runs"):
        layout_cache.write(key, measured(1.0))


def test_a_model_without_a_configuration_is_left_to_the_run(tmp_path):
    assert layout_cache.key_of({"model.model": str(tmp_path)}, "VLLMLocal") is None


def trial(processes: int = 1):
    return SimpleNamespace(processes=processes, threads=1)


def test_trials_share_the_time_and_skip_what_needs_too_much_memory(monkeypatch):
    asked = []

    def answer(which, groups, deadline):
        asked.append((which.processes, groups))
        return {"iteration": 1.0, "generate": 0.5, "groups": 4, "bytes": 300}

    monkeypatch.setattr(probe, "_in_processes", answer)
    trials = {"one": trial(), "two": trial(2), "four": trial(4)}
    found = probe.measure(trials, 10.0, memory=1200)
    assert asked == [(1, 0), (2, 4)]  # four processes would take 1200, which is more than half
    assert found == {name: {"iteration": 1.0, "generate": 0.5} for name in ("one", "two")}


def _fails(*_):
    raise ValueError("a model that cannot be read")


def _sleeps(*_):
    torch.multiprocessing.Event().wait(60)


@pytest.mark.parametrize("what", [_fails, _sleeps])
def test_a_trial_that_fails_or_takes_too_long_is_left_out(monkeypatch, what):
    monkeypatch.setattr(probe, "_timed", what)
    assert probe.measure({"one": trial(), "two": trial(2)}, 0.3) == {}
