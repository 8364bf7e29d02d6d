"""Provide CPU kernels whose results move by as much as real kernels differ from each other.

Each result moves by a sample of the differences in ``spread.json``, in the units of
``operations.py``. The sample is a function of the seed, the operation, its shapes and the place in
the result, so the same computation gives the same bits in any process, and promises of equal bits
stay checkable. Results that every CPU computes alike stay as they are:

* sums of one term or two, of which no other order exists, and products of a single term; terms that
  are zero do not count;
* sums of few binary digits, such as counts, masks and rewards of 0.25, which no order rounds; and
  all results of few binary digits, be they zero, one, infinite, or a mask's -3.4e38;
* operations without a family in ``spread.json``: those that IEEE 754 rounds correctly, and those
  for which all kernels have the same code.

The units of products and sums take a second run of the kernel on absolute values, and a third on
ones where there are zeros among the terms.
"""

import json
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import LEVELS, SPREAD
from .operations import ATEN, FIRST_ONLY, VLLM, Operation, absolute, family_of, scale_of

FEW_DIGITS = 1024.0
"""Multiples of 1 over this are left alone, which leaves out all beyond 2^14 in float32."""
DIGITS = {torch.float64: 53, torch.float32: 24}
PERIOD = 2**14
"""Samples of a family are drawn once; each computation reads them from a place of its own.

Twice as many are no more than PyTorch's threads share, so that a process that only imports modules
starts none, and may fork.
"""
EXACT_POWERS = (-2, -1, -0.5, 0.5, 1, 2, 3)
"""Exponents that PyTorch takes apart into products, divisions and square roots."""
WITHIN = {
    # The range that any kernel keeps to.
    "softmax": (0, 1), "sigmoid": (0, 1), "log_softmax": (None, 0), "log_sigmoid": (None, 0),
    "tanh": (-1, 1), "erf": (-1, 1), "sin": (-1, 1), "cos": (-1, 1),
}  # fmt: skip


class Samples:
    """Samples the measured differences with signs, ``size`` times as large."""

    def __init__(self, seed: int, size: float = 1) -> None:
        self.seed, self.size = seed, size
        self._spread: dict[str, list[float]] = json.loads(SPREAD.read_text())
        self._drawn: dict[tuple[str, torch.dtype], Tensor] = {}
        self._begins: dict[Any, int] = {}

    def known(self, family: str) -> bool:
        return family in self._spread

    def of(self, family: str, name: str, shapes: tuple[torch.Size, ...], like: Tensor) -> Tensor:
        """Return samples in the shape and dtype of a result, for an operation on such inputs."""
        key = name, shapes
        if key not in self._begins:
            self._begins[key] = zlib.crc32(f"{self.seed} {name} {shapes}".encode()) % PERIOD
        if (family, like.dtype) not in self._drawn:
            # Twice, so that a place near the end can be read on from.
            self._drawn[family, like.dtype] = self._draw(family).to(like.dtype).repeat(2)
        begin, count = self._begins[key], like.numel()
        samples = self._drawn[family, like.dtype]
        if count > PERIOD:
            samples = samples.repeat(count // PERIOD + 1)
        return samples[begin : begin + count].view(like.shape)

    def _draw(self, family: str) -> Tensor:
        generator = np.random.default_rng(self.seed + zlib.crc32(family.encode()))
        signs = generator.integers(0, 2, PERIOD) * 2 - 1
        sizes = np.interp(generator.random(PERIOD), LEVELS, self._spread[family])
        return torch.from_numpy(sizes * signs * self.size)


def shapes_of(inputs: Any) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in inputs if isinstance(x, Tensor))


def move(
    samples: Samples,
    name: str,
    family: str,
    shapes: tuple[torch.Size, ...],
    result: Tensor,
    scale: Tensor,
    where: Tensor | bool = True,
) -> None:
    """Move the elements of a result that have many digits, all or those ``where``."""
    if not samples.known(family):
        return
    drawn = samples.of(family, name, shapes, result)
    moved = result + drawn * (scale * torch.finfo(result.dtype).eps)
    finite = moved.isfinite()  # before a bound makes infinity a number
    bounds = WITHIN.get(family.partition(" of ")[0].partition(",")[0])
    if bounds:
        moved = moved.clamp(*bounds)
    changed = _has_many_digits(result) & finite & where
    result.copy_(torch.where(changed, moved, result))


def _has_many_digits(x: Tensor) -> Tensor:
    # Numbers of 16 bits have few digits all of them; those that are integers may well be exact.
    scaled = x * FEW_DIGITS if x.element_size() > 2 else x
    return scaled.frac().abs() > 0  # which is false of nan


def _exact(terms: Tensor, count: int) -> bool:
    """Tell whether no order of adding so many of these terms rounds."""
    largest = 2.0 ** DIGITS.get(terms.dtype, 8) / FEW_DIGITS
    return bool((~_has_many_digits(terms) & (terms.abs() * count < largest)).all())


class Disturbed:
    """The kernel of an operation, followed by the disturbance of its result."""

    def __init__(self, samples: Samples, name: str, operation: Operation, kernel: Any) -> None:
        self.samples, self.name, self.operation, self.kernel = samples, name, operation, kernel
        self.plain = operation.functional and torch.library.get_kernel(
            f"aten::{operation.functional}", "CPU"
        )

    def __call__(self, keys: Any, *inputs: Any, **named: Any) -> Any:
        if self.operation.family == "pow.Tensor_Scalar" and inputs[1] in EXACT_POWERS:
            return self.kernel.call_boxed(keys, *inputs, **named)
        if self.operation.family == "pow.Tensor_Tensor":
            # A number that PyTorch made a tensor of arrives as a number again.
            inputs = tuple(
                torch.as_tensor(x, dtype=getattr(x, "dtype", torch.float64)) for x in inputs
            )
        shapes = shapes_of(inputs)
        sums, counts = self._terms(keys, inputs, named) if self.plain else (None, True)
        before = absolute(inputs) if self.operation.scale == "input" else inputs
        result = self.kernel.call_boxed(keys, *inputs, **named)
        if counts is not None:
            parts = [result] if isinstance(result, Tensor) else list(result)
            for part in parts[: 1 if self.name in FIRST_ONLY else None]:
                # None is a gradient that nobody asked for.
                if part is not None and part.is_floating_point() and part.numel():
                    family = family_of(self.operation, part, before)
                    scale = scale_of(self.operation.scale, part, before, sums)
                    where = True if counts is True else counts
                    move(self.samples, self.name, family, shapes, part, scale, where)
        return result

    def _terms(self, keys: Any, inputs: Any, named: Any) -> tuple[Tensor | None, Any]:
        """Return sums of absolute values, and where more terms than have one order come together.

        None stands for nowhere.
        """
        factors = ("alpha", "beta", "value")
        named = {k: abs(v) if k in factors else v for k, v in named.items() if k != "out"}
        run = partial(self.plain.call_boxed, keys)
        if self.operation.length is None:
            return run(*absolute(inputs), **named), True
        given = [x for x in inputs if isinstance(x, Tensor)]
        floats = [x for x in given if x.is_floating_point()]
        count = self.operation.length(inputs)
        product = self.operation.family == "product"
        if not floats or not all(x.numel() for x in given):
            return None, None
        if not product and _exact(floats[-1], max(count, floats[-1].numel())):
            return None, None
        sums = run(*absolute(inputs), **named)
        if product and all(bool((x != 0).all()) for x in floats) and count > 1:
            return sums, True
        named |= {k: 1 for k in named if k in factors}
        ones = (
            (x != 0).to(x.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in inputs
        )
        return sums, run(*ones, **named) > (1 if product else 2)


def draw_otherwise(name: str, keys: Any, x: Tensor, *inputs: Any, **named: Any) -> Tensor:
    """Draw exponential or Bernoulli numbers from a stream that one generator number seeds.

    PyTorch does so with MKL's generator on CPUs that it takes for Intel's, and reads its own
    generator on others, so the same seed draws other numbers there.
    """
    seed = torch.empty((), dtype=torch.int64).random_(generator=named.get("generator"))
    stream = torch.Generator().manual_seed(int(seed))
    uniform = torch.rand(x.shape, generator=stream, dtype=torch.float64)
    if name == "exponential_":
        rate = inputs[0] if inputs else 1.0
        return x.copy_(-torch.log1p(-uniform) / rate)
    return x.copy_(uniform < (inputs[0] if inputs else 0.5))


@contextmanager
def disturbed(seed: int, size: float = 1, draws: str = "") -> Iterator[None]:
    """Disturb PyTorch's kernels in the block, in all threads of the process."""
    library = disturb(seed, size, draws)
    try:
        yield
    finally:
        library._destroy()


def disturb(seed: int, size: float = 1, draws: str = "") -> torch.library.Library:
    """Disturb PyTorch's kernels from now on, as long as what is returned lives."""
    samples = Samples(seed, size)
    replaced: dict[str, Callable[[Any], Callable[..., Any]]] = {
        name: partial(Disturbed, samples, name, operation) for name, operation in ATEN.items()
    }
    if draws:
        replaced["exponential_"] = lambda _: partial(draw_otherwise, "exponential_")
        replaced["bernoulli_.float"] = lambda _: partial(draw_otherwise, "bernoulli_")
    return _replace("aten", replaced)


def disturb_vllm(seed: int, size: float = 1, draws: str = "") -> torch.library.Library:
    """Disturb vLLM's kernels for CPUs likewise, which write into their arguments."""
    samples = Samples(seed, size)

    def after(name: str, kernel: Any, keys: Any, *inputs: Any, **named: Any) -> Any:
        returned = kernel.call_boxed(keys, *inputs, **named)
        family, places = VLLM[name]
        for part in (inputs[place] for place in places):
            if part.is_floating_point() and part.numel():
                key = family_of(Operation(family, "row"), part, inputs)
                scale = scale_of("row", part, inputs, None)
                move(samples, name, key, shapes_of(inputs), part, scale)
        return returned

    # Each instruction set has a build of its own, and not all have all kernels.
    known = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names()}
    return _replace("_C", {name: partial(partial, after, name) for name in VLLM if name in known})


def _replace(
    namespace: str, replaced: dict[str, Callable[[Any], Callable[..., Any]]]
) -> torch.library.Library:
    """Register for each operation what is made of its kernel."""
    library = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are overridden
        for name, made in replaced.items():
            full = f"{namespace}::{name}"
            try:
                torch._C._dispatch_dump(full)
                found = torch._C._dispatch_has_computed_kernel_for_dispatch_key(full, "CPU")
            except RuntimeError:  # not every operation has all three variants
                continue
            if found:
                kernel = made(torch.library.get_kernel(full, "CPU"))
                library.impl(name, kernel, "CPU", with_keyset=True)
    return library
