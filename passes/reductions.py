"""Recognise the reductions of a tensor-parallel graph.

    partial ─► _c10d_functional.all_reduce(op, group) ─► wait_tensor ─► the reduced value

In-place `dist.all_reduce` under torch.compile arrives here as the same chain with a copy behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphfuse.passes.graph_reading import is_call, value
from graphfuse.passes.rule import Context, Decline

c10d = torch.ops._c10d_functional
ALL_REDUCES = (c10d.all_reduce.default, c10d.all_reduce_.default)
COALESCED = (c10d.all_reduce_coalesced.default, c10d.all_reduce_coalesced_.default)


def all_reduce(node: Node) -> bool:
    """Anchor: an all_reduce of any op over any group."""
    return is_call(node, *ALL_REDUCES, *COALESCED)


def reductions(graph: Graph) -> list[Node]:
    """Every all_reduce of a graph, in order."""
    return [node for node in graph.nodes if all_reduce(node)]


@dataclass(frozen=True)
class Reduction:
    """A sum over the compiled group: `partial` [..., H] goes in, `reduced` is the value after the wait."""

    node: Node
    wait: Node
    partial: Node
    dtype: torch.dtype
    hidden_size: int

    @property
    def reduced(self) -> Node:
        return self.wait


def sum_over_compiled_group(node: Node, context: Context) -> Reduction | Decline:
    """What every fusing rule asks first of an all_reduce node."""
    partial, op, group_name = node.args[:3]
    why_not = context.groups.why_not(str(group_name))
    if why_not is not None:
        return Decline(why_not)
    if is_call(node, *COALESCED):
        return Decline("it reduces several tensors in one call, which is left alone")
    if op != "sum":
        return Decline(f"it reduces by {op}, only sums are fused")
    waits = [user for user in node.users if is_call(user, c10d.wait_tensor.default)]
    if len(waits) != 1 or len(node.users) != 1:
        return Decline("its result is read before the reduction has finished")
    x = value(node)
    if x is None or not isinstance(partial, Node):
        return Decline("the shape of the reduced value is not known")
    if node.target is c10d.all_reduce_.default and len(partial.users) > 1:
        return Decline("it reduces in place, and the input is read elsewhere")
    if x.dim() == 0:
        return Decline("it reduces a scalar")
    if not isinstance(x.shape[-1], int):
        return Decline("the last dimension of the reduced value is not static")
    if not x.dtype.is_floating_point:
        return Decline(f"it reduces {_name(x.dtype)}, only floating point is fused")
    return Reduction(node, waits[0], partial, x.dtype, int(x.shape[-1]))


def gate_allows(reduction: Reduction, context: Context) -> Decline | None:
    """The gate's answer for a reduction of this dtype and width."""
    decision = context.decide(reduction.dtype, reduction.hidden_size)
    if decision.allowed:
        return None
    return Decline(" ".join(decision.reasons), residual=True)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
