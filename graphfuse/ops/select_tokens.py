"""Which tokens a query attends to, as one opaque op, `graphfuse::select_tokens`: those that an indexer scores highest.

    score(t, s) = sum over the indexer's heads of w[t, h] * relu(q[t, h] . k[s]),   s <= t

All its heads share one key of a token, which is all that is cached. The op owns that cache, as `graphfuse::attention`
does; see there for why. Factors that all scores have in common (1 / sqrt(D)) do not change which are highest, and are
left out.

A selection is `[B, S, K]` int32: for each query K numbers of keys, in no order, -1 for those that it has less. Queries
that see at most K keys have all of them. Of equal scores at the edge any may be taken.

Source: DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.

Legend: B batch, S sequence of this call, L keys, H the indexer's heads, D their size, K top_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.errors import ArgumentError
from graphfuse.ops.layout import check_ragged, read_pages, split, write_entries, write_rows

MOST_PRODUCTS = 1 << 26
"""Products of queries and keys at a time: 256 MiB of float32."""


@torch.library.custom_op("graphfuse::select_tokens", mutates_args=())
def select_tokens(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    positions: Tensor,
    k_cache: Tensor | None,
    top_k: int,
    entries: Tensor | None = None,
    pages: Tensor | None = None,
    spans: Tensor | None = None,
) -> Tensor:
    """The selection of each query among the keys in the cache, or in the call itself.

    Args:
        q: `[B, S, H, D]`, after the rotary embedding.
        k: `[B, S, D]`, after its norm and the rotary embedding.
        weights: `[B, S, H]` float32, of each head in the sum.
        positions: `[B, S]` int64, as for `graphfuse::attention`.
        k_cache: `[max_batch, max_len, D]`, or None. Written **in place** at (b, positions[b, s]). Of a ragged call
            `[num_pages, page_size, D]`, written at `entries`.
        top_k: how many keys a query has at most.
        entries, pages, spans: of a ragged call, B = 1, with a cache; see `graphfuse.ops.layout.Layout`.

    Returns:
        `[B, S, top_k]` int32. A key's number is its position, or without a cache its place in the row.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit, or (on the CPU) a position lies outside the cache.

    With S == 1 (of a ragged call: a token a sequence) on CUDA nothing depends on the values in `positions`: such a call
    can be captured in a CUDA graph.
    """
    _check(q, k, weights, positions, k_cache, top_k)
    check_ragged(positions, entries, pages, spans)
    shapes = {tuple(t.shape[:2]) for t in (q, k, weights, positions)}
    if len(shapes) != 1:
        raise ArgumentError(
            f"Queries, keys, weights and positions disagree on [batch, sequence]: {sorted(shapes)}. Pass the same for "
            "all."
        )
    if q.numel() == 0:
        return q.new_empty(*q.shape[:2], top_k, dtype=torch.int32)
    if entries is not None and pages is not None and spans is not None:
        if k_cache is None:
            raise ArgumentError("A ragged call reads and writes a cache. Pass k_cache.")
        write_entries(k_cache, entries, k[0])
        return _of_pages(q[0], weights[0], positions[0], k_cache, top_k, pages, spans)[None]
    if k_cache is None:
        return _highest(q, weights, k, positions[:, None, :], positions, top_k)
    keys = write_rows(k, positions, k_cache)
    if not (q.is_cuda and q.shape[1] == 1):
        keys = keys[:, : int(positions.max()) + 1]
    return _highest(q, weights, keys, None, positions, top_k)


@select_tokens.register_fake
def _(q, k, weights, positions, k_cache, top_k, entries=None, pages=None, spans=None):
    _check(q, k, weights, positions, k_cache, top_k)
    check_ragged(positions, entries, pages, spans)
    return q.new_empty(*q.shape[:2], top_k, dtype=torch.int32)


def _of_pages(
    q: Tensor, weights: Tensor, positions: Tensor, k_cache: Tensor, top_k: int, pages: Tensor, spans: Tensor
) -> Tensor:
    """A ragged call, its keys in the cache already: `[T, K]` for queries `[T, H, D]` and positions `[T]`."""
    num_single, longer = split(len(q), spans)
    out = q.new_empty(len(q), top_k, dtype=torch.int32)
    if num_single:
        one = slice(0, num_single)
        keys = read_pages(k_cache, pages[one], longest(positions[one], pages, k_cache))
        out[one] = _highest(q[one, None], weights[one, None], keys, None, positions[one, None], top_k)[:, 0]
    for span in longer:
        keys = read_pages(k_cache, pages[span.row][None], span.end)
        here = span.here
        out[here] = _highest(q[here][None], weights[here][None], keys, None, positions[here][None], top_k)[0]
    return out


def longest(positions: Tensor, pages: Tensor, cache: Tensor) -> int:
    """How many entries of each sequence to read for one token each: on CUDA all, since to look would be to wait."""
    return pages.shape[1] * cache.shape[1] if positions.is_cuda else int(positions.max()) + 1


def _highest(
    q: Tensor, weights: Tensor, keys: Tensor, key_positions: Tensor | None, positions: Tensor, top_k: int
) -> Tensor:
    """`[B, S, K]` among keys `[B, L, D]` at key_positions `[B, 1, L]`, or at 0, 1, ... if None."""
    num_rows, length, num_heads, _ = q.shape
    num_keys = keys.shape[1]
    index = torch.arange(num_keys, device=q.device)
    at = index if key_positions is None else key_positions
    step = length
    if num_keys > top_k:
        step = max(1, MOST_PRODUCTS // (num_rows * num_heads * num_keys))
    parts = []
    for start in range(0, length, step):
        here = slice(start, start + step)
        seen = at <= positions[:, here, None]  # [B, s, L]
        if num_keys <= top_k:
            found = index.expand(seen.shape).masked_fill(~seen, -1)
        else:
            scores = _scores(q[:, here], weights[:, here], keys).masked_fill_(~seen, -torch.inf)
            best, found = scores.topk(top_k, dim=-1, sorted=False)
            found = found.masked_fill_(best.isneginf(), -1)
        parts.append(found.int())
    found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return F.pad(found, (0, top_k - found.shape[-1]), value=-1)


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """`[B, S, L]`, in at least float32."""
    products = wide_bmm(q.flatten(1, 2), keys.transpose(1, 2)).relu_()  # [B, S * H, L]
    products = products.unflatten(1, q.shape[1:3])
    return torch.matmul(weights.to(products.dtype)[:, :, None], products)[:, :, 0]


def selected_mask(selected: Tensor, num_keys: int) -> Tensor:
    """`[B, S, L]` bool: the keys that are in the selection."""
    mask = torch.zeros(*selected.shape[:2], num_keys + 1, dtype=torch.bool, device=selected.device)
    mask.scatter_(2, (selected + 1).long(), True)
    return mask[:, :, 1:].contiguous()


def gather_selected(cache: Tensor, pages: Tensor, selected: Tensor) -> Tensor:
    """`[R, K, ...]` of a cache `[num_pages, page_size, ...]`: each sequence's selection `[R, K]`; anything for -1."""
    at = selected.clamp(min=0).long()
    page_size = cache.shape[1]
    return cache.flatten(0, 1)[pages.gather(1, at // page_size) * page_size + at % page_size]


def wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    """A batched product in at least float32, for what will be summed or compared."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def check_selected(selected: Tensor | None, positions: Tensor) -> None:
    """What can be checked without looking at a token dimension."""
    if selected is None:
        return
    if selected.dim() != 3 or selected.dtype != torch.int32 or selected.device != positions.device:
        raise ArgumentError(
            f"selected is {selected.dtype} with {selected.dim()} dimensions on {selected.device}. Pass [B, S, K] int32 "
            f"on {positions.device}, from graphfuse::select_tokens."
        )


def _check(q, k, weights, positions, k_cache, top_k) -> None:
    """What can be checked without looking at a token dimension."""
    if (q.dim(), k.dim(), weights.dim(), positions.dim()) != (4, 3, 3, 2):
        raise ArgumentError(
            f"select_tokens got tensors of {q.dim()}, {k.dim()}, {weights.dim()}, {positions.dim()} dimensions. Pass q "
            "[B, S, H, D], k [B, S, D], weights [B, S, H], positions [B, S]."
        )
    if positions.dtype != torch.int64 or weights.dtype != torch.float32:
        raise ArgumentError(
            f"positions are {positions.dtype}, weights {weights.dtype}. Pass int64 positions and float32 weights."
        )
    if q.shape[2] != weights.shape[2] or q.shape[3] != k.shape[2]:
        raise ArgumentError(
            f"q has {q.shape[2]} heads of {q.shape[3]}, weights are of {weights.shape[2]} heads, keys of size "
            f"{k.shape[2]}. All heads need a weight, and queries and keys one size."
        )
    if top_k < 1:
        raise ArgumentError(f"top_k is {top_k}. Pass how many keys a query may have, at least one.")
    caches = () if k_cache is None else (k_cache,)
    for t in (k, *caches):
        if t.dtype != q.dtype:
            raise ArgumentError(f"q is {q.dtype} but another input is {t.dtype}. Use one dtype for all.")
    for t in (k, weights, positions, *caches):
        if t.device != q.device:
            raise ArgumentError(f"q is on {q.device} but another input on {t.device}. Use one device.")
    for cache in caches:
        if cache.dim() != 3 or cache.shape[2] != k.shape[2]:
            raise ArgumentError(
                f"The cache has shape {tuple(cache.shape)}. Allocate it as [max_batch, max_len, {k.shape[2]}]."
            )
