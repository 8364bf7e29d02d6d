"""What does GRPO add to a small model that sees, on three tasks with pictures?

    python -m benchmarks.vision_recipe [--seeds 0 1 2] [--save]

Runs recipes/vision: its pictures and model, its warm start unless it is there already, then GRPO
once per seed, a process each, as ``benchmarks.reasoning`` does.

The last line is JSON: accuracy on held-out questions before and after, of all and of each task, the
mean over the seeds, and the seeds. ``--save`` also keeps it in benchmarks/results, and writes the
table and the figure of the recipe's page.
"""

import subprocess
import sys
from pathlib import Path

from benchmarks.reasoning import measured, summary_of, table
from benchmarks.reasoning_plot import draw
from benchmarks.results import parser_of, report, write_block
from recipes.vision.draw import TASKS

OUT = Path("runs/vision")
RECIPE = "recipes/vision"
PAGE = Path(__file__).parents[1] / RECIPE / "README.md"
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "vision-curves.png"
PICTURE = (
    "![Held-out accuracy over iterations, and of each task before and after]"
    "(../../docs/images/vision-curves.png)"
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "recipes.vision.warm_start", "--out", str(OUT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    runs = [measured(seed, OUT, RECIPE, TASKS) for seed in arguments.seeds]
    result = summary_of(runs, TASKS)
    lines = table(result)
    print("\n".join(lines))
    if arguments.save:
        write_block(PAGE, "vision", [PICTURE, "", *lines])
        draw(result["seeds"], result["tasks"], str(FIGURE))
    report("vision-recipe", result, arguments.save)


if __name__ == "__main__":
    main()
