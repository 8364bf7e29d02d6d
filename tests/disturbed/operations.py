"""Define the disturbed operations, and the unit in which each one's rounding is measured.

Every disturbance is a sample times the dtype's epsilon times a scale. The scale is one of

* the sum of the absolute values of the terms, for products and sums, so that a result of
  cancellation moves by as much as one without it. It is found by the same kernel, run on absolute
  values;
* the result's own absolute value, where nothing cancels: exponentials, norms, softmax;
* the largest absolute value of the result along its last dimension, or of all of it, for
  compositions of both;
* the input's absolute value, for functions such as GELU that approach zero by cancellation.

Sums of 16 bits are taken in float32 and rounded once, so they move by a unit of their own or not
at all. No kernel here adds in another order in ``cumsum`` or ``index_add``; rows in another order
would, so these take the samples of sums.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Operation:
    """The scale of the results of one operation.

    ``scale`` says how ("terms", "own", "row", "whole" or "input"), ``family`` whose samples are
    taken. For terms, ``functional`` is the overload that computes the same into a new tensor.
    ``length`` counts the terms of one element of the result, where the spread depends on it.
    """

    family: str
    scale: str
    functional: str = ""
    length: Callable[[Inputs], int] | None = None


def _variants(name: str) -> tuple[str, str, str]:
    base, dot, overload = name.partition(".")
    out = f"{base}.{overload}_out" if dot else f"{base}.out"
    return name, out, f"{base}_{dot}{overload}"


def _last(place: int) -> Callable[[Inputs], int]:
    return lambda inputs: inputs[place].shape[-1]


def _reduced(inputs: Inputs) -> int:
    dims = inputs[1] if len(inputs) > 1 and isinstance(inputs[1], list | tuple) else ()
    shape = inputs[0].shape
    return torch.Size([shape[dim] for dim in dims] if dims else shape).numel()


def _normed(inputs: Inputs) -> int:
    return _reduced((inputs[0], *inputs[2:]))


def _along(inputs: Inputs) -> int:
    """Return the length of the dimension that the second argument names, or of all of them."""
    x = inputs[0]
    return x.shape[inputs[1]] if len(inputs) > 1 and x.dim() else x.numel()


def _added(inputs: Inputs) -> int:
    """Return the mean number of rows that come together."""
    return -(-inputs[2].numel() // max(_along(inputs), 1))


PRODUCTS = {"mm": 0, "bmm": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1}
"""The place of the argument whose last dimension is summed over."""
SUMS: dict[str, Operation] = {
    variant: Operation("product", "terms", name, _last(place))
    for name, place in PRODUCTS.items()
    for variant in _variants(name)
} | {
    "vdot": Operation("product", "terms", "dot", _last(0)),
    "convolution": Operation(
        "product", "terms", "convolution", lambda inputs: inputs[1][0].numel()
    ),
    "sum.dim_IntList": Operation("sum", "terms", "sum.dim_IntList", _reduced),
    "sum.IntList_out": Operation("sum", "terms", "sum.dim_IntList", _reduced),
    "nansum": Operation("sum", "terms", "nansum", _reduced),
    "trace": Operation("sum", "terms", "trace", lambda inputs: min(inputs[0].shape)),
    "embedding_dense_backward": Operation(
        "sum", "terms", "embedding_dense_backward", lambda inputs: inputs[1].numel()
    ),
    **{variant: Operation("sum", "terms", "cumsum", _along) for variant in _variants("cumsum")},
    **{
        variant: Operation("sum", "terms", name, _added)
        for name in ("index_add", "scatter_add")
        for variant in _variants(name)
    },
}
# Chains of a product and a sum, which some instruction sets round once and others twice.
SUMS |= {
    variant: Operation(name.partition(".")[0], "terms", name)
    for name in ("addcmul", "addcdiv", "lerp.Scalar", "lerp.Tensor")
    for variant in _variants(name)
}
ELEMENTWISE = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh",
    "tanh", "asin", "acos", "atan", "atan2", "erf", "erfc", "erfinv", "sigmoid", "silu",
    "softplus", "rsqrt", "lgamma", "digamma", "logaddexp", "hypot", "pow.Tensor_Tensor",
)  # fmt: skip
BACKWARD = ("silu", "gelu", "sigmoid", "tanh", "softplus", "log_sigmoid")
OWN: dict[str, tuple[tuple[str, ...], Callable[[Inputs], int] | None]] = {
    "norm": (("linalg_vector_norm", "linalg_vector_norm.out", "norm.ScalarOpt_dim"), _normed),
    "var": (
        ("var.correction", "var_mean.correction", "std.correction", "std_mean.correction"),
        _reduced,
    ),
    "prod": (("prod", "prod.dim_int"), _along),
    "softmax": (("_softmax", "_softmax.out"), _along),
    # The sum of absolute values is the result itself where all terms are positive.
    "sum": (
        ("mse_loss", "huber_loss", "smooth_l1_loss", "nll_loss_forward"),
        lambda inputs: inputs[0].shape[0] if inputs[0].dim() else 1,
    ),
    **{name: (_variants(name), None) for name in ELEMENTWISE},
    "pow.Tensor_Scalar": (("pow.Tensor_Scalar", "pow.Tensor_Scalar_out", "pow_.Scalar"), None),
    "log": ((*_variants("log"), "logsumexp", "logsumexp.out"), None),
}
ROWS = {
    "softmax_backward": ("_softmax_backward_data", "_softmax_backward_data.out"),
    "log_softmax": ("_log_softmax", "_log_softmax.out"),
    "log_softmax_backward": ("_log_softmax_backward_data", "_log_softmax_backward_data.out"),
    "layer_norm": ("native_layer_norm", "native_group_norm"),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu",),
    "solve": ("_linalg_solve_ex", "_linalg_solve_ex.result", "linalg_inv_ex"),
    "product_row": ("_addmm_activation", "convolution_backward"),
    "normal": ("normal_",),
    **{f"{n}_backward": (f"{n}_backward", f"{n}_backward.grad_input") for n in BACKWARD},
    "log_sigmoid": ("log_sigmoid_forward", "log_sigmoid_forward.output"),
}
WHOLE = {
    "layer_norm_backward": ("native_layer_norm_backward", "native_group_norm_backward"),
    "attention_backward": ("_scaled_dot_product_flash_attention_for_cpu_backward",),
}
INPUT = {"gelu": ("gelu", "gelu.out", "gelu_")}
FIRST_ONLY = ("native_layer_norm", "native_group_norm", *ROWS["log_sigmoid"])
"""Operations of whose results only the first is moved: the others are means, which may cancel, or
what the backward pass reads, which is not in the range of the result."""
VLLM = {
    # vLLM's kernels for CPUs, by name: the family, and the arguments that hold results.
    "onednn_mm": ("product_row", (0,)),
    "bmm_cpu": ("product_row", (0,)),
    "rms_norm": ("layer_norm", (0,)),
    "fused_add_rms_norm": ("layer_norm", (0,)),
    "cpu_attention_with_kv_cache": ("attention", (3,)),
    "silu_and_mul": ("silu", (0,)),
    "gelu_and_mul": ("gelu", (0,)),
    "gelu_tanh_and_mul": ("gelu", (0,)),
}

ATEN = (
    SUMS
    | {
        name: Operation(family, "own", length=length)
        for family, (names, length) in OWN.items()
        for name in names
    }
    | {
        name: Operation(family, scale)
        for scale, families in (("row", ROWS), ("whole", WHOLE), ("input", INPUT))
        for family, names in families.items()
        for name in names
    }
)


def absolute(inputs: Inputs) -> Inputs:
    """Remove the arguments' signs, so that the sums are those of absolute values."""
    return tuple(x.abs() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def scale_of(how: str, result: Tensor, inputs: Inputs, sums: Tensor | None) -> Tensor:
    """Return the scale of each element of a result; ``sums`` are those of absolute values."""
    if how == "input":
        return inputs[0].abs()
    if how in ("whole", "row") and result.dim():
        sizes = result.abs().nan_to_num(0, 0)  # what is masked says nothing about the others
        return sizes.amax() if how == "whole" else sizes.amax(-1, keepdim=True)
    if how == "terms" and sums is not None and result.element_size() > 2:
        return sums
    return result.abs()


def family_of(operation: Operation, result: Tensor, inputs: Inputs) -> str:
    """Return the name under which the samples for this result are kept."""
    if result.element_size() == 2:
        return f"{operation.family}, 16 bits"
    if operation.length is None:
        return operation.family
    length = 4
    while length < min(operation.length(inputs), 4096):
        length *= 4
    return f"{operation.family} of {length}"
