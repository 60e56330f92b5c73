"""Module paths for people, from what Dynamo records: `layers.3.mlp` for `L['self']._modules['layers']...`."""

from __future__ import annotations

import functools
import re

from torch.fx import GraphModule


def innermost(stack: dict | None) -> str:
    return list(stack.values())[-1][0] if stack else ""


_ROOT = re.compile(r"^L\['\w+'\](\[\d+\])?\.?|^L__\w+?__\.?|^getattr\(.*?\)\.?")
_WRAPPED = re.compile(r"\.forward(?:\.__closure__\[\d+\]\.cell_contents)+\.__self__")
"""How Dynamo spells the module behind a forward that wraps its own, as transformers' tensor parallelism makes them."""
_ITEM = re.compile(r"_modules\[['\"](.+?)['\"]\]|\[['\"]?(\w+)['\"]?\]")


@functools.lru_cache(maxsize=4096)
def plain_path(raw: str) -> str:
    """A module path as `named_modules` spells it, from Dynamo's `L['self'].layers.0`."""
    path = _ITEM.sub(lambda m: "." + (m.group(1) or m.group(2)), _WRAPPED.sub("", _ROOT.sub("", raw)))
    path = path.replace("._modules", "").replace("..", ".").strip(".")
    return path.removeprefix("_orig_mod.").removeprefix("_orig_mod")


def annotate_paths(module: GraphModule) -> None:
    """Give each node the plain path of the module it was traced in. A node without one takes its input's."""
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["graphfuse_path"] = plain_path(innermost(stack))
        elif node.op == "call_function":
            inherited = [p for n in node.all_input_nodes if (p := n.meta.get("graphfuse_path"))]
            node.meta["graphfuse_path"] = inherited[0] if inherited else ""
