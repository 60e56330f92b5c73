"""Graphs as text that is the same on every machine and torch version, and the comparison with a stored one."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphfuse.errors import TraceMismatchError
from graphfuse.passes.graph_reading import module_path

_update = False
"""Set by the pytest option --update-goldens (pytest_plugin.py)."""


def set_update(update: bool) -> None:
    """Let `assert_golden` write files instead of comparing with them."""
    global _update
    _update = update


def graph_text(module: GraphModule) -> str:
    """A graph as normalised text: one line per op, `%3 = add(%1, %2)  bf16[s0, 64]  # layers.0.mlp`.

    Values are numbered in order, symbols are renamed s0, s1, ... in order of appearance, groups are called by their
    size, and module paths stand behind. Addresses, versions and names that torch makes up do not appear.
    """
    names: dict[Node, str] = {}
    symbols: dict[str, str] = {}
    lines = []
    hidden = _size_checks(module)
    for node in module.graph.nodes:
        if node in hidden:
            continue
        if node.op == "output":
            lines.append(f"return {_argument(node.args[0], names, symbols)}")
            continue
        val = node.meta.get("val")
        if node.op == "placeholder":
            names[node] = f"%{len(names)}"
            lines.append(f"{names[node]} = input  {_type(val, symbols)}".rstrip())
            continue
        names[node] = f"%{len(names)}"
        arguments = [_argument(a, names, symbols) for a in node.args]
        arguments += [f"{k}={_argument(v, names, symbols)}" for k, v in node.kwargs.items()]
        if "all_reduce" in str(node.target):
            arguments[-1] = "group"
        text = f"{names[node]} = {_op(node)}({', '.join(arguments)})  {_type(val, symbols)}".rstrip()
        path = module_path(node)
        lines.append(f"{text}  # {path}" if path else text)
    return "\n".join(lines) + "\n"


def assert_golden(module: GraphModule, path: str | Path) -> None:
    """Compare a graph's text with a file. `pytest --update-goldens` writes the file instead.

    Raises:
        TraceMismatchError: the file is missing, or the graph differs; the message is a unified diff.
    """
    path, text = Path(path), graph_text(module)
    if _update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    if not path.exists():
        raise TraceMismatchError(
            f"There is no golden graph {path}. Run pytest --update-goldens, and read what it wrote."
        )
    expected = path.read_text()
    if text != expected:
        diff = "".join(difflib.unified_diff(expected.splitlines(True), text.splitlines(True), str(path), "this graph"))
        raise TraceMismatchError(f"The graph differs from the golden one (pytest --update-goldens accepts it):\n{diff}")


def _size_checks(module: GraphModule) -> set[Node]:
    """Run-time checks on sizes, and what only they read: torch versions word and place them differently."""
    hidden: set[Node] = set()
    for node in reversed(module.graph.nodes):
        check = node.target is torch.ops.aten._assert_scalar.default
        symbolic = node.op == "call_function" and isinstance(node.meta.get("val"), (torch.SymBool, torch.SymInt, bool))
        if check or (symbolic and all(user in hidden for user in node.users)):
            hidden.add(node)
    return hidden


def _op(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return getattr(target, "__name__", str(target))


def _argument(arg: Any, names: dict[Node, str], symbols: dict[str, str]) -> str:
    if isinstance(arg, Node):
        return names[arg]
    if isinstance(arg, (list, tuple)):
        return "[" + ", ".join(_argument(a, names, symbols) for a in arg) + "]"
    if isinstance(arg, torch.dtype):
        return _dtype(arg)
    if isinstance(arg, torch.SymInt):
        return _size(arg, symbols)
    return repr(arg) if isinstance(arg, str) else str(arg)


def _type(val: Any, symbols: dict[str, str]) -> str:
    if isinstance(val, torch.Tensor):
        return f"{_dtype(val.dtype)}[{', '.join(_size(s, symbols) for s in val.shape)}]"
    if isinstance(val, (list, tuple)):
        return "(" + ", ".join(_type(v, symbols) for v in val) + ")"
    if isinstance(val, torch.SymInt):
        return _size(val, symbols)
    return ""


def _size(size: Any, symbols: dict[str, str]) -> str:
    return re.sub(r"\b[su]\d+\b", lambda m: symbols.setdefault(m.group(), f"s{len(symbols)}"), str(size))


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    short = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32"}
    return short.get(name, name)
