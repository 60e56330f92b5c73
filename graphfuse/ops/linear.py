"""A linear layer as one op, `graphfuse::linear`, which takes another kernel for few rows than for many.

Registered by hand, since `torch.library.custom_op` would add its checks of aliasing and gradients, several times what
the op itself costs the host, to every call of every layer.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.errors import ArgumentError

SKINNY_DTYPES = (torch.bfloat16, torch.float16)
MOST_SKINNY_ROWS, MOST_SKINNY_BYTES = 16, 8 << 20
"""Rows, and bytes of weights: up to these the kernel is faster than torch's ones on an H200, which
benchmarks/results/linear_h200.json has the figures of."""

MOST_INPUTS_OF_ONE_ROW, MOST_BYTES_OF_ONE_ROW = 8192, 128 << 20
"""For one row of so many inputs it is for larger weights too."""

_LIBRARY = torch.library.Library("graphfuse", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[M, N]`: x `[M, K]` times the transpose of weight `[N, K]`, plus bias `[N]`; all of one dtype.

    On CUDA, few rows of 16-bit floats take `graphfuse.kernels.skinny_product`, which reads the weights while the kernel
    before it still runs: they must not be written to on the way. All else is torch's product.

    Raises `ArgumentError`: shapes or dtypes do not fit.
    """
    _check(x, weight, bias)
    if x.is_cuda and is_skinny(x.shape[0], weight) and why_not_skinny(weight) is None:
        from graphfuse.kernels.skinny_product import skinny_product  # not above: Triton is published for Linux only

        return skinny_product(x, weight, bias)
    return F.linear(x, weight, bias)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ArgumentError(
            f"linear got x {list(x.shape)} {x.dtype} and a weight {list(weight.shape)} {weight.dtype}. "
            "Pass [M, K] and [N, K] of one dtype."
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0] or bias.dtype != x.dtype):
        raise ArgumentError(f"bias is {list(bias.shape)} {bias.dtype}. Pass [{weight.shape[0]}] of x's dtype.")


def is_skinny(num_rows: int, weight: Tensor) -> bool:
    """Whether the kernel for few rows is the faster one."""
    num_bytes = weight.numel() * weight.element_size()
    if num_rows <= 1 and weight.shape[1] <= MOST_INPUTS_OF_ONE_ROW:
        return num_bytes <= MOST_BYTES_OF_ONE_ROW
    return num_rows <= MOST_SKINNY_ROWS and num_bytes <= MOST_SKINNY_BYTES


def why_not_skinny(weight: Tensor) -> str | None:
    """Why no number of rows is served by the kernel for few; None if some are."""
    if weight.dtype not in SKINNY_DTYPES:
        return f"the weights are {str(weight.dtype).removeprefix('torch.')}; the kernel serves bfloat16 and float16"
    if not weight.is_contiguous():
        return "the weights are not contiguous"
    num_outputs, num_inputs = weight.shape
    if num_inputs % 16 or not num_outputs:
        return f"{num_inputs} inputs are no whole number of 16"
    if not is_skinny(1, weight):
        return "the weights are so large that torch's kernels read them as fast"
    return None


_LIBRARY.impl("linear", linear, "CompositeExplicitAutograd")
OP = torch.ops.graphfuse.linear.default


@torch.library.register_fake("graphfuse::linear")
def _(x, weight, bias=None):
    _check(x, weight, bias)
    return x.new_empty(x.shape[0], weight.shape[0])
