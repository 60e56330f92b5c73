"""The weighted sum of each token's choices.

    eager equivalent:  out[t] = sum over k of weights[t, k] * choices[t, k]          in float32, in the order of k

Choices of experts that are not held here are not read, and count for nothing.

Legend: T tokens, K choices per token, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.moe_blocks import from_first
from graphfuse.kernels.sizes import ceil_div, power_of_two


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _combine(
    choices_ptr,  # [T, K, H]
    ids_ptr,  # [T, K]
    weights_ptr,  # [T, K]
    out_ptr,  # [T, H]
    first_expert,
    num_experts,
    H,
    TOP_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        choice = token * TOP_K + k
        expert = from_first(tl.load(ids_ptr + choice), first_expert)
        end = tl.where((expert >= 0) & (expert < num_experts), H, 0)
        row = tl.load(choices_ptr + choice * H + column, mask=column < end, other=0.0).to(tl.float32)
        weight = tl.load(weights_ptr + choice).to(tl.float32)
        out += tl.where(end > 0, weight, 0.0) * row
    tl.store(out_ptr + token * H + column, out.to(out_ptr.dtype.element_ty), mask=column < H)


def combine(
    choices: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    first_expert: int,
    num_experts: int,
    out: Tensor,
    launch: dict[str, bool],
) -> None:
    """choices `[T * K, H]`, topk_ids and topk_weights `[T, K]`, out `[T, H]`, all contiguous; T at least 1.
    launch: keyword arguments of a dependent launch."""
    tokens, hidden = out.shape
    block = min(power_of_two(hidden), 256 if tokens < 64 else 1024)
    _combine[(tokens, ceil_div(hidden, block))](
        choices, topk_ids, topk_weights, out, first_expert, num_experts, hidden,
        TOP_K=topk_ids.shape[1], BLOCK=block, num_warps=max(1, block // 256), **launch,
    )  # fmt: skip
