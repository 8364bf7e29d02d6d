"""The benchmark of recipes/vision, from curves that are known, and the page from its result."""

import json

from benchmarks import vision_recipe
from benchmarks.support.results import RESULTS
from benchmarks.support.seed_curves import draw
from benchmarks.vision_recipe import FIGURE, PAGE, PICTURE, TASKS, measured, summary_of, table


def run(seed, before, after):
    curve = [before, 0.5, after]
    tasks = dict.fromkeys(TASKS, curve) | {"odd": [0.0, 0.0, after]}
    return {"seed": seed, "iterations": [0, 5, 10], "accuracy": curve, "tasks": tasks}


def test_first_and_last_evaluation_are_averaged_over_seeds():
    result = summary_of([run(0, 0.25, 0.75), run(1, 0.5, 1.0)])
    assert (result["accuracy_before"], result["accuracy_after"]) == (0.375, 0.875)
    assert result["tasks"]["odd"] == {"before": 0.0, "after": 0.875}
    lines = table(result)
    assert lines[0] == "| task | seed 0 | seed 1 | mean |"
    assert "| `odd` | 0.00 → 0.75 | 0.00 → 1.00 | 0.00 → 0.88 |" in lines
    assert lines[-1] == "| all | 0.25 → 0.75 | 0.50 → 1.00 | 0.38 → 0.88 |"


def test_a_seed_that_was_measured_is_not_measured_again(tmp_path, monkeypatch):
    asked = []

    def measure(seed):
        asked.append(seed)
        return run(seed, 0.25, 0.75)

    monkeypatch.setattr(vision_recipe, "measure", measure)
    assert measured(3, tmp_path) == measured(3, tmp_path) == run(3, 0.25, 0.75)
    assert asked == [3]


def test_the_figure_is_drawn_from_one_seed_or_more(tmp_path):
    for count in (1, 3):
        runs = [run(seed, 0.25, 0.75) for seed in range(count)]
        path = tmp_path / f"{count}.png"
        draw(runs, summary_of(runs)["tasks"], str(path), "Accuracy")
        assert path.stat().st_size > 10_000


def test_the_page_shows_what_was_measured_and_nothing_else():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    shown = lines[lines.index("<!-- vision -->") + 1 : lines.index("<!-- /vision -->")]
    kept = RESULTS / "vision-recipe-cpu.json"
    assert kept.exists() == FIGURE.exists() == bool(shown)
    if kept.exists():
        assert shown == [PICTURE, "", *table(json.loads(kept.read_text())["result"])]
