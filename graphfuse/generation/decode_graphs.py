"""Steps in which every sequence has one token, captured in CUDA graphs: one for each of a ladder of sizes.

A step of R sequences runs the graph of the next larger size; rows that pad it are nobody's. So has the number of pages
a ladder, since attention is launched for as many as there may be.

A graph is captured when its size comes up for the first time, after runs that load and tune what it launches. Each has
inputs of its own; all share one memory pool, and one place for the logits, which would else stay, large, for each size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphfuse.generation.inputs import HostInputs, Inputs, StaticInputs

_WARM_UPS = 2


def ladder(largest: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8, of 16 from 64 on, up to `largest`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max(largest, 64), 16)]
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """Runs `forward` by replaying it. The logits are overwritten by the next call."""

    def __init__(self, forward: Callable[[Inputs], Tensor], max_batch_size: int, device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._sizes = ladder(max_batch_size)
        self._captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, StaticInputs]] = {}
        self._logits: Tensor | None = None  # [max_batch_size, V]
        self._pool: Any = None

    def __call__(self, step: HostInputs, sampled: Tensor | None) -> Tensor:
        """`sampled`: the tokens of the step before (see `HostInputs`)."""
        rows, num_pages = step.pages.shape
        size = self._sizes[bisect_left(self._sizes, rows)]
        key = (size, 1 << (num_pages - 1).bit_length())
        if key not in self._captured:
            self._captured[key] = self._capture(*key)
        graph, static = self._captured[key]
        static.fill(step, sampled)
        graph.replay()
        assert self._logits is not None
        return self._logits[:rows]

    def _capture(self, size: int, num_pages: int) -> tuple[torch.cuda.CUDAGraph, StaticInputs]:
        device, static = self._device, StaticInputs(size, num_pages, self._device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):  # all rows are padding: nothing but page 0 and state 0 is written
                logits = self._forward(static.inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        if self._logits is None:
            self._logits = logits.new_empty(self._sizes[-1], logits.shape[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            self._logits[:size].copy_(self._forward(static.inputs))
        self._pool = graph.pool()
        return graph, static
