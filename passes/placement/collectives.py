"""Collectives: what is reduced must be a partial of that op over that group, and no whole value is reduced again.

A group that has one rank in common with the compiled one (data or pipeline parallelism) does the same on every rank of
it: placements pass through. A group that has some of its ranks, and not all, is the wrong one.
"""

from __future__ import annotations

from typing import Any

import torch

from graphfuse.passes.groups import group_ranks
from graphfuse.passes.placement.call import Call, Operand
from graphfuse.passes.placement.lattice import (
    INHERITED,
    REPLICATED,
    Kind,
    Lookup,
    Outcome,
    Partial,
    Placement,
    Replicated,
    Shard,
    Unknown,
    Violation,
)

c10d = torch.ops._c10d_functional


def over_compiled_group(call: Call, name: str, x: Operand) -> Placement | None:
    """None for the compiled group, else the placement after a collective over another one."""
    if name == call.groups.name:
        return None
    ranks = group_ranks(name)
    if ranks is None:
        return Unknown(f"a collective over the group {name!r}, which this process does not know")
    if set(ranks) == set(call.groups.ranks):
        return None
    if len(set(ranks) & set(call.groups.ranks)) == 1:
        return x.placement
    if isinstance(x.placement, Partial | Lookup):
        text = (
            f"{call.name} runs over ranks {list(ranks)}; the {x.placement} is one over ranks {list(call.groups.ranks)}"
        )
        raise Violation(Kind.WRONG_GROUP, x.node, text)
    return Unknown(f"a collective over ranks {list(ranks)}, which are not the compiled group's")


def reduced(call: Call, x: Operand, op: str, group_name: str) -> Placement:
    """What a value is after all ranks of a group have reduced it."""
    elsewhere = over_compiled_group(call, group_name, x)
    if elsewhere is not None:
        return elsewhere
    placement = x.placement
    if isinstance(placement, Replicated) and op == "sum" and not placement.zero:
        text = f"{call.name} sums a value that is equal on every rank: it grows {call.groups.size} times"
        raise Violation(Kind.TWICE, x.node, text)
    if isinstance(placement, Lookup):
        text = f"{call.name} sums looked-up rows, of which those of other ranks were not zeroed"
        raise Violation(Kind.LOOKUP, x.node, text)
    if isinstance(placement, Shard):
        raise Violation(Kind.WRONG_OP, x.node, f"{call.name} adds up different parts of a value, a {placement}")
    if isinstance(placement, Partial) and placement.op != op:
        raise Violation(Kind.WRONG_OP, x.node, f"{call.name} reduces a {placement} by {op}")
    return REPLICATED


def all_reduce(call: Call) -> Outcome:
    x, op, group_name = call.node.args[:3]
    return reduced(call, call.as_operand(x), str(op), str(group_name))


def all_reduce_coalesced(call: Call) -> Outcome:
    tensors, op, group_name = call.node.args[:3]
    return tuple(reduced(call, call.as_operand(x), str(op), str(group_name)) for x in tensors)  # type: ignore[union-attr]


def reduce_scatter(call: Call) -> Outcome:
    x, op, _, group_name = call.node.args[:4]
    found = reduced(call, call.as_operand(x), str(op), str(group_name))
    return Shard(0) if found == REPLICATED else found


def reduce_scatter_coalesced(call: Call) -> Outcome:
    tensors, op, _, group_name = call.node.args[:4]
    found = [reduced(call, call.as_operand(x), str(op), str(group_name)) for x in tensors]  # type: ignore[union-attr]
    return tuple(Shard(0) if placement == REPLICATED else placement for placement in found)


def gathered(call: Call, x: Operand, group_name: str) -> Placement:
    elsewhere = over_compiled_group(call, group_name, x)
    if elsewhere is not None:
        return elsewhere
    if isinstance(x.placement, Partial | Lookup):
        text = f"{call.name} gathers a {x.placement}, which must be summed"
        raise Violation(Kind.WRONG_OP, x.node, text)
    return REPLICATED  # every rank holds all parts, in whatever order


def all_gather(call: Call) -> Outcome:
    return gathered(call, call.first(), str(call.argument("group_name")))


def all_gather_coalesced(call: Call) -> Outcome:
    tensors, _, group_name = call.node.args[:3]
    return tuple(gathered(call, call.as_operand(x), str(group_name)) for x in tensors)  # type: ignore[union-attr]


def all_to_all(call: Call) -> Outcome:
    x = call.first()
    elsewhere = over_compiled_group(call, str(call.argument("group_name")), x)
    if elsewhere is not None:
        return elsewhere
    if isinstance(x.placement, Partial | Lookup):
        raise Violation(Kind.WRONG_OP, x.node, f"{call.name} exchanges parts of a {x.placement}, which must be summed")
    if isinstance(x.placement, Unknown):
        return INHERITED
    return Unknown("what an all-to-all leaves on each rank is not followed")


def broadcast_from(call: Call) -> Outcome:
    x = call.first()
    elsewhere = over_compiled_group(call, str(call.argument("group_name")), x)
    if elsewhere is not None:
        return elsewhere
    if isinstance(x.placement, Partial | Lookup):
        raise Violation(Kind.WRONG_OP, x.node, f"{call.name} gives every rank one rank's share of a {x.placement}")
    return REPLICATED if isinstance(x.placement, Replicated) else Unknown("every rank gets one rank's value")


def wait(call: Call) -> Outcome:
    return call.first().placement


RULES: dict[Any, Any] = {
    **dict.fromkeys((c10d.all_reduce.default, c10d.all_reduce_.default), all_reduce),
    **dict.fromkeys((c10d.all_reduce_coalesced.default, c10d.all_reduce_coalesced_.default), all_reduce_coalesced),
    c10d.reduce_scatter_tensor.default: reduce_scatter,
    c10d.reduce_scatter_tensor_coalesced.default: reduce_scatter_coalesced,
    c10d.all_gather_into_tensor.default: all_gather,
    c10d.all_gather_into_tensor_coalesced.default: all_gather_coalesced,
    c10d.all_to_all_single.default: all_to_all,
    **dict.fromkeys((c10d.broadcast.default, c10d.broadcast_.default), broadcast_from),
    c10d.wait_tensor.default: wait,
}
IN_PLACE = frozenset({c10d.all_reduce_.default, c10d.broadcast_.default})
