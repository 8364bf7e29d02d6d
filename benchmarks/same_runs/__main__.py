"""Record eight runs to the last bit: rollouts, metrics and weights.

    python -m benchmarks.same_runs --out before --at 3c66317     (a commit)
    python -m benchmarks.same_runs --out before --checkout FOLDER
    python -m benchmarks.same_runs --out after                   (this checkout)
    python -m benchmarks.same_runs --compare before after

Record before and after a change that must change nothing, and compare. Each run is a command in
the checkout it is of, so modules may have moved: configurations name classes by their bare names.
Compared are rollouts (prompts, tokens, logprobs, masks, rewards, seeds, however the files keep
them), metrics but times, and the bits of all weights, by value where they have other names. The
first comparison is of the models that the runs began with, which each checkout makes.

The runs, with real vLLM and seed 0: the quickstart (28 iterations); one step ahead of the trainer;
two processes; several turns; SAC on Pendulum; a protocol between two policies; programs that are
agents; and training by fine-tuning jobs, in stages. The last line is JSON; the exit status is 1 if
there are differences.
"""

import argparse
import json
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.house.counts import checkout
from benchmarks.house.modules import ROOT
from benchmarks.same_runs import recorder
from benchmarks.same_runs.compare import compare
from benchmarks.same_runs.runs import RUNS, Checkout, record


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.same_runs",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="record into this folder")
    task.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    code = parser.add_mutually_exclusive_group()
    code.add_argument("--at", metavar="COMMIT", help="record a commit's runs")
    code.add_argument(
        "--checkout", type=Path, default=ROOT, help="record a folder's; default: this"
    )
    parser.add_argument("--only", choices=RUNS, nargs="+", default=list(RUNS))
    args = parser.parse_args()
    if args.compare is not None:
        before, after = args.compare
        count = compare(before, after, args.only)
        print(json.dumps({"runs": len(args.only), "differences": count}))
        return int(bool(count))
    with ExitStack() as folders:
        root = args.checkout.resolve()
        if args.at is not None:
            root = checkout(args.at, folders.enter_context(tempfile.TemporaryDirectory()))
        alone = Path(folders.enter_context(tempfile.TemporaryDirectory()))
        shutil.copy(recorder.__file__, alone)  # the checkout has another, or none
        record(Checkout(root, (alone,)), args.out.resolve(), args.only)
    print(json.dumps({"runs": len(args.only)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
