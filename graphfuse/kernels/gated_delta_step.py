"""One token of the gated delta rule for each of several sequences, their states updated where they are.

    eager equivalent, for row r, value head h, key head j = h // (Hv // Hk), S = cache[states[r], h] (0 at position 0):
        k, q = k[r, j] / |k[r, j]|, q[r, j] / |q[r, j]| / sqrt(Dk)
        S = exp(g[r, h]) * S
        S = S + outer(k, beta[r, h] * (v[r, h] - k @ S))                in float32
        out[r, h] = q @ S

A program has some columns of a head's state, which need nothing of the others: a state is read once and written once.
Source: Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464), section 3.

Legend: R rows, Hk and Hv key and value heads, Dk and Dv their sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.sizes import ceil_div, power_of_two

ELEMENTS_PER_PROGRAM = 4096
"""Of a state, in the registers of four warps: 32 a thread."""


@triton.jit
def _step(
    q_ptr,  # [R, Hk, Dk]
    k_ptr,  # [R, Hk, Dk]
    v_ptr,  # [R, Hv, Dv]
    g_ptr,  # [R, Hv] float32
    beta_ptr,  # [R, Hv]
    positions_ptr,  # [R]
    states_ptr,  # [R]
    cache_ptr,  # [num_states, Hv, Dk, Dv] float32
    out_ptr,  # [R, Hv, Dv]
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_g_row,
    stride_beta_row,
    scale,
    eps,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.load(states_ptr + row)
    goes_on = tl.load(positions_ptr + row) != 0

    key_head = head // GROUP
    q = tl.load(q_ptr + row * stride_q_row + key_head * stride_q_head + key, mask=key < DK, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + row * stride_k_row + key_head * stride_k_head + key, mask=key < DK, other=0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q) + eps) * scale
    k = k * tl.rsqrt(tl.sum(k * k) + eps)
    v = tl.load(v_ptr + row * stride_v_row + head * stride_v_head + value, mask=value < DV, other=0.0).to(tl.float32)
    keep = tl.exp(tl.load(g_ptr + row * stride_g_row + head))
    beta = tl.load(beta_ptr + row * stride_beta_row + head).to(tl.float32)

    at = cache_ptr + ((state * HV + head) * DK + key[:, None]) * DV + value[None, :]
    inside = (key[:, None] < DK) & (value[None, :] < DV)
    kept = tl.where(goes_on, keep * tl.load(at, mask=inside, other=0.0), 0.0)
    error = beta * (v - tl.sum(k[:, None] * kept, 0))
    kept += k[:, None] * error[None, :]
    tl.store(at, kept, mask=inside)
    out = tl.sum(q[:, None] * kept, 0)
    tl.store(out_ptr + (row * HV + head) * DV + value, out.to(out_ptr.dtype.element_ty), mask=value < DV)


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    positions: Tensor,
    states: Tensor,
    cache: Tensor,
    eps: float,
) -> Tensor:
    """`[R, Hv, Dv]` in v's dtype, contiguous.

    Args:
        q, k: `[R, Hk, Dk]`, v: `[R, Hv, Dv]`, each with adjacent elements of a head.
        g, beta: `[R, Hv]` with adjacent heads; g float32, the logarithm of what is kept.
        positions, states: `[R]` int64. A row at position 0 starts from zero. No two rows may have the same state, but
            for rows whose results nobody reads.
        cache: `[num_states, Hv, Dk, Dv]` float32, contiguous. Written **in place**.
        eps: added to the squares of a key's or query's length.
    """
    num_rows, num_heads, value_size = v.shape
    num_key_heads, key_size = k.shape[1:]
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    g, beta = (x if x.stride(1) == 1 else x.contiguous() for x in (g, beta))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    block_k = power_of_two(key_size)
    block_v = min(power_of_two(value_size), max(1, ELEMENTS_PER_PROGRAM // block_k))
    _step[num_rows, num_heads, ceil_div(value_size, block_v)](
        q, k, v, g, beta, positions, states, cache, out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), g.stride(0), beta.stride(0),
        key_size**-0.5, eps,
        HV=num_heads, GROUP=num_heads // num_key_heads, DK=key_size, DV=value_size, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=4,
    )  # fmt: skip
    return out
