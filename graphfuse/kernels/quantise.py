"""Round rows to FP8, with a scale for each row, for each of its groups, or one that is given.

    eager equivalent:  scale = amax(abs(x.unflatten(-1, (-1, group))), -1) / finfo(dtype).max    # never 0
                       out = (x / scale).clamp(-finfo(dtype).max, finfo(dtype).max).to(dtype)

Legend: R rows, N numbers in each, G groups of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.moe_product import group_scale, round_to
from graphfuse.kernels.sizes import ceil_div, power_of_two


@triton.jit
def _quantise(
    x_ptr,
    out_ptr,
    scale_ptr,
    N,
    stride_x,
    STATIC: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, COLUMNS)
    column = group[:, None] * GROUP + lane[None, :]
    inside = (lane[None, :] < GROUP) & (column < N)
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0)
    if STATIC:
        out = round_to(x, tl.load(scale_ptr), out_ptr.dtype.element_ty)
    else:
        scale = group_scale(x, out_ptr.dtype.element_ty)
        num_groups = tl.cdiv(N, GROUP)
        tl.store(scale_ptr + row * num_groups + group, scale, mask=group < num_groups)
        out = round_to(x, scale[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * N + column, out, mask=inside)


def quantise(x: Tensor, group: int, dtype: torch.dtype, launch: dict[str, bool]) -> tuple[Tensor, Tensor]:
    """x `[R, N]` with rows of adjacent numbers; group at most 65,536. Returns out `[R, N]`, scales `[R, G]` float32.
    launch: keyword arguments of a dependent launch."""
    scales = torch.empty(x.shape[0], ceil_div(x.shape[1], group), dtype=torch.float32, device=x.device)
    return _launch(x, scales, group, dtype, launch, static=False), scales


def quantise_static(x: Tensor, scale: Tensor, dtype: torch.dtype, launch: dict[str, bool]) -> Tensor:
    """x `[R, N]` with rows of adjacent numbers, divided by scale `[1]`. Returns `[R, N]`."""
    return _launch(x, scale, 1024, dtype, launch, static=True)


def _launch(
    x: Tensor, scales: Tensor, group: int, dtype: torch.dtype, launch: dict[str, bool], *, static: bool
) -> Tensor:
    rows, size = x.shape
    group = min(group, size)
    num_groups, columns = ceil_div(size, group), power_of_two(group)
    groups = min(power_of_two(num_groups), max(1, 2048 // columns))
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    _quantise[(rows, ceil_div(num_groups, groups))](
        x, out, scales, size, x.stride(0), STATIC=static, GROUP=group, GROUPS=groups, COLUMNS=columns,
        num_warps=max(1, min(16, groups * columns // 512)), **launch,
    )  # fmt: skip
    return out
