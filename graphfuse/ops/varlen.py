"""Causal attention of ragged prompts: the queries of several sequences, one after the other, over their gathered keys.

    caches ─► gather_pages ─► k, v [L, Hkv, D] of all sequences in turn ─► varlen_attention(q [T, Hq, D]) ─► [T, Hq, Dv]

A sequence's queries are its last tokens: query i of n, over m keys, sees the keys 0 .. m - n + i, or the last of them
within the window.

    kernel   on CUDA in bfloat16 and float16: FlashAttention, as torch has it, which reads what is ragged as it is
    plain    elsewhere: torch's scaled dot products, or `sinks.attend`, one sequence after the other

Sinks and small values need no kernel of their own. A head's sink takes exp(sink) / (exp(sink) + exp(lse)) of the
weight, with lse the logarithm of the sum that the kernel has divided by; values smaller than keys (MLA) are padded.

Legend: R sequences, T queries of all, L keys of all, Hq query heads, Hkv key-value heads, D head size, Dv value size.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.errors import ArgumentError
from graphfuse.ops import sinks as sink_attention
from graphfuse.ops.layout import Starts


def gather_pages(cache: Tensor, pages: Tensor, key_lengths: Tensor, total: int | None = None) -> Tensor:
    """`[L, ...]`: the first key_lengths[r] positions of each sequence, in turn, copied out of its pages.

    Args:
        cache: `[num_pages, page_size, ...]`.
        pages: `[R, N]` int64. Only those of positions that are read are looked up.
        key_lengths: `[R]` int64, at most N * page_size.
        total: L, their sum. Without it the host waits for the device, to learn it.
    """
    return gather_slots(cache, page_slots(pages, key_lengths, cache.shape[1], total))


def gather_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """`[L, ...]` of cache `[num_pages, page_size, ...]`; slots as of `page_slots`, which all layers share."""
    return cache.flatten(0, 1).index_select(0, slots)


def page_slots(pages: Tensor, key_lengths: Tensor, page_size: int, total: int | None = None) -> Tensor:
    """`[L]` int64: page * page_size + slot of each position; arguments as of `gather_pages`."""
    if total is None:
        total = int(key_lengths.sum())
    ends = key_lengths.cumsum(0)
    rows = torch.arange(len(pages), device=pages.device).repeat_interleave(key_lengths, output_size=total)  # [L]
    position = torch.arange(total, device=pages.device) - (ends - key_lengths)[rows]
    return pages[rows, position // page_size] * page_size + position % page_size


def slots_of_step(pages: Tensor, first: int, starts: Starts, page_size: int) -> Tensor:
    """`[L]` int64: `page_slots` of the sequences from `first` on. All layers of a step ask for the same; it is made for
    the first of them, and kept until another step's are. `pages` may change in place by PyTorch's own operations, which
    count; behind its back (`.data`, NumPy, a kernel) it must not."""
    global _last
    key = None if pages.is_inference() else (pages._version, first, page_size)
    last = _last
    if key is not None and last is not None and last[0] is pages and last[1] is starts and last[2] == key:
        return last[3]
    slots = page_slots(pages[first:], starts.key_lengths, page_size, starts.num_keys)
    _last = None if key is None else (pages, starts, key, slots)
    return slots


_last: tuple[Tensor, Starts, tuple[int, int, int], Tensor] | None = None


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query: int,
    max_key: int,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Each sequence's queries over its own keys.

    Args:
        q: `[T, Hq, D]`; query head h reads key-value head `h // (Hq // Hkv)`.
        k, v: `[L, Hkv, D]` and `[L, Hkv, Dv]`.
        query_starts, key_starts: `[R + 1]` int32: sequence r has the queries query_starts[r] to query_starts[r + 1],
            that one not included, and keys likewise, at least as many. Sequences may be empty.
        max_query, max_key: the most queries and keys of a sequence, or more.
        scale: factor on the dot products.
        sliding_window: a query sees that many keys at most, the last of which is its own; None: all before it.
        sinks: `[Hq]`, floating: a logit of each head that joins its softmax and has no value.

    Returns:
        `[T, Hq, Dv]`, contiguous, in q's dtype.

    Raises:
        ArgumentError: there are sinks, and values larger than keys.

    The kernel waits for nothing on the host; the plain path reads the starts.
    """
    if q.shape[0] == 0 or k.shape[0] == 0:
        return q.new_zeros(*q.shape[:2], v.shape[2])
    if sinks is not None and v.shape[2] > k.shape[2]:
        raise ArgumentError(
            f"Keys of {k.shape[2]} have values of {v.shape[2]} and sinks. Use values of at most that size."
        )
    if why_plain(q, v) is None:
        return _kernel(q, k, v, query_starts, key_starts, max_query, max_key, scale, sliding_window, sinks)
    return _plain(q, k, v, query_starts, key_starts, scale, sliding_window, sinks)


def why_plain(q: Tensor, v: Tensor) -> str | None:
    """Why FlashAttention does not serve such queries and values; None if it does."""
    size, value_size = q.shape[2], v.shape[2]
    if not q.is_cuda:
        return "the tensors are not on a CUDA GPU"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention does not take {q.dtype}"
    if size > 256 or size % 8 or value_size > size:
        return f"FlashAttention does not take heads of {size} with values of {value_size}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU is older than FlashAttention's"
    return None


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query: int,
    max_key: int,
    scale: float,
    sliding_window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    value_size = v.shape[2]
    if value_size < k.shape[2]:
        v = F.pad(v, (0, k.shape[2] - value_size))
    more: dict[str, Any] = {} if sinks is None else {"return_aux": AuxRequest(lse=True)}
    if q.shape[1] != k.shape[1] and _has_enable_gqa():
        more["enable_gqa"] = True
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # keys before the query's own, and after
    result = varlen_attn(
        _adjacent(q), _adjacent(k), _adjacent(v), query_starts, key_starts, max_query, max_key,
        scale=scale, window_size=window, **more,
    )  # fmt: skip
    if isinstance(result, Tensor):
        return result[..., :value_size].contiguous()
    assert sinks is not None
    out, lse = result  # lse: [Hq, T] float32, natural
    share = torch.sigmoid(lse.t() - sinks.float())  # [T, Hq]
    return (out[..., :value_size] * share[..., None]).to(q.dtype)


@lru_cache
def _has_enable_gqa() -> bool:
    """torch 2.11 has not, and hands what it is given to a kernel that knows groups; later ones want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    scale: float,
    sliding_window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    queries, keys = query_starts.tolist(), key_starts.tolist()
    for r in range(len(queries) - 1):
        here, there = slice(queries[r], queries[r + 1]), slice(keys[r], keys[r + 1])
        if here.start < here.stop:
            out[here] = _attend(q[here], k[there], v[there], scale, sliding_window, sinks)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None, sinks: Tensor | None) -> Tensor:
    """`[S, Hq, Dv]` for q `[S, Hq, D]`, the last queries of k `[L, Hkv, D]` and v `[L, Hkv, Dv]`."""
    length, num_keys = len(q), len(k)
    whole = length == num_keys and (sliding_window is None or sliding_window >= length)
    if whole and sinks is None:
        return _dot_product_attention(q, k, v, None, scale)
    key = torch.arange(num_keys, device=q.device)
    last = torch.arange(num_keys - length, num_keys, device=q.device)[:, None]
    mask = key <= last  # [S, L]
    if sliding_window is not None:
        mask &= key > last - sliding_window
    if sinks is None:
        return _dot_product_attention(q, k, v, mask, scale)
    padded = F.pad(v, (0, q.shape[2] - v.shape[2]))
    return sink_attention.attend(q[None], k[None], padded[None], sinks, mask[None], scale)[0, ..., : v.shape[2]]


def _dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Of one sequence; mask `[S, L]`, or None for causal."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, S or L, D]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
