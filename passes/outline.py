"""Give Inductor each repeated part of a flat graph once.

Layers of a model come out of the passes as runs of equal nodes, now cut at the fused reductions and no longer at the
modules. Inductor's time grows with the number of nodes it sees, so a run that repeats becomes a subgraph, called n
times (`invoke_subgraph`), and is compiled once.

    a b c d  a b c d  a b c d  e      becomes      r r r e,   r = a b c d

The period is found from the graph alone: two nodes are alike if they have the same target, constants, result shapes and
dtypes; two runs are if their nodes are, and are wired alike. Values from outside (weights, caches) become operands.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

invoke_subgraph = torch.ops.higher_order.invoke_subgraph
MIN_NODES = 16
"""Shorter runs are not worth a subgraph."""


def outline(module: GraphModule) -> dict[str, int]:
    """Replace repeated runs of `module` in place. Returns the number of calls per subgraph made."""
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    calls = set(nodes)
    run = _longest_run([_look(node, calls) for node in nodes])
    if run is None:
        return {}
    chunks = _chunks(nodes, run)
    if not chunks:
        return {}
    name = "graphfuse_region_0"
    _outline_chunks(module, chunks, name)
    module.graph.lint()
    module.recompile()
    return {name: len(chunks)}


@dataclass(frozen=True)
class _Run:
    start: int
    period: int
    count: int


def _look(node: Node, calls: set[Node]) -> Hashable:
    """What must agree for two nodes to be alike, wherever they stand. How they are wired is compared afterwards."""

    def show(arg: Any) -> Any:
        if isinstance(arg, Node):
            return ("value",) if arg in calls else ("input",)
        if isinstance(arg, (list, tuple)):
            return tuple(show(a) for a in arg)
        if isinstance(arg, slice):
            return ("slice", arg.start, arg.stop, arg.step)
        return (type(arg).__name__, str(arg))

    kwargs = tuple((k, show(v)) for k, v in sorted(node.kwargs.items()))
    return str(node.target), tuple(show(a) for a in node.args), kwargs, _shape(node)


def _shape(node: Node) -> Hashable:
    val = node.meta.get("val")
    values = val if isinstance(val, (tuple, list)) else (val,)
    return tuple(
        (str(v.dtype), tuple(map(str, v.shape)), tuple(map(str, v.stride())), str(v.device))
        if isinstance(v, torch.Tensor)
        else type(v).__name__
        for v in values
    )


def _longest_run(looks: list[Hashable]) -> _Run | None:
    """The stretch looks[i] == looks[i + period] that covers most nodes. Periods tried: distances between equal rare
    looks (a fused reduction is one), so that the search stays linear."""
    ids: dict[Hashable, int] = {}
    codes = [ids.setdefault(look, len(ids)) for look in looks]
    places: dict[int, list[int]] = {}
    for i, code in enumerate(codes):
        places.setdefault(code, []).append(i)
    distances: Counter[int] = Counter()
    for where in places.values():
        for step in (1, 2, 3, 4):  # the same look up to 4 times a layer
            distances.update(b - a for a, b in zip(where, where[step:], strict=False))
    best: _Run | None = None
    for period, _ in distances.most_common(24):
        if period < MIN_NODES:
            continue
        for start, length in _stretches(codes, period):
            count = length // period + 1
            if count >= 2 and (best is None or count * period - period > best.count * best.period - best.period):
                best = _Run(start, period, count)
    return best


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


@dataclass
class _Wiring:
    """A chunk in canonical form: chunks of equal `key` are one function of `operands`, which gives `results`."""

    key: Hashable
    operands: list[Node]
    results: list[Node]


def _wiring(chunk: list[Node]) -> _Wiring:
    inside = {node: i for i, node in enumerate(chunk)}
    operands: dict[Node, int] = {}

    def show(arg: Any) -> Any:
        if isinstance(arg, Node):
            if arg in inside:
                return ("own", inside[arg])
            return ("operand", operands.setdefault(arg, len(operands)))
        if isinstance(arg, (list, tuple)):
            return tuple(show(a) for a in arg)
        if isinstance(arg, slice):
            return ("slice", show(arg.start), show(arg.stop), show(arg.step))
        return (type(arg).__name__, str(arg))

    body = tuple(
        (str(n.target), tuple(show(a) for a in n.args), tuple((k, show(v)) for k, v in sorted(n.kwargs.items())))
        for n in chunk
    )
    results = [n for n in chunk if any(user not in inside for user in n.users)]
    key = (
        body,
        tuple(map(_shape, operands)),
        tuple(inside[n] for n in results),
    )
    return _Wiring(key, list(operands), results)


def _chunks(nodes: list[Node], run: _Run) -> list[list[Node]]:
    """The run cut into alike chunks, at the first place where no cut parts an op from its several results."""
    end = run.start + run.count * run.period
    for start in range(run.start, run.start + run.period):
        chunks = [nodes[i : i + run.period] for i in range(start, end - run.period + 1, run.period)]
        chunks = _alike(chunks) if len(chunks) > 1 else []
        if chunks:
            return chunks
    return []


def _alike(chunks: list[list[Node]]) -> list[list[Node]]:
    """The chunks whose wiring is the most common one; the first and last of a run may differ."""
    wirings = [_wiring(chunk) for chunk in chunks]
    (key, count), *_ = Counter(w.key for w in wirings).most_common(1)
    usable = all(isinstance(n.meta.get("val"), torch.Tensor) for w in wirings if w.key == key for n in w.results)
    if count < 2 or not usable:
        return []
    return [chunk for chunk, wiring in zip(chunks, wirings, strict=True) if wiring.key == key]


def _outline_chunks(module: GraphModule, chunks: list[list[Node]], name: str) -> None:
    setattr(module, name, _subgraph(module, chunks[0]))
    graph = module.graph
    for chunk in chunks:
        wiring = _wiring(chunk)
        with graph.inserting_before(chunk[-1].next):
            body = graph.get_attr(name)
            call = graph.call_function(invoke_subgraph, (body, name, *wiring.operands))
            call.meta["val"] = tuple(n.meta["val"] for n in wiring.results)
            for i, result in enumerate(wiring.results):
                item = graph.call_function(operator.getitem, (call, i))
                item.meta = dict(result.meta)
                inside = set(chunk)
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
