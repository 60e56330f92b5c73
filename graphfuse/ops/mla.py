"""Multi-head latent attention over a compressed cache, as one opaque op: `graphfuse::mla_attention`.

A token's keys and values of all heads come from one latent vector c, and its heads share one rotated key r:

    k[h] = [W_uk[h] c, r],   v[h] = W_uv[h] c,   y[h] = sum over tokens of softmax(scale * (q[h] . k[h])) v[h]

so the cache holds c and r alone. The heads, and with them the rows of W, may be divided over ranks; the cache may not,
since every head reads all of it. There are two ways to the same result:

    expanded    keys and values are made of the latents: fewer operations for each pair of tokens, so for prompts
    absorbed    (q W_uk) . c and W_uv (sum of c): nothing is made, the cache is read once for all heads: for decoding

Like `graphfuse::attention`, the op owns its cache and declares no mutation; see there for why.
Source: DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.

Legend: B batch, S sequence of this call, L slots of the cache, H heads here, R latent size (kv_lora_rank), N and P the
parts of a key without and with rotary positions, V value size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.errors import ArgumentError
from graphfuse.ops.attention import dot_product_attention, is_plain_causal
from graphfuse.ops.layout import check_ragged, read_pages, split, starts_of, write_pair, write_rows
from graphfuse.ops.select_tokens import check_selected, gather_selected, longest, selected_mask, wide_bmm
from graphfuse.ops.varlen import gather_slots, slots_of_step, varlen_attention


@torch.library.custom_op("graphfuse::mla_attention", mutates_args=())
def mla_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_up: Tensor,
    positions: Tensor,
    latent_cache: Tensor | None,
    k_rope_cache: Tensor | None,
    scale: float,
    entries: Tensor | None = None,
    pages: Tensor | None = None,
    spans: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """Causal attention of this rank's heads over the cache, or over the tokens of the call themselves.

    Args:
        q_nope, q_rope: `[B, S, H, N]` and `[B, S, H, P]`, the latter after the rotary embedding.
        latent: `[B, S, R]`, after its norm.
        k_rope: `[B, S, P]`, after the rotary embedding.
        kv_up: `[H * (N + V), R]`: for each head W_uk, then W_uv.
        positions: `[B, S]` int64, as for `graphfuse::attention`.
        latent_cache, k_rope_cache: `[max_batch, max_len, R]` and `[max_batch, max_len, P]`, or both None. Written **in
            place** at (b, positions[b, s]). Of a ragged call `[num_pages, page_size, ...]`, written at `entries`.
        scale: factor on the dot products.
        entries, pages, spans: of a ragged call, B = 1, with caches; see `graphfuse.ops.layout.Layout`.
        selected: `[B, S, K]` int32, what `graphfuse::select_tokens` gives: the only keys that a query attends to. None:
            all before it.

    Returns:
        `[B, S, H, V]`, contiguous, in q_nope's dtype.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit, or (on the CPU) a position lies outside the cache.

    With S == 1 (of a ragged call: a token a sequence) on CUDA nothing depends on the values in `positions`: such a call
    can be captured in a CUDA graph.
    """
    value_size = _check(q_nope, q_rope, latent, k_rope, kv_up, positions, latent_cache, k_rope_cache)
    check_ragged(positions, entries, pages, spans)
    check_selected(selected, positions)
    _check_token_dims(q_nope, q_rope, latent, k_rope, positions, *(() if selected is None else (selected,)))
    batch, length, num_heads, _ = q_nope.shape
    if q_nope.numel() == 0:
        return q_nope.new_empty(batch, length, num_heads, value_size)
    if entries is not None and pages is not None and spans is not None:
        if latent_cache is None or k_rope_cache is None:
            raise ArgumentError("A ragged call reads and writes caches. Pass latent_cache and k_rope_cache.")
        write_pair((latent_cache, k_rope_cache), entries, (latent[0], k_rope[0]))
        return _of_pages(
            q_nope[0], q_rope[0], kv_up, positions[0], latent_cache, k_rope_cache, scale, pages, spans, value_size,
            None if selected is None else selected[0],
        )[None]  # fmt: skip
    captured = q_nope.is_cuda and length == 1
    sees_all = selected is None or length <= selected.shape[2]
    if not captured and length > 1 and sees_all and is_plain_causal(positions, None):
        if latent_cache is not None and k_rope_cache is not None:
            write_rows(latent, positions, latent_cache)
            write_rows(k_rope, positions, k_rope_cache)
        return _expanded(q_nope, q_rope, latent, k_rope, kv_up, None, scale)
    if latent_cache is None or k_rope_cache is None:
        key_positions = positions[:, None, :]  # [B, 1, S]
    else:
        latent = write_rows(latent, positions, latent_cache)
        k_rope = write_rows(k_rope, positions, k_rope_cache)
        used = latent.shape[1] if captured else int(positions.max()) + 1
        latent, k_rope = latent[:, :used], k_rope[:, :used]
        key_positions = torch.arange(used, device=positions.device)[None, None, :]  # [1, 1, L]
    mask = key_positions <= positions[:, :, None] if selected is None else selected_mask(selected, latent.shape[1])
    attend = _absorbed if length == 1 else _expanded
    return attend(q_nope, q_rope, latent, k_rope, kv_up, mask, scale)


@mla_attention.register_fake
def _(
    q_nope, q_rope, latent, k_rope, kv_up, positions, latent_cache, k_rope_cache, scale,
    entries=None, pages=None, spans=None, selected=None,
):  # fmt: skip
    value_size = _check(q_nope, q_rope, latent, k_rope, kv_up, positions, latent_cache, k_rope_cache)
    check_ragged(positions, entries, pages, spans)
    check_selected(selected, positions)
    return q_nope.new_empty(*q_nope.shape[:3], value_size)


def _of_pages(
    q_nope: Tensor,
    q_rope: Tensor,
    kv_up: Tensor,
    positions: Tensor,
    latent_cache: Tensor,
    k_rope_cache: Tensor,
    scale: float,
    pages: Tensor,
    spans: Tensor,
    value_size: int,
    selected: Tensor | None,
) -> Tensor:
    """A ragged call, its latents in the caches already: `[T, H, V]` for queries `[T, H, ...]`, positions `[T]` and a
    selection `[T, K]`."""
    num_single, longer = split(len(q_nope), spans)
    if not longer:
        where = (latent_cache, k_rope_cache, pages, positions, scale)
        return _one_token_each(q_nope, q_rope, kv_up, *where, selected).contiguous()
    out = q_nope.new_empty(*q_nope.shape[:2], value_size)
    if num_single:
        one = slice(0, num_single)
        where = (latent_cache, k_rope_cache, pages[one], positions[one], scale)
        chosen = None if selected is None else selected[one]
        out[one] = _one_token_each(q_nope[one], q_rope[one], kv_up, *where, chosen)
    if selected is not None and any(span.end > selected.shape[1] for span in longer):
        for span in longer:
            here, its_pages = span.here, pages[span.row][None]
            latent, k_rope = (read_pages(cache, its_pages, span.end) for cache in (latent_cache, k_rope_cache))
            mask = selected_mask(selected[here][None], span.end)
            out[here] = _expanded(q_nope[here][None], q_rope[here][None], latent, k_rope, kv_up, mask, scale)[0]
    else:
        starts = starts_of(tuple(longer), q_nope.device)
        slots = slots_of_step(pages, num_single, starts, latent_cache.shape[1])
        keys, values = _keys_values(
            gather_slots(latent_cache, slots), gather_slots(k_rope_cache, slots), kv_up, *q_nope.shape[1:]
        )
        q = torch.cat((q_nope[num_single:], q_rope[num_single:]), dim=-1)
        out[num_single:] = varlen_attention(
            q, keys, values, starts.queries, starts.keys, starts.max_query, starts.max_key, scale
        )
    return out


def _one_token_each(
    q_nope: Tensor,
    q_rope: Tensor,
    kv_up: Tensor,
    latent_cache: Tensor,
    k_rope_cache: Tensor,
    pages: Tensor,
    positions: Tensor,
    scale: float,
    selected: Tensor | None,
) -> Tensor:
    """Absorbed attention of one token a sequence, `[R, H, V]`, with a selection `[R, K]`: of what it names alone is
    read, unless that is all there may be."""
    if selected is not None and longest(positions, pages, latent_cache) > selected.shape[1]:
        latent, k_rope = (gather_selected(cache, pages, selected) for cache in (latent_cache, k_rope_cache))
        mask = (selected >= 0)[:, None]  # [R, 1, K]
        return _absorbed(q_nope[:, None], q_rope[:, None], latent, k_rope, kv_up, mask, scale)[:, 0]
    if not q_nope.is_cuda:
        length = int(positions.max()) + 1
        latent, k_rope = (read_pages(cache, pages, length, positions + 1) for cache in (latent_cache, k_rope_cache))
        mask = (torch.arange(length, device=positions.device) <= positions[:, None])[:, None]  # [R, 1, L]
        return _absorbed(q_nope[:, None], q_rope[:, None], latent, k_rope, kv_up, mask, scale)[:, 0]
    from graphfuse.kernels.paged_latent_decode import paged_latent_decode

    num_heads, nope = q_nope.shape[1:]
    up = kv_up.view(num_heads, -1, kv_up.shape[1])  # [H, N + V, R]
    q_latent = torch.einsum("bhn,hnr->bhr", q_nope, up[:, :nope])
    mixed = paged_latent_decode(q_latent, q_rope, latent_cache, k_rope_cache, pages, positions, scale)
    return torch.einsum("bhr,hvr->bhv", mixed, up[:, nope:])


def _expanded(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_up: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Ordinary attention with as many key-value heads as query heads; latent `[B, L, R]`, k_rope `[B, L, P]`, mask
    `[B, S, L]` or None for causal."""
    keys, values = _keys_values(latent, k_rope, kv_up, *q_nope.shape[2:])
    return dot_product_attention(torch.cat((q_nope, q_rope), dim=-1), keys, values, mask, scale)


def _keys_values(latent: Tensor, k_rope: Tensor, kv_up: Tensor, num_heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """Of latents `[..., R]` and rotary keys `[..., P]`: keys `[..., H, N + P]` and values `[..., H, V]`."""
    both = F.linear(latent, kv_up).unflatten(-1, (num_heads, -1))  # [..., H, N + V]
    k_rope = k_rope[..., None, :].expand(*k_rope.shape[:-1], num_heads, k_rope.shape[-1])
    return torch.cat((both[..., :nope], k_rope), dim=-1), both[..., nope:]


def _absorbed(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_up: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """The same, with W_uk moved to the query and W_uv behind the sum: one key-value head, the cache itself."""
    batch, length, num_heads, nope = q_nope.shape
    up = kv_up.view(num_heads, -1, kv_up.shape[1])  # [H, N + V, R]
    q_latent = torch.einsum("bshn,hnr->bshr", q_nope, up[:, :nope])
    scores = wide_bmm(q_latent.flatten(1, 2), latent.transpose(1, 2))  # [B, S * H, L]
    scores = (scores + wide_bmm(q_rope.flatten(1, 2), k_rope.transpose(1, 2))) * scale
    scores = scores.unflatten(1, (length, num_heads)).masked_fill(~mask[:, :, None], -torch.inf)
    weights = scores.softmax(-1).to(latent.dtype)  # [B, S, H, L]
    mixed = torch.bmm(weights.flatten(1, 2), latent).view(batch, length, num_heads, -1)  # [B, S, H, R]
    return torch.einsum("bshr,hvr->bshv", mixed, up[:, nope:]).contiguous()


def _check(q_nope, q_rope, latent, k_rope, kv_up, positions, latent_cache, k_rope_cache) -> int:
    """What can be checked without looking at a token dimension. The size of a value."""
    given = (q_nope, q_rope, latent, k_rope, kv_up, positions)
    if tuple(t.dim() for t in given) != (4, 4, 3, 3, 2, 2):
        raise ArgumentError(
            f"mla_attention got tensors of {', '.join(str(t.dim()) for t in given)} dimensions. Pass q_nope "
            "[B, S, H, N], q_rope [B, S, H, P], latent [B, S, R], k_rope [B, S, P], kv_up [H * (N + V), R], "
            "positions [B, S]."
        )
    if positions.dtype != torch.int64:
        raise ArgumentError(f"positions are {positions.dtype}. Pass int64.")
    num_heads, nope = q_nope.shape[2:]
    if q_rope.shape[2] != num_heads or q_rope.shape[3] != k_rope.shape[2]:
        raise ArgumentError(
            f"Rotary parts do not fit: q_nope has {num_heads} heads, q_rope is {tuple(q_rope.shape[2:])} (heads, "
            f"size), k_rope of size {k_rope.shape[2]}. Both queries need the same heads, both rotary parts one size."
        )
    rows, rank = kv_up.shape
    if rank != latent.shape[2] or rows % num_heads or rows // num_heads <= nope:
        raise ArgumentError(
            f"kv_up is {list(kv_up.shape)} for {num_heads} heads, keys of {nope} and latents of {latent.shape[2]}. "
            "Pass [H * (N + V), R]."
        )
    if (latent_cache is None) != (k_rope_cache is None):
        raise ArgumentError("Only one of latent_cache and k_rope_cache is given. Pass both or neither.")
    caches = [t for t in (latent_cache, k_rope_cache) if t is not None]
    for t in (q_rope, latent, k_rope, kv_up, *caches):
        if t.dtype != q_nope.dtype:
            raise ArgumentError(f"q_nope is {q_nope.dtype} but another input is {t.dtype}. Use one dtype for all.")
    for t in (*given, *caches):
        if t.device != q_nope.device:
            raise ArgumentError(f"q_nope is on {q_nope.device} but another input on {t.device}. Use one device.")
    for cache, size in zip(caches, (rank, k_rope.shape[2]), strict=False):
        if cache.dim() != 3 or cache.shape[2] != size:
            raise ArgumentError(f"A cache has shape {tuple(cache.shape)}. Allocate it as [max_batch, max_len, {size}].")
    return rows // num_heads - nope


def _check_token_dims(*tensors: Tensor) -> None:
    shapes = {tuple(t.shape[:2]) for t in tensors}
    if len(shapes) != 1:
        raise ArgumentError(
            f"Queries, latents, rotary keys and positions disagree on [batch, sequence]: {sorted(shapes)}. Pass the "
            "same for all."
        )
