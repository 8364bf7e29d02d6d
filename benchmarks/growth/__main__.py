"""Does anything grow faster than the work? ``python -m benchmarks.growth [--save]``

Each cost is measured over two to three decades of its size; sizes alternate, and the least of
``--repeats`` counts, so other load on the machine matters little. Seconds are the process's own CPU
time, memory is what Python allocates at most. A cost's exponent is the slope of log cost against
log size, by least squares over the upper half of the sizes, where constants no longer matter: 1 is
in proportion. The last line is JSON with each exponent, and the ``worst`` of them.

Attention is quadratic in the context, and no part of this: what calls an engine calls one that
draws tokens, except for ``transformers_turns``, on contexts that are short beside the layers.
"""

import sys
from typing import Any

from benchmarks.growth.costs import COSTS
from benchmarks.growth.fits import measured, summary
from benchmarks.support.results import parser_of, report


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[cost.name for cost in COSTS])
    given = parser.parse_args()
    costs: dict[str, dict[str, Any]] = {}
    for cost in COSTS:
        if cost.name not in given.only:
            continue
        found = costs[cost.name] = measured(cost, given.repeats)
        exponents = " ".join(f"{of} {found[of]:5.2f}" for of in ("time", "memory") if of in found)
        largest = f"{found['cpu_s'][-1]:.3g} s at {cost.sizes[-1]}"
        print(f"{cost.name:20}{exponents:26}{largest}", file=sys.stderr, flush=True)
    result = summary(costs)
    report("growth", result | ({"costs": costs} if given.save else {}), given.save)


if __name__ == "__main__":
    main()
