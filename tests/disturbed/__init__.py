"""Another rounding than this CPU's: what other CPUs, shapes and orders of adding would give.

``python -m tests.disturbed`` runs the tests with every matrix product and every reduction on the
CPU off by a unit in the last place (``kernels.py``), in the processes that tests start, too
(``start/``).

A test that fails so compares what rounding decides. Tokens that are drawn, or the likeliest ones,
are not to be compared between two layouts (two processes and one, other packs or minibatches,
sharded weights, another engine): let them be drawn by lot (``tests/support/lots.py``), or compute
in float64. For numbers there are bounds (``tests/support/tolerances.py``).
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = "LIGHTNING_RL_ROUNDING"
"""Of the environment: the seed. ``7:2000`` is seed 7 with 2000 units instead of one, which breaks
all bounds, but finds within minutes the tokens that one unit decides in one run of thousands."""
