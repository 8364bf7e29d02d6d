"""Run the tests as other CPUs would round.

The order in which a CPU adds, and the polynomial by which it computes an exponential, depend on its
instructions and on the shapes. ``python -m tests.disturbed`` runs the tests with the results of
matrix products, reductions and transcendental functions moved by as much as real kernels differ
(``kernels.py``; measured by ``spread.py``), in the processes that tests start as well (``start/``),
and reports how far each numerical assertion is from failing (``margins.py``).

A test that fails so compares what rounding decides. Tokens that are drawn, or the likeliest ones,
are not to be compared between two layouts (two processes and one, other micro-batches or
minibatches, sharded weights, another engine): let them be drawn by lot (``tests/support/lots.py``),
or compute in float64. For numbers there are bounds (``tests/support/tolerances.py``).
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SPREAD = Path(__file__).with_name("spread.json")
LEVELS = (*(i / 10 for i in range(10)), 0.95, 0.99, 0.999, 0.9999, 1.0)
"""The quantiles that ``spread.json`` keeps of each family."""
VARIABLE = "LIGHTNING_RL_ROUNDING"
"""Environment variable with the seed. ``7:100`` is seed 7 with everything 100 times as large, which
breaks all bounds, but finds within minutes the tokens that rounding decides in one run of
thousands. ``7:1:draws`` also draws exponential and Bernoulli numbers from another stream, as
PyTorch does on some CPUs."""
CAPS = {
    # The instructions that PyTorch's own kernels, oneDNN and MKL may use. None of them checks
    # whether the CPU has them: a kernel that it has no instructions for ends the process.
    "default": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",  # without bfloat16's own
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
