"""Tell a gated norm, norm(x) * silu(gate), from a plain one: its kernels are others, so it is left alone."""

from __future__ import annotations

from torch.fx import Node

from graphfuse.passes.graph_reading import CASTS, VIEWS, aten, is_call, reaches


def gate_of(output: Node) -> str | None:
    """The name of an activation that the norm's only reader multiplies it with: the mark of a gated norm."""
    forms = {step.node: step for step in reaches(output)}
    users = [user for form, step in forms.items() for user in form.users if step.through(user) is None]
    if len(users) != 1 or not is_call(users[0], aten.mul.Tensor):
        return None
    for operand in users[0].args:
        if isinstance(operand, Node) and operand not in forms:
            return _activation_behind(operand)
    return None


def _activation_behind(node: Node) -> str | None:
    """silu or sigmoid, whole or as Inductor's table decomposes them, behind casts and views."""
    while isinstance(node, Node) and node.op == "call_function":
        if is_call(node, aten.silu.default, aten.sigmoid.default):
            return node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
        if is_call(node, aten.div.Tensor) and isinstance(node.args[1], Node):
            if any(is_call(a, aten.exp.default) for a in node.args[1].args if isinstance(a, Node)):
                return "silu"
            return None
        if is_call(node, aten.mul.Tensor) and any(is_call(a, aten.sigmoid.default) for a in node.args):
            return "silu"
        if node.target in CASTS or node.target in VIEWS:
            node = node.args[0]  # type: ignore[assignment]
            continue
        return None
    return None
