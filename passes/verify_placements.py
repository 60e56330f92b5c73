"""Prove, value by value, that each partial sum of a graph is reduced exactly once and read whole.

Every value gets a placement over the ranks (`passes/placement/lattice.py`) from those of the op's arguments, by the
transfer rules of `passes/placement/`; parameters and inputs get theirs from whoever divided the model. An op for which
no placement of the result is right is a fault: a partial sum that is returned, added to a whole value or put through
something non-linear, a whole value that is summed again, a sum over the wrong ranks. What no rule covers is unknown,
which is listed, and neither right nor wrong.

Constants are taken to be equal on every rank, as in the offset of a rank's rows of an embedding.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphfuse.errors import ReductionProofError
from graphfuse.passes.graph_reading import aten, module_path, value
from graphfuse.passes.groups import Groups
from graphfuse.passes.placement import collectives, fp8, fused, indexing, pointwise, products, reductions, views
from graphfuse.passes.placement.call import Call, all_replicated, op_name
from graphfuse.passes.placement.chain import SOURCE, draw, origin
from graphfuse.passes.placement.lattice import (
    INHERITED,
    REPLICATED,
    Kind,
    Lookup,
    Outcome,
    Partial,
    Placement,
    Replicated,
    Unknown,
    Violation,
)

__all__ = ["PLACEMENT", "SOURCE", "PlacementFault", "PlacementReport", "UnknownValue", "check", "known_placements"]

PLACEMENT = "graphfuse_placement"
"""Metadata of a placeholder: its placement."""

RULES: dict[Any, Any] = {
    **pointwise.RULES,
    **views.RULES,
    **indexing.RULES,
    **products.RULES,
    **reductions.RULES,
    **collectives.RULES,
    **fused.RULES,
    **fp8.RULES,
}


@dataclass(frozen=True)
class PlacementFault:
    """One op that is wrong, where it stands, and the values that lead from the partial sum to it."""

    kind: Kind
    module: str
    text: str
    chain: str

    def __str__(self) -> str:
        return f"{self.module or 'the top of the model'}: {self.text}\n{self.chain}"


@dataclass(frozen=True)
class UnknownValue:
    """A value of which nothing is known, for a reason that lies in its own op."""

    name: str
    module: str
    reason: str


@dataclass
class PlacementReport:
    faults: tuple[PlacementFault, ...]
    unknown: tuple[UnknownValue, ...]
    """Where knowledge ends; values computed from these are unknown too, and counted in `num_unknown`."""

    values: dict[str, Outcome] = field(repr=False)
    num_proved: int
    num_unknown: int
    seconds: float

    def summary(self) -> str:
        faults = f", {len(self.faults)} faults" if self.faults else ""
        return f"placements: proved {self.num_proved} values, {self.num_unknown} unknown{faults}"

    def to_json(self) -> dict[str, Any]:
        return {
            "proved": self.num_proved,
            "unknown": self.num_unknown,
            "reasons": [{"value": u.name, "module": u.module, "reason": u.reason} for u in self.unknown],
            "faults": [{"kind": f.kind.value, "module": f.module, "text": f.text} for f in self.faults],
            "seconds": round(self.seconds, 3),
        }

    def require_no_faults(self, what: str, advice: str) -> None:
        """Raise `ReductionProofError` that says whose graph is wrong, draws each fault, and says what to do."""
        if self.faults:
            shown = [str(fault) for fault in self.faults[:_MOST_SHOWN]]
            more = len(self.faults) - len(shown)
            lines = [f"{what}:", *shown, *([f"... and {more} more"] if more else []), advice]
            raise ReductionProofError("\n".join(lines))


_MOST_SHOWN = 5


def check(
    graph: Graph, placements: Mapping[str, Placement], groups: Groups, reducing: Collection[object] = ()
) -> PlacementReport:
    """Find the placement of every value of a flat ATen graph.

    Args:
        placements: by the name of a placeholder, what is known of it; one that is not named is unknown.
        groups: the group that placements are about.
        reducing: further ops that sum their first argument over the group (`Rule.reduces`).
    """
    started = time.perf_counter()
    found: dict[Node, Outcome] = {}
    faults: list[PlacementFault] = []
    rules = {**dict.fromkeys(reducing, fused.fused_reduction), **RULES}
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = placements.get(node.name, Unknown("nothing says how this input is divided over the ranks"))
        elif node.op == "output":
            faults += _returned(node, found)
        elif _holds_tensors(node):
            try:
                found[node] = _outcome(Call(node, found, groups), rules)
            except Violation as violation:
                faults.append(_fault(node, violation, found))
                found[node] = _like(node, INHERITED)
            if node.target in collectives.IN_PLACE and isinstance(node.args[0], Node):
                found[node.args[0]] = found[node]
    values = [node for node in found if _holds_tensors(node)]
    flat = {node: list(_leaves(found[node])) for node in values}
    is_unknown = {node: any(isinstance(p, Unknown) for p in leaves) for node, leaves in flat.items()}
    unknown = [
        UnknownValue(node.name, module_path(node), p.reason)
        for node, leaves in flat.items()
        for p in dict.fromkeys(leaves)
        if isinstance(p, Unknown) and not p.inherited
    ]
    return PlacementReport(
        tuple(faults),
        tuple(unknown),
        {node.name: found[node] for node in values},
        sum(not u for u in is_unknown.values()),
        sum(is_unknown.values()),
        time.perf_counter() - started,
    )


def known_placements(graph: Graph) -> dict[str, Placement]:
    """What is known of a graph's placeholders, from their metadata (see `graphfuse/input_placements.py`)."""
    return {n.name: n.meta[PLACEMENT] for n in graph.nodes if n.op == "placeholder" and PLACEMENT in n.meta}


def _outcome(call: Call, rules: Mapping[Any, Any]) -> Outcome:
    node = call.node
    if node.op == "get_attr":
        return REPLICATED  # a constant
    if node.target in _GETITEM:
        return _item(call.found[node.args[0]], node.args[1])  # type: ignore[index]
    rule = rules.get(node.target)
    if rule is not None:
        return rule(call)
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return _like(node, Unknown(f"there is no rule for {op_name(node)}"))
    if op in _CONSTANTS:
        return _constant(node)
    if torch.Tag.pointwise in op.tags:
        return pointwise.nonlinear(call)
    operands = call.tensors()
    by_chance = torch.Tag.nondeterministic_seeded in op.tags
    if op.namespace in ("aten", "prims") and not by_chance and all_replicated(operands):
        return _like(node, REPLICATED)  # equal results for equal operands
    if any(isinstance(o.placement, Unknown) for o in operands):
        return _like(node, INHERITED)
    about = ", ".join(dict.fromkeys(str(o.placement) for o in operands)) or "no operands"
    return _like(node, Unknown(f"there is no rule for {op_name(node)} of {about}"))


_GETITEM = (operator.getitem,)
_CONSTANTS = (
    aten.scalar_tensor.default,
    aten.full.default,
    aten.zeros.default,
    aten.full_like.default,
    aten.zeros_like.default,
)


def _constant(node: Node) -> Placement:
    tensor = value(node)
    name = op_name(node)
    number = node.args[0] if name == "scalar_tensor" else node.args[1] if name in ("full", "full_like") else 0
    dims = range(tensor.dim() if tensor is not None else 0)
    return Replicated(frozenset(dims), zero=bool(not isinstance(number, Node) and number == 0))


def _item(outcome: Outcome, index: Any) -> Outcome:
    if isinstance(outcome, tuple):
        return outcome[index]
    return outcome


def _like(node: Node, placement: Placement) -> Outcome:
    """The same placement for each result of an op."""
    values = views.value_tuple(node)
    return (placement,) * len(values) if values else placement


def _holds_tensors(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) or (isinstance(val, tuple | list) and any(isinstance(v, Tensor) for v in val))


def _leaves(outcome: Outcome) -> Iterable[Placement]:
    if isinstance(outcome, tuple):
        for part in outcome:
            yield from _leaves(part)
    else:
        yield outcome


def _returned(output: Node, found: dict[Node, Outcome]) -> Iterable[PlacementFault]:
    for node in output.all_input_nodes:
        placement = found.get(node)
        if isinstance(placement, Partial | Lookup):
            text = f"the model returns a {placement}, which no collective reduces"
            yield _fault(output, Violation(Kind.OUTPUT, node, text), found)


def _fault(node: Node, violation: Violation, found: dict[Node, Outcome]) -> PlacementFault:
    path = module_path(node)
    if node.op == "output" and violation.operand is not None:
        path = module_path(violation.operand)
    return PlacementFault(violation.kind, path, violation.text, draw(origin(violation.operand, found), node, found))
