"""Test what benchmarks write into the documentation, from numbers that are known."""

import json
import os
import subprocess
import sys
from select import select

import pytest

from benchmarks import algorithms, brief, experts, faults, guards, layout, overoptimisation, scaling
from benchmarks.parallel import tables as parallel
from benchmarks.peers import tables as peers
from benchmarks.peers.layouts import Layout, reason, run, together
from benchmarks.peers.tasks import NEVER, Task
from benchmarks.schedulers import tables as schedulers
from benchmarks.schedulers.dynamic import dynamic_table
from benchmarks.support import quiet
from benchmarks.support.results import RESULTS as SAVED, write_block
from benchmarks.wall import __main__ as wall, choice, figures, tables as wall_tables

RESULTS = """<testsuites><testsuite>
<testcase name="test_a"><properties>
<property name="other" value="1"/>
<property name="fault" value='["a layer left out", "`IncompleteWeightsError` naming it", 0.1234]'/>
</properties></testcase>
<testcase name="test_b[memory]"><properties>
<property name="fault" value='["a server killed", "started anew", 44.8]'/>
</properties></testcase>
<testcase name="test_c"/>
</testsuite></testsuites>"""


def test_each_fault_is_a_line_with_its_test(tmp_path):
    file = tmp_path / "results.xml"
    file.write_text(RESULTS)
    assert faults.table(faults.faults_in(file))[2:] == [
        "| a layer left out | `IncompleteWeightsError` naming it | 0.12 | `test_a` |",
        "| a server killed | started anew | 45 | `test_b` |",
    ]


def test_a_block_takes_the_place_of_the_one_before_and_of_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- t -->\n| old |\n\nold\n<!-- /t -->\n| kept |\n")
    write_block(page, "t", ["| new |", "", "new"])
    assert page.read_text() == "before\n<!-- t -->\n| new |\n\nnew\n<!-- /t -->\n| kept |\n"


def algorithms_table(result):
    rows = (algorithms.row(*item) for item in result["algorithms"].items())
    return [*algorithms.HEAD, *rows]


def wall_table(result):
    return wall_tables.table(result["tasks"])


def front_table(result):
    return wall_tables.front_table(result["tasks"])


@pytest.mark.parametrize(
    ("page", "block", "table"),
    [
        ("README", "wall", front_table),
        ("docs/algorithms", "algorithms", algorithms_table),
        ("docs/benchmarks", "peers", peers.table),
        ("docs/benchmarks", "wall", wall_table),
        ("docs/collectors", "schedulers-dynamic", dynamic_table),
        ("docs/collectors", "schedulers-real", schedulers.real_table),
        ("docs/collectors", "schedulers-cores", schedulers.real_table),
        ("docs/distributed", "parallel", parallel.table),
        ("docs/experts", "experts", experts.table),
        ("docs/gpu", "layout", layout.table),
        ("docs/guards", "guards", guards.table),
        ("docs/rewards", "brief", brief.table),
        ("docs/rewards", "overoptimisation", overoptimisation.table),
    ],
)
def test_a_page_shows_what_was_saved(page, block, table):
    saved = json.loads((SAVED / f"{block}-cpu.json").read_text())
    text = (SAVED.parents[1] / f"{page}.md").read_text(encoding="utf-8")
    shown = text.partition(f"<!-- {block} -->\n")[2].partition(f"\n<!-- /{block} -->")[0]
    assert shown.splitlines() == table(saved.get("result", saved))


def test_overoptimisation_finds_the_peak_of_the_gold_reward():
    assert overoptimisation.gold(["124", "1234", "12", ""], ["124", "124", "124", "124"]) == [
        1.0, 0.5, pytest.approx(2 / 3), 0.0,
    ]  # fmt: skip
    runs = [
        {"rows": [{"gold": g, "model": m, "distance": d} for g, m, d in rows], "alarm": alarm}
        for rows, alarm in (
            ([(0.4, 0, 0), (0.7, 1, 1), (0.8, 2, 2), (0.9, 3, 3), (0.1, 4, 4)], None),
            ([(0.6, 0, 0), (0.5, 1, 1), (0.8, 2, 2), (0.7, 3, 3), (0.3, 4, 4)], 5),
        )
    ]
    # Means of both: 0.5, 0.6, 0.8, 0.8, 0.2; over three iterations: 1.9 / 3, 2.2 / 3, 1.8 / 3.
    found = overoptimisation.summary(runs)
    assert (found["gold_start"], found["peak_iteration"]) == (0.5, 3)
    assert found["gold_peak"] == pytest.approx(2.2 / 3)
    assert (found["gold_end"], found["distance_peak"]) == (pytest.approx(0.6), 2.0)
    assert (found["model_peak"], found["model_end"]) == (2.0, 3.0)
    assert found["alarms"] == [None, 5]


def test_scaling_compares_processes_with_one():
    row = {"generate": 1.5, "logprob": 0.0, "train": 2.0, "sync": 0.1, "tokens": 2560.0}
    one = row | {"wall_s": 4.0, "cpu_s": 3.8, "tokens_per_s": 640.0}
    two = row | {"wall_s": 2.5, "cpu_s": 4.2, "tokens_per_s": 1024.0}
    four = row | {"wall_s": 3.2, "cpu_s": 5.1, "tokens_per_s": 800.0}
    results = {"small": {"parameters": 1_600_000, "speedup": 1.25, "1": one, "2": two, "4": four}}
    assert scaling.table(results)[2:] == [
        "| 1.6 M | 2560 | 1 | 4.00 | 1.50, 2.00 | 3.80 | 640 |",
        "| 1.6 M | 2560 | 2 | 2.50 (1.60× as fast) | 1.50, 2.00 | 4.20 | 1,024 |",
        "| 1.6 M | 2560 | 4 | 3.20 (1.25× as fast) | 1.50, 2.00 | 5.10 | 800 |",
    ]


# ---------------------------------------------------------------- benchmarks.wall


def run_of(*wall_s, generate=0.0, train=0.0):
    """Return one run, whose first iteration is not counted."""
    count = len(wall_s)
    parts = [{"generate": generate, "train": train, "iteration": s} for s in wall_s]
    same = {"cpu_s": wall_s, "tokens": [100] * count, "rewards": [2.0] * count}
    return same | {"wall_s": wall_s, "parts": parts, "setup_cpu_s": 9.0, "peak_rss_bytes": 2**30}


@pytest.fixture
def measured():
    return {
        "ours": {
            "vllm, 2 processes": [run_of(9.0, 0.6, 0.6), run_of(9.0, 0.5)],
            "vllm, 1 thread": [run_of(9.0, 1.0, generate=0.5, train=0.4)],
            "transformers, 1 thread": [run_of(9.0, 0.7, generate=0.2, train=0.4)],
        },
        "trl": {"padded, 2 threads": [run_of(9.0, 1.2)], "vllm, 1 thread": [run_of(9.0, 1.5)]},
    }


def task_of(goal=NEVER):
    return Task("quickstart", "model", "prompts", 3, goal=goal)


def test_wall_compares_the_best_layout_of_each_with_the_other_and_with_the_floor(measured):
    result = figures.figures(task_of(goal=0.9), measured)
    best = result["ours"]["best"], result["trl"]["best"]
    assert best == ("vllm, 2 processes", "padded, 2 threads")
    assert result["ratio"] == pytest.approx(1.2 / 0.6)
    assert result["two_over_one"] == pytest.approx(1.0 / 0.6)
    # Both at once: max(0.5, 0.4). Perfectly halved: 1.0 / 2. Here they are the same.
    assert result["floor_ratio"] == pytest.approx(0.6 / 0.5)
    assert result["floor"] == pytest.approx(
        {"generate": 0.5, "train": 0.4, "rest": 0.1, "floor": 0.5}
    )
    # With the first iteration: 10.2 beside the median of 10.2 and 9.5.
    assert result["goal_ratio"] == pytest.approx(10.2 / 9.85)
    assert wall_tables.table({"quickstart": result})[2:] == [
        "| quickstart | 0.6 (vllm, 2 processes) | 1.2 (padded, 2 threads) | 2.00 | 1.67 | 1.20 |"
    ]


@pytest.mark.parametrize(
    ("generate", "train", "floor"),
    [(0.9, 0.1, 0.6), (0.5, 0.5, 0.5)],  # of 1.2 seconds: halved, 0.6; at once, 0.9 or 0.5
)
def test_the_floor_is_the_better_of_halving_and_doing_both_at_once(generate, train, floor):
    found = figures.floor_of([run_of(9.0, 1.2, generate=generate, train=train)])
    assert found["floor"] == pytest.approx(floor)


def test_the_ratios_of_all_tasks_and_the_smallest(measured):
    quick, longer = figures.figures(task_of(0.9), measured), figures.figures(task_of(), measured)
    found = figures.headline({"quickstart": quick, "longer": longer | {"ratio": 1.7}})
    assert found["ratio_quickstart"] == pytest.approx(2.0)
    assert (found["ratio_longer"], found["ratio_min"]) == (1.7, 1.7)
    assert found["two_over_one"] == found["two_over_one_quickstart"]
    assert found["goal_ratio"] == quick["goal_ratio"]
    assert "goal_ratio" not in figures.headline({"longer": longer})


def test_saving_keeps_the_tasks_that_were_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert figures.with_saved({"long": {"ratio": 2.0}}) == {"long": {"ratio": 2.0}}
    saved = {"result": {"tasks": {"quickstart": {"ratio": 1.5}, "long": {"ratio": 9.0}}}}
    (tmp_path / "wall-cpu.json").write_text(json.dumps(saved))
    found = figures.with_saved({"long": {"ratio": 2.0}})
    assert list(found.items()) == [("quickstart", {"ratio": 1.5}), ("long", {"ratio": 2.0})]


def test_finalists_are_the_fastest_and_the_next_if_near():
    tried = {"a": 1.0, "b": 1.05, "c": 1.08, "d": "failed: no MPI", "1 thread": 1.9}
    assert choice.finalists(tried, 2) == ["a", "b"]
    assert choice.finalists({"a": 1.0, "b": 1.2}, 2) == ["a"]
    both = ["transformers, 2 processes", "vllm, 2 threads"]
    assert choice.with_one_thread(both) == [*both, "transformers, 1 thread", "vllm, 1 thread"]
    with pytest.raises(RuntimeError, match=r"no layout ran.*no MPI"):
        choice.finalists({"d": "failed: no MPI"}, 2)


def test_a_generation_that_is_slow_on_two_processes_is_out_and_one_that_failed_is_not():
    tried = {
        "padded, 2 processes": 1.0,
        "continuous, 2 processes": 2.5,
        "vllm, 2 processes": "failed: gloo",
    }
    assert choice.slow_generations(tried) == {"continuous": "2.5 times the fastest in 2 processes"}


def test_processes_add_up_to_one_run():
    first = {"cpu_s": [1.0, 2.0], "setup_cpu_s": 3.0, "peak_rss_bytes": 10, "wall_s": [2.0, 2.5]}
    second = {"cpu_s": [0.5, 0.25], "setup_cpu_s": 1.0, "peak_rss_bytes": 5, "wall_s": [2.1, 2.4]}
    assert together([first, second]) == {
        "cpu_s": [1.5, 2.25],
        "setup_cpu_s": 4.0,
        "peak_rss_bytes": 15,
        "wall_s": [2.0, 2.5],
    }


def test_wall_refuses_a_machine_that_is_not_quiet(monkeypatch, capsys):
    monkeypatch.setattr(wall, "take_cores", lambda count: None)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.3, 1.0, 1.0))
    monkeypatch.setattr(sys, "argv", ["wall"])
    with pytest.raises(SystemExit) as caught:
        wall.main()
    assert caught.value.code == 2
    assert "load of the last minute is 1.30, more than 0.7" in capsys.readouterr().err


def test_wall_needs_two_cores_and_takes_no_more(monkeypatch, capsys):
    taken = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: taken.append(cores))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {7, 3, 5})
    quiet.take_cores(2)
    assert taken == [[3, 5]]
    with pytest.raises(SystemExit):
        quiet.take_cores(4)
    assert "3 core(s) to run on, and 4 are needed" in capsys.readouterr().err


LEAVES = """
import json, sys
rank = {"completions": [%d], "cpu_s": [1.0], "setup_cpu_s": 1.0, "peak_rss_bytes": 1}
open(sys.argv[-1] + "/measured_0.json", "w").write(json.dumps(rank))
"""


def test_a_run_on_half_a_batch_is_refused():
    task, command = task_of(), [sys.executable, "-S", "-c"]
    assert run([*command, LEAVES % 256], task, 0, Layout())["cpu_s"] == [1.0]
    with pytest.raises(RuntimeError, match=r"1 processes trained on \[128\] completions"):
        run([*command, LEAVES % 128], task, 0, Layout())
    with pytest.raises(RuntimeError, match="not 2 on 256"):
        run([*command, LEAVES % 256], task, 0, Layout(processes=2))


def test_a_run_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    child = f"import time; f = open({str(fifo)!r}, 'w'); f.write('x'); f.flush(); time.sleep(60)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {child!r}])"
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable, "-S", "-c", script], task_of(), 0, Layout(), patience=1)
    assert os.read(reader, 9) == b"x"
    assert select([reader], [], [], 10)[0]  # its end, for nobody can write any more
    assert os.read(reader, 9) == b""
    os.close(reader)


def test_a_failure_is_told_by_the_error_of_the_first_process_that_had_one():
    log = """ImportError: of a warning
[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 1, in <module>
[rank1]: ValueError: no group for rank 1
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============"""
    assert reason(log) == "ValueError: no group for rank 1"
    assert reason("killed") == "without a traceback"
