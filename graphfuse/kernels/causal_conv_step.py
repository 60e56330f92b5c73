"""One token of a short causal convolution for each of several sequences, what they remember shifted where it is.

    eager equivalent, for row r and channel c:
        inputs = [*cache[states[r], c], x[r, c]]                        0 in front of a text that starts
        out[r, c] = silu(weight[c] @ inputs)                            in float32
        cache[states[r], c] = inputs[1:]

Source: the short convolution of Mamba (Gu and Dao 2023, arXiv 2312.00752).

Legend: R rows, C channels, K taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.sizes import ceil_div, power_of_two

MOST_CHANNELS = 256


@triton.jit
def _step(
    x_ptr,  # [R, C]
    weight_ptr,  # [C, K]
    positions_ptr,  # [R]
    states_ptr,  # [R]
    cache_ptr,  # [num_states, C, K - 1]
    out_ptr,  # [R, C]
    stride_x_row,
    C,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    state = tl.load(states_ptr + row)
    goes_on = tl.load(positions_ptr + row) != 0
    new = tl.load(x_ptr + row * stride_x_row + channel, mask=inside, other=0.0)
    at = cache_ptr + (state * C + channel) * (TAPS - 1)
    total = tl.zeros([BLOCK], tl.float32)
    # An element is read before its successor takes its place: a channel is one thread's own.
    for i in tl.static_range(TAPS - 1):
        old = tl.where(goes_on, tl.load(at + i, mask=inside, other=0.0), 0.0).to(new.dtype)
        total += old.to(tl.float32) * tl.load(weight_ptr + channel * TAPS + i, mask=inside, other=0.0).to(tl.float32)
        if i > 0:
            tl.store(at + (i - 1), old, mask=inside)
    tl.store(at + (TAPS - 2), new, mask=inside)
    total += new.to(tl.float32) * tl.load(weight_ptr + channel * TAPS + (TAPS - 1), mask=inside, other=0.0).to(
        tl.float32
    )
    out = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + row * C + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


def causal_conv_step(x: Tensor, weight: Tensor, positions: Tensor, states: Tensor, cache: Tensor) -> Tensor:
    """`[R, C]` in x's dtype, contiguous.

    Args:
        x: `[R, C]` with adjacent channels.
        weight: `[C, K]`, contiguous, K at least 2; the last tap is that of the token itself.
        positions, states: `[R]` int64, as of `gated_delta_step`.
        cache: `[num_states, C, K - 1]` of x's dtype, contiguous. Written **in place**.
    """
    num_rows, num_channels = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(power_of_two(num_channels), MOST_CHANNELS)
    _step[num_rows, ceil_div(num_channels, block)](
        x, weight, positions, states, cache, out, x.stride(0), num_channels, TAPS=weight.shape[1], BLOCK=block,
        num_warps=max(1, block // 64),
    )  # fmt: skip
    return out
