"""What a comm backend with a workspace is to the pool: can it, make it, use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from graphfuse.comm.call import FusedCall
from graphfuse.comm.control import ControlChannel


@dataclass(frozen=True)
class WorkspaceRequest:
    """A workspace for messages of up to `max_bytes` of [tokens, hidden_size] over a group."""

    group: ProcessGroup
    dtype: torch.dtype
    hidden_size: int
    max_bytes: int
    device: torch.device


class Workspace(Protocol):
    """Memory that the ranks of a group share, and the kernel that works in it."""

    capacity: int
    """Largest message in bytes."""

    def reserve(self, hidden_size: int) -> None:
        """Allocate what calls of this hidden size need beside the shared memory, outside graph capture."""

    def accepts(self, call: FusedCall) -> bool:
        """Whether `run` can take the call. Looks only at what is the same on every rank: shapes and dtypes."""

    def run(self, call: FusedCall, variant: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, residual + reduced). No host synchronisation, no state on the Python side: graphs can capture it."""

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
