"""How dimensions are divided over the ranks of a tensor-parallel group, when they divide and when they do not.

A `Shard` says which pieces of a checkpoint's dimension lie where in this rank's dimension. What no piece covers stays
zero: a zero row of a column-parallel weight gives a zero activation, and a zero column of a row-parallel weight ignores
one, so padding never changes the result. Any model therefore runs at any tensor-parallel size.

Attention is divided by *slots*. A slot holds one key-value head and the query heads that read it:

    num_kv_heads >= tp   a slot is a whole group; ranks get ceil(num_kv_heads / tp) slots, the last ones zero
    num_kv_heads <  tp   each key-value head is copied tp // num_kv_heads times, its query heads split over the copies
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphfuse.errors import GroupError


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place in the group; `group` is None for a model on one rank."""

    group: dist.ProcessGroup | None
    size: int
    rank: int

    inner_multiple: int = 1
    """Inner dimensions of MLPs and experts are divided in whole multiples of this: the blocks that share a scale."""

    @classmethod
    def of(cls, tp_group: dist.ProcessGroup | DeviceMesh | None) -> TensorParallel:
        """Raises GroupError for a mesh of several dimensions, a group this rank is not in, or what is no group."""
        if isinstance(tp_group, DeviceMesh):
            if tp_group.ndim != 1:
                raise GroupError(
                    f"The device mesh has {tp_group.ndim} dimensions. Pass its tensor-parallel dimension, mesh['tp']."
                )
            tp_group = tp_group.get_group()
        if tp_group is None:
            return cls(None, 1, 0)
        if tp_group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(tp_group, dist.ProcessGroup):
            raise GroupError(
                f"tp_group is of type {type(tp_group).__name__}. Pass a ProcessGroup or a one-dimensional DeviceMesh."
            )
        rank = dist.get_rank(tp_group)
        if rank < 0:
            raise GroupError(
                f"Rank {dist.get_rank()} is not in the tensor-parallel group. Build the model on its ranks."
            )
        return cls(tp_group, dist.get_world_size(tp_group), rank)


@dataclass(frozen=True)
class Span:
    """`length` entries from `source` in the checkpoint's dimension to `target` in the rank's."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Shard:
    """A dimension of `full` entries in the checkpoint and `local` on this rank."""

    full: int
    local: int
    spans: tuple[Span, ...]

    unit: int = 1
    """On every rank, spans begin at multiples of this, there and here, and end at one or with the dimension. 0: the
    dimension is whole on every rank."""

    def times(self, factor: int) -> Shard:
        """The same division with `factor` entries for each: heads → rows."""
        spans = tuple(Span(s.source * factor, s.target * factor, s.length * factor) for s in self.spans)
        return Shard(self.full * factor, self.local * factor, spans, self.unit * factor)


def whole(size: int) -> Shard:
    """Every rank has all of it."""
    return Shard(size, size, (Span(0, 0, size),), unit=0)


def even(size: int, tp: TensorParallel, multiple: int = 1) -> Shard:
    """Contiguous parts of ceil(size / tp) entries, rounded up to a multiple, padded at the end."""
    if tp.size == multiple == 1:
        return whole(size)
    local = -(-size // (tp.size * multiple)) * multiple
    start = tp.rank * local
    length = min(local, size - start)
    return Shard(size, local, (Span(start, 0, length),) if length > 0 else (), unit=local)


def attention_heads(num_heads: int, num_kv_heads: int, tp: TensorParallel) -> tuple[Shard, Shard]:
    """Query heads and key-value heads of this rank, in units of heads (see above)."""
    group = num_heads // num_kv_heads
    copies = max(1, tp.size // num_kv_heads)
    slots = -(-num_kv_heads * copies // tp.size)
    per_slot = -(-group // copies)
    queries, keys = [], []
    for slot in range(slots):
        kv_head, part = divmod(tp.rank * slots + slot, copies)
        if kv_head >= num_kv_heads:
            continue
        keys.append(Span(kv_head, slot, 1))
        length = min(per_slot, group - part * per_slot)
        if length > 0:
            queries.append(Span(kv_head * group + part * per_slot, slot * per_slot, length))
    unit = 0 if tp.size == 1 else 1
    return (
        Shard(num_heads, slots * per_slot, tuple(queries), unit),
        Shard(num_kv_heads, slots, tuple(keys), unit),
    )
