"""Give Inductor each repeated part of a flat graph once.

Layers of a model come out of the passes as runs of equal nodes, now cut at the fused reductions and no longer at the
modules. Inductor's time grows with the number of nodes it sees, so a run that repeats becomes a subgraph, called n
times (`invoke_subgraph`), and is compiled once.

    a b c d  a b c d  a b c d  e      becomes      r r r e,   r = a b c d

The period is found from the graph alone: two nodes are alike if they have the same target, constants, result shapes and
dtypes; two runs are if their nodes are, and are wired alike. Values from outside (weights, caches) become operands.
What must happen where it stands (mutations, random numbers, ops that hold graphs of their own) is like nothing else, so
no run contains it. A cut may part anything but an op from its several results, a view from its base (the caller would
take the two for separate memory), and a collective from its wait.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from graphfuse.passes.graph_reading import VIEWS, is_call

invoke_subgraph = torch.ops.higher_order.invoke_subgraph
CHUNK = "graphfuse_chunk"
"""Of a call's meta: the stack traces of the nodes that it stands for, in order. The subgraph has the first call's."""

MIN_NODES = 16
"""Shorter runs are not worth a subgraph."""
MOST_RUNS = 16
"""Each costs a search of the graph."""


def outline(module: GraphModule) -> dict[str, int]:
    """Replace repeated runs of `module` in place, the longest first: models with layers of several kinds have several.
    Returns the number of calls per subgraph made."""
    made: dict[Hashable, str] = {}
    calls: Counter[str] = Counter()
    for _ in range(MOST_RUNS):
        nodes = [n for n in module.graph.nodes if n.op == "call_function"]
        chunks = next(filter(None, (_chunks(nodes, run, made) for run in _runs(_looks(nodes)))), [])
        if not chunks:
            break
        name = made.setdefault(_wiring(chunks[0]).key, f"graphfuse_region_{len(made)}")
        _outline_chunks(module, chunks, name)
        calls[name] += len(chunks)
    if calls:
        module.graph.lint()
        module.recompile()
    return dict(calls)


# --- alike nodes, and the period at which they come again -------------------------------------------------------------


def _looks(nodes: list[Node]) -> list[Hashable]:
    calls = set(nodes)
    return [_look(node, calls) for node in nodes]


def _look(node: Node, calls: set[Node]) -> Hashable:
    """What must agree for two nodes to be alike, wherever they stand. How they are wired is compared afterwards."""
    if not _may_move(node):
        return node
    return _text(node, lambda arg: "value" if arg in calls else "input"), _shape(node)


def _may_move(node: Node) -> bool:
    """Whether a node only computes its result from its arguments."""
    target, val = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem or isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return val is not None and not target._schema.is_mutable and not _draws_numbers(node, target)


def _draws_numbers(node: Node, target: torch._ops.OpOverload) -> bool:
    """Whether an op takes random numbers. Attention is tagged so for its dropout, which inference sets to zero."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    default = target._schema.arguments[place].default_value
    return bool((node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", default)) != 0)


def _text(node: Node, show: Callable[[Node], Hashable]) -> Hashable:
    """A node's target and arguments; arguments that are nodes as `show` gives them."""

    def text(arg: Any) -> Hashable:
        if isinstance(arg, Node):
            return ("node", show(arg))
        if isinstance(arg, (list, tuple)):
            return tuple(map(text, arg))
        if isinstance(arg, slice):
            return ("slice", text(arg.start), text(arg.stop), text(arg.step))
        return (type(arg).__name__, str(arg))

    return node.target, text(node.args), tuple((name, text(arg)) for name, arg in sorted(node.kwargs.items()))


def _shape(node: Node) -> Hashable:
    val = node.meta.get("val")
    values = val if isinstance(val, (tuple, list)) else (val,)
    return tuple(
        (str(v.dtype), tuple(map(str, v.shape)), tuple(map(str, v.stride())), str(v.device))
        if isinstance(v, torch.Tensor)
        else (type(v).__name__, str(v))
        for v in values
    )


@dataclass(frozen=True)
class _Run:
    start: int
    period: int
    count: int


def _runs(looks: list[Hashable]) -> list[_Run]:
    """The stretches looks[i] == looks[i + period], those that spare most nodes first. Periods tried: distances between
    equal rare looks (a fused reduction is one), so that the search stays linear."""
    ids: dict[Hashable, int] = {}
    codes = [ids.setdefault(look, len(ids)) for look in looks]
    places: dict[int, list[int]] = {}
    for i, code in enumerate(codes):
        places.setdefault(code, []).append(i)
    distances: Counter[int] = Counter()
    for where in places.values():
        for step in (1, 2, 3, 4):  # the same look up to 4 times a layer
            distances.update(b - a for a, b in zip(where, where[step:], strict=False) if b - a >= MIN_NODES)
    runs = [
        _Run(start, period, length // period + 1)
        for period, _ in distances.most_common(24)
        for start, length in _stretches(codes, period)
    ]
    return sorted((run for run in runs if run.count >= 2), key=lambda run: -(run.count - 1) * run.period)


def _stretches(codes: list[int], period: int) -> list[tuple[int, int]]:
    """Maximal stretches of positions i with codes[i] == codes[i + period], as (start, length ≥ period)."""
    found, start = [], None
    for i in range(len(codes) - period + 1):
        equal = i + period < len(codes) and codes[i] == codes[i + period]
        if equal and start is None:
            start = i
        elif not equal and start is not None:
            if i - start >= period:
                found.append((start, i - start))
            start = None
    return found


# --- alike chunks -----------------------------------------------------------------------------------------------------


@dataclass
class _Wiring:
    """A chunk in canonical form: chunks of equal `key` are one function of `operands`, which gives `results`."""

    key: Hashable
    operands: list[Node]
    results: list[Node]


def _wiring(chunk: list[Node]) -> _Wiring:
    inside = {node: i for i, node in enumerate(chunk)}
    operands: dict[Node, int] = {}

    def show(arg: Node) -> Hashable:
        return ("own", inside[arg]) if arg in inside else ("operand", operands.setdefault(arg, len(operands)))

    body = tuple(_text(node, show) for node in chunk)
    results = [node for node in chunk if any(user not in inside for user in node.users)]
    key = (body, tuple(map(_shape, operands)), tuple(inside[node] for node in results))
    return _Wiring(key, list(operands), results)


def _chunks(nodes: list[Node], run: _Run, known: Container[Hashable]) -> list[list[Node]]:
    """The run cut into alike chunks: where that gives a subgraph that is `known`, else at the first place where a cut
    is allowed."""
    end = run.start + run.count * run.period
    first: list[list[Node]] = []
    for start in range(run.start, run.start + run.period):
        chunks = [nodes[i : i + run.period] for i in range(start, end - run.period + 1, run.period)]
        if len(chunks) < 2:
            break
        wiring = _wiring(chunks[len(chunks) // 2])
        if _may_be_cut(wiring) and (not first or wiring.key in known):
            chunks = _alike(chunks)
            if chunks and (not known or _wiring(chunks[0]).key in known):
                return chunks
            first = first or chunks
    return first


def _alike(chunks: list[list[Node]]) -> list[list[Node]]:
    """The chunks whose wiring is the most common one; the first and last of a run may differ."""
    wirings = [_wiring(chunk) for chunk in chunks]
    ((key, count),) = Counter(w.key for w in wirings).most_common(1)
    if count < 2 or not all(_may_be_cut(w) for w in wirings if w.key == key):
        return []
    return [chunk for chunk, wiring in zip(chunks, wirings, strict=True) if wiring.key == key]


def _may_be_cut(wiring: _Wiring) -> bool:
    given = all(isinstance(n.meta.get("val"), (torch.Tensor, torch.SymInt)) for n in wiring.operands)
    return given and all(map(_may_leave, wiring.results))


def _may_leave(node: Node) -> bool:
    """Whether a value may be the result of a subgraph: one tensor, memory of its own, and complete."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    source = node.args[0] if node.target is operator.getitem else node
    if not isinstance(source, Node) or not isinstance(source.target, torch._ops.OpOverload):
        return False
    if is_call(source, *VIEWS) or any(result.alias_info is not None for result in source.target._schema.returns):
        return False
    return (
        source.target.namespace != "_c10d_functional" or source.target is torch.ops._c10d_functional.wait_tensor.default
    )


# --- the rewrite ------------------------------------------------------------------------------------------------------


def _outline_chunks(module: GraphModule, chunks: list[list[Node]], name: str) -> None:
    if not hasattr(module, name):
        setattr(module, name, _subgraph(module, chunks[0]))
    graph = module.graph
    for chunk in chunks:
        wiring, inside = _wiring(chunk), set(chunk)
        with graph.inserting_before(chunk[-1].next):
            body = graph.get_attr(name)
            call = graph.call_function(invoke_subgraph, (body, name, *wiring.operands))
            call.meta["val"] = tuple(n.meta["val"] for n in wiring.results)
            call.meta[CHUNK] = [n.meta.get("stack_trace") for n in chunk]
            for i, result in enumerate(wiring.results):
                item = graph.call_function(operator.getitem, (call, i))
                item.meta = dict(result.meta)
                result.replace_all_uses_with(item, delete_user_cb=lambda user, inside=inside: user not in inside)  # type: ignore[misc]
        for node in reversed(chunk):
            graph.erase_node(node)


def _subgraph(module: GraphModule, chunk: list[Node]) -> GraphModule:
    wiring = _wiring(chunk)
    graph = Graph()
    env: dict[Node, Node] = {}
    for i, operand in enumerate(wiring.operands):
        env[operand] = graph.placeholder(f"arg{i}_1")
        env[operand].meta = {k: v for k, v in operand.meta.items() if k in ("val", "tensor_meta")}
    for node in chunk:
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].meta = dict(node.meta)
    graph.output(tuple(map_arg(wiring.results, lambda n: env[n])))
    return GraphModule(module, graph)
