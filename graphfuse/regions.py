"""Trace repeated layers once.

Tracing a model flat costs time in proportion to its depth. So the layers of an `nn.ModuleList` are marked, from the
outside, as regions (`torch.compiler.nested_compile_region`): Dynamo then records one subgraph per distinct layer and a call of
it per layer. AOTAutograd would still walk every call, several times. So it is shown something cheaper:

    Dynamo graph:   call region 0 (x, weights of layer 0) ─► call region 0 (x, weights of layer 1) ─► ...
    seal:           each call becomes one opaque op with the recorded output shapes; AOT traces the top in no time
    trace bodies:   each distinct subgraph goes through AOT once
    inline:         bodies replace the opaque ops, which gives the flat ATen graph that passes work on

Inlining is exact: values a body writes to (KV caches, handed in as inputs of the whole graph) are threaded from call to
call, and written back once at the end. Where that cannot be done, `RegionsUnsupported` says why, and the caller traces
the model flat. Inductor gets repeated parts of the rewritten graph back as subgraphs (`passes/outline.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

log = logging.getLogger(__name__)
invoke_subgraph = torch.ops.higher_order.invoke_subgraph
_MIN_LAYERS = 2


class RegionsUnsupported(Exception):
    """The regions of this graph cannot be traced apart; the text says why. The caller traces flat."""


def repeated_layer_classes(model: nn.Module) -> list[type[nn.Module]]:
    """Classes of which some `nn.ModuleList` of the model holds at least two instances."""
    classes: list[type[nn.Module]] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            counts = Counter(type(child) for child in module)
            classes += [c for c, n in counts.items() if n >= _MIN_LAYERS and c not in classes]
    nested = {type(m) for c in classes for layer in _instances(model, c) for m in layer.modules() if m is not layer}
    return [c for c in classes if c not in nested]


def _instances(model: nn.Module, cls: type[nn.Module]) -> Iterator[nn.Module]:
    return (m for m in model.modules() if type(m) is cls)


@contextlib.contextmanager
def marked_regions(model: nn.Module) -> Iterator[None]:
    """While open, calls of the model's repeated layers trace as regions. The model is left as it was."""
    patched = []
    try:
        for cls in repeated_layer_classes(model):
            own = cls.__dict__.get("forward")
            patched.append((cls, own))
            cls.forward = torch.compiler.nested_compile_region(cls.forward)  # type: ignore[method-assign]
        yield
    finally:
        for cls, own in patched:
            if own is None:
                del cls.forward
            else:
                cls.forward = own  # type: ignore[method-assign]


# --- the opaque op that stands for a region while AOTAutograd traces the top ---------------------------------------


@torch.library.custom_op("graphfuse::_region", mutates_args=())
def _region(tensors: Sequence[Tensor], sizes: Sequence[int], key: int) -> list[Tensor]:
    raise AssertionError("a region op is always inlined before anything runs")


@_region.register_fake
def _(tensors, sizes, key):  # type: ignore[no-untyped-def]
    return [
        torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in _OPEN_REGIONS[key].outputs
    ]


@dataclass
class _Region:
    """One distinct subgraph: its Dynamo graph, what its calls return, and, once traced, its ATen graph."""

    module: GraphModule
    inputs: list[Any]
    outputs: list[Tensor]
    body: Graph | None = None


_OPEN_REGIONS: dict[int, _Region] = {}
"""Regions of the graphs being traced at this moment, by the key their op carries. Emptied by `Sealed.close`."""

_KEYS = itertools.count()


@dataclass
class Sealed:
    """A Dynamo graph whose region calls are opaque, and the regions behind them."""

    module: GraphModule
    keys: list[int] = field(default_factory=list)

    def close(self) -> None:
        for key in self.keys:
            _OPEN_REGIONS.pop(key, None)

    @property
    def num_regions(self) -> int:
        return len(self.keys)


def seal(module: GraphModule) -> Sealed:
    """Replace every region call of a Dynamo graph by the opaque op. The graph is changed in place."""
    sealed = Sealed(module)
    key_of: dict[str, int] = {}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not invoke_subgraph:
            continue
        subgraph, _, *operands = node.args
        outputs = node.meta["example_value"]
        if not isinstance(outputs, (tuple, list)) or not all(isinstance(t, Tensor) for t in outputs):
            sealed.close()
            raise RegionsUnsupported("a layer returns something other than tensors")
        values = [o.meta["example_value"] if isinstance(o, Node) else o for o in operands]
        if any(is_traceable_wrapper_subclass(v) for v in [*values, *outputs]):
            sealed.close()
            raise RegionsUnsupported("a layer takes or returns DTensors")
        name = str(subgraph.target)
        if name not in key_of:
            key_of[name] = next(_KEYS)
            sealed.keys.append(key_of[name])
            _OPEN_REGIONS[key_of[name]] = _Region(getattr(module, name), values, list(outputs))
        tensors = [o for o, v in zip(operands, values, strict=True) if isinstance(v, Tensor)]
        sizes = [o for o, v in zip(operands, values, strict=True) if not isinstance(v, Tensor)]
        with module.graph.inserting_before(node):
            call = module.graph.call_function(torch.ops.graphfuse._region.default, (tensors, sizes, key_of[name]))
        call.meta = dict(node.meta)
        call.meta["example_value"] = list(outputs)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
        if not subgraph.users:
            module.graph.erase_node(subgraph)
    module.recompile()
    return sealed


def trace_bodies(sealed: Sealed, capture: Callable[[GraphModule, list[Any]], GraphModule]) -> None:
    """Trace each distinct region once. `capture` is AOTAutograd up to the ATen graph."""
    for key in sealed.keys:
        region = _OPEN_REGIONS[key]
        region.body = capture(region.module, region.inputs).graph


def inline(top: GraphModule) -> GraphModule:
    """The flat graph: every region op of an ATen graph replaced by its body."""
    return _Inliner(top).run()


class _Inliner:
    """Rebuilds the top graph node by node, putting bodies in place of region ops.

    `current` maps an input of the whole graph that some body wrote to, to its newest value, so that later readers see
    the write, and the end of the graph can store it.
    """

    def __init__(self, top: GraphModule) -> None:
        self._top = top
        self._graph = Graph()
        self._env: dict[Node, Any] = {}
        self._results: dict[Node, list[Any]] = {}
        self._current: dict[Node, Node] = {}

    def run(self) -> GraphModule:
        for node in self._top.graph.nodes:
            if node.op == "call_function" and node.target is torch.ops.graphfuse._region.default:
                self._results[node] = self._inline_call(node)
            elif node.op == "call_function" and node.target is operator.getitem and node.args[0] in self._results:
                self._env[node] = self._results[node.args[0]][node.args[1]]
            elif node.op == "output":
                for base, newest in self._current.items():
                    written = self._graph.call_function(torch.ops.aten.copy_.default, (base, newest))
                    written.meta = {"val": base.meta["val"]}
                output = self._graph.node_copy(node, self._lookup)
                output.meta = dict(node.meta)
            else:
                if node.target is torch.ops.aten.copy_.default and self._env[node.args[0]] in self._current:
                    raise RegionsUnsupported("a tensor is written to both inside a layer and outside of it")
                copy = self._graph.node_copy(node, self._lookup)
                copy.meta = dict(node.meta)
                self._env[node] = copy
        return GraphModule(self._top, self._graph, class_name="GraphfuseModule")

    def _lookup(self, node: Node) -> Any:
        found = self._env[node]
        return self._current.get(found, found) if isinstance(found, Node) else found

    def _inline_call(self, call: Node) -> list[Any]:
        tensors, sizes, key = call.args
        region = _OPEN_REGIONS[key]  # type: ignore[index]
        assert region.body is not None
        operands_of = {True: iter(tensors), False: iter(sizes)}  # type: ignore[arg-type]
        operands = [next(operands_of[isinstance(v, Tensor)]) for v in region.inputs]
        placeholders = [n for n in region.body.nodes if n.op == "placeholder"]
        if len(placeholders) != len(operands):
            raise RegionsUnsupported("a layer's inputs change in number while it is traced")
        env: dict[Node, Any] = {}
        outer = {p: (self._env[o] if isinstance(o, Node) else o) for p, o in zip(placeholders, operands, strict=True)}
        for p, o in zip(placeholders, operands, strict=True):
            env[p] = self._lookup(o) if isinstance(o, Node) else o
        prefix = _Prefix(region.body, call)
        for node in region.body.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                (outputs,) = node.args
                return [env[o] if isinstance(o, Node) else o for o in outputs[: len(region.outputs)]]
            if node.op == "get_attr":
                raise RegionsUnsupported("a layer holds constants that are no parameters or buffers")
            if node.target is torch.ops.aten.copy_.default and node.args[0] in outer:
                base = outer[node.args[0]]
                if not (isinstance(base, Node) and base.op == "placeholder"):
                    raise RegionsUnsupported("a layer writes to a tensor that is no input of the model")
                self._current[base] = env[node.args[0]] = env[node.args[1]]
                continue
            copy = self._graph.node_copy(node, lambda n: env[n])
            copy.meta = dict(node.meta)
            copy.meta["nn_module_stack"] = prefix.move(node.meta.get("nn_module_stack"))
            env[node] = copy
        raise AssertionError("a graph without output")


class _Prefix:
    """Moves module paths of a body, which carry the first layer's, under the layer of one call."""

    def __init__(self, body: Graph, call: Node) -> None:
        self._call = _innermost(call.meta.get("nn_module_stack"))
        paths = [p for n in body.nodes if (p := _outermost(n.meta.get("nn_module_stack"), len(self._call_stack(call))))]
        self._first = min(paths, key=len) if paths else ""

    @staticmethod
    def _call_stack(call: Node) -> dict:
        return call.meta.get("nn_module_stack") or {}

    def move(self, stack: dict | None) -> dict | None:
        if not stack or not self._call or not self._first:
            return stack
        return {
            key: (self._call + path[len(self._first) :] if path.startswith(self._first) else path, cls)
            for key, (path, cls) in stack.items()
        }


def _innermost(stack: dict | None) -> str:
    return list(stack.values())[-1][0] if stack else ""


def _outermost(stack: dict | None, depth: int) -> str:
    """The path of the region's own layer in the stack of a node inside it."""
    entries = [path for path, _ in stack.values()] if stack else []
    return entries[depth - 1] if 0 < depth <= len(entries) else (entries[0] if entries else "")


_ROOT = re.compile(r"^L\['\w+'\](\[\d+\])?\.?|^L__\w+?__\.?|^getattr\(.*?\)\.?")
_ITEM = re.compile(r"_modules\[['\"](.+?)['\"]\]|\[['\"]?(\w+)['\"]?\]")


def plain_path(raw: str) -> str:
    """A module path as `named_modules` spells it, from Dynamo's `L['self'].layers.0`."""
    path = _ITEM.sub(lambda m: "." + (m.group(1) or m.group(2)), _ROOT.sub("", raw))
    path = path.replace("._modules", "").replace("..", ".").strip(".")
    return path.removeprefix("_orig_mod.").removeprefix("_orig_mod")


def annotate_paths(module: GraphModule) -> None:
    """Give each node the plain path of the module it was traced in. A node without one takes its input's."""
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["graphfuse_path"] = plain_path(_innermost(stack))
        elif node.op == "call_function":
            inherited = [p for n in node.all_input_nodes if (p := n.meta.get("graphfuse_path"))]
            node.meta["graphfuse_path"] = inherited[0] if inherited else ""
