"""Another rounding than this CPU's: what other CPUs, shapes and orders of adding would give.

``python -m tests.disturbed`` runs the tests with every matrix product and every reduction on the
CPU off by a unit in the last place (``kernels.py``), in the processes that tests start, too
(``start/``).
"""

SEED = "LIGHTNING_RL_ROUNDING"
"""The environment variable that switches it on; its value is the seed."""
