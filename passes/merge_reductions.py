"""Merge reductions whose results are added up: one all_reduce for routed and shared experts instead of two.

    wait(all_reduce(a)) * f + g * wait(all_reduce(b))      becomes      wait(all_reduce(a * f + g * b))

A sum over ranks is linear, so factors that are equal on every rank (a gate computed from whole values, a constant),
views that keep the rows, and signs may stand on either side, and any number of terms merges, pair by pair. What is
added is then reduced once, and the rules after this one find a single reduction in front of the norm.

It rounds elsewhere: the terms are computed and added in float32 and rounded on each rank, and once more as a sum, where
the model rounds each sum, each product, and the addition. The partial sums are smaller than the whole, so that makes an
error of the same size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from graphfuse.passes.graph_reading import (
    COPIES,
    SCALES,
    VIEWS,
    aten,
    describe,
    is_call,
    keeps_rows,
    prims,
    replay,
    same_shape,
    value,
)
from graphfuse.passes.placement.lattice import Replicated
from graphfuse.passes.reductions import Reduction, all_reduce, c10d, sum_over_compiled_group
from graphfuse.passes.rule import Context, Decline, Rule, Site
from graphfuse.passes.verify_placements import check, known_placements

NAME = "merge_reductions"
_ROUNDED = "graphfuse_rounded_here"
"""Marks the sum of two terms, rounded for the reduction: a third one is added before the rounding."""
SUMS = (aten.add.Tensor, aten.sub.Tensor)


@dataclass(frozen=True)
class _Term:
    """One operand of the addition: a reduced value and the linear ops between the wait and the addition, in order."""

    reduction: Reduction
    steps: tuple[Node, ...]

    @property
    def factors(self) -> list[Node]:
        """The tensors that the reduced value is multiplied or divided by."""
        found: list[Node] = []
        current = self.reduction.reduced
        for step in self.steps:
            found += [
                arg for arg in step.args if isinstance(arg, Node) and arg is not current and step.target in SCALES
            ]
            current = step
        return found


@dataclass(frozen=True)
class _Parts:
    addition: Node
    terms: tuple[_Term, _Term]
    """In the order of the addition's operands."""


def match_merge(node: Node, context: Context) -> Site | Decline:
    reduction = sum_over_compiled_group(node, context)
    if isinstance(reduction, Decline):
        return replace(reduction, remote=True)  # the rules after this one say the same
    addition = _addition_behind(reduction.reduced)
    if isinstance(addition, Decline):
        return addition
    terms = []
    for operand in addition.args[:2]:
        term = _term(operand, context)
        if isinstance(term, Decline):
            return term
        terms.append(term)
    first, second = terms
    if first.reduction.node is second.reduction.node:
        return Decline("a reduced value is added to itself")
    if first.reduction.dtype != second.reduction.dtype:
        return Decline("the two reductions have different dtypes")
    # The later one stays, so that its place in the graph does too: everything the sum needs is there.
    other = second if first.reduction.node is node else first
    parts = _Parts(addition, (first, second))
    return Site(node, NAME, None, reduction.dtype, reduction.hidden_size, parts, merged_into=other.reduction.node)


def _addition_behind(reduced: Node) -> Node | Decline:
    """The addition that a reduced value reaches by linear ops that nobody else reads."""
    current = reduced
    while True:
        if len(current.users) != 1:
            return Decline("its result has several users, or none: there is nothing to merge it with", remote=True)
        (user,) = current.users
        if is_call(user, *SUMS):
            return user
        if not _is_linear(user, current):
            return Decline(f"it is not added to another reduced value: it feeds {describe(user)}", remote=True)
        current = user


def _term(operand: object, context: Context) -> _Term | Decline:
    """The operand of an addition as a reduced value under linear ops."""
    steps: list[Node] = []
    while not is_call(operand, c10d.wait_tensor.default):
        source = _scaled(operand)
        if source is None or not isinstance(operand, Node):
            return Decline("what it is added to is not a reduced value", remote=True)
        if steps and len(operand.users) != 1:
            return Decline("a reduced value has another user")
        steps.insert(0, operand)
        operand = source
    assert isinstance(operand, Node)
    partial = operand.args[0]
    if not isinstance(partial, Node) or not all_reduce(partial):
        return Decline("what it is added to is not an all_reduce", remote=True)
    reduction = sum_over_compiled_group(partial, context)
    if isinstance(reduction, Decline):
        return reduction
    if any(len(node.users) != 1 for node in (operand, *steps)):
        return Decline("a reduced value has another user")
    return _Term(reduction, tuple(steps))


def _scaled(node: object) -> Node | None:
    """The operand of a linear op that the reduced value may come through: the one with the op's own shape."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    for argument in node.args[:2]:
        if isinstance(argument, Node) and _is_linear(node, argument) and _leads_to_reduction(argument):
            return argument
    return None


def _leads_to_reduction(node: Node) -> bool:
    while not is_call(node, c10d.wait_tensor.default):
        operands = [a for a in node.args[:2] if isinstance(a, Node) and _is_linear(node, a)]
        found = next((a for a in operands if _leads_to_reduction(a)), None)
        if found is None:
            return False
        node = found
    return True


def _is_linear(op: Node, operand: Node) -> bool:
    """Whether an op is linear in an operand, keeps its dtype, and works on its rows one by one."""
    before, after = value(operand), value(op)
    if before is None or after is None or before.dtype != after.dtype or op.op != "call_function":
        return False
    if op.target in VIEWS:
        return op.args[0] is operand and keeps_rows(op)
    if op.target in COPIES:  # what in-place reductions leave behind: copy(destination, source)
        return len(op.args) > 1 and op.args[1] is operand and same_shape(before, after)
    if op.target in SCALES and same_shape(before, after):
        by_itself = len(op.args) > 1 and op.args[0] is op.args[1]
        divides_by = op.target is aten.div.Tensor and op.args[0] is not operand
        return not by_itself and not divides_by and "rounding_mode" not in op.kwargs
    return False


def applies(site: Site, context: Context) -> Decline | None:
    parts: _Parts = site.parts
    total = value(parts.addition)
    for operand in parts.addition.args[:2]:
        whole = value(operand)
        if whole is None or total is None or whole.dtype != total.dtype or not same_shape(whole, total):
            return Decline("one of the reduced values is broadcast, or changes its dtype, where they are added")
    for factor in (factor for term in parts.terms for factor in term.factors):
        if not is_replicated(factor, context):
            return Decline(f"it is not known that its factor {describe(factor)} is equal on every rank")
    return None


def is_replicated(factor: Node, context: Context) -> bool:
    """Whether a factor is proved to be equal on every rank, from what is known of the model's parameters and inputs."""
    if not context.placements:
        context.placements.update(check(factor.graph, known_placements(factor.graph), context.groups).values)
    return isinstance(context.placements.get(factor.name), Replicated)


def merge(graph: Graph, site: Site, context: Context) -> Node:
    """Returns the all_reduce that stands for both from now on."""
    parts: _Parts = site.parts
    addition, kept = parts.addition, site.merged_into
    assert kept is not None
    whole = value(addition)
    assert whole is not None
    wide = torch.promote_types(whole.dtype, torch.float32)
    with graph.inserting_before(addition):
        first, second = (_apply(term, wide) for term in parts.terms)
        total = graph.node_copy(addition, dict(zip(addition.args[:2], (first, second), strict=True)).__getitem__)
        total.meta = {**addition.meta, "val": whole.to(wide)}
        total = _cast(total, whole.dtype)
        total.meta[_ROUNDED] = whole.dtype != wide
        reduced = graph.call_function(c10d.all_reduce.default, (total, "sum", kept.args[2]))
        wait = graph.call_function(c10d.wait_tensor.default, (reduced,))
        reduced.meta = wait.meta = {**kept.meta, "val": whole}
    addition.replace_all_uses_with(wait)
    graph.erase_node(addition)
    for term in parts.terms:
        for node in (*reversed(term.steps), term.reduction.wait, term.reduction.node):
            graph.erase_node(node)
    return reduced


def _apply(term: _Term, wide: torch.dtype) -> Node:
    """The term's linear ops on the partial sum, in a wide dtype, at the graph's insertion point."""
    old, partial = term.reduction.reduced, term.reduction.partial
    current = partial.args[0] if partial.meta.get(_ROUNDED) else _cast(partial, wide)
    assert isinstance(current, Node)
    for step in term.steps:
        if step.target in COPIES:
            old = step
            continue
        if step.target in VIEWS:
            current = replay((step,), current)
        else:
            current = step.graph.node_copy(step, lambda n, old=old, new=current: new if n is old else n)  # type: ignore[misc]
        stood = value(step)
        assert stood is not None
        current.meta = {**step.meta, "val": stood.to(wide)}
        old = step
    return current


def _cast(node: Node, dtype: torch.dtype) -> Node:
    before = value(node)
    assert before is not None
    if before.dtype == dtype:
        return node
    cast = node.graph.call_function(prims.convert_element_type.default, (node, dtype))
    cast.meta = {**node.meta, "val": before.to(dtype)}
    return cast


MERGE_REDUCTIONS = Rule(name=NAME, anchor=all_reduce, match=match_merge, applies=applies, rewrite=merge)
