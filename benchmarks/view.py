"""How long do the viewer's pages of long runs take to open, and what does a new row cost?

    python -m benchmarks.view [--iterations 2000] [--runs 1 4] [--save]

Writes runs of so many iterations with `METRICS` metrics each. For each number of runs, it opens
their pages in the Chromium that `make browser` installs, and counts the seconds until all curves
are drawn: of the file that `lightning-rl view` writes from its loading on (`file_seconds`), of the
page of `--follow` from the start of its server on, which reads the runs first
(`followed_seconds`). Then rows come, one after the other: `poll_seconds` is what the server takes
to read and answer, `draw_seconds` what the page takes to draw all curves again; medians of `ROWS`.
The last line is JSON.
"""

import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.results import parser_of, report
from lightning_rl.cli.view.page import build_page
from lightning_rl.cli.view.runs import read_run
from lightning_rl.cli.view.server import PageServer
from tests.support.browser import find_browser, launched, wait_until
from tests.support.serving import serving

METRICS = 80
ROWS = 10
USUAL = ("reward/mean", "eval/accuracy", "policy/entropy", "policy/kl_ref", "policy/grad_norm")
"""Some of those that the page draws at first, as do all pages of real runs."""
DRAWN = "document.querySelectorAll('#charts path.line').length"


def row_of(iteration: int, draw: random.Random) -> str:
    names = [*USUAL, *(f"policy/metric_{i}" for i in range(METRICS - len(USUAL)))]
    return json.dumps({"iteration": iteration} | {name: draw.gauss(0, 1) for name in names}) + "\n"


def write_runs(folder: Path, count: int, iterations: int) -> list[Path]:
    runs = [folder / f"version_{number}" for number in range(count)]
    for number, run in enumerate(runs):
        run.mkdir(parents=True)
        draw = random.Random(number)
        rows = (row_of(iteration, draw) for iteration in range(1, iterations + 1))
        (run / "metrics.jsonl").write_text("".join(rows))
        (run / "config.yaml").write_text(f"seed_everything: {number}\n")
    return runs


def opened(browser: Any, address: str, lines: int, started: float) -> tuple[Any, float]:
    """Return a page, and the seconds from ``started`` until it has so many lines."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(address)
    wait_until(page, f"{DRAWN} === {lines}")
    return page, time.perf_counter() - started


def measure(browser: Any, folder: Path, count: int, iterations: int) -> dict[str, float]:
    runs = write_runs(folder, count, iterations)
    lines = count * len(USUAL)
    file = folder / "view.html"
    file.write_text(build_page([read_run(run, 1) for run in runs]), encoding="utf-8")
    _, file_seconds = opened(browser, file.as_uri(), lines, time.perf_counter())

    started = time.perf_counter()
    with serving(PageServer([folder], 1)) as server:
        page, followed_seconds = opened(browser, server.address, lines, started)
        polls, draws = [], []
        for iteration in range(iterations + 1, iterations + 1 + ROWS):
            cursor = server.following.since(0)["cursor"]
            with (runs[0] / "metrics.jsonl").open("a") as metrics:
                metrics.write(row_of(iteration, random.Random(iteration)))
            started = time.perf_counter()
            server.following.since(cursor)
            polls.append(time.perf_counter() - started)
            draws.append(page.evaluate("[performance.now(), show([]), performance.now()]"))
    return {
        "file_seconds": file_seconds,
        "followed_seconds": followed_seconds,
        "poll_seconds": median(polls),
        "draw_seconds": median((after - before) / 1000 for before, _, after in draws),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4])
    given = parser.parse_args()
    path = find_browser()
    if path is None:
        parser.error("there is no Chromium: run `make browser`, or set CHROMIUM to one")
    result: dict[str, Any] = {"iterations": given.iterations, "metrics": METRICS}
    with launched(path) as browser, tempfile.TemporaryDirectory() as folder:
        browser.new_page().close()  # the first one waits for the browser itself
        for count in given.runs:
            seconds = measure(browser, Path(folder, str(count)), count, given.iterations)
            print(f"{count} runs: " + ", ".join(f"{k} {v:.3f}" for k, v in seconds.items()))
            result[f"runs_{count}"] = seconds
    report("view", result, given.save)


if __name__ == "__main__":
    main()
