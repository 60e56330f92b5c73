"""A fault as a chain of values: from where the placement at fault comes from, op by op, to where it goes wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.fx import Node

from graphfuse.passes.graph_reading import module_path
from graphfuse.passes.placement.call import op_name
from graphfuse.passes.placement.lattice import Outcome, Replicated

SOURCE = "graphfuse_source"
"""Metadata of a placeholder: the parameter or argument that it is."""

MOST_LINKS = 8
"""Longer chains leave out the middle."""


def origin(operand: Node | None, found: Mapping[Node, Outcome]) -> list[Node]:
    """The values through which a value got its placement, first the one that made it, last itself."""
    if operand is not None and isinstance(found.get(operand), Replicated):
        return _from_reduction(operand)
    chain: list[Node] = []
    node = operand
    while node is not None:
        chain.append(node)
        kind = type(found.get(node))
        node = next((n for n in node.all_input_nodes if kind is not tuple and _has_kind(found.get(n), kind)), None)
    return chain[::-1]


def _has_kind(outcome: Any, kind: type) -> bool:
    return isinstance(outcome, kind) or (isinstance(outcome, tuple) and any(isinstance(p, kind) for p in outcome))


def _from_reduction(whole: Node) -> list[Node]:
    """The shortest way from the reduction that made a value whole, if that is near."""
    paths, seen = [[whole]], {whole}
    while paths:
        path = paths.pop(0)
        if "all_reduce" in op_name(path[0]):
            return path
        if len(path) < MOST_LINKS:
            new = [n for n in path[0].all_input_nodes if n not in seen]
            seen.update(new)
            paths.extend([n, *path] for n in new)
    return [whole]


def draw(chain: list[Node], end: Node, found: Mapping[Node, Outcome]) -> str:
    """One line a value, with its operands' placements where the chain starts and where it ends."""
    lines = [_line(node, found, operands=i == 0) for i, node in enumerate(chain)]
    left_out = len(lines) - MOST_LINKS
    if left_out > 0:
        half = MOST_LINKS // 2
        lines[half : half + left_out] = [f"... {left_out} more"]
    lines.append(f"{_line(end, found, operands=True)}  <-- here")
    return "\n".join(f"  {'' if i == 0 else '-> '}{line}" for i, line in enumerate(lines))


def _line(node: Node, found: Mapping[Node, Outcome], *, operands: bool) -> str:
    if node.op == "call_function":
        read = [f"{n.name}: {_show(found[n])}" if operands else n.name for n in node.all_input_nodes if n in found]
        what = f"{node.name} = {op_name(node)}({', '.join(read)})"
    else:
        what = "the model's output" if node.op == "output" else str(node.meta.get(SOURCE, node.name))
    path = module_path(node)
    shown = _show(found.get(node))
    parts = (what, _shape(node), "" if shown == "unknown" else shown, f"in {path}" if path else "")
    return "  ".join(part for part in parts if part)


def _shape(node: Node) -> str:
    val = node.meta.get("val")
    return f"[{', '.join(map(str, val.shape))}]" if isinstance(val, Tensor) else ""


def _show(outcome: Outcome | None) -> str:
    if isinstance(outcome, tuple):
        return f"({', '.join(map(_show, outcome))})"
    return "" if outcome is None else str(outcome)
