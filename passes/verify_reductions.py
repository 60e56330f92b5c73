"""Prove that rewriting kept every reduction: each partial sum is still summed over its group exactly once.

Before the passes the partial sums are the arguments of the all_reduces. Afterwards each, or what a rewrite has put in
its place, must be the argument of exactly one all_reduce over the same ranks with the same op, or of one fused op. A
rule that forgets a reduction, doubles one or moves it to another group cannot pass. (It trusts the traced graph itself,
not the rewriting.)
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphfuse.errors import ReductionProofError
from graphfuse.passes.graph_reading import CASTS, VIEWS, aten, is_call, module_path, value
from graphfuse.passes.groups import Groups, group_ranks
from graphfuse.passes.reductions import c10d, reductions
from graphfuse.passes.rule import Rule

Entry = tuple[str, str, tuple[int, ...]]
"""One reduction: (name of its partial sum, reduce op, ranks)."""


@dataclass
class Ledger:
    """The reductions of a graph, counted, and which values have been replaced by which since then."""

    entries: Counter[Entry]
    replaced: defaultdict[str, list[str]]
    """By a value's name: the names of those whose readers it was given. Filled while the ledger lives."""

    def partial(self, name: str) -> str:
        """The partial sum of this ledger that a value is, or has replaced; its own name if there is none."""
        known = {partial for partial, _, _ in self.entries}
        pending, seen = [name], set()
        while pending:
            current = pending.pop(0)
            if current in known:
                return current
            seen.add(current)
            pending.extend(old for old in self.replaced.get(current, ()) if old not in seen)
        return name


def ledger(graph: Graph, groups: Groups) -> Ledger:
    """Take down every reduction of a graph that is about to be rewritten."""
    book = Ledger(_entries(graph, groups), defaultdict(list))
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
    after: Counter[Entry] = Counter()
    for (partial, op, ranks), times in _entries(graph, groups, _reducing_ops(rules)).items():
        after[before.partial(partial), op, ranks] += times
    if after == before.entries:
        return
    paths = {node.name: module_path(node) for node in graph.nodes}
    faults = [f"{_name(entry, paths)} is no longer reduced" for entry in (before.entries - after)]
    faults += [f"{_name(entry, paths)} is reduced once more than before" for entry in (after - before.entries)]
    raise ReductionProofError(
        f"Rewriting changed the reductions of the graph: {'; '.join(faults)}. "
        "Switch off the last rule you added (FuseConfig.disabled_rules) or find it with GRAPHFUSE_FUEL=n."
    )


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
    """What a vector is added to, if that is what a node does."""
    if not is_call(node, aten.add.Tensor):
        return None
    whole, bias = value(node.args[0]), value(node.args[1])
    return node.args[0] if whole is not None and bias is not None and bias.dim() == 1 < whole.dim() else None
