"""The static KV cache: allocated once, written in place, the same tensors for every step.

Fixed addresses and shapes are what lets one compiled graph (and a CUDA graph) serve all steps. The sizes are either
given, or follow the first call's need and grow by doubling; growing makes new tensors, so it costs one more trace.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

KVCaches = list[tuple[Tensor, Tensor]]
"""One (keys, values) pair a layer, each [max_batch, max_length, num_kv_heads, head_dim]."""

_SMALLEST_LENGTH = 256


class StaticCache:
    """Room for the keys and values of up to `max_batch_size` rows of up to `limit` tokens."""

    def __init__(self, model: Any, *, max_batch_size: int, max_length: int | None, limit: int) -> None:
        """`max_length=None` means as long as needed up to `limit`, the longest context the model was made for."""
        self._model = model
        self._fixed = max_length is not None
        self.max_batch_size = max_batch_size
        self.max_length = limit if max_length is None else max_length
        self.batch_size = 0
        self.length = 0
        self.tensors: KVCaches = []

    def reserve(self, batch_size: int, length: int) -> bool:
        """Make room for `batch_size` ≤ max_batch_size rows of `length` ≤ max_length; true when tensors are new."""
        if self._fixed:
            batch_size, length = self.max_batch_size, self.max_length
        if batch_size <= self.batch_size and length <= self.length:
            return False
        self.batch_size = _grown(self.batch_size, batch_size, self.max_batch_size)
        self.length = _grown(self.length, max(length, _SMALLEST_LENGTH), self.max_length)
        self.tensors = []  # free the old ones before the new ones are made
        self.tensors = self._model.new_kv_caches(self.batch_size, self.length)
        return True


def _grown(have: int, need: int, limit: int) -> int:
    """`need` when there is nothing yet, then at least twice as much as there was, never more than `limit`."""
    if need <= have:
        return have
    return min(max(need, 2 * have), limit)
