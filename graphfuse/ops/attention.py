"""Causal attention with an optional KV cache, as one opaque op: `graphfuse::attention`.

Everything a decoder layer mutates lives behind this op, so that the rest of a traced layer is functional and repeated
layers can be traced once. Keys and values of the new tokens are written into the cache, then every query attends to
the slots whose position is at most its own; without a cache it attends to the tokens of the call.

The schema declares no mutation on purpose. A declared mutation inside a traced region cannot be functionalised (torch
2.11 to 2.13), and none is needed for correctness: the op alone owns the cache, nothing else in a graph reads it, and
the data dependence between calls of different steps is the program order of whole graphs.

Legend: B batch, S sequence of this call, L slots of the cache, Hq query heads, Hkv key-value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.errors import ArgumentError
from graphfuse.ops.layout import check_ragged, read_pages, split, starts_of, write_pair, write_rows
from graphfuse.ops.sinks import attend
from graphfuse.ops.varlen import gather_slots, slots_of_step, varlen_attention


@torch.library.custom_op("graphfuse::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    scale: float,
    sliding_window: int | None,
    sinks: Tensor | None = None,
    entries: Tensor | None = None,
    pages: Tensor | None = None,
    spans: Tensor | None = None,
) -> Tensor:
    """Grouped-query causal attention of `q` over the cache, or over `k` and `v` themselves.

    Args:
        q: `[B, S, Hq, D]`, after the rotary embedding.
        k, v: `[B, S, Hkv, D]` with Hq a multiple of Hkv; query head h reads key-value head `h // (Hq // Hkv)`.
        positions: `[B, S]` int64. Rows that are padded on the right simply count on: their last tokens write slots
            that the row's real tokens overwrite before they can see them.
        k_cache, v_cache: `[max_batch, max_len, Hkv, D]` of q's dtype, or both None. Row b of the call is row b of the
            cache. Written **in place** at (b, positions[b, s]), although the schema says nothing of it (see above).
            Of a ragged call `[num_pages, page_size, Hkv, D]`, written at `entries`.
        scale: factor on the dot products.
        sliding_window: a query at p sees the keys at p - window + 1 .. p; None sees all.
        sinks: `[Hq]`, floating: a logit of each head that joins its softmax and has no value.
        entries, pages, spans: of a ragged call, B = 1, with caches; see `graphfuse.ops.layout.Layout`.

    Returns:
        `[B, S, Hq, D]`, contiguous, in q's dtype.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit, or (on the CPU, where looking is free) a position lies
            outside the cache.

    With S == 1 (of a ragged call: a token a sequence) on CUDA nothing depends on the values in `positions`, so the call
    can be captured in a CUDA graph. A longer call looks at them once, to take the causal kernel when rows start at zero
    and to read only the used slots.
    """
    _check(q, k, v, positions, k_cache, v_cache, sliding_window, sinks)
    check_ragged(positions, entries, pages, spans)
    _check_token_dims(q, k, v, positions)
    if q.numel() == 0:
        return q.new_empty(q.shape)
    if entries is not None and pages is not None and spans is not None:
        if k_cache is None or v_cache is None:
            raise ArgumentError("A ragged call reads and writes caches. Pass k_cache and v_cache.")
        write_pair((k_cache, v_cache), entries, (k[0], v[0]))
        attended = _of_pages(q[0], positions[0], k_cache, v_cache, scale, sliding_window, sinks, pages, spans)
        return attended[None]
    length = positions.shape[1]
    captured = q.is_cuda and length == 1
    if k_cache is None or v_cache is None:
        keys, values, key_positions = k, v, positions[:, None, :]  # [B, 1, S]
    else:
        keys, values = write_rows(k, positions, k_cache), write_rows(v, positions, v_cache)
        used = keys.shape[1] if captured else int(positions.max()) + 1
        keys, values = keys[:, :used], values[:, :used]
        key_positions = torch.arange(used, device=q.device)[None, None, :]  # [1, 1, L]
    if sinks is None and not captured and length > 1 and is_plain_causal(positions, sliding_window):
        return dot_product_attention(q, k, v, None, scale)
    query_positions = positions[:, :, None]  # [B, S, 1]
    mask = key_positions <= query_positions  # [B, S, L]
    if sliding_window is not None:
        mask = mask & (key_positions > query_positions - sliding_window)
    if sinks is not None:
        return attend(q, keys, values, sinks, mask, scale)
    return dot_product_attention(q, keys, values, mask, scale)


@attention.register_fake
def _(q, k, v, positions, k_cache, v_cache, scale, sliding_window, sinks=None, entries=None, pages=None, spans=None):
    _check(q, k, v, positions, k_cache, v_cache, sliding_window, sinks)
    check_ragged(positions, entries, pages, spans)
    return q.new_empty(q.shape)


def _of_pages(
    q: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    pages: Tensor,
    spans: Tensor,
) -> Tensor:
    """A ragged call, its keys and values in the caches already: `[T, Hq, D]` for q `[T, Hq, D]`, positions `[T]`."""
    num_single, longer = split(len(q), spans)
    if not longer:
        return _one_token_each(q, k_cache, v_cache, pages, positions, scale, window, sinks).contiguous()
    out = q.new_empty(q.shape)
    if num_single:
        one = slice(0, num_single)
        out[one] = _one_token_each(q[one], k_cache, v_cache, pages[one], positions[one], scale, window, sinks)
    starts = starts_of(tuple(longer), q.device)
    slots = slots_of_step(pages, num_single, starts, k_cache.shape[1])
    keys, values = gather_slots(k_cache, slots), gather_slots(v_cache, slots)
    out[num_single:] = varlen_attention(
        q[num_single:], keys, values, starts.queries, starts.keys, starts.max_query, starts.max_key, scale, window,
        sinks,
    )  # fmt: skip
    return out


def _one_token_each(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    if q.is_cuda:
        from graphfuse.kernels.paged_decode import paged_decode

        return paged_decode(q, k_cache, v_cache, pages, positions, scale, window, sinks)
    length = int(positions.max()) + 1
    keys, values = (read_pages(cache, pages, length, positions + 1) for cache in (k_cache, v_cache))  # [R, L, Hkv, D]
    at = torch.arange(length, device=q.device)
    mask = (at <= positions[:, None])[:, None]  # [R, 1, L]
    if window is not None:
        mask = mask & (at > positions[:, None, None] - window)
    if sinks is not None:
        return attend(q[:, None], keys, values, sinks, mask, scale)[:, 0]
    return dot_product_attention(q[:, None], keys, values, mask, scale)[:, 0]


def is_plain_causal(positions: Tensor, sliding_window: int | None) -> bool:
    """Every row starts at zero and no window cuts in: the new tokens are all there is to attend to."""
    length = positions.shape[1]
    if sliding_window is not None and sliding_window < length:
        return False
    return bool((positions == torch.arange(length, device=positions.device)).all())


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of q `[B, S, Hq, D]` over k, v `[B, L, Hkv, D]` (v's D may be another); mask `[B, S, L]`, or None for
    causal."""
    batch, length, num_heads, _ = q.shape
    num_kv_heads = k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, Hkv, L, D]
    if mask is None:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=num_heads != num_kv_heads
        )
        return out.transpose(1, 2).contiguous()
    # The heads of a group become more queries of their key-value head: no kernel needs to know of groups, and the
    # cache is read once instead of being expanded to the query heads.
    group = num_heads // num_kv_heads
    q = q.view(batch, length, num_kv_heads, group, -1).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, num_kv_heads, group * length, -1)
    mask = mask[:, None, None].expand(batch, 1, group, length, mask.shape[-1]).reshape(batch, 1, group * length, -1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)  # [B, Hkv, group * S, D]
    out = out.view(batch, num_kv_heads, group, length, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, length, num_heads, -1).contiguous()


def _check(q, k, v, positions, k_cache, v_cache, sliding_window, sinks) -> None:
    """What can be checked without looking at a token dimension (they may be unknown while tracing)."""
    if not (q.dim() == k.dim() == v.dim() == 4 and positions.dim() == 2):
        raise ArgumentError(
            f"attention got q, k, v of {q.dim()}, {k.dim()}, {v.dim()} dimensions and positions of {positions.dim()}. "
            "Pass q [B, S, Hq, D], k and v [B, S, Hkv, D], positions [B, S]."
        )
    if positions.dtype != torch.int64:
        raise ArgumentError(f"positions are {positions.dtype}. Pass int64.")
    if k.shape[2:] != v.shape[2:] or q.shape[3] != k.shape[3]:
        raise ArgumentError(
            f"Head shapes do not fit: q {tuple(q.shape[2:])}, k {tuple(k.shape[2:])}, v {tuple(v.shape[2:])}. "
            "All need the same head size, k and v the same number of heads."
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        raise ArgumentError(
            f"{q.shape[2]} query heads cannot be shared by {k.shape[2]} key-value heads. "
            "The first must be a multiple of the second."
        )
    if (k_cache is None) != (v_cache is None):
        raise ArgumentError("Only one of k_cache and v_cache is given. Pass both or neither.")
    caches = [t for t in (k_cache, v_cache) if t is not None]
    for t in (k, v, *caches):
        if t.dtype != q.dtype:
            raise ArgumentError(f"q is {q.dtype} but another input is {t.dtype}. Use one dtype for all.")
    for t in (k, v, positions, *caches, *(() if sinks is None else (sinks,))):
        if t.device != q.device:
            raise ArgumentError(f"q is on {q.device} but another input is on {t.device}. Use one device for all.")
    for cache in caches:
        if cache.dim() != 4 or cache.shape[2:] != k.shape[2:]:
            raise ArgumentError(
                f"A KV cache has shape {tuple(cache.shape)}. Allocate it as [max_batch, max_len, "
                f"{k.shape[2]}, {k.shape[3]}]."
            )
    if sliding_window is not None and sliding_window < 1:
        raise ArgumentError(f"sliding_window is {sliding_window}. Pass a positive number of tokens, or None.")
    if sinks is not None and (sinks.shape != (q.shape[2],) or not sinks.is_floating_point()):
        raise ArgumentError(
            f"sinks are {sinks.dtype} of shape {tuple(sinks.shape)}. Pass one floating logit for each of the "
            f"{q.shape[2]} query heads."
        )


def _check_token_dims(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
    shapes = {tuple(t.shape[:2]) for t in (q, k, v, positions)}
    if len(shapes) != 1:
        raise ArgumentError(
            f"q, k, v and positions disagree on [batch, sequence]: {sorted(shapes)}. Pass the same for all four."
        )
