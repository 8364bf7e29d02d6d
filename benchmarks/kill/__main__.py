"""Kill a training run at random points, let it go on, and compare it with one that was not killed.

    python -m benchmarks.kill --points 20

The run is the command that a user gives: ``lightning-rl fit ... --ckpt_path last``, here on the
sort-digits task with a critic of its own, a moving reference and an adaptive coefficient, for six
iterations in two epochs. A point names a stage and an iteration; there the process gets a SIGKILL
(from itself, or from a thread of it, so that stages of a few milliseconds are hit too). The same
command is then given again until it ends well. "equal" means: weights, optimizer, schedule,
coefficients, random states and data cursor by torch.equal; every row of metrics but for times; and
every rollout of every iteration, token by token with its logprobs.

With ``--program`` each rollout is a program that asks the model twice, and in the killed runs a
third of these programs are killed too, between their calls.

With ``--quantization NF4`` a LoRA is trained, whose frozen base is packed in few bits.

With ``--pictures`` a tiny model that sees is trained, its tower too, on questions about pictures,
and a reward looks at them.

With ``--learner sft``, ``dpo``, ``kto`` or ``reward_model`` the run is supervised: six optimizer
steps of two batches in two epochs, with a validation after each; it is also killed between the two
batches of a step, and in a validation.

With ``--collector AsyncCollector`` runs are not repeatable, so other things are checked: that every
prompt that was drawn was trained on exactly once or is still waiting in the last checkpoint, and
that no token was staler than allowed.

The last line is JSON.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.kill.compare import check_async, compare, run_directory
from benchmarks.kill.killer import STAGES, SUPERVISED, draw_points, killed_and_resumed
from benchmarks.kill.runs import (
    LEARNERS,
    configuration,
    folder_of,
    prepare_pictures,
    prepare_rows,
    run_command,
    supervised_configuration,
    with_killed_programs,
    with_pictures,
)
from recipes.sort_digits.prepare import prepare


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.kill", description="Kill a run at random points and compare."
    )
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engine", default="VLLMLocal", choices=["VLLMLocal", "TransformersEngine"]
    )
    parser.add_argument(
        "--collector", default="SyncCollector", choices=["SyncCollector", "AsyncCollector"]
    )
    parser.add_argument("--program", action="store_true", help="rollouts are programs")
    parser.add_argument(
        "--quantization", choices=["NF4", "Int8"], help="train a LoRA whose base is in few bits"
    )
    parser.add_argument("--pictures", action="store_true", help="train a model that sees")
    parser.add_argument("--learner", choices=list(LEARNERS), help="a supervised run")
    parser.add_argument("--keep", type=Path, help="a folder for the runs (default: deleted)")
    options = parser.parse_args(arguments)
    with folder_of(options.keep, "kill_") as out:
        return measure(options, out)


def measure(options: argparse.Namespace, out: Path) -> int:
    """Run everything, print the table; 0 if all points are equal."""
    (prepare_pictures if options.pictures else prepare)(out / "data")
    prepare_rows(out / "data")

    def config(name: str) -> dict[str, Any]:
        if options.learner is not None:
            return supervised_configuration(out / "data", out / name, options.learner)
        made = configuration(
            out / "data",
            out / name,
            options.collector,
            options.engine,
            options.program,
            options.quantization,
        )
        made = with_pictures(made) if options.pictures else made
        killed = options.program and name != "whole"
        return with_killed_programs(made, out / name) if killed else made

    if run_command(config("whole"), out / "whole") != 0:
        raise SystemExit(f"the uninterrupted run failed: see {out}/whole/output.txt")
    # A random moment is then one of training, and a moment of collecting is within it.
    rows = (run_directory(out / "whole") / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((run_directory(out / "whole") / "summary.json").read_text())
    seconds = {"any": summary["wall_s"], "collect": summary["wall_s"] / len(rows) / 4}
    print(f"{'point':>5}  {'stage':<14}{'iteration':>9}  {'starts':>6}  equal", flush=True)
    equal = 0
    stages = STAGES if options.learner is None else SUPERVISED
    for number, point in enumerate(draw_points(options.points, options.seed, stages), 1):
        name = f"point_{number}"
        share = seconds.get(point.stage, 0.0)
        starts = killed_and_resumed(config(name), out / name, point, share)
        if options.program and not list((out / name / "programs").iterdir()):
            raise SystemExit(f"no program of {name} was killed")
        asynchronous = options.collector == "AsyncCollector"
        found = check_async(out / name) if asynchronous else compare(out / name, out / "whole")
        equal += not found
        where = "any" if point.stage == "any" else point.iteration
        verdict = "no: " + "; ".join(found[:3]) if found else "yes"
        print(f"{number:>5}  {point.stage:<14}{where:>9}  {starts:>6}  {verdict}", flush=True)
        if not found and options.keep is None:
            shutil.rmtree(out / name)
    result = {"points": options.points, "equal": equal, "collector": options.collector,
              "engine": options.engine, "program": options.program, "pictures": options.pictures,
              "learner": options.learner,
              "seed": options.seed}  # fmt: skip
    print(json.dumps(result))
    return 0 if equal == options.points else 1


if __name__ == "__main__":
    sys.exit(main())
