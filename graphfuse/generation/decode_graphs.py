"""Steps in which every sequence has one token, captured in CUDA graphs: one for each of a ladder of sizes.

A step of R sequences runs the graph of the next larger size. Rows that pad it have page 0 and state 0, which are
nobody's. So has the number of pages a ladder, since attention is launched for as many as there may be.

A graph is captured when its size comes up for the first time, after runs that load and tune what it launches. Each has
inputs of its own; all share one memory pool, and one place for the logits, which would else stay, large, for each size.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from graphfuse.generation.runner import Inputs

_WARM_UPS = 2


def ladder(largest: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8, of 16 from 64 on, up to `largest`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max(largest, 64), 16)]
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """Runs `forward` by replaying it. The logits are overwritten by the next call."""

    def __init__(self, forward: Callable[[Inputs], Tensor], max_batch_size: int) -> None:
        self._forward = forward
        self._sizes = ladder(max_batch_size)
        self._captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Inputs]] = {}
        self._logits: Tensor | None = None  # [max_batch_size, V]
        self._pool: Any = None

    def __call__(self, inputs: Inputs) -> Tensor:
        rows, num_pages = inputs.pages.shape
        size = self._sizes[bisect_left(self._sizes, rows)]
        key = (size, 1 << (num_pages - 1).bit_length())
        if key not in self._captured:
            self._captured[key] = self._capture(inputs, *key)
        graph, static = self._captured[key]
        _fill(static, inputs)
        graph.replay()
        assert self._logits is not None
        return self._logits[:rows]

    def _capture(self, inputs: Inputs, size: int, num_pages: int) -> tuple[torch.cuda.CUDAGraph, Inputs]:
        device = inputs.input_ids.device
        row = {name: torch.zeros(size, dtype=torch.int64, device=device) for name in _ROWS}
        pages = torch.zeros(size, num_pages, dtype=torch.int64, device=device)
        last = torch.arange(size, device=device)
        spans = torch.tensor([[1, 0]] * size)
        torch._dynamo.mark_static(spans, 1)
        static = dataclasses.replace(inputs, **row, last_token=last, pages=pages, spans=spans)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):  # all rows are padding: nothing but page 0 and state 0 is written
                logits = self._forward(static)
        torch.cuda.current_stream(device).wait_stream(stream)
        if self._logits is None:
            self._logits = logits.new_empty(self._sizes[-1], logits.shape[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            self._logits[:size].copy_(self._forward(static))
        self._pool = graph.pool()
        return graph, static


_ROWS = ("input_ids", "positions", "entries", "states")


def _fill(static: Inputs, inputs: Inputs) -> None:
    rows, num_pages = inputs.pages.shape
    for name in _ROWS:
        there = getattr(static, name)
        there[:rows].copy_(getattr(inputs, name))
        there[rows:].zero_()
    static.pages[:rows, :num_pages].copy_(inputs.pages)
    static.pages[:rows, num_pages:].zero_()
    static.pages[rows:].zero_()
