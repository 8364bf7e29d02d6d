"""Test the page of ``view --follow`` in a real Chromium, while files grow as runs write them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_rl.cli.view.server import PageServer
from tests.support.bad_configs import CONFIG, furnish
from tests.support.browser import wait_until
from tests.support.planted_run import HOSTILE, good_rollout
from tests.support.serving import serving

pytest.importorskip("playwright.sync_api", reason="no playwright: run `make browser`")


@pytest.fixture
def follow(browser, tmp_path):
    """Open the page of a folder's runs; fails on script errors, and on requests elsewhere."""
    problems: list[str] = []
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(60_000)
    with serving(PageServer([tmp_path], 100)) as server:
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"script error: {error}"))
        page.on(
            "request",
            lambda r: problems.append(r.url) if not r.url.startswith(server.address) else None,
        )
        yield lambda: (page.goto(server.address), page)[1]
        context.close()
    assert problems == []


def add(path: Path, *records: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def row(iteration: int, reward: float) -> dict[str, float]:
    return {"iteration": iteration, "reward/mean": reward, "x/other": 2 * reward}


def curve(page, place: int = 0) -> list[list[float]]:
    """Return what is drawn of a run: the points behind its line."""
    return page.evaluate(
        "(place) => curves.charts[0].series.find((s) => s.place === place).points", place
    )


def wait_for_rows(page, count: int, place: int = 0) -> None:
    wait_until(page, f"view.runs[{place}]?.metrics.length === {count}")


def test_new_rows_are_drawn_without_a_reload(follow, tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"
    add(metrics, row(1, 0.1), row(2, 0.2))
    page = follow()
    wait_for_rows(page, 2)
    page.evaluate("window.kept = true")
    page.check("[data-metric='x/other']")
    page.click("[data-chart='reward/mean'] button")  # a logarithmic axis
    page.fill(".picker input[type=search]", "oth")
    drawn = page.get_attribute("[data-chart='reward/mean'] path.line", "d")
    add(metrics, row(3, 0.3))
    wait_for_rows(page, 3)
    assert curve(page) == [[1, 0.1], [2, 0.2], [3, 0.3]]
    assert page.get_attribute("[data-chart='reward/mean'] path.line", "d") != drawn
    chart = page.locator("[data-chart='reward/mean']")
    assert chart.locator(".readout").inner_text().split() == ["0.3", "last"]
    # Nothing was loaded anew, and what was chosen is still chosen.
    assert page.evaluate("window.kept")
    assert chart.locator("button").get_attribute("aria-pressed") == "true"
    assert page.locator("[data-chart='x/other']").count() == 1
    assert page.input_value(".picker input[type=search]") == "oth"
    assert page.evaluate("document.activeElement.type") == "search"


def test_the_page_stays_where_it_was_scrolled_to(follow, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    many = {f"m/{i}": 1.0 for i in range(60)}
    add(metrics, {"iteration": 1} | many)
    page = follow()
    wait_for_rows(page, 1)
    page.evaluate("curves.chosen = new Set(metricNames()); drawCurves(); scrollTo(0, 1500)")
    page.evaluate("$('.picker').scrollTop = 200")
    add(metrics, {"iteration": 2} | many)
    wait_for_rows(page, 2)
    assert page.evaluate("[scrollY, $('.picker').scrollTop]") == [1500, 200]


def test_a_run_that_was_killed_and_resumed_shows_the_right_curve(follow, tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"
    add(metrics, row(1, 0.1), row(2, 0.2), row(3, 0.3))
    with metrics.open("a") as file:
        file.write('{"iteration": 4, "rew')  # killed
    page = follow()
    wait_for_rows(page, 3)
    assert page.locator("[data-chart='reward/mean'] path.line").count() == 1
    saved = len(json.dumps(row(1, 0.1))) + 1
    os.truncate(metrics, saved)  # it resumes at the checkpoint of iteration 1
    add(metrics, row(2, 0.25), row(3, 0.35), row(4, 0.45), row(5, 0.55))
    wait_for_rows(page, 5)
    assert curve(page) == [[1, 0.1], [2, 0.25], [3, 0.35], [4, 0.45], [5, 0.55]]
    # Killed once more; a resumed run may also only append what it repeats.
    add(metrics, row(5, 0.6), row(6, 0.7))
    wait_for_rows(page, 6)
    assert curve(page)[3:] == [[4, 0.45], [5, 0.6], [6, 0.7]]
    assert page.inner_text("#news") == ""


def test_runs_that_start_later_lie_over_the_others(follow, tmp_path):
    page = follow()
    page.wait_for_selector("#news .note:has-text('waiting')")
    assert "No metrics" in page.inner_text("#charts")
    for name, seed in (("a", 1), (f"b{HOSTILE.replace('/', '')}", 2)):
        add(tmp_path / name / "metrics.jsonl", row(1, seed / 8), row(2, seed / 4))
        (tmp_path / name / "config.yaml").write_text(json.dumps({"seed": seed, "note": HOSTILE}))
    page.wait_for_selector("[data-chart='reward/mean'] path.line >> nth=1")
    assert page.inner_text("#news") == ""
    assert curve(page) == [[1, 0.125], [2, 0.25]]
    assert curve(page, 1) == [[1, 0.25], [2, 0.5]]
    assert page.locator("#differences tbody tr").all_inner_texts() == ["seed\t1\t2"]
    assert page.locator(".chip small").all_inner_texts() == ["running", "running"]
    assert page.locator("img").count() == 0
    assert page.title().endswith("lightning-rl")
    summary = {"status": "failed", "error": HOSTILE}
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary))
    page.wait_for_selector(".chip small.bad")
    assert page.inner_text(".chip small.bad") == f"failed: {HOSTILE}"


def test_an_open_rollout_and_its_filters_stay_while_others_come(follow, tmp_path):
    for name in "ab":
        rollouts = [good_rollout(id=f"{name}{i}", completion=HOSTILE) for i in range(3)]
        add(tmp_path / name / "recorded.jsonl", *rollouts)
    page = follow()
    page.wait_for_selector("[data-rollout='5']")
    page.fill("input[data-filter='reward from']", "0.5")
    page.click("[data-rollout='4']")
    page.wait_for_selector(".detail h2:has-text('b1')")
    new = [good_rollout(id=f"new{i}", reward=i, iteration=4) for i in (0.0, 2.0)]
    add(tmp_path / "a" / "recorded.jsonl", *new)
    wait_until(page, "view.rollouts.length === 8")
    assert page.inner_text("#count").startswith("7 of 8 rollouts")
    assert page.input_value("input[data-filter='reward from']") == "0.5"
    assert page.inner_text(".detail h2") == "b1"
    selected = page.locator("[data-rollout][aria-selected=true]")
    assert selected.get_attribute("data-rollout") == "6"  # two came before it
    page.click("[data-rollout='4']")
    page.wait_for_selector(".detail h2:has-text('new2.0')")
    assert page.locator("#completion .token").all_inner_texts() == ["hel", "lo", " you", "<eos>"]


def test_the_page_says_when_nobody_answers(browser, tmp_path):
    add(tmp_path / "metrics.jsonl", row(1, 0.1), row(2, 0.2))
    context = browser.new_context()
    context.set_default_timeout(60_000)
    page = context.new_page()
    with serving(PageServer([tmp_path], 100)) as server:
        page.goto(server.address)
        page.wait_for_selector("[data-chart='reward/mean'] path.line")
    page.wait_for_selector("#news .note:has-text('Not connected')")
    assert page.locator("[data-chart='reward/mean'] path.line").count() == 1
    again = PageServer([tmp_path], 100, server.server_port)
    again.token = server.token
    with serving(again):
        page.wait_for_selector("#news .note", state="detached")
    context.close()


KILLS = """
import os, signal
from pathlib import Path

def length(completions, **columns):
    rows = [line for file in Path("runs").rglob("metrics.jsonl") for line in file.open()]
    if Path("kill").exists() and len(rows) >= 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(c)) for c in completions]
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_run_is_killed_and_resumed_before_the_readers_eyes(follow, tiny_model, tmp_path):
    furnish(tmp_path, tiny_model)
    (tmp_path / "my_rewards.py").write_text(KILLS)
    (tmp_path / "kill").touch()
    saves = {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 2}}
    trainer = CONFIG["trainer"] | {
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "one"}},
        "enable_checkpointing": True,
        "callbacks": [{"class_path": "WeightSync"}, {"class_path": "RunReport"}, saves],
    }
    data = CONFIG["data"]["init_args"] | {"iterations_per_epoch": 5, "evaluation": None}
    run = {"data": {"class_path": "RLDataModule", "init_args": data}, "trainer": trainer}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG | run))
    command = [sys.executable, "-m", "lightning_rl", "fit", "--config", "run.yaml"]
    environment = os.environ | {"PYTHONPATH": f"{Path.cwd()}"}

    page = follow()
    fit = subprocess.run([*command, "--ckpt_path", "last"], cwd=tmp_path, env=environment)
    assert fit.returncode == -signal.SIGKILL
    wait_for_rows(page, 4)  # iterations 0 to 3, of which the last checkpoint lacks one
    assert page.inner_text(".chip small") == "running"
    (tmp_path / "kill").unlink()
    subprocess.run([*command, "--ckpt_path", "last"], cwd=tmp_path, env=environment, check=True)
    page.wait_for_selector(".chip small:has-text('completed')")
    [metrics] = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    shown = page.evaluate("view.runs[0].metrics.map((row) => [row.iteration, row.cpu_s])")
    assert shown == [[row["iteration"], row["cpu_s"]] for row in rows]
    assert [iteration for iteration, _ in shown] == [0, 1, 2, 3, 4, 5]
