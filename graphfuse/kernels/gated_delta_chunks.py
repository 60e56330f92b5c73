"""The gated delta rule over several sequences of any lengths, in chunks, their states updated where they are.

    eager equivalent, for each sequence and value head h, key head j = h // (Hv // Hk), S = cache[state, h] (0 at
    position 0), k and q of unit length, q also over sqrt(Dk); for each chunk of at most 64 tokens, with
    G = cumsum(g), between[i, j] = exp(G[i] - G[j]) for j <= i and else 0:
        solve = inverse(I + strictly_lower(beta[:, None] * between * (k @ k.T))) * beta
        u = solve @ (v - exp(G)[:, None] * (k @ S))
        out = exp(G)[:, None] * (q @ S) + (between * (q @ k.T)) @ u
        S = exp(G[-1]) * S + (exp(G[-1] - G)[:, None] * k).T @ u

    _prepare   a program a chunk and head: solve, the scores between * (q @ k.T), and each token's factors
    _advance   a program a sequence, head and some columns of S, which need nothing of the others: chunk after chunk

Products. Keys and queries stay as they came, bfloat16 numbers, and their lengths are among the factors, so that
products of two of them are exact but for summing. What is float32 is split in two bfloat16 parts, and so right to 16
bits. For other dtypes products are tf32x3. All sums, states and factors are float32.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv
2406.06484) and "Gated Delta Networks" (arXiv 2412.06464), section 3.

Legend: T tokens, Hk and Hv key and value heads, Dk and Dv their sizes, R sequences, N chunks (`ragged_chunks`), C = 64.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.paged_split import dependent_launch
from graphfuse.kernels.ragged_chunks import CHUNK, Chunks
from graphfuse.kernels.sizes import ceil_div, power_of_two
from graphfuse.kernels.unit_triangular import unit_triangular_inverse

MOST_COLUMNS = 32
MOST_KEYS = 128
LARGE = 160 * 1024
"""Bytes of shared memory a program, such as A100 and later ones of its kind have: enough to load a chunk ahead."""

NUM_FACTORS = 4
"""Of each token: what it reads of the state by its key and by its query, what of its own is there at the chunk's end,
and what the whole chunk keeps of the state."""


@triton.jit
def _split_product(a, b):
    """a @ b in float32, right to 16 bits where an operand is float32, which bfloat16 alone is not."""
    if a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        return tl.dot(a, high) + tl.dot(a, (b - high.to(tl.float32)).to(tl.bfloat16))
    else:
        a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
        a_low, b_low = (a - a_high.to(tl.float32)).to(tl.bfloat16), (b - b_high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(a_high, b_high) + (tl.dot(a_high, b_low) + tl.dot(a_low, b_high))


@triton.jit
def _product(a, b, BF16: tl.constexpr):
    """a @ b; a bfloat16 if it is exactly that."""
    if BF16:
        return _split_product(a, b)
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _prepare(
    q_ptr,  # [T, Hk, Dk]
    k_ptr,  # [T, Hk, Dk]
    g_ptr,  # [T, Hv] float32
    beta_ptr,  # [T, Hv]
    chunks_ptr,  # [N, 4]
    solve_ptr,  # [N, Hv, C, C] float32
    scores_ptr,  # [N, Hv, C, C] float32
    factors_ptr,  # [N, Hv, 4, C] float32
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_g_row,
    stride_beta_row,
    scale,
    eps,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    C: tl.constexpr,
    BF16: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(chunks_ptr + chunk * 4 + 1), tl.load(chunks_ptr + chunk * 4 + 2)
    i = tl.arange(0, C)
    token = (start + tl.load(chunks_ptr + chunk * 4 + 3) * C + i).to(tl.int64)
    real = token < end
    key, key_head = tl.arange(0, BLOCK_K), head // GROUP
    inside = real[:, None] & (key < DK)[None, :]
    k_ptrs = k_ptr + token[:, None] * stride_k_row + key_head * stride_k_head + key[None, :]
    q_ptrs = q_ptr + token[:, None] * stride_q_row + key_head * stride_q_head + key[None, :]
    k, q = tl.load(k_ptrs, mask=inside, other=0.0), tl.load(q_ptrs, mask=inside, other=0.0)
    g = tl.load(g_ptr + token * stride_g_row + head, mask=real, other=0.0)
    beta = tl.load(beta_ptr + token * stride_beta_row + head, mask=real, other=0.0).to(tl.float32)

    wide_k, wide_q = k.to(tl.float32), q.to(tl.float32)
    k_unit = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + eps)
    q_unit = tl.rsqrt(tl.sum(wide_q * wide_q, 1) + eps) * scale
    since_start = tl.cumsum(g, 0)
    whole = tl.sum(tl.where(i == C - 1, since_start, 0.0), 0)  # not sum(g), which rounds otherwise
    # Masked first: exp of a large positive number is infinite.
    between = tl.exp(tl.where(i[:, None] >= i[None, :], since_start[:, None] - since_start[None, :], -float("inf")))
    between *= k_unit[None, :]
    if BF16:
        alike, scores = tl.dot(k, tl.trans(k)), tl.dot(q, tl.trans(k))
    else:
        alike = tl.dot(wide_k, tl.trans(wide_k), input_precision="tf32x3")
        scores = tl.dot(wide_q, tl.trans(wide_k), input_precision="tf32x3")

    of_chunk = chunk * HV + head
    square = of_chunk * C * C + i[:, None] * C + i[None, :]
    scores *= between * q_unit[:, None]
    tl.store(scores_ptr + square, scores)
    alike = tl.where(i[:, None] > i[None, :], alike * between * (beta * k_unit)[:, None], 0.0)
    tl.store(solve_ptr + square, unit_triangular_inverse(alike, C) * beta[None, :])
    factors = factors_ptr + of_chunk * 4 * C + i
    tl.store(factors, tl.exp(since_start) * k_unit)
    tl.store(factors + C, tl.exp(since_start) * q_unit)
    tl.store(factors + 2 * C, tl.exp(whole - since_start) * k_unit)
    tl.store(factors + 3 * C, tl.exp(whole) + tl.zeros([C], tl.float32))


@triton.jit
def _advance(
    q_ptr,  # [T, Hk, Dk]
    k_ptr,  # [T, Hk, Dk]
    v_ptr,  # [T, Hv, Dv]
    positions_ptr,  # [T]
    states_ptr,
    sequences_ptr,  # [R, 4]
    solve_ptr,  # [N, Hv, C, C] float32
    scores_ptr,  # [N, Hv, C, C] float32
    factors_ptr,  # [N, Hv, 4, C] float32
    cache_ptr,  # [num_states, Hv, Dk, Dv] float32
    out_ptr,  # [T, Hv, Dv]
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_out_row,
    stride_out_head,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    BF16: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    of_sequence = sequences_ptr + tl.program_id(2) * 4
    start, end, first = tl.load(of_sequence + 1), tl.load(of_sequence + 2), tl.load(of_sequence + 3)
    state = tl.load(states_ptr + tl.load(of_sequence))
    goes_on = tl.load(positions_ptr + start) != 0
    i, key = tl.arange(0, C), tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = (key < DK)[None, :], (value < DV)[None, :]
    at = cache_ptr + ((state * HV + head) * DK + key[:, None]) * DV + value[None, :]
    in_state = (key < DK)[:, None] & has_value
    kept = tl.where(goes_on, tl.load(at, mask=in_state, other=0.0), 0.0)  # [Dk, BLOCK_V]

    q_ptr += (head // GROUP) * stride_q_head + key[None, :]
    k_ptr += (head // GROUP) * stride_k_head + key[None, :]
    v_ptr += head * stride_v_head + value[None, :]
    out_ptr += head * stride_out_head + value[None, :]
    for chunk in range(tl.cdiv(end - start, C)):
        token = (start + chunk * C + i).to(tl.int64)[:, None]
        real = token < end
        of_chunk = (first + chunk).to(tl.int64) * HV + head
        square = of_chunk * C * C + i[:, None] * C + i[None, :]
        factors = factors_ptr + of_chunk * 4 * C
        k = tl.load(k_ptr + token * stride_k_row, mask=real & has_key, other=0.0)
        q = tl.load(q_ptr + token * stride_q_row, mask=real & has_key, other=0.0)
        v = tl.load(v_ptr + token * stride_v_row, mask=real & has_value, other=0.0)
        solve, scores = tl.load(solve_ptr + square), tl.load(scores_ptr + square)
        if not BF16:
            k, q = k.to(tl.float32), q.to(tl.float32)

        seen = tl.load(factors + i)[:, None] * _product(k, kept, BF16)  # [C, BLOCK_V]
        update = _product(solve, v.to(tl.float32) - seen, BF16)
        out = tl.load(factors + C + i)[:, None] * _product(q, kept, BF16)
        out += _product(scores, update, BF16)
        tl.store(out_ptr + token * stride_out_row, out.to(out_ptr.dtype.element_ty), mask=real & has_value)
        at_end = tl.load(factors + 2 * C + i)[:, None] * update
        kept = tl.load(factors + 3 * C) * kept + _product(tl.trans(k), at_end, BF16)
    tl.store(at, kept, mask=in_state)


def why_not(q: Tensor, v: Tensor) -> str | None:
    """Why the kernels do not serve such queries and values; None if they do."""
    if _shared_memory(v.device) == 0:
        return "the GPU is older than the kernels' tensor cores"
    if q.shape[-1] > MOST_KEYS:
        return f"a state of keys of {q.shape[-1]} has no room in a program's registers"
    return None


@lru_cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program can have; 0 if the GPU has no tensor cores for bfloat16. The interpreter has enough."""
    if device.type != "cuda":
        return LARGE
    if torch.cuda.get_device_capability(device) < (8, 0):
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def gated_delta_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    positions: Tensor,
    states: Tensor,
    chunks: Chunks,
    cache: Tensor,
    out: Tensor,
    eps: float,
) -> None:
    """The tokens that `chunks` tells of; others are left alone, here and in out. Two launches.

    Args:
        q, k: `[T, Hk, Dk]`, v: `[T, Hv, Dv]`; copied first if the elements of a head are not adjacent. See `why_not`.
        g, beta: `[T, Hv]`, likewise; g float32, the logarithm of what is kept.
        positions: `[T]` int64. A sequence whose first token is at position 0 starts from zero.
        states: int64, the cache's row of each row of the layout. No two sequences may have the same.
        cache: `[num_states, Hv, Dk, Dv]` float32, contiguous. Written **in place**.
        out: `[T, Hv, Dv]` of v's dtype with adjacent elements of a head.
        eps: added to the squares of a key's or query's length.
    """
    num_heads, value_size = v.shape[1:]
    num_key_heads, key_size = k.shape[1:]
    q, k, v, g, beta = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, g, beta))
    num_chunks, bf16 = len(chunks.chunks), v.dtype == torch.bfloat16
    square = num_chunks, num_heads, CHUNK, CHUNK
    solve, scores = (torch.empty(square, dtype=torch.float32, device=v.device) for _ in range(2))
    factors = torch.empty((num_chunks, num_heads, NUM_FACTORS, CHUNK), dtype=torch.float32, device=v.device)
    block_k = max(16, power_of_two(key_size))
    block_v = min(max(16, power_of_two(value_size)), MOST_COLUMNS)
    load_ahead = bf16 and _shared_memory(v.device) >= LARGE
    shared = {
        "HV": num_heads, "GROUP": num_heads // num_key_heads, "DK": key_size, "BLOCK_K": block_k, "C": CHUNK,
        "BF16": bf16, "num_warps": 4, **dependent_launch(v.device),
    }  # fmt: skip
    _prepare[num_chunks, num_heads](
        q, k, g, beta, chunks.chunks, solve, scores, factors,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), g.stride(0), beta.stride(0), key_size**-0.5, eps, **shared,
    )  # fmt: skip
    _advance[ceil_div(value_size, block_v), num_heads, len(chunks.sequences)](
        q, k, v, positions, states, chunks.sequences, solve, scores, factors, cache, out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        DV=value_size, BLOCK_V=block_v, num_stages=2 if load_ahead else 1, **shared,
    )  # fmt: skip
