"""Round rows to FP8, with a scale for each row or for each of its groups.

    eager equivalent:  scale = amax(abs(x.unflatten(-1, (-1, group))), -1) / finfo(dtype).max    # 1 where it would be 0
                       out = (x / scale).to(dtype)

Legend: R rows, N numbers in each, G groups of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.moe_product import group_scale, round_to


@triton.jit
def _quantise(x_ptr, out_ptr, scale_ptr, N, stride_x, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, COLUMNS)
    column = group[:, None] * GROUP + lane[None, :]
    inside = (lane[None, :] < GROUP) & (column < N)
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0)
    scale = group_scale(x, out_ptr.dtype.element_ty)
    num_groups = tl.cdiv(N, GROUP)
    tl.store(scale_ptr + row * num_groups + group, scale, mask=group < num_groups)
    tl.store(out_ptr + row * N + column, round_to(x, scale[:, None], out_ptr.dtype.element_ty), mask=inside)


def quantise(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[R, N]` with rows of adjacent numbers, group at most 65,536. Returns out `[R, N]` and scales `[R, G]` float32."""
    rows, size = x.shape
    group = min(group, size)
    num_groups = triton.cdiv(size, group)
    columns = triton.next_power_of_2(group)
    groups = min(triton.next_power_of_2(num_groups), max(1, 2048 // columns))
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(rows, num_groups, dtype=torch.float32, device=x.device)
    _quantise[(rows, triton.cdiv(num_groups, groups))](
        x, out, scales, size, x.stride(0), GROUP=group, GROUPS=groups, COLUMNS=columns,
        num_warps=max(1, min(16, groups * columns // 512)),
    )  # fmt: skip
    return out, scales
