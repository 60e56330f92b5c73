"""A short causal convolution over several sequences of any lengths, what they remember renewed where it is.

    eager equivalent, for each sequence with tokens x [L, C], channel c, and old = cache[state, c] (0 at position 0):
        inputs = [*old, *x[:, c]]
        out[t, c] = silu(weight[c] @ inputs[t : t + K])                 in float32
        cache[state, c] = inputs[L:]

A program has 64 tokens of some channels. That of a sequence's first tokens alone reads what it remembers, and so it is
also the one that writes it, wherever the last tokens are.

Source: the short convolution of Mamba (Gu and Dao 2023, arXiv 2312.00752).

Legend: T tokens, C channels, K taps, N chunks (`ragged_chunks`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.paged_split import dependent_launch
from graphfuse.kernels.ragged_chunks import CHUNK, Chunks
from graphfuse.kernels.sizes import ceil_div, power_of_two

MOST_CHANNELS = 64


@triton.jit
def _convolve(
    x_ptr,  # [T, C]
    weight_ptr,  # [C, K]
    positions_ptr,  # [T]
    states_ptr,
    chunks_ptr,  # [N, 4]
    cache_ptr,  # [num_states, C, K - 1]
    out_ptr,  # [T, C]
    stride_x_row,
    stride_out_row,
    C,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    KEPT: tl.constexpr = TAPS - 1
    of_chunk = chunks_ptr + tl.program_id(0) * 4
    start, end, index = tl.load(of_chunk + 1), tl.load(of_chunk + 2), tl.load(of_chunk + 3)
    state = tl.load(states_ptr + tl.load(of_chunk))
    goes_on = tl.load(positions_ptr + start) != 0
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    remembered = cache_ptr + (state * C + channel) * KEPT

    token = start + index * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for i in tl.static_range(TAPS):
        source = token - KEPT + i  # [TOKENS]
        here = (source >= start) & (source < end)
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * stride_x_row + channel[None, :]
        new = tl.load(x_ptrs, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if index == 0:
            old_ptrs = remembered[None, :] + (source - start + KEPT)[:, None]
            old = tl.load(old_ptrs, mask=(source < start)[:, None] & inside[None, :], other=0.0).to(tl.float32)
            new += tl.where(goes_on, old, 0.0)
        weight = tl.load(weight_ptr + channel * TAPS + i, mask=inside, other=0.0).to(tl.float32)
        total += new * weight[None, :]
    out = total / (1.0 + tl.exp(-total))
    out_ptrs = out_ptr + token.to(tl.int64)[:, None] * stride_out_row + channel[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(token < end)[:, None] & inside[None, :])

    if index == 0:
        kept = tl.arange(0, BLOCK_KEPT)
        last = end - KEPT + kept  # [BLOCK_KEPT]
        valid = inside[:, None] & (kept < KEPT)[None, :]
        last_ptrs = x_ptr + last.to(tl.int64)[None, :] * stride_x_row + channel[:, None]
        newest = tl.load(last_ptrs, mask=valid & (last >= start)[None, :], other=0.0)
        kept_ptrs = remembered[:, None] + (last - start + KEPT)[None, :]
        kept_before = tl.load(kept_ptrs, mask=valid & (last < start)[None, :], other=0.0)
        newest = tl.where((last >= start)[None, :], newest, tl.where(goes_on, kept_before, 0.0).to(newest.dtype))
        tl.debug_barrier()  # all threads have read what was remembered
        tl.store(remembered[:, None] + kept[None, :], newest, mask=valid)


def causal_conv_ragged(
    x: Tensor, weight: Tensor, positions: Tensor, states: Tensor, chunks: Chunks, cache: Tensor, out: Tensor
) -> None:
    """The tokens that `chunks` tells of; others of x and out are left alone.

    Args:
        x: `[T, C]`; copied first if channels are not adjacent.
        weight: `[C, K]`, contiguous, K from 2 to 65; the last tap is that of the token itself.
        positions: `[T]` int64. A sequence whose first token is at position 0 starts from zero.
        states: int64, the cache's row of each row of the layout. No two sequences may have the same.
        cache: `[num_states, C, K - 1]` of x's dtype, contiguous. Written **in place**.
        out: `[T, C]` of x's dtype with adjacent channels.
    """
    num_channels, taps = weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    block = min(power_of_two(num_channels), MOST_CHANNELS)
    _convolve[len(chunks.chunks), ceil_div(num_channels, block)](
        x, weight, positions, states, chunks.chunks, cache, out, x.stride(0), out.stride(0), num_channels,
        TAPS=taps, TOKENS=CHUNK, BLOCK=block, BLOCK_KEPT=power_of_two(taps - 1), num_warps=8,
        **dependent_launch(x.device),
    )  # fmt: skip
