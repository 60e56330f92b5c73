"""Prove that rewriting kept every reduction: each partial sum is still summed over its group exactly once.

Before the passes the partial sums are the arguments of the all_reduces that somebody reads. Afterwards each, or what a
rewrite has put in its place, must be the argument of exactly one such all_reduce over the same ranks with the same op,
or of one fused op, by itself or as a term of a sum of partial sums; and nobody may read a partial sum who did not
before, but through views and casts. So a rule that forgets a reduction, doubles one, moves it to another group, puts
something in front of it, or reads past it is found.

The traced graph itself is trusted, not the rewriting; so is what a fused op does with the sum. This follows reductions
and their arguments, not the placement of every value.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphfuse.errors import ReductionProofError
from graphfuse.passes.graph_reading import CASTS, SCALES, VIEWS, aten, is_call, module_path, value
from graphfuse.passes.groups import Groups, group_ranks
from graphfuse.passes.placement.pointwise import ONE_RANK_ADDS
from graphfuse.passes.reductions import ALL_REDUCES, COALESCED, c10d, reductions
from graphfuse.passes.rule import Rule

Entry = tuple[str, str, tuple[int, ...]]
"""One reduction: (name of its partial sum, reduce op, ranks)."""


@dataclass
class Ledger:
    """The reductions of a graph, counted, and which values have been replaced by which since then."""

    entries: Counter[Entry]
    readers: dict[str, frozenset[str]]
    """By a partial sum's name: the names of those that read it, through views and casts or not."""

    replaced: defaultdict[str, list[str]]
    """By a value's name: the names of those whose readers it was given. Filled while the ledger lives."""

    def partial(self, name: str, nodes: Mapping[str, Node]) -> str:
        """The partial sum of this ledger that a value is, or has replaced; its own name if there is none. A value that
        is computed from another one has not replaced it: it stands between it and its readers."""
        known = {partial for partial, _, _ in self.entries}
        pending, seen = [name], set()
        while pending:
            current = pending.pop(0)
            if current in known:
                return current
            seen.add(current)
            pending.extend(
                old
                for old in self.replaced.get(current, ())
                if old not in seen and not (old in nodes and current in nodes and _depends(nodes[current], nodes[old]))
            )
        return name


def ledger(graph: Graph, groups: Groups) -> Ledger:
    """Take down every reduction of a graph that is about to be rewritten."""
    entries = _entries(graph, groups)
    readers = _readers(graph, {partial for partial, _, _ in entries})
    book = Ledger(entries, readers, defaultdict(list))
    replaced, module = book.replaced, graph.owning_module

    def follow(old: Node, new: str, user: Node) -> None:
        if old.name not in replaced[new]:
            replaced[new].append(old.name)

    if module is not None:
        module._register_replace_node_hook(follow)
        weakref.finalize(book, module._unregister_replace_node_hook, follow)
    return book


def verify_reductions(graph: Graph, before: Ledger, groups: Groups, rules: Collection[Rule]) -> None:
    """Raise `ReductionProofError` unless the graph reduces what `before` lists, each exactly once."""
    reducing = _reducing_ops(rules)
    nodes = {node.name: node for node in graph.nodes}
    after: Counter[Entry] = Counter()
    summing: set[str] = set()
    for (argument, op, ranks), times in _entries(graph, groups, reducing).items():
        partials = [before.partial(argument, nodes)]
        if op == "sum" and partials == [argument] and argument in nodes:
            partials = _terms(nodes[argument], before, nodes, summing) or partials
        for partial in partials:
            after[partial, op, ranks] += times
    paths = {name: module_path(node) for name, node in nodes.items()}
    faults = [f"{_name(entry, paths)} is no longer reduced" for entry in (before.entries - after)]
    faults += [f"{_name(entry, paths)} is reduced once more than before" for entry in (after - before.entries)]
    for partial, readers in _readers(graph, {partial for partial, _, _ in after}).items():
        known = before.readers.get(before.partial(partial, nodes), frozenset())
        faults += [
            f"the partial sum {partial!r} is read by {name!r} before it is reduced"
            for name in sorted(readers - known - summing)
            if not is_call(nodes[name], *reducing, *ALL_REDUCES, *COALESCED)
        ]
    if not faults:
        return
    raise ReductionProofError(
        f"Rewriting changed the reductions of the graph: {'; '.join(faults)}. "
        "Switch off the last rule you added (FuseConfig.disabled_rules) or find it with GRAPHFUSE_FUEL=n."
    )


def _terms(node: object, before: Ledger, nodes: Mapping[str, Node], summing: set[str]) -> list[str]:
    """The partial sums of the ledger that a sum of them is made of, each as often as it is added; none if anything else
    is in it. `summing` gets the names of the ops passed, which read them rightly. Factors are the merging rule's
    business: it takes those alone that are proved to be equal on every rank."""
    if not isinstance(node, Node):
        return []
    partial = before.partial(node.name, nodes)
    if any(partial == known for known, _, _ in before.entries):
        return [partial]
    if is_call(node, *VIEWS, *CASTS):
        terms = _terms(node.args[0], before, nodes, summing)
    elif is_call(node, aten.add.Tensor, aten.sub.Tensor):
        left, right = (_terms(operand, before, nodes, summing) for operand in node.args[:2])
        terms = [*left, *right] if left and right else []
    elif is_call(node, *SCALES):
        terms = next(filter(None, (_terms(operand, before, nodes, summing) for operand in node.args[:2])), [])
    else:
        terms = []
    if terms:
        summing.add(node.name)
    return terms


def _readers(graph: Graph, partials: Collection[str]) -> dict[str, frozenset[str]]:
    """Who reads each partial sum, seen through views, casts and an added bias."""
    found: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        if node.name in partials:
            pending, names = [node], set()
            while pending:
                for user in pending.pop().users:
                    through = is_call(user, *VIEWS, *CASTS) or _without_bias(user) is not None
                    pending.extend([user] if through else [])
                    names.update([] if through else [user.name])
            found[node.name] = frozenset(names)
    return found


def _depends(value: Node, on: Node) -> bool:
    """Whether a value is computed from another one that stands before it."""
    pending, seen = [value], {value}
    while pending:
        for node in pending.pop().all_input_nodes:
            if node is on:
                return True
            if node > on and node not in seen:
                seen.add(node)
                pending.append(node)
    return False


def _reducing_ops(rules: Collection[Rule]) -> frozenset[object]:
    return frozenset().union(*(rule.reduces for rule in rules))


def _entries(graph: Graph, groups: Groups, reducing_ops: Collection[object] = ()) -> Counter[Entry]:
    entries: Counter[Entry] = Counter()
    for node in filter(_is_read, reductions(graph)):
        entries[_source(node.args[0]), str(node.args[1]), _ranks(str(node.args[2]), groups)] += 1
    for node in graph.nodes:
        if is_call(node, *reducing_ops):
            entries[_source(node.args[0]), "sum", _ranks(_group_argument(node), groups)] += 1
    return entries


def _is_read(reduction: Node) -> bool:
    """Whether somebody reads the sum. Unread reductions stay in a graph as side effects, and reduce nothing."""
    return any(user.users or not is_call(user, c10d.wait_tensor.default) for user in reduction.users) or is_call(
        reduction, c10d.all_reduce_.default
    )


def _ranks(name: str | None, groups: Groups) -> tuple[int, ...]:
    if name is None or name == groups.name:
        return tuple(sorted(groups.ranks))
    return tuple(sorted(group_ranks(name) or ()))


def _group_argument(node: Node) -> str | None:
    """What a fused op was given as `group_name`; None when it has no such argument."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "group_name" not in names:
        return None
    index = names.index("group_name")
    return str(node.args[index] if index < len(node.args) else node.kwargs.get("group_name"))


def _name(entry: tuple[str, str, tuple[int, ...]], paths: dict[str, str]) -> str:
    partial, op, ranks = entry
    path = paths.get(partial)
    return f"the partial {op} {partial!r}{f' of {path}' if path else ''} over ranks {list(ranks)}"


def _source(node: object) -> str:
    """The name of the value behind views, casts and an added bias, which a rewrite may replay elsewhere."""
    while isinstance(node, Node):
        source = node.args[0] if is_call(node, *VIEWS, *CASTS) else _without_bias(node)
        if source is None:
            return node.name
        node = source
    return repr(node)


def _without_bias(node: Node) -> object:
    """What a vector, or a term that one rank alone adds, is added to, if that is what a node does."""
    if not is_call(node, aten.add.Tensor):
        return None
    if ONE_RANK_ADDS in node.meta and node.kwargs.get("alpha") in (0.0, 1.0):
        return node.args[0]
    whole, bias = value(node.args[0]), value(node.args[1])
    return node.args[0] if whole is not None and bias is not None and bias.dim() == 1 < whole.dim() else None
