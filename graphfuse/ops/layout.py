"""Which tokens of a call belong together, and where caches have what came before them.

There are three kinds of calls:

    whole texts    [B, S] tokens, no caches: all there is to see is in the call
    padded rows    [B, S] tokens, row b of the call is row b of the caches; rows are padded on the right to one length
    ragged         [1, T] tokens: R sequences one behind another, those with one token first; each has its own pages of
                   the caches, and its own row of the caches of states

Caches of the last kind are `[num_pages, page_size, ...]`, and a sequence's position p is entry p % page_size of its
page p // page_size. A cache whose rows are sequences has one page for each.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from graphfuse.errors import ArgumentError


class Layout(NamedTuple):
    """`lengths` for whole texts and padded rows; all others for a ragged call."""

    lengths: Tensor | None = None
    """`[B]` int64, how many tokens of each row are real."""

    entries: Tensor | None = None
    """`[T]` int64, where each token's keys and values go: page * page_size + entry."""

    pages: Tensor | None = None
    """`[R, N]` int64, each sequence's pages in the order of its positions. What stands behind those it needs is not
    read, but must be a page."""

    states: Tensor | None = None
    """`[R]` int64, each sequence's row in the caches of states."""

    spans: Tensor | None = None
    """`[R, 2]` int64 **on the CPU**: how many tokens of this call each sequence has (1 or more), and how many came
    before them. Not looked at if there are as many tokens as sequences: such a call can be captured in a CUDA graph."""


class Span(NamedTuple):
    """A sequence with several tokens in a ragged call."""

    row: int
    start: int
    """Its first token among those of the call."""

    length: int
    before: int
    """How many tokens of it the caches have."""

    @property
    def here(self) -> slice:
        return slice(self.start, self.start + self.length)

    @property
    def end(self) -> int:
        return self.before + self.length


def split(num_tokens: int, spans: Tensor) -> tuple[int, list[Span]]:
    """How many sequences have one token, which stand first, and the others."""
    if num_tokens == spans.shape[0]:
        return num_tokens, []
    counts = spans.tolist()
    num_single = next((row for row, (length, _) in enumerate(counts) if length != 1), len(counts))
    longer, start = [], num_single
    for row, (length, before) in enumerate(counts[num_single:], num_single):
        longer.append(Span(row, start, length, before))
        start += length
    if start != num_tokens:
        raise ArgumentError(f"spans count {start} tokens, and the call has {num_tokens}. They must be the same.")
    return num_single, longer


class Starts(NamedTuple):
    """Where the queries and keys of sequences that are read from pages begin, one sequence behind another."""

    queries: Tensor
    keys: Tensor
    """`[R + 1]` int32 each."""

    key_lengths: Tensor
    """`[R]` int64."""

    max_query: int
    max_key: int
    num_keys: int


@lru_cache(maxsize=8)
def starts_of(spans: tuple[Span, ...], device: torch.device) -> Starts:
    """The same for every layer of a step, and so made once; on one stream of a device, which is the current one's."""
    lengths, ends = [span.length for span in spans], [span.end for span in spans]
    queries, keys = (torch.tensor([0, *accumulate(sizes)], dtype=torch.int32) for sizes in (lengths, ends))
    queries, keys, key_lengths = (t.to(device, non_blocking=True) for t in (queries, keys, torch.tensor(ends)))
    return Starts(queries, keys, key_lengths, max(lengths), max(ends), sum(ends))


def write_entries(cache: Tensor, entries: Tensor, values: Tensor) -> None:
    """Put values `[T, ...]` into their entries of a cache `[num_pages, page_size, ...]`."""
    cache.flatten(0, 1).index_put_((entries,), values)


def write_pair(caches: tuple[Tensor, Tensor], entries: Tensor, values: tuple[Tensor, Tensor]) -> None:
    """The same for two caches, on a GPU in one launch."""
    if entries.is_cuda and all(cache.is_contiguous() for cache in caches):
        from graphfuse.kernels.paged_write import paged_write  # not above: Triton is published for Linux only

        paged_write(*values, entries, *caches)
        return
    for cache, its in zip(caches, values, strict=True):
        write_entries(cache, entries, its)


def write_rows(values: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    """Put values `[B, S, ...]` at their positions of a cache `[max_batch, max_len, ...]`; return this batch's rows."""
    batch, length = positions.shape
    max_batch, max_len = cache.shape[:2]
    if batch > max_batch:
        raise ArgumentError(
            f"The batch has {batch} rows but the KV cache holds {max_batch}. Allocate it with max_batch >= {batch}."
        )
    if not positions.is_cuda and int(positions.max()) >= max_len:
        raise ArgumentError(
            f"Position {int(positions.max())} lies outside the KV cache of {max_len} slots. Allocate it with a larger "
            "max_len, or shorten the prompt or the generation."
        )
    rows = torch.arange(batch, device=positions.device)[:, None].expand(batch, length)
    cache.index_put_((rows, positions), values)
    return cache[:batch]


def read_pages(cache: Tensor, pages: Tensor, length: int, ends: Tensor | None = None) -> Tensor:
    """The first `length` entries of each sequence, `[R, length, ...]`, for pages `[R, N]`; zero from `ends` `[R]`
    on, if given: what stands there is anybody's, and weighed with zero, a NaN would still be one."""
    num_pages = -(-length // cache.shape[1])
    found = cache[pages[:, :num_pages]].flatten(1, 2)[:, :length]
    if ends is None:
        return found
    behind = torch.arange(length, device=pages.device) >= ends[:, None]  # [R, length]
    return found.masked_fill_(behind[(..., *[None] * (found.dim() - 2))], 0)


def check_ragged(positions: Tensor, entries: Tensor | None, pages: Tensor | None, spans: Tensor | None) -> None:
    """What can be checked without looking at a token dimension."""
    given = [t is not None for t in (entries, pages, spans)]
    if not any(given):
        return
    if entries is None or pages is None or spans is None:
        raise ArgumentError("A ragged call needs entries, pages and spans. Pass all three, or none.")
    if (entries.dim(), pages.dim(), spans.dim()) != (1, 2, 2) or spans.shape[1] != 2:
        raise ArgumentError(
            f"entries have {entries.dim()} dimensions, pages {pages.dim()}, spans {spans.dim()}. Pass [T], [R, N] and "
            "[R, 2]."
        )
    if {entries.dtype, pages.dtype, spans.dtype} != {torch.int64}:
        raise ArgumentError(f"entries are {entries.dtype}, pages {pages.dtype}, spans {spans.dtype}. Pass int64.")
    if entries.device != positions.device or pages.device != positions.device or spans.device.type not in _HOST:
        raise ArgumentError(
            f"entries are on {entries.device}, pages on {pages.device}, spans on {spans.device}. Put the first two on "
            f"{positions.device}, and spans on the CPU."
        )


_HOST = ("cpu", "meta")
