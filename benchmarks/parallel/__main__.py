"""Do processes that share micro-batches get what one gets, and what do they send and keep?

    python -m benchmarks.parallel [--ranks 2 4] [--models qwen3 two_heads qwen3_moe] [--save]

``ShardedStrategy(sequence=n)``, ``tensor=2`` and both, for tiny random models of two kinds, and for
three that have fewer heads than that takes: with ``one_head`` two ranks, and with ``two_heads`` two
pairs of ranks, share queries, and so do those that have the ``one_left`` after matrices are shared.
Two kinds of mixtures have ``expert=n``, ``expert=2`` and ``sequence=n`` with it. All run over gloo,
in float64 and once in float32. Each feature has the largest difference of scores (logprobs,
entropies, values) and of gradients, relative to the largest of them or to 1, between micro-batches
that one process computes and those that several compute together. Each rank has micro-batches of
its own, with shared prompts, tokens that nobody wrote, and penalties; in ``one_silent`` a rank has
nothing to train on, in ``brief`` there are fewer tokens than ranks, and in ``idle`` tokens choose
experts of one rank only. Then, in float32, of one rollout: bytes that autograd keeps on a rank,
against what ``lightning-rl check`` plans, and bytes that a rank sends in both passes, against the
formulas of Ulysses, of gathered keys, of Megatron-LM and of GShard, the last at an even load.
A whole update is measured by the most that a rank has allocated at a time, against the plan.

The last line is JSON: ``layouts``, how many (model, processes, layout, feature) were compared;
``equal``, how many of them are within 1e-12, and in float32 at most three times as far from
float64's gradients as one process is; ``max_difference``, in float64; ``memory_plan_error``, the
largest of any layout.
"""

import tempfile
from itertools import product
from pathlib import Path

from benchmarks.parallel.kinds import KINDS, measured, relative, times_rounding
from benchmarks.parallel.tables import table
from benchmarks.support.results import parser_of, report, write_block

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
CLOSE, TIMES_ROUNDING = 1e-12, 3.0


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", choices=KINDS, nargs="+", default=list(KINDS))
    arguments = parser.parse_args()
    off: dict[str, float] = {}
    of_rounding: dict[str, float] = {}
    plan: dict[str, float] = {}
    print(f"{'model':<11}{'ranks':<7}{'layout':<10}{'feature':<12}{'scores':>10}{'gradients':>11}")
    for name, ranks in product(arguments.models, arguments.ranks):
        if ranks not in KINDS[name].layouts:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = measured(name, ranks, Path(folder))
        for layout in KINDS[name].layouts[ranks]:
            begin = f"{name:<11}{ranks:<7}{layout:<10}"
            for feature in KINDS[name].features:
                row, key = found[f"{layout}_{feature}"], f"{name}/{ranks}/{layout}/{feature}"
                scores, gradients = relative(row)
                told = f"{begin}{feature:<12}{scores:>10.1e}{gradients:>11.1e}"
                off[key] = max(scores, gradients)
                if "rounding" in row:
                    of_rounding[key] = times_rounding(row)
                    told += f", {of_rounding[key]:.2f} times as far from float64 as one process"
                print(told)
            kept, peak = found[f"{layout}_kept"], found[f"{layout}_peak"]
            plan[f"{name}/{ranks}/{layout}/kept"] = abs(kept["planned"] / kept["together"] - 1)
            plan[f"{name}/{ranks}/{layout}/peak"] = abs(peak["planned"] / peak["measured"] - 1)
            print(
                f"{begin}a rollout: {kept['together']:,.0f} bytes kept, planned "
                f"{kept['planned']:,.0f}; {kept['sent']:,.0f} sent, formula {kept['formula']:,.0f}"
            )
            print(
                f"{begin}an update: {peak['measured']:,.0f} bytes at most, planned "
                f"{peak['planned']:,.0f}"
            )
    exact = [value for key, value in off.items() if key not in of_rounding]
    result = {
        "layouts": len(off),
        "equal": sum(value < CLOSE for value in exact)
        + sum(times < TIMES_ROUNDING for times in of_rounding.values()),
        "max_difference": max(exact),
        "max_times_rounding": max(of_rounding.values()),
        "memory_plan_error": max(plan.values()),
        "differences": off,
        "plan_errors": plan,
    }
    if arguments.save:
        write_block(PAGE, "parallel", table(result))
    report("parallel", result, arguments.save)


if __name__ == "__main__":
    main()
