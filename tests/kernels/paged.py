"""Paged caches for tests, and attention over them in float64, one row after the other.

What no row may read holds NaN, and page tables hold numbers of no page where they need not be looked at.

Legend: R rows, N pages of a row, Hq query heads, Hkv key-value heads, D head size, Dv value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOWHERE = 1 << 40


@dataclass
class Paged:
    """Rows of pages `[R, N]` and positions `[R]`, in pages that nobody else has unless `shared`."""

    pages: Tensor
    positions: Tensor
    page_size: int
    num_pages: int

    def cache(self, *sizes: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """`[num_pages, page_size, *sizes]`: random numbers where a row sees them, NaN elsewhere."""
        device = self.pages.device
        cache = torch.full((self.num_pages, self.page_size, *sizes), torch.nan, dtype=dtype, device=device)
        for page, slot in self.seen(window):
            cache[page, slot] = torch.randn(len(page), *sizes, device=device).to(dtype)
        return cache

    def seen(self, window: int | None) -> list[tuple[Tensor, Tensor]]:
        """(page, slot) of each row's visible tokens."""
        found = []
        for row, position in zip(self.pages, self.positions.tolist(), strict=True):
            first = 0 if window is None else max(0, position + 1 - window)
            token = torch.arange(first, max(position + 1, first), device=row.device)
            found.append((row[token // self.page_size], token % self.page_size))
        return found


def paged(positions: list[int], page_size: int, *, spare: int = 0, shared: int = 0, device: str = "cpu") -> Paged:
    """Rows at these positions, in pages in any order. spare: columns of the table beyond the longest row's.
    shared: the first pages of all rows are the same."""
    counts = [max(0, position) // page_size + 1 for position in positions]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages - 1) + 1  # page 0 is nobody's
    pages = torch.full((len(positions), max(counts, default=0) + spare), NOWHERE)
    at = 0
    for row, count in enumerate(counts):
        pages[row, :count] = order[at : at + count]
        common = min(shared, count, counts[0])
        pages[row, :common] = pages[0, :common]
        at += count
    return Paged(pages.to(device), torch.tensor(positions, device=device), page_size, num_pages)


def exact(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    where: Paged,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`[R, Hq, Dv]` float64 for q `[R, Hq, D]`."""
    out = torch.zeros(*q.shape[:2], v_cache.shape[-1], dtype=torch.float64, device=q.device)
    group = q.shape[1] // k_cache.shape[2]
    for r, (page, slot) in enumerate(where.seen(window)):
        if not len(page):
            continue
        k, v = (cache[page, slot].double().repeat_interleave(group, 1) for cache in (k_cache, v_cache))
        scores = torch.einsum("hd,lhd->hl", q[r].double(), k) * scale
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
        out[r] = torch.einsum("hl,lhd->hd", scores.softmax(1)[:, : len(page)], v)
    return out


def exact_latent(
    q_latent: Tensor, q_rope: Tensor, latent_cache: Tensor, k_rope_cache: Tensor, where: Paged, scale: float
) -> Tensor:
    """`[R, H, Rank]` float64: a latent and its rotary key are the key of all heads, the latent their value."""
    q, keys = torch.cat([q_latent, q_rope], -1), torch.cat([latent_cache, k_rope_cache], -1)
    return exact(q, keys[:, :, None], latent_cache[:, :, None], where, scale)
