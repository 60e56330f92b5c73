"""Trace repeated layers once.

Tracing a model flat costs time in proportion to its depth. So the layers of an `nn.ModuleList` or `nn.Sequential` are
marked as regions, from outside (`graphfuse/region_marks.py`): Dynamo then records one subgraph per distinct layer, and
a call of it per layer. AOTAutograd would still walk every call, several times. So it is shown something cheaper:

    Dynamo graph:   call region 0 (x, weights of layer 0) ─► call region 0 (x, weights of layer 1) ─► ...
    seal:           the chain of calls becomes one opaque op with the recorded result shapes
    trace bodies:   each distinct subgraph goes through AOT once
    inline:         bodies replace the opaque op (graphfuse/inlining.py): the flat ATen graph that passes work on

Inlining is exact: values a body writes to (KV caches, handed in as inputs of the whole graph) are threaded from call to
call, and written back once at the end. Where that cannot be done, `RegionsUnsupported` says why, and the caller traces
the model flat. Inductor gets repeated parts of the rewritten graph back as subgraphs (`passes/outline.py`).
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphfuse.module_paths import innermost

log = logging.getLogger(__name__)
invoke_subgraph = torch.ops.higher_order.invoke_subgraph


class RegionsUnsupported(Exception):
    """The regions of this graph cannot be traced apart; the text says why. The caller traces flat."""


# --- the opaque op that stands for calls of regions while AOTAutograd traces the top --------------------------------


@torch.library.custom_op("graphfuse::_regions", mutates_args=())
def _regions(tensors: Sequence[Tensor], sizes: Sequence[int], key: int) -> list[Tensor]:
    raise AssertionError("a region op is always inlined before anything runs")


@_regions.register_fake
def _(tensors, sizes, key):
    outputs = OPEN_CHAINS[key].calls[-1].region.outputs
    return [
        torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)
        for t in outputs
        if isinstance(t, Tensor)
    ]


@dataclass
class Region:
    """One distinct subgraph: its Dynamo graph, example values of its inputs, recorded results, and its ATen graph.

    Some torch versions also return sizes, which nobody reads; only the tensors among the results count.
    """

    module: GraphModule
    inputs: list[Any]
    outputs: list[Any]
    body: Graph | None = None
    _first: str | None = None

    def mover(self, stack: dict | None) -> Callable[[dict | None], dict | None]:
        """What moves module stacks of the body, which carry the first layer's paths, under the layer of a call."""
        layer = innermost(stack)
        if self._first is None:
            assert self.body is not None
            depth = len(stack or ())
            stacks = [list(s.values()) for n in self.body.nodes if (s := n.meta.get("nn_module_stack"))]
            self._first = min({s[min(depth, len(s)) - 1][0] for s in stacks if depth}, key=len, default="")
        first, moved = self._first, {}

        def move(inner: dict | None) -> dict | None:
            if not inner or not layer or not first:
                return inner
            name = innermost(inner)
            if name not in moved:
                moved[name] = {
                    key: (layer + path[len(first) :] if path.startswith(first) else path, cls)
                    for key, (path, cls) in inner.items()
                }
            return moved[name]

        return move


@dataclass(frozen=True)
class Outer:
    """The index-th operand of the opaque op."""

    index: int


@dataclass(frozen=True)
class Result:
    """The index-th result of the call-th call of the chain."""

    call: int
    index: int


@dataclass
class Call:
    region: Region
    operands: list[Outer | Result | int]
    stack: dict | None
    """Dynamo's module stack of the call: the layer it is."""


@dataclass
class Chain:
    """Calls of which each is read by the next one only: what one opaque op stands for."""

    calls: list[Call] = field(default_factory=list)
    outer: dict[Node, int] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def operand(self, node: Any) -> Outer | Result | int:
        if not isinstance(node, Node):
            return node
        if node.op == "call_function" and node.target is operator.getitem and node.args[0] in self.nodes:
            return Result(self.nodes.index(node.args[0]), node.args[1])  # type: ignore[arg-type]
        return Outer(self.outer.setdefault(node, len(self.outer)))


OPEN_CHAINS: dict[int, Chain] = {}
"""Chains of the graphs being traced at this moment, by the key their op carries. Emptied by `Sealed.close`."""

_KEYS = itertools.count()


@dataclass
class Sealed:
    """A Dynamo graph whose region calls are opaque, and the regions behind them."""

    regions: list[Region] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    def close(self) -> None:
        for key in self.keys:
            OPEN_CHAINS.pop(key, None)


def seal(module: GraphModule) -> Sealed:
    """Replace the region calls of a Dynamo graph by opaque ops, one a chain of calls. The graph is changed in place."""
    calls = [n for n in module.graph.nodes if n.op == "call_function" and n.target is invoke_subgraph]
    for call in calls:
        _read_sizes_elsewhere(module.graph, call)
    sealed = Sealed()
    regions: dict[str, Region] = {}
    for node in calls:
        name = _subgraph_name(node)
        if name not in regions:
            regions[name] = _region_of(module, node)
            sealed.regions.append(regions[name])
    for chain_nodes in _chains(module.graph, calls):
        chain = Chain()
        for node in chain_nodes:
            operands = [chain.operand(o) for o in node.args[2:]]
            chain.calls.append(Call(regions[_subgraph_name(node)], operands, node.meta.get("nn_module_stack")))
            chain.nodes.append(node)
        key = next(_KEYS)
        OPEN_CHAINS[key] = chain
        sealed.keys.append(key)
        _replace_chain(module.graph, chain, key)
    if calls:
        module.recompile()
    return sealed


def _subgraph_name(call: Node) -> str:
    return str(call.args[0].target)  # type: ignore[union-attr]


def _region_of(module: GraphModule, call: Node) -> Region:
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
    return Region(getattr(module, str(subgraph.target)), values, list(outputs))  # type: ignore[union-attr]


def _read_sizes_elsewhere(graph: Graph, call: Node) -> None:
    """Sizes among a region's results (torch 2.11 returns what it computed on the way) are those of some tensor before:
    let their readers ask that one, so that calls hand on nothing but tensors."""
    outputs = call.meta["example_value"]
    for item in list(call.users):
        size = outputs[item.args[1]] if item.target is operator.getitem else None
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
    """Cut the calls into chains. A call joins the one before if it alone reads it, all else it reads stands before the
    chain, and nothing between the two touches memory that the chain is given and may write to: then the chain can run
    as one op where its last call stands."""
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    chain: list[Node] = []
    given: set[int | None] = set()
    for call in calls:
        if chain:
            items = set(chain[-1].users)
            only_reader = all(reader is call for item in items for reader in item.users)
            rest = [o for o in call.args[2:] if isinstance(o, Node) and o not in items]
            between = [n for n in nodes[place[chain[-1]] + 1 : place[call]] if n not in items]
            read = {memory(i.meta.get("example_value")) for n in between for i in n.all_input_nodes}
            if not (only_reader and not read & given and all(place[o] < place[chain[0]] for o in rest)):
                yield chain
                chain, given = [], set()
        chain.append(call)
        given |= {memory(o.meta["example_value"]) for o in call.args[2:] if isinstance(o, Node)} - {None}
    if chain:
        yield chain


def memory(value: object) -> int | None:
    """What is equal for tensors that share memory, as long as they live; None for all else."""
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return None
    return value.untyped_storage()._cdata


def _replace_chain(graph: Graph, chain: Chain, key: int) -> None:
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
        call.operands = [Outer(renumber[o.index]) if isinstance(o, Outer) else o for o in call.operands]
    chain.nodes, chain.outer = [], {}


def trace_bodies(sealed: Sealed, capture: Callable[[GraphModule, list[Any]], GraphModule]) -> None:
    """Trace each distinct region once. `capture` is AOTAutograd up to the ATen graph."""
    for region in sealed.regions:
        try:
            region.body = capture(region.module, region.inputs).graph
        except Exception as error:  # whatever it is, the layer may still trace as a part of the whole
            raise RegionsUnsupported(f"a layer cannot be traced apart ({type(error).__name__}: {error})") from error
