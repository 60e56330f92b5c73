"""Faults, put into real graphs by surgery: each function changes a copy of a graph at one place, or says it cannot.

A mutation is given the graph, the reduction to work on, and the placements of the sound graph by node name, from which
it picks values of some placement; what is wrong afterwards is known by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphfuse.passes.graph_reading import is_call, readers, same_dim, same_shape, value
from graphfuse.passes.placement.fused import REDUCING
from graphfuse.passes.placement.lattice import Kind, Lookup, Outcome, Partial, Replicated, Shard
from graphfuse.passes.reductions import reductions

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Site:
    """A reduction of the copied graph, the name of a group of fewer ranks, and the sound graph's placements."""

    graph: Graph
    reduction: Node
    wrong_group: str
    sound: dict[str, Outcome]

    @property
    def partial(self) -> Node:
        return self.reduction.args[0]  # type: ignore[return-value]

    @property
    def wait(self) -> Node:
        return next(iter(self.reduction.users))

    def before(self) -> Iterator[Node]:
        """Values in front of the reduction, the nearest first."""
        node = self.reduction.prev
        while node.op != "root":
            yield node
            node = node.prev


Mutation = Callable[[Site], bool]
"""Changes the graph in place; False if there is no such place."""


def new(graph: Graph, like: Node, target: object, *args: object, **kwargs: object) -> Node:
    """A node with the value and the module path of another one."""
    node = graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    return node


def summed_again(graph: Graph, x: Node, like: Node) -> Node:
    reduced = new(graph, x, c10d.all_reduce.default, x, "sum", like.args[2])
    return new(graph, x, c10d.wait_tensor.default, reduced)


def put_in_front(site: Site, target: object, *args: object) -> bool:
    """target(partial, *args) is reduced instead of the partial sum."""
    with site.graph.inserting_before(site.reduction):
        changed = new(site.graph, site.partial, target, site.partial, *args)
    site.reduction.args = (changed, *site.reduction.args[1:])
    return True


# --- the traced graph -------------------------------------------------------------------------------------------------


def dropped(site: Site) -> bool:
    """Everybody reads the partial sum."""
    site.wait.replace_all_uses_with(site.partial)
    return True


def bypassed(site: Site) -> bool:
    """One reader of several reads the partial sum."""
    users = list(site.wait.users)
    if len(users) < 2:
        return False
    users[-1].replace_input_with(site.wait, site.partial)
    return True


def returned(site: Site) -> bool:
    """The model returns the partial sum besides."""
    output = list(site.graph.nodes)[-1]
    output.args = ((*output.args[0], site.partial),)
    return True


def doubled(site: Site) -> bool:
    with site.graph.inserting_after(site.wait):
        again = new(site.graph, site.wait, c10d.all_reduce.default, site.wait, "sum", site.reduction.args[2])
    with site.graph.inserting_after(again):
        wait = new(site.graph, site.wait, c10d.wait_tensor.default, again)
    site.wait.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not again)
    return True


def residual_add(site: Site) -> Node | None:
    """The add behind the reduction, seen through views."""
    return next((n for _, n in readers(site.wait) if is_call(n, aten.add.Tensor)), None)


def summed_behind(site: Site, add: Node) -> None:
    users = list(add.users)
    with site.graph.inserting_before(add.next):
        again = summed_again(site.graph, add, site.reduction)
    for user in users:
        user.replace_input_with(add, again)


def doubled_later(site: Site) -> bool:
    """The residual stream is summed behind the add."""
    add = residual_add(site)
    if add is not None:
        summed_behind(site, add)
    return add is not None


def moved_behind_the_add(site: Site) -> bool:
    """The residual stream is summed behind the add, instead of what is added."""
    add = residual_add(site)
    if add is None:
        return False
    summed_behind(site, add)
    site.wait.replace_all_uses_with(site.partial)
    return True


def reduced_in_part(site: Site) -> bool:
    """Half of the columns are reduced."""
    partial = value(site.partial)
    assert partial is not None
    dim, half = partial.dim() - 1, int(partial.shape[-1]) // 2
    with site.graph.inserting_after(site.wait):
        part = new(site.graph, site.wait, aten.slice.Tensor, site.wait, dim, 0, half)
        part.meta["val"] = partial.narrow(dim, 0, half)
    with site.graph.inserting_after(part):
        whole = new(site.graph, site.wait, aten.slice_scatter.default, site.partial, part, dim, 0, half)
    site.wait.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not part)
    return True


def activated(site: Site) -> bool:
    return put_in_front(site, aten.relu.default)


def squared(site: Site) -> bool:
    return put_in_front(site, aten.mul.Tensor, site.partial)


def residual_before(site: Site) -> bool:
    """A whole value of the same shape is added in front of the reduction."""
    partial = value(site.partial)
    assert partial is not None
    for node in site.before():
        tensor = value(node)
        if tensor is None or tensor.dtype != partial.dtype or not same_shape(tensor, partial):
            continue
        if isinstance(site.sound.get(node.name), Replicated):
            return put_in_front(site, aten.add.Tensor, node)
    return False


def bias_before(site: Site) -> bool:
    """A vector that every rank holds is added in front of the reduction."""
    size = value(site.partial).shape[-1]
    for node in site.graph.nodes:
        tensor = value(node)
        if node.op != "placeholder" or tensor is None or not isinstance(site.sound.get(node.name), Replicated):
            continue
        if tensor.dim() == 1 and tensor.shape[0] == size and tensor.dtype.is_floating_point:
            return put_in_front(site, aten.add.Tensor, node)
    return False


def wrong_group(site: Site) -> bool:
    site.reduction.args = (*site.reduction.args[:2], site.wrong_group)
    return True


def averaged(site: Site) -> bool:
    site.reduction.args = (site.partial, "avg", site.reduction.args[2])
    return True


def maximum(site: Site) -> bool:
    site.reduction.args = (site.partial, "max", site.reduction.args[2])
    return True


def gate_of_this_rank(site: Site, scaled: Node) -> Node | None:
    """A column of a sharded value, of the rows of the value that it is to scale: a gate in which ranks differ."""
    whole = value(scaled)
    assert whole is not None
    dim = whole.dim() - 1
    for node in site.before():
        tensor = value(node)
        if node > scaled or tensor is None or tensor.dim() != whole.dim() or site.sound.get(node.name) != Shard(dim):
            continue
        if all(same_dim(a, b) for a, b in zip(tensor.shape[:-1], whole.shape[:-1], strict=True)):
            with site.graph.inserting_after(node):
                gate = new(site.graph, node, aten.slice.Tensor, node, dim, 0, 1)
            gate.meta["val"] = tensor.narrow(-1, 0, 1)
            return gate
    return None


def gated_by_a_shard(site: Site) -> bool:
    gate = gate_of_this_rank(site, site.partial)
    return gate is not None and put_in_front(site, aten.mul.Tensor, gate)


def unmasked(site: Site) -> bool:
    """The rows of other ranks' parts of the embedding are not zeroed."""
    found = next((n for n in site.partial.all_input_nodes if isinstance(site.sound.get(n.name), Lookup)), None)
    if found is None:
        return False
    site.partial.replace_all_uses_with(found)
    return True


@dataclass(frozen=True)
class Fault:
    """A mutation and the kinds of fault, of which one must be found."""

    mutation: Mutation
    kinds: frozenset[Kind]

    @property
    def name(self) -> str:
        return self.mutation.__name__


def fault(mutation: Mutation, *kinds: Kind) -> Fault:
    return Fault(mutation, frozenset(kinds))


MISREAD = (Kind.RESIDUAL, Kind.NON_LINEAR, Kind.GATE, Kind.BIAS, Kind.OUTPUT, Kind.MIXED)
"""What a partial sum runs into whom nobody has reduced."""

TRACED = [
    fault(dropped, *MISREAD),
    fault(bypassed, *MISREAD),
    fault(returned, Kind.OUTPUT),
    fault(doubled, Kind.TWICE),
    fault(doubled_later, Kind.TWICE),
    fault(moved_behind_the_add, *MISREAD),
    fault(reduced_in_part, Kind.MIXED),
    fault(activated, Kind.NON_LINEAR),
    fault(squared, Kind.NON_LINEAR),
    fault(residual_before, Kind.RESIDUAL),
    fault(bias_before, Kind.BIAS),
    fault(wrong_group, Kind.WRONG_GROUP),
    fault(averaged, Kind.WRONG_OP),
    fault(maximum, Kind.WRONG_OP),
    fault(gated_by_a_shard, Kind.GATE),
    fault(unmasked, Kind.LOOKUP),
]


# --- the rewritten graph ----------------------------------------------------------------------------------------------


def _results(site: Site) -> tuple[Node, Node]:
    """The (normed, summed) results of a fused op, where both are read."""
    by_index = {user.args[1]: user for user in site.reduction.users}
    return by_index.get(0), by_index.get(1)  # type: ignore[return-value]


def sum_read_past(site: Site) -> bool:
    """Readers of the fused op's sum read its argument instead."""
    summed = _results(site)[1]
    if summed is None or value(summed) is None or not summed.users:
        return False
    summed.replace_all_uses_with(site.partial)
    return True


def operands_swapped(site: Site) -> bool:
    """The residual is summed, and the partial sum added."""
    if not is_call(site.reduction, torch.ops.graphfuse.all_reduce_add_rms_norm.default):
        return False
    x, residual, *rest = site.reduction.args
    site.reduction.args = (residual, x, *rest)
    return True


def summed_once_more(site: Site) -> bool:
    normed = _results(site)[0]
    if normed is None:
        return False
    readers = list(normed.users)
    with site.graph.inserting_after(normed):
        again = new(site.graph, normed, c10d.all_reduce.default, normed, "sum", site.reduction.args[-1])
    with site.graph.inserting_after(again):
        wait = new(site.graph, normed, c10d.wait_tensor.default, again)
    for reader in readers:
        reader.replace_input_with(normed, wait)
    return True


def fused_over_the_wrong_group(site: Site) -> bool:
    site.reduction.args = (*site.reduction.args[:-1], site.wrong_group)
    return True


def bias_on_every_rank(site: Site) -> bool:
    """The bias that only the first rank adds loses its mark."""
    from graphfuse.passes.placement.pointwise import ONE_RANK_ADDS

    partial = site.partial
    while is_call(partial, aten.view.default, aten.reshape.default):
        partial = partial.args[0]  # type: ignore[assignment]
    return partial.meta.pop(ONE_RANK_ADDS, False)


def merged_gate_of_this_rank(site: Site) -> bool:
    """The gate of a merged reduction, routed + gate * shared, is replaced by one that ranks differ in."""
    pending = [site.partial]
    while pending:
        node = pending.pop()
        gates = [n for n in node.all_input_nodes if isinstance(site.sound.get(n.name), Replicated)]
        if is_call(node, aten.mul.Tensor) and gates:
            own = gate_of_this_rank(site, node)
            if own is not None:
                node.replace_input_with(gates[0], own)
            return own is not None
        pending += [n for n in node.all_input_nodes if isinstance(site.sound.get(n.name), Partial)]
    return False


def activated_before_fusion(site: Site) -> bool:
    return put_in_front(site, aten.silu.default)


REWRITTEN = [
    fault(sum_read_past, *MISREAD),
    fault(operands_swapped, Kind.TWICE),
    fault(summed_once_more, Kind.TWICE),
    fault(fused_over_the_wrong_group, Kind.WRONG_GROUP),
    fault(bias_on_every_rank, Kind.BIAS),
    fault(merged_gate_of_this_rank, Kind.GATE),
    fault(activated_before_fusion, Kind.NON_LINEAR),
]


def reductions_of(graph: Graph) -> list[Node]:
    return reductions(graph)


def fused_ops_of(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if is_call(node, *REDUCING)]
