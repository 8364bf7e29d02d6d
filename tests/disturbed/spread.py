"""Measure how far other kernels' results are from this CPU's:  python -m tests.disturbed.spread

The same operations on the same numbers are computed in processes that may use fewer instructions,
reproducible modes of MKL, two threads or strided inputs. The differences of all pairs of processes,
in the units of ``operations.py``, are written to ``spread.json`` as quantiles of their absolute
value. A pair of results with equal bits counts only once it differs anywhere: equal kernels say
nothing about different ones.
"""

import itertools
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tests.disturbed import CAPS, LEVELS, ROOT, SPREAD
from tests.disturbed.operations import ATEN, FIRST_ONLY, absolute, family_of, scale_of

Case = tuple[str, list[Any], dict[str, Any]]
"""The operation, its arguments, and those by name."""
VARIANTS: dict[str, dict[str, str]] = {
    "as it is": {},
    "avx2": CAPS["avx2"],
    "default": CAPS["default"],
    "oneDNN AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "MKL compatible": {"MKL_CBWR": "COMPATIBLE"},
    "MKL AVX2": {"MKL_CBWR": "AVX2"},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "strided": {"STRIDED": "1"},
    "strided, default": {"STRIDED": "1", **CAPS["default"]},
}
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
LENGTHS = (3, 8, 16, 48, 200, 1000, 4000)
CONTIGUOUS = ("native_layer_norm", "flash_attention", "normal_")
"""Parts of the names of kernels that PyTorch only ever calls with contiguous inputs."""


def cases() -> Iterator[Case]:
    """Yield the operations and their inputs."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
        # Uniform numbers need no logarithm or cosine, which differ themselves.
        return (torch.rand(*shape, generator=generator, dtype=torch.float64) * 4 - 2).to(dtype)

    for dtype, length in itertools.product(FLOATS, LENGTHS):
        for rows, columns in ((1, 16), (7, 16), (32, 64)):
            a = numbers(rows, length, dtype=dtype)
            b = numbers(length, columns, dtype=dtype)
            half = length // 2  # whose products the other half cancels, but for a thousandth
            cancelling = torch.cat([b[:half], -b[:half] * 1.001, b[2 * half :] * 1e-3])
            doubled = torch.cat([a[:, :half], a[:, :half], a[:, 2 * half :]], 1)
            bias = numbers(columns, dtype=dtype)
            cancels = [(doubled, cancelling)] if dtype != torch.bfloat16 else []
            for left, right in [(a, b), (a.abs(), b.abs()), *cancels]:
                yield "mm", [left, right], {}
                yield "addmm", [bias, left, right], {}
                yield "bmm", [left.expand(2, -1, -1).contiguous(), right.expand(2, -1, -1)], {}
                yield "addmv", [numbers(rows, dtype=dtype), left, right[:, 0].contiguous()], {}
            yield "product_row", [a, b], {}
            for terms in (a, doubled * torch.cat([torch.ones(half), -torch.ones(length - half)])):
                terms = terms.to(dtype)
                yield "sum.dim_IntList", [terms.abs(), [1]], {}
                yield "sum.dim_IntList", [terms.abs().T.contiguous(), [0]], {}
                yield "sum.dim_IntList", [terms, [1]], {}
                yield "sum.dim_IntList", [terms.T.contiguous(), [0]], {}
                yield "cumsum", [terms, 1], {}
                yield "linalg_vector_norm", [terms, 2, [1]], {}
                yield "var.correction", [terms, [1]], {"correction": 1}
                yield "_softmax", [terms, 1, False], {}
                yield "_log_softmax", [terms, 1, False], {}
                yield "_softmax_backward_data", [terms, terms.softmax(1), 1, dtype], {}
                yield "_log_softmax_backward_data", [terms, terms.log_softmax(1), 1, dtype], {}
            index = torch.arange(length) % 3
            yield "index_add", [torch.zeros(3, columns, dtype=dtype), 0, index, b], {}
            places = index[:, None].expand_as(b).contiguous()
            yield "scatter_add", [torch.zeros(3, columns, dtype=dtype), 0, places, b], {}
            yield "embedding_dense_backward", [b, index, 3, -1, False], {}
            yield "prod.dim_int", [1 + a[:, :200] / length, 1], {}
            weight, back = numbers(length, dtype=dtype), numbers(rows, length, dtype=dtype)
            yield "native_layer_norm", [a, [length], weight, weight, 1e-5], {}
            _, mean, scale = torch.native_layer_norm(a, [length], weight, weight, 1e-5)
            yield (
                "native_layer_norm_backward",
                [back, a, [length], mean, scale, weight, weight, [True] * 3],
                {},
            )
        for head in (8, 32):
            q, k, v, back = (numbers(2, 2, length // 8 + 3, head, dtype=dtype) for _ in range(4))
            attention = "_scaled_dot_product_flash_attention_for_cpu"
            yield attention, [q, k, v, 0.0, True], {}
            out, summed = getattr(torch.ops.aten, attention)(q, k, v, 0.0, True)
            yield f"{attention}_backward", [back, q, k, v, out, summed, 0.0, True], {}
    for dtype in FLOATS:
        x, y = (numbers(4003, dtype=dtype) for _ in range(2))
        size, unit = x.abs() + 0.01, x / 2.01
        whole = ["exp", "exp2", "expm1", "sin", "cos", "tan", "sinh", "cosh", "tanh", "atan", "erf"]
        whole += ["erfc", "sigmoid", "silu", "gelu", "softplus", "log_sigmoid_forward"]
        positive = ["log", "log2", "log10", "log1p", "rsqrt", "lgamma", "digamma"]
        for factor in (0.1, 1, 5):
            for names, inputs in ((whole, x * factor), (positive, size * factor)):
                yield from ((name, [inputs], {}) for name in names)
        yield from ((name, [unit], {}) for name in ("asin", "acos", "erfinv"))
        yield from ((name, [x, y], {}) for name in ("atan2", "logaddexp", "hypot"))
        yield from (("pow.Tensor_Scalar", [size, power], {}) for power in (-0.5, 1.7, 3, -2))
        yield "pow.Tensor_Tensor", [size, y], {}
        yield from ((name, [x, y], {}) for name in ("silu_backward", "gelu_backward"))
        yield "sigmoid_backward", [x, y.sigmoid()], {}
        yield "tanh_backward", [x, y.tanh()], {}
        yield "softplus_backward", [x, y, 1, 20], {}
        yield "log_sigmoid_backward", [x, y, (-y.abs()).exp()], {}
        yield from ((name, [x, y, size], {"value": 0.3}) for name in ("addcmul", "addcdiv"))
        yield "lerp.Scalar", [x, y, 0.1], {}
        yield "normal_", [torch.empty(4003, dtype=dtype)], {}
        pictures, filters = numbers(2, 3, 14, 14, dtype=dtype), numbers(8, 3, 7, 7, dtype=dtype)
        settings = [[7, 7], [0, 0], [1, 1], False, [0, 0], 1]
        yield "convolution", [pictures, filters, None, *settings], {}
        if dtype != torch.bfloat16:
            for size in (2, 8, 40):
                matrix = numbers(size, size, dtype=dtype) + 2 * torch.eye(size, dtype=dtype)
                yield "_linalg_solve_ex", [matrix, numbers(size, 3, dtype=dtype)], {}


def call(case: Case) -> list[Tensor]:
    """Return floating results of the kernel that this process has for the case."""
    name, inputs, named = case
    torch.manual_seed(0)
    base, _, overload = ("mm" if name == "product_row" else name).partition(".")
    result = getattr(getattr(torch.ops.aten, base), overload or "default")(*inputs, **named)
    results = (
        [result] if isinstance(result, Tensor) else result[: 1 if name in FIRST_ONLY else None]
    )
    return [x for x in results if x is not None and x.is_floating_point() and x.numel()]


def strided(x: Tensor) -> Tensor:
    # Sums of 16 bits that are rounded after each term occur with strides alone.
    return x if x.element_size() == 2 else torch.stack([x, x], -1)[..., 0]


def compute(given: str, path: str) -> None:
    """Save the results of this process for the cases that another one saved."""
    saved = []
    for name, inputs, named in torch.load(given):
        if "STRIDED" in os.environ and not any(part in name for part in CONTIGUOUS):
            inputs = [strided(x) if isinstance(x, Tensor) else x for x in inputs]
        saved.append(call((name, inputs, named)))
    torch.save(saved, path)


def measure() -> dict[str, list[float]]:
    """Return quantiles of the differences, by family."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    every = list(cases())
    with TemporaryDirectory() as folder:
        torch.save(every, f"{folder}/cases")
        for variant in VARIANTS:
            paths = [f"{folder}/cases", f"{folder}/{variant}"]
            command = [sys.executable, "-m", "tests.disturbed.spread", *paths]
            environment = {"OMP_NUM_THREADS": "1", **os.environ, **VARIANTS[variant]}
            subprocess.run(command, cwd=ROOT, env=environment, check=True)
        saved = [torch.load(Path(folder) / variant) for variant in VARIANTS]
    for case, *results in zip(every, *saved, strict=True):
        for parts in zip(*results, strict=True):
            family, unit = in_units(case, parts[0])
            for one, other in itertools.combinations(parts, 2):
                apart = (one.double() - other.double()).abs() / unit
                apart = apart[unit.expand_as(apart) > 0]
                if apart.numel() and apart.max() > 0:
                    sixteen_bits = one.element_size() == 2
                    found[family].append(apart.clamp(max=1) if sixteen_bits else apart)
    return {family: quantiles(torch.cat(found[family])) for family in sorted(found)}


def in_units(case: Case, result: Tensor) -> tuple[str, Tensor]:
    """Return the family, and what one unit is in each element of the result."""
    name, inputs, named = case
    operation, sums = ATEN["_addmm_activation" if name == "product_row" else name], None
    if operation.scale == "terms" and result.element_size() > 2:
        [sums] = call((name, list(absolute(tuple(inputs))), named))
    scale = scale_of(operation.scale, result, tuple(inputs), sums).double()
    return family_of(operation, result, tuple(inputs)), scale * torch.finfo(result.dtype).eps


def quantiles(values: Tensor) -> list[float]:
    values = values.sort().values
    places = [min(round(level * len(values)), len(values) - 1) for level in LEVELS]
    return [float(f"{values[place]:.3g}") for place in places]


def main(arguments: list[str]) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if arguments:
        compute(*arguments)
        return
    measured = measure()
    lines = [f"  {json.dumps(name)}: {json.dumps(levels)}" for name, levels in measured.items()]
    SPREAD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    middle, high = LEVELS.index(0.5), LEVELS.index(0.99)
    print(f"{'family':28} {'median':>8} {'99 %':>8} {'largest':>8}")
    for name, levels in measured.items():
        assert all(map(math.isfinite, levels)), name
        print(f"{name:28} {levels[middle]:8.3g} {levels[high]:8.3g} {levels[-1]:8.3g}")


if __name__ == "__main__":
    main(sys.argv[1:])
