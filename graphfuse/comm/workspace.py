"""What a comm backend with a workspace is to the pool: can it, make it, use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from graphfuse.comm.call import FusedCall
from graphfuse.comm.control import ControlChannel

ANY_SIZE = 1 << 62
"""The capacity of a workspace that works in pieces."""


@dataclass(frozen=True)
class WorkspaceRequest:
    """A workspace for messages of up to `max_bytes` (None: any size) of [tokens, hidden_size] over a group."""

    group: ProcessGroup
    dtype: torch.dtype
    hidden_size: int
    max_bytes: int | None
    device: torch.device
    variants: tuple[tuple[str | None, int | None], ...] = ()
    """The variants that will be asked for, each with its largest message."""

    @property
    def capacity(self) -> int:
        """The largest message: whole rows."""
        row_bytes = self.hidden_size * self.dtype.itemsize
        return ANY_SIZE if self.max_bytes is None else self.max_bytes // row_bytes * row_bytes


class Workspace(Protocol):
    """Memory that the ranks of a group share, and the kernel that works in it."""

    quantises: bool
    """Whether `run` gives FP8 outputs itself."""

    @property
    def capacity(self) -> int:
        """Largest message in bytes."""

    @property
    def num_bytes(self) -> int:
        """GPU memory held on this rank."""

    def reserve(self, request: WorkspaceRequest, channel: ControlChannel) -> None:
        """Allocate what calls of the request's hidden size and variants need, outside graph capture. Each rank calls
        it; waits go through the channel, as in `Backend.create`."""

    def accepts(self, call: FusedCall) -> bool:
        """Whether `run` can take the call. Looks only at what is the same on every rank: shapes and dtypes."""

    def run(self, call: FusedCall, variant: str | None) -> tuple[torch.Tensor, ...]:
        """(normed, residual + reduced), and (quantised, scale) where the call wants FP8. No host synchronisation, no
        state on the Python side: graphs can capture it."""

    def close(self) -> None:
        """Give the memory back. Called once no compiled model uses the workspace."""


class Backend(Protocol):
    """Makes workspaces."""

    keeps_workspaces: bool
    """True when `close` cannot free the memory: the pool then keeps unused workspaces for the next model."""

    def refusal(self, request: WorkspaceRequest) -> str | None:
        """Why this rank cannot make the workspace, as a sentence, or None. Local: it waits for no other rank."""

    def create(self, request: WorkspaceRequest, channel: ControlChannel) -> Workspace:
        """Make it together with the other ranks. Every wait goes through the channel, so that a rank that fails
        ends its peers' waiting (`PeerFailed`)."""
