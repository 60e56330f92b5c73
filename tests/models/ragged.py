"""Texts that a model reads piece by piece, in ragged calls with paged caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

PAGE_SIZE = 4


class Ragged:
    """The rows of ids `[B, S]`, each with pages of its own, in an order that is not that of their positions."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self._ids = ids
        self._read = [0] * len(ids)
        num_pages = -(-ids.shape[1] // PAGE_SIZE)
        order = torch.randperm(len(ids) * num_pages, generator=torch.Generator().manual_seed(0)) + 1
        self._pages = order.view(len(ids), num_pages).to(ids.device)
        self._caches = model.new_paged_caches(len(ids) * num_pages + 1, PAGE_SIZE, len(ids) + 1)

    def __len__(self) -> int:
        return len(self._ids)

    def run(self, model: Callable[..., Tensor], lengths: Mapping[int, int]) -> Tensor:
        """Read so many more tokens of each row; logits behind the last ones `[rows, V]`, in the order given."""
        rows = sorted(lengths, key=lambda row: lengths[row] > 1)  # those of one token stand first
        inputs = self.inputs({row: lengths[row] for row in rows})
        for row in rows:
            self._read[row] += lengths[row]
        logits = model(**inputs)
        return logits[torch.tensor([rows.index(row) for row in lengths])]

    def inputs(self, lengths: Mapping[int, int]) -> dict[str, Any]:
        """The arguments of that call. Rows of one token must stand first."""
        spans = torch.tensor([(length, self._read[row]) for row, length in lengths.items()])
        torch._dynamo.mark_static(spans, 1)
        rows = torch.tensor(list(lengths), device=self._ids.device)
        at = torch.cat([torch.arange(before, before + length) for length, before in spans.tolist()]).to(rows.device)
        row_of = rows.repeat_interleave(spans[:, 0].to(rows.device))
        return {
            "input_ids": self._ids[row_of, at],
            "positions": at,
            "kv_caches": self._caches,
            "last_token": (spans[:, 0].cumsum(0) - 1).to(rows.device),
            "entries": self._pages[row_of, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE,
            "pages": self._pages[rows],
            "states": rows + 1,
            "spans": spans,
        }
