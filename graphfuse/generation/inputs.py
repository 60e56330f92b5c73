"""What a step computes: on the host, where the scheduler's parts become arrays, and on the device, where they are the
arguments of the model's ragged call.

Everything the host says goes to the device in one copy. The token that a sequence samples in one step is the input of
the next one; it is taken from where it was sampled, so that a step can be launched before the host has read it.

T tokens of R sequences, N pages each at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """Arguments of the model's ragged call, on the device but for spans (see `graphfuse.ops.layout.Layout`)."""

    input_ids: Tensor
    positions: Tensor
    last_token: Tensor
    entries: Tensor
    pages: Tensor
    states: Tensor
    spans: Tensor

    def arguments(self, kv_caches: Any) -> dict[str, Any]:
        return {**vars(self), "kv_caches": kv_caches}


@dataclass(frozen=True)
class HostInputs:
    """The same as int64 arrays, with what is known on the device only: the tokens at `targets` are those that the step
    before samples in the rows `sources`."""

    input_ids: np.ndarray
    positions: np.ndarray
    last_token: np.ndarray
    entries: np.ndarray
    pages: np.ndarray
    states: np.ndarray
    spans: np.ndarray
    targets: np.ndarray
    sources: np.ndarray

    def on(self, device: torch.device, sampled: Tensor | None) -> Inputs:
        """`sampled`: the tokens of the step before, if there are targets."""
        names = ("input_ids", "positions", "last_token", "entries", "states", "targets", "sources", "pages")
        fields = [getattr(self, name).ravel() for name in names]
        sizes = [len(field) for field in fields]
        host = np.zeros(sum(map(_aligned, sizes)), dtype=np.int64)
        for start, field in zip(_starts(sizes), fields, strict=True):
            host[start : start + len(field)] = field
        packed = to_device(torch.from_numpy(host), device)
        found = [packed[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=True)]
        ids, positions, last, entries, states, targets, sources, pages = found
        take_sampled(ids, targets, sources, sampled)
        return Inputs(ids, positions, last, entries, pages.view(self.pages.shape), states, spans_of(self.spans))


class StaticInputs:
    """Inputs of a token for each of `size` sequences of `num_pages` pages, in memory of their own. Rows that no
    sequence has are of page 0 and state 0, which are nobody's."""

    _ROWS = ("input_ids", "positions", "entries", "states", "targets", "sources")

    def __init__(self, size: int, num_pages: int, device: torch.device) -> None:
        self._size, self._num_pages, count = size, num_pages, len(self._ROWS)
        self._wide = _aligned(size)
        self._packed = torch.zeros(count * self._wide + size * num_pages, dtype=torch.int64, device=device)
        rows = self._packed[: count * self._wide].view(count, self._wide)[:, :size]
        ids, positions, entries, states, self._targets, self._sources = rows
        pages = self._packed[count * self._wide :].view(size, num_pages)
        last, spans = torch.arange(size, device=device), spans_of(np.array([[1, 0]] * size))
        self.inputs = Inputs(ids, positions, last, entries, pages, states, spans)

    def fill(self, step: HostInputs, sampled: Tensor | None) -> None:
        """With a step of no more sequences and pages; arguments as of `HostInputs.on`."""
        packed = np.zeros(self._packed.shape, dtype=np.int64)
        count, rows, num_pages = len(self._ROWS), *step.pages.shape
        by_name = packed[: count * self._wide].reshape(count, self._wide)
        for its, name in zip(by_name, self._ROWS, strict=True):
            values = getattr(step, name)
            its[: len(values)] = values
        packed[count * self._wide :].reshape(self._size, self._num_pages)[:rows, :num_pages] = step.pages
        self._packed.copy_(pinned(torch.from_numpy(packed), self._packed.device), non_blocking=True)
        under_way = len(step.targets)
        take_sampled(self.inputs.input_ids, self._targets[:under_way], self._sources[:under_way], sampled)


def _aligned(size: int) -> int:
    """So many int64 that what follows them starts at 16 bytes again: Inductor copies inputs that do not."""
    return size + size % 2


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(map(_aligned, sizes))][:-1]


def take_sampled(input_ids: Tensor, targets: Tensor, sources: Tensor, sampled: Tensor | None) -> None:
    """Put sampled[sources] at targets, in place. What a row without a token (-1) goes on with, nobody looks at."""
    if len(targets):
        assert sampled is not None, "a token is under way"
        input_ids.index_copy_(0, targets, sampled.index_select(0, sources).clamp_min(0))


def spans_of(spans: np.ndarray | Sequence[Sequence[int]]) -> Tensor:
    found = torch.from_numpy(np.asarray(spans, dtype=np.int64))
    torch._dynamo.mark_static(found, 1)
    return found


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Where `device` can copy it from while the host goes on."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return pinned(tensor, device).to(device, non_blocking=True)
