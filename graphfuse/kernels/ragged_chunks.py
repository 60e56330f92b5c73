"""The tokens of a ragged call's longer sequences in chunks, as tables on the device that kernels find their work in.

The host knows the lengths, so grids are exact and nothing waits. Legend: R sequences, N chunks of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from graphfuse.kernels.sizes import ceil_div

CHUNK = 64


class Span(Protocol):
    """See `graphfuse.ops.layout.Span`."""

    @property
    def row(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...


class Chunks(NamedTuple):
    sequences: Tensor
    """`[R, 4]` int32: its row in the layout, its first token of the call, the one after its last, its first chunk."""

    chunks: Tensor
    """`[N, 4]` int32: row, first token and the one after the last of its **sequence**, and how many come before it."""


@lru_cache(maxsize=8)
def chunks_of(spans: Sequence[Span], device: torch.device) -> Chunks:
    """The same for every layer of a step, and so made once. spans: a tuple."""
    sequences: list[tuple[int, int, int, int]] = []
    chunks: list[tuple[int, int, int, int]] = []
    for span in spans:
        where = span.row, span.start, span.start + span.length
        sequences.append((*where, len(chunks)))
        chunks += [(*where, index) for index in range(ceil_div(span.length, CHUNK))]
    table = torch.tensor(sequences + chunks, dtype=torch.int32).to(device, non_blocking=True)
    return Chunks(table[: len(sequences)], table[len(sequences) :])
