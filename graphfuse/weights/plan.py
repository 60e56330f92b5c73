"""What loading does, as data: which box of which checkpoint tensor goes into which part of which parameter.

A model describes itself as a list of `TensorPlan`s. The loader knows nothing of models, and a model nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Copy:
    """The box `source` of a checkpoint tensor is copied into `into`, a view of a parameter of the same shape."""

    source: tuple[slice, ...]
    into: Tensor


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
