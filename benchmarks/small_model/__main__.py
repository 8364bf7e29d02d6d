"""Measure what SmolLM2-135M-Instruct learns of five tasks, here and with TRL's same settings.

    python -m benchmarks.small_model [--only full-0 trl] [--save]

Trains by recipes/smollm2 with its variant `five.yaml`: three seeds, a LoRA, TRL (in the environment
of `benchmarks.peers`), and for 20 iterations five other learning rates. The models are examined by
vLLM alone (`benchmarks.exam`) on 128 held-out questions of each task, and on two tasks that were
not trained on; so is the untrained one, also with 256 tokens and greedily. Each takes 7 to 30
minutes of one core. What is done stays in runs/small_model: `--only` makes some of it, so that
several can run side by side; delete a folder to measure it again.

The last line is JSON: accuracy before and after, the mean over seeds; the gain and its 95 %
interval, over questions and seeds; TRL's accuracy, and the CPU seconds of all iterations over
TRL's, of seed 0 on both sides.
``--save`` also keeps it in benchmarks/results, and writes the figure and tables of the recipe; with
``--only`` the tables of what is named.
"""

from pathlib import Path

from benchmarks.small_model.figures import curves, rates_table, summary_of, tasks_table
from benchmarks.small_model.runs import DATA, EXAMS, RECIPE, RUNS, TRL, measured
from benchmarks.support.results import parser_of, report, write_block
from benchmarks.support.seed_curves import draw
from recipes.smollm2.prepare import prepare
from recipes.smollm2.weights import fetch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / RECIPE / "README.md"
FIGURE = ROOT / "docs" / "images" / "small-model.png"
PICTURE = (
    "![Right answers in training over iterations, and of each task before and after]"
    "(../../docs/images/small-model.png)"
)


def main() -> None:
    parser = parser_of(__doc__)
    names = [*EXAMS, *RUNS, TRL]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    fetch(DATA / "model")
    prepare(DATA)
    found = {name: measured(name) for name in arguments.only}
    whole = len(found) == len(names)
    print("\n".join([*tasks_table(found), "", *rates_table(found)]))
    if arguments.save:
        write_block(PAGE, "tasks", [*([PICTURE, ""] if whole else []), *tasks_table(found)])
        write_block(PAGE, "rates", rates_table(found))
    if not whole:
        return
    result = summary_of(found)
    if arguments.save:
        title = "Right answers in training, mean of five iterations"
        draw(curves(found), result["tasks"], str(FIGURE), title)
    report("small-model", result, arguments.save)


if __name__ == "__main__":
    main()
