"""What loading does, as data: which box of which checkpoint tensor goes into which part of which parameter.

A model describes itself as a list of `TensorPlan`s. The loader knows nothing of models, and a model nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Copy:
    """The box `source` of a checkpoint tensor is copied into `into`, a view of a parameter of the same shape."""

    source: tuple[slice, ...]
    into: Tensor

    change: Callable[[Tensor], Tensor] | None = None
    """For scales, which are small: the tensor is read whole, changed by this, and spread over `into`."""


@dataclass(frozen=True)
class TensorPlan:
    """A tensor of the checkpoint: its name, its whole shape there, and what of it goes into this rank's `target`.

    `copies` may be empty: where a dimension does not divide, the last ranks can hold nothing but padding.
    """

    name: str
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]
    target: nn.Parameter
    scales: str | None = None
    """MXFP4: `name` holds blocks, this one their scales (see `mxfp4`); shape and copies are of what they decode to."""
    also: tuple[tuple[int, ...], ...] = ()
    """Other shapes that the tensor may have, for scales."""

    @property
    def is_scale(self) -> bool:
        return any(copy.change is not None for copy in self.copies)
