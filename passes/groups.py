"""Which process group a reduction in a graph belongs to.

A reduction belongs to the compiled group when their sets of ranks are equal, whatever their names: a model may have
made its own group, or a device mesh, over the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group


def group_ranks(group_name: str) -> tuple[int, ...] | None:
    """Global ranks of a group by its name in a graph; None when this process does not know the name."""
    try:
        return tuple(dist.get_process_group_ranks(_resolve_process_group(group_name)))  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError, LookupError):
        return None


@dataclass(frozen=True)
class Groups:
    """The compiled group: its name, its global ranks in order, and this process's place among them.

    No name: nothing belongs to it.
    """

    name: str | None
    ranks: tuple[int, ...]
    rank: int = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Groups:
        if group is None:
            return cls(None, ())
        return cls(group.group_name, tuple(dist.get_process_group_ranks(group)), group.rank())

    @property
    def size(self) -> int:
        return len(self.ranks)

    def why_not(self, group_name: str) -> str | None:
        """None when a reduction over `group_name` is one over the compiled group, else the reason it is not."""
        if self.name is None:
            return "no tensor-parallel group was given"
        if group_name == self.name:
            return None
        ranks = group_ranks(group_name)
        if ranks is None:
            return f"it reduces over the group {group_name!r}, which this process does not know"
        if set(ranks) != set(self.ranks):
            return f"it reduces over ranks {list(ranks)}, the compiled group is ranks {list(self.ranks)}"
        return None
