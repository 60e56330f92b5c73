"""Run rules over a graph: one loop for all of them, which counts, times, dumps, and records every reduction's fate.

Rules are tried in order, each at every anchor it has left. The result lists one `SiteReport` per all_reduce of the
graph as it came in, and one `ExpertsReport` per layer of experts that is in it at the end. Rewriting can be stopped
after the n-th rewrite (fuel) to bisect a bad one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from graphfuse.config import FuseConfig
from graphfuse.errors import GraphfuseError, RuleError, UnknownRuleError
from graphfuse.passes.dump import Dump
from graphfuse.passes.expert_layers import ROUTE, expert_layers
from graphfuse.passes.expert_layers import RULES as EXPERT_RULES
from graphfuse.passes.fuse_norm_rotary import NAME as NORM_ROTARY
from graphfuse.passes.graph_reading import aten, is_call, module_path
from graphfuse.passes.lower_linear import NAME as LOWER_LINEAR
from graphfuse.passes.reductions import reductions
from graphfuse.passes.rule import Context, Decline, Rule, Site, Tier
from graphfuse.passes.surroundings import after_passes, before_passes, emitted
from graphfuse.passes.verify_reductions import ledger, verify_reductions
from graphfuse.report import DECLINED, FUSED, MERGED, DeclineReport, SiteReport
from graphfuse.report_experts import ExpertsReport
from graphfuse.report_graph import Surroundings

log = logging.getLogger(__name__)

_NOT_OF_REDUCTIONS = (*EXPERT_RULES, ROUTE, NORM_ROTARY, LOWER_LINEAR)
"""Rules that decline no reduction when they are switched off."""


@dataclass
class PassResult:
    """What one run did: a line per reduction and per layer of experts, counters per rule, and how long it took in
    seconds."""

    sites: list[SiteReport] = field(default_factory=list)
    experts: list[ExpertsReport] = field(default_factory=list)
    rules: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0


def select_rules(rules: Sequence[Rule], config: FuseConfig) -> list[Rule]:
    """The rules a config leaves switched on. An unknown name in `disabled_rules` raises `UnknownRuleError`."""
    names = [rule.name for rule in rules]
    unknown = sorted(config.disabled_rules - set(names))
    if unknown:
        raise UnknownRuleError(
            f"disabled_rules names {', '.join(map(repr, unknown))}, which no rule has. Known: {', '.join(names)}."
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UnknownRuleError(f"Two rules are called {', '.join(map(repr, twice))}. Give each rule a name of its own.")
    return [rule for rule in rules if rule.name not in config.disabled_rules]


def run_passes(
    module: GraphModule,
    rules: Sequence[Rule],
    context: Context,
    config: FuseConfig,
    *,
    fuel: int | None = None,
    dump: Dump | None = None,
) -> PassResult:
    """Rewrite `module` in place."""
    start = time.perf_counter()
    graph = module.graph
    dump = dump or Dump(None)
    anchors = reductions(graph)
    fates = [
        _Fate(index, module_path(node), _meets_residual(node), before_passes(node))
        for index, node in enumerate(anchors)
    ]
    fate_of = dict(zip(anchors, fates, strict=True))
    before = ledger(graph, context.groups)
    result = PassResult()
    dump.write("before", module)
    elsewhere: defaultdict[Node, list[DeclineReport]] = defaultdict(list)  # declines of what is no reduction
    if config.fusion == "off":
        switches = [DeclineReport("fusion", "fusion is switched off (fusion='off')")]
        rules = []
    else:
        disabled = sorted(config.disabled_rules)
        switches = [DeclineReport(name, f"the rule {name} is switched off (disabled_rules)") for name in disabled]
        if not context.groups.ranks or context.groups.size == 1:
            why = "the group has one rank: there is nothing to reduce" if context.groups.ranks else "no group was given"
            for fate in fates:
                fate.declines.append(DeclineReport("group", why))
            rules = [rule for rule in rules if not rule.needs_group]
    for fate in fates:
        fate.declines += [switch for switch in switches if switch.rule not in _NOT_OF_REDUCTIONS]

    for rule in rules:
        started, matches, declines = time.perf_counter(), 0, 0
        pending = deque(n for n in graph.nodes if rule.anchor(n))
        while pending:
            node = pending.popleft()
            if node._erased:  # by a rewrite of this rule, further up
                continue
            path = module_path(node) or "the top of the model"
            with _blame(rule, "reads", path):
                outcome, closeness = _try(rule, node, context, config, fuel)
            reduction_fate = fate_of.get(node)
            if isinstance(outcome, Decline):
                declines += 1
                if reduction_fate is None:
                    elsewhere[node].append(DeclineReport(rule.name, outcome.reason, closeness))
                else:
                    reduction_fate.declines.append(DeclineReport(rule.name, outcome.reason, closeness))
                    reduction_fate.residual = reduction_fate.residual or outcome.residual
                continue
            norm = module_path(outcome.norm) if outcome.norm is not None else None
            known = emitted(graph, rule)
            with _blame(rule, "rewrites", path):
                successor = rule.rewrite(graph, outcome, context)
            matches += 1
            fuel = None if fuel is None else fuel - 1
            if outcome.merged_into is not None:
                assert reduction_fate is not None and successor is not None
                fate_of[successor] = reduction_fate.into = fate_of[outcome.merged_into]
                pending.appendleft(successor)
            elif reduction_fate is not None:
                reduction_fate.fuse(rule, outcome, norm, context)
                reduction_fate.became = next(iter(emitted(graph, rule) - known), None)
        if matches:
            graph.eliminate_dead_code()
        seconds = time.perf_counter() - started
        result.rules[rule.name] = {"matches": matches, "declines": declines, "seconds": round(seconds, 4)}
        log.info("%s: %d matched, %d declined, %.3f s", rule.name, matches, declines, seconds)
        dump.write(rule.name, module)

    if config.verify:
        verify_reductions(graph, before, context.groups, rules)
    graph.lint()
    module.recompile()
    pictures: dict[Surroundings, Surroundings] = {}
    result.sites = [fate.report(pictures) for fate in fates]
    result.experts = expert_layers(graph, elsewhere, switches)
    result.seconds = time.perf_counter() - start
    return result


@contextlib.contextmanager
def _blame(rule: Rule, what: str, path: str) -> Iterator[None]:
    """Name the rule in whatever goes wrong inside it."""
    try:
        yield
    except GraphfuseError:
        raise
    except Exception as error:
        raise RuleError(
            f"The rule {rule.name!r} fails where it {what} {path}: {type(error).__name__}: {error}. "
            f"Mend it, or leave it out with disabled_rules={{{rule.name!r}}}."
        ) from error


def _try(rule: Rule, node: Node, context: Context, config: FuseConfig, fuel: int | None) -> tuple[Site | Decline, int]:
    """What a rule says of an anchor, and how close it came (`DeclineReport.closeness`)."""
    if rule.tier is Tier.RELAXED and config.tier != "relaxed":
        return Decline(f"the rule {rule.name} is a relaxed one (tier='relaxed' allows it)"), 0
    site = rule.match(node, context)
    if not isinstance(site, (Site, Decline)):
        raise TypeError(f"match returned {site!r}, not a Site or a Decline")
    if isinstance(site, Decline):
        return site, -1 if site.remote else int(site.residual)
    refusal = rule.applies(site, context)
    if refusal is None and fuel is not None and fuel <= 0:
        refusal = Decline("stopped by GRAPHFUSE_FUEL")
    return (site if refusal is None else refusal), 2


@dataclass
class _Fate:
    """What became of one all_reduce of the graph."""

    index: int
    module: str
    residual: bool
    surroundings: Surroundings
    norm: str | None = None
    op: str | None = None
    served_as: tuple[torch.dtype, int] | None = None
    backends: tuple[dict, ...] = ()
    declines: list[DeclineReport] = field(default_factory=list)
    into: _Fate | None = None
    became: Node | None = None

    def fuse(self, rule: Rule, site: Site, norm: str | None, context: Context) -> None:
        self.op, self.norm = site.op, norm
        if rule.dispatched:
            self.served_as = (site.dtype, site.hidden_size)
            self.backends = tuple(context.decide(*self.served_as).to_json()["ranges"])

    def report(self, pictures: dict[Surroundings, Surroundings]) -> SiteReport:
        """`pictures` holds each surroundings once."""
        if self.became is not None and not self.became._erased:
            self.surroundings = dataclasses.replace(self.surroundings, after=after_passes(self.became))
        around = pictures.setdefault(self.surroundings, self.surroundings)
        site = SiteReport(self.index, self.module, self.norm, FUSED, self.op, self.backends, (), True, self.served_as)
        site = dataclasses.replace(site, surroundings=around)
        if self.op is not None:
            return site
        if self.into is not None:
            return dataclasses.replace(site, status=MERGED, merged_into=self.into.module or "(top)")
        declines = self.declines or [DeclineReport("rules", "no rule starts at this reduction")]
        return dataclasses.replace(site, status=DECLINED, declines=tuple(declines), residual=self.residual)


def _meets_residual(node: Node) -> bool:
    """Whether the reduced value is added to something, at one remove: the mark of a residual-stream reduction."""
    waits = [user for user in node.users if user.op == "call_function"]
    return any(is_call(user, aten.add.Tensor) for wait in waits for user in wait.users)
