"""Record how far each numerical assertion is from failing, as a pytest plugin.

``python -m tests.disturbed`` loads it in each of its rounds. It notes both sides of every
comparison of floating-point numbers by ``<``, ``<=``, ``>`` or ``>=`` within an ``assert`` (but for
those with the clock), and error and tolerance of ``pytest.approx``, ``math.isclose``, and the
``allclose`` and ``isclose`` of PyTorch and numpy, ``assert_close`` and ``assert_allclose``. It
notes the tightest element of tensors. Each process writes a file of lines of JSON into the folder
that ``FOLDER`` names.

A margin needs two rounds. Where one side is an error that rounding makes up, the margin is bound
over error, in the round where it is smallest. An error is rounding's if it moves by a tenth of
itself or more from one round to another, while the bound stays. Anything else (``later < earlier``,
or a result that is off for another reason, such as a truncated series) is compared with what
rounding moves: the margin is the gap between the two sides over the sum of their movements, and is
infinite where nothing moves.
"""

import ast
import builtins
import functools
import inspect
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest import approx
from _pytest.assertion import rewrite

from tests.disturbed import ROOT

FOLDER = "LIGHTNING_RL_MARGINS"
NOTE = "@margin_note"
"""The name of ``note`` in rewritten tests; no source can use it."""
MOST = 200
"""Comparisons of one place in one test; a loop may have more."""
OWN = 0.1
"""An error that moves by this share of itself is rounding."""


class Recorder:
    """Writes comparisons as they happen, with the test that made them and their place in it."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("a")
        self._counts: Counter[tuple[str, str]] = Counter()
        self._left = threading.local()

    def record(self, place: str, measured: float, bound: float) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        count = self._counts[test, place]
        if test and count < MOST and math.isfinite(measured) and math.isfinite(bound):
            self._counts[test, place] += 1
            self._file.write(json.dumps([test, place, count, float(measured), float(bound)]) + "\n")
            self._file.flush()

    def note(self, place: str, ascending: bool, index: int, value: Any) -> Any:
        """Return the value of a comparison's operand, and record it with the one before."""
        if index:
            pair = tightest(self._left.value, value, ascending)
            if pair:
                self.record(place, *pair)
        self._left.value = value
        return value


def tightest(left: Any, right: Any, ascending: bool) -> tuple[float, float] | None:
    """Return the pair of elements closest to breaking the order; None unless one is a float."""
    if not (is_float(left) or is_float(right)):
        return None
    try:
        both = [torch.as_tensor(x).detach().double() for x in (left, right)]
        both = [x.flatten() for x in torch.broadcast_tensors(*both)]
    except (TypeError, ValueError, RuntimeError):  # a float may be compared with an object
        return None
    if not both[0].numel():
        return None
    gaps = both[1] - both[0] if ascending else both[0] - both[1]
    place = int(gaps.argmin())
    return float(both[0][place]), float(both[1][place])


def is_float(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.is_floating_point()
    return isinstance(x, float | np.floating) or (isinstance(x, np.ndarray) and x.dtype.kind == "f")


class Rewriter(ast.NodeTransformer):
    """Passes the operands of comparisons in assertions through ``note``."""

    def __init__(self, path: str) -> None:
        self.path, self.asserted = path, False

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        self.asserted = True
        node.test = self.visit(node.test)
        self.asserted = False
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        self.generic_visit(node)
        ordered = all(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops)
        if self.asserted and ordered and "time.monotonic" not in ast.unparse(node):
            place = f"{self.path}:{node.lineno}:{node.col_offset}"
            ascending = isinstance(node.ops[0], ast.Lt | ast.LtE)
            operands = [
                ast.copy_location(
                    ast.Call(
                        ast.Name(NOTE, ast.Load()),
                        [*map(ast.Constant, (place, ascending, index)), operand],
                        [],
                    ),
                    operand,
                )
                for index, operand in enumerate([node.left, *node.comparators])
            ]
            node.left, *node.comparators = operands
            ast.fix_missing_locations(node)
        return node


def place_of_caller() -> str | None:
    """Return the test's line that called a library's function; None if lightning_rl did."""
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if (
            frame.f_globals is not globals() and "@pytest_ar" in frame.f_globals
        ):  # which pytest imports into what it rewrites
            return f"{os.path.relpath(path, ROOT)}:{frame.f_lineno}"
        if path.startswith(str(ROOT / "lightning_rl")):
            return None
        frame = frame.f_back
    return None


def largest_error(actual: Any, expected: Any, rtol: float, atol: float) -> float | None:
    """Return the largest error in units of its tolerance."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        parts = [largest_error(actual[k], expected[k], rtol, atol) for k in actual if k in expected]
        return max((part for part in parts if part is not None), default=None)
    if isinstance(actual, list | tuple) and any(map(is_float, actual)) and len(actual):
        parts = [largest_error(*pair, rtol, atol) for pair in zip(actual, expected, strict=False)]
        return max((part for part in parts if part is not None), default=None)
    pair = [torch.as_tensor(x).detach() for x in (actual, expected)]
    if not any(x.is_floating_point() for x in pair):
        return None
    ours, theirs = torch.broadcast_tensors(*(x.double() for x in pair))
    errors = (ours - theirs).abs() / (atol + rtol * theirs.abs())
    errors = errors[errors.isfinite()]  # infinities are equal or not
    return float(errors.max()) if errors.numel() else None


def default_tolerances(actual: Any, expected: Any) -> tuple[float, float]:
    dtypes = [x.dtype if isinstance(x, torch.Tensor) else torch.float64 for x in (actual, expected)]
    return torch.testing._comparison.default_tolerances(*dtypes)


def watch(recorder: Recorder, module: Any, name: str, rtol: float | None, atol: float = 0) -> None:
    """Record what a function of (actual, expected, rtol, atol) compares; None: by dtype."""
    function = getattr(module, name)
    names = ("rel_tol", "abs_tol") if module is math else ("rtol", "atol")

    @functools.wraps(function)
    def watched(actual: Any, expected: Any, *rest: Any, **named: Any) -> Any:
        place = place_of_caller()
        given = {**dict(zip(names, rest, strict=False)), **named}
        defaults = (rtol, atol) if rtol is not None else default_tolerances(actual, expected)
        relative, absolute = (
            default if given.get(key) is None else given[key]
            for key, default in zip(names, defaults, strict=True)
        )
        if place and (relative or absolute):
            try:
                error = largest_error(actual, expected, relative, absolute)
            except (TypeError, ValueError, RuntimeError):  # the function says what is wrong
                error = None
            if error is not None:
                recorder.record(place, error, 1.0)
        return function(actual, expected, *rest, **named)

    setattr(module, name, watched)


def watch_approx(recorder: Recorder) -> None:
    compare: Callable[[Any, Any], bool] = approx.ApproxScalar.__eq__

    def watched(self: approx.ApproxScalar, actual: Any) -> bool:
        place = place_of_caller()
        numbers = all(isinstance(x, int | float | np.number) for x in (actual, self.expected))
        if place and numbers and (is_float(actual) or is_float(self.expected)):
            recorder.record(place, abs(actual - self.expected), self.tolerance)
        return compare(self, actual)

    approx.ApproxScalar.__eq__ = watched


def rewrite_comparisons(recorder: Recorder) -> None:
    """Note operands before pytest rewrites assertions, in files of compiled code of their own."""
    setattr(builtins, NOTE, recorder.note)
    rewrite.PYC_TAIL = "-margins" + rewrite.PYC_TAIL
    theirs = rewrite.rewrite_asserts

    def ours(module: ast.Module, source: bytes, path: str | None = None, *rest: Any) -> None:
        if path and "site-packages" not in path:  # plugins are rewritten too
            Rewriter(os.path.relpath(path, ROOT)).visit(module)
        theirs(module, source, path, *rest)

    rewrite.rewrite_asserts = ours
    pytest.register_assert_rewrite("tests.support")


def pytest_load_initial_conftests() -> None:
    """Begin before the first module of tests is imported, in each worker of xdist as well."""
    recorder = Recorder(Path(os.environ[FOLDER]))
    rewrite_comparisons(recorder)
    watch_approx(recorder)
    watch(recorder, math, "isclose", 1e-9)
    for module in (torch, torch.Tensor, np):
        watch(recorder, module, "allclose", 1e-5, 1e-8)
    for module in (torch, np):
        watch(recorder, module, "isclose", 1e-5, 1e-8)
    watch(recorder, np.testing, "assert_allclose", 1e-7)
    watch(recorder, torch.testing, "assert_close", None)


@dataclass(frozen=True, order=True)
class Margin:
    """The smallest margin of a place, in the test that has it."""

    margin: float
    place: str
    test: str
    measured: float
    bound: float

    def __str__(self) -> str:
        sides = f"measured {self.measured:.3g}, bound {self.bound:.3g}"
        return f"{self.margin:10.3g}  {self.place}  {sides}  {self.test}"


def read(folders: list[Path]) -> list[Margin]:
    """Return margins by place, largest first, of what several rounds recorded."""
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for path in (path for folder in folders for path in folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            test, place, count, measured, bound = json.loads(line)
            found.setdefault((test, place, count), []).append((measured, bound))
    smallest: dict[str, Margin] = {}
    for (test, place, _), pairs in found.items():
        if len(pairs) > 1:
            closest = min(pairs, key=lambda pair: abs(pair[1] - pair[0]))
            margin = Margin(margin_of(pairs), place, test, *closest)
            smallest[place] = min(margin, smallest.get(place, margin))
    return sorted(smallest.values(), reverse=True)


def margin_of(pairs: list[tuple[float, float]]) -> float:
    """Return the margin of one comparison from both sides in each round."""
    movements = [max(side) - min(side) for side in zip(*pairs, strict=True)]
    largest = [max(map(abs, side)) for side in zip(*pairs, strict=True)]
    rounding = [moved > OWN * size for moved, size in zip(movements, largest, strict=True)]
    if rounding[0] != rounding[1]:
        return min(ratio(*map(abs, pair)) for pair in pairs)
    gap = min(abs(one - other) for one, other in pairs)
    return gap / sum(movements) if any(movements) else math.inf


def ratio(one: float, other: float) -> float:
    low, high = sorted((one, other))
    return high / low if low else math.inf
