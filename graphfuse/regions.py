"""Trace repeated layers once.

Tracing a model flat costs time in proportion to its depth. So layers of an `nn.ModuleList` are marked, from the outside, as regions (`torch.compiler.nested_compile_region`): Dynamo then records one subgraph per distinct layer and a call of
it per layer. AOTAutograd would still walk every call, several times. So it is shown something cheaper:

    Dynamo graph:   call region 0 (x, weights of layer 0) ─► call region 0 (x, weights of layer 1) ─► ...
    seal:           the chain of calls becomes one opaque op with the recorded result shapes; AOT traces the top quickly
    trace bodies:   each distinct subgraph goes through AOT once
    inline:         bodies replace the opaque op, which gives the flat ATen graph that passes work on

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


# --- the opaque op that stands for calls of regions while AOTAutograd traces the top --------------------------------


@torch.library.custom_op("graphfuse::_regions", mutates_args=())
def _regions(tensors: Sequence[Tensor], sizes: Sequence[int], key: int) -> list[Tensor]:
    raise AssertionError("a region op is always inlined before anything runs")


@_regions.register_fake
def _(tensors, sizes, key):  # type: ignore[no-untyped-def]
    outputs = _OPEN_CHAINS[key].calls[-1].region.outputs
    return [
        torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)
        for t in outputs
        if isinstance(t, Tensor)
    ]


@dataclass
class _Region:
    """One distinct subgraph: its Dynamo graph, example values of its inputs, recorded results, and its ATen graph.

    Some torch versions also return sizes, which nobody reads; only the tensors among the results count.
    """

    module: GraphModule
    inputs: list[Any]
    outputs: list[Any]
    body: Graph | None = None


@dataclass(frozen=True)
class _Outer:
    """The index-th operand of the opaque op."""

    index: int


@dataclass(frozen=True)
class _Result:
    """The index-th result of the call-th call of the chain."""

    call: int
    index: int


@dataclass
class _Call:
    region: _Region
    operands: list[_Outer | _Result | int]
    stack: dict | None
    """Dynamo's module stack of the call: the layer it is."""


@dataclass
class _Chain:
    """Calls of which each is read by the next one only: what one opaque op stands for."""

    calls: list[_Call] = field(default_factory=list)
    outer: dict[Node, int] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def operand(self, node: Any) -> _Outer | _Result | int:
        if not isinstance(node, Node):
            return node
        if node.op == "call_function" and node.target is operator.getitem and node.args[0] in self.nodes:
            return _Result(self.nodes.index(node.args[0]), node.args[1])  # type: ignore[arg-type]
        return _Outer(self.outer.setdefault(node, len(self.outer)))


_OPEN_CHAINS: dict[int, _Chain] = {}
"""Chains of the graphs being traced at this moment, by the key their op carries. Emptied by `Sealed.close`."""

_KEYS = itertools.count()


@dataclass
class Sealed:
    """A Dynamo graph whose region calls are opaque, and the regions behind them."""

    regions: list[_Region] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    def close(self) -> None:
        for key in self.keys:
            _OPEN_CHAINS.pop(key, None)


def seal(module: GraphModule) -> Sealed:
    """Replace the region calls of a Dynamo graph by opaque ops, one a chain of calls. The graph is changed in place."""
    calls = [n for n in module.graph.nodes if n.op == "call_function" and n.target is invoke_subgraph]
    for call in calls:
        _read_sizes_elsewhere(module.graph, call)
    sealed = Sealed()
    regions: dict[str, _Region] = {}
    for node in calls:
        name = str(node.args[0].target)
        if name not in regions:
            regions[name] = _region_of(module, node)
            sealed.regions.append(regions[name])
    for chain_nodes in _chains(module.graph, calls):
        chain = _Chain()
        for node in chain_nodes:
            operands = [chain.operand(o) for o in node.args[2:]]
            chain.calls.append(_Call(regions[str(node.args[0].target)], operands, node.meta.get("nn_module_stack")))
            chain.nodes.append(node)
        key = next(_KEYS)
        _OPEN_CHAINS[key] = chain
        sealed.keys.append(key)
        _replace_chain(module.graph, chain, key)
    if calls:
        module.recompile()
    return sealed


def _region_of(module: GraphModule, call: Node) -> _Region:
    subgraph, _, *operands = call.args
    outputs = call.meta["example_value"]
    if not isinstance(outputs, (tuple, list)) or not any(isinstance(t, Tensor) for t in outputs):
        raise RegionsUnsupported("a layer returns something other than tensors")
    values = [o.meta["example_value"] if isinstance(o, Node) else o for o in operands]
    if any(is_traceable_wrapper_subclass(v) for v in [*values, *outputs] if isinstance(v, Tensor)):
        raise RegionsUnsupported("a layer takes or returns DTensors")
    for user in call.users:
        if user.target is not operator.getitem or (user.users and not isinstance(outputs[user.args[1]], Tensor)):  # type: ignore[index]
            raise RegionsUnsupported("a layer returns something other than tensors")
    return _Region(getattr(module, str(subgraph.target)), values, list(outputs))  # type: ignore[union-attr]


def _read_sizes_elsewhere(graph: Graph, call: Node) -> None:
    """Sizes among a region's results (torch 2.11 returns what it computed on the way) are those of some tensor before:
    let their readers ask that one, so that calls hand on nothing but tensors."""
    outputs = call.meta["example_value"]
    for item in list(call.users):
        size = outputs[item.args[1]] if item.target is operator.getitem else None  # type: ignore[index]
        if not item.users or not isinstance(size, torch.SymInt):
            continue
        found = _dimension_of_size(graph, call, size)
        if found is None:
            continue
        tensor, dim = found
        with graph.inserting_after(tensor):
            asked = graph.call_method("size", (tensor, dim))
        asked.meta["example_value"] = size
        item.replace_all_uses_with(asked)


def _dimension_of_size(graph: Graph, before: Node, size: torch.SymInt) -> tuple[Node, int] | None:
    for node in graph.nodes:
        if node is before:
            return None
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and node.op != "placeholder":
            for dim, other in enumerate(value.shape):
                if isinstance(other, torch.SymInt) and other.node.expr == size.node.expr:
                    return node, dim
    return None


def _chains(graph: Graph, calls: list[Node]) -> Iterator[list[Node]]:
    """Cut the calls into chains. A call joins the one before if it alone reads it, and all else it reads stands before
    the chain: then the chain can run as one op where its last call stands."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    chain: list[Node] = []
    for call in calls:
        if chain:
            items = set(chain[-1].users)
            only_reader = all(reader is call for item in items for reader in item.users)
            rest = [o for o in call.args[2:] if isinstance(o, Node) and o not in items]
            if not (only_reader and all(place[o] < place[chain[0]] for o in rest)):
                yield chain
                chain = []
        chain.append(call)
    if chain:
        yield chain


def _replace_chain(graph: Graph, chain: _Chain, key: int) -> None:
    final = chain.nodes[-1]
    example = {node: node.meta["example_value"] for node in chain.outer}
    tensors = [node for node in chain.outer if isinstance(example[node], Tensor)]
    sizes = [node for node in chain.outer if not isinstance(example[node], Tensor)]
    outputs = chain.calls[-1].region.outputs
    with graph.inserting_before(final):
        op = graph.call_function(torch.ops.graphfuse._regions.default, (tensors, sizes, key))
    op.meta = dict(final.meta)
    op.meta["example_value"] = [t for t in outputs if isinstance(t, Tensor)]
    position = list(itertools.accumulate((isinstance(t, Tensor) for t in outputs), initial=0))
    for item in list(final.users):
        if item.users:
            item.args = (op, position[item.args[1]])  # type: ignore[index]
        else:
            graph.erase_node(item)
    for node in reversed(chain.nodes):
        for item in list(node.users):
            graph.erase_node(item)
        graph.erase_node(node)
    # tensors first, then sizes: the order in which `_Inliner` meets them again
    order = {node: i for i, node in enumerate([*tensors, *sizes])}
    renumber = {index: order[node] for node, index in chain.outer.items()}
    for call in chain.calls:
        call.operands = [_Outer(renumber[o.index]) if isinstance(o, _Outer) else o for o in call.operands]
    chain.nodes, chain.outer = [], {}


def trace_bodies(sealed: Sealed, capture: Callable[[GraphModule, list[Any]], GraphModule]) -> None:
    """Trace each distinct region once. `capture` is AOTAutograd up to the ATen graph."""
    for region in sealed.regions:
        try:
            region.body = capture(region.module, region.inputs).graph
        except Exception as error:  # whatever it is, the layer may still trace as a part of the whole
            raise RegionsUnsupported(f"a layer cannot be traced apart ({type(error).__name__}: {error})") from error


# --- back to a flat graph -------------------------------------------------------------------------------------------


def inline(top: GraphModule) -> GraphModule:
    """The flat graph: every region op of an ATen graph replaced by the bodies it stands for."""
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
            if node.target is torch.ops.graphfuse._regions.default:
                self._results[node] = self._inline_chain(node)
            elif node.target is operator.getitem and node.args[0] in self._results:
                self._env[node] = self._results[node.args[0]][node.args[1]]
            elif node.op == "output":
                for base, newest in self._current.items():
                    written = self._graph.call_function(torch.ops.aten.copy_.default, (base, newest))
                    written.meta = {"val": base.meta["val"]}
                self._graph.node_copy(node, self._lookup).meta = dict(node.meta)
            else:
                if node.target is torch.ops.aten.copy_.default and self._env[node.args[0]] in self._current:
                    raise RegionsUnsupported("a tensor is written to both inside a layer and outside of it")
                self._env[node] = self._graph.node_copy(node, self._lookup)
                self._env[node].meta = dict(node.meta)
        return GraphModule(self._top, self._graph, class_name="GraphfuseModule")

    def _lookup(self, node: Node) -> Any:
        return self._newest(self._env[node])

    def _newest(self, found: Any) -> Any:
        return self._current.get(found, found) if isinstance(found, Node) else found

    def _inline_chain(self, op: Node) -> list[Any]:
        tensors, sizes, key = op.args
        outer = [self._env[o] if isinstance(o, Node) else o for o in (*tensors, *sizes)]  # type: ignore[misc]
        results: list[list[Any]] = []
        for call in _OPEN_CHAINS[key].calls:  # type: ignore[index]
            operands = []
            for operand in call.operands:
                if isinstance(operand, _Outer):
                    operands.append(outer[operand.index])
                else:
                    operands.append(results[operand.call][operand.index] if isinstance(operand, _Result) else operand)
            results.append(self._inline_call(call, operands))
        last = _OPEN_CHAINS[key].calls[-1].region.outputs  # type: ignore[index]
        return [value for value, recorded in zip(results[-1], last, strict=True) if isinstance(recorded, Tensor)]

    def _inline_call(self, call: _Call, operands: list[Any]) -> list[Any]:
        region = call.region
        assert region.body is not None
        placeholders = [n for n in region.body.nodes if n.op == "placeholder"]
        if len(placeholders) != len(operands):
            raise RegionsUnsupported("a layer's inputs change in number while it is traced")
        given = dict(zip(placeholders, operands, strict=True))
        env = {p: self._newest(o) for p, o in given.items()}
        prefix = _Prefix(region.body, call.stack)
        for node in region.body.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                (outputs,) = node.args
                return [env[o] if isinstance(o, Node) else o for o in outputs[: len(region.outputs)]]
            if node.op == "get_attr":
                raise RegionsUnsupported("a layer holds constants that are no parameters or buffers")
            if node.target is torch.ops.aten.copy_.default and node.args[0] in given:
                base = given[node.args[0]]
                if not (isinstance(base, Node) and base.op == "placeholder"):
                    raise RegionsUnsupported("a layer writes to a tensor that is no input of the model")
                self._current[base] = env[node.args[0]] = env[node.args[1]]
                continue
            copy = self._graph.node_copy(node, env.__getitem__)
            copy.meta = dict(node.meta)
            copy.meta["nn_module_stack"] = prefix.move(node.meta.get("nn_module_stack"))
            env[node] = copy
        raise AssertionError("a graph without output")


class _Prefix:
    """Moves module paths of a body, which carry the first layer's, under the layer of one call."""

    def __init__(self, body: Graph, stack: dict | None) -> None:
        self._layer = _innermost(stack)
        depth = len(stack or ())
        stacks = [list(s.values()) for n in body.nodes if (s := n.meta.get("nn_module_stack"))]
        paths = {s[min(depth, len(s)) - 1][0] for s in stacks if depth}
        self._first = min(paths, key=len, default="")

    def move(self, stack: dict | None) -> dict | None:
        if not stack or not self._layer or not self._first:
            return stack
        return {
            key: (self._layer + path[len(self._first) :] if path.startswith(self._first) else path, cls)
            for key, (path, cls) in stack.items()
        }


def _innermost(stack: dict | None) -> str:
    return list(stack.values())[-1][0] if stack else ""


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
