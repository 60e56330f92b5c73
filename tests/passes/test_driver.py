"""The driver: order, switches, fuel, counters; and the verifier, which notices rules that are wrong."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist

from graphfuse import FuseConfig
from graphfuse.errors import ConfigError, ReductionProofError, RuleError, UnknownRuleError
from graphfuse.passes import default_rules
from graphfuse.passes.driver import run_passes, select_rules
from graphfuse.passes.fuse_add_rms_norm import FUSE_ADD_RMS_NORM
from graphfuse.passes.fuse_rms_norm import FUSE_RMS_NORM
from graphfuse.passes.reductions import all_reduce, sum_over_compiled_group
from graphfuse.passes.rule import Decline, Rule, Site, Tier
from graphfuse.testing import fake_tp, trace
from tests.passes.graphs import HIDDEN, Builder, aten, c10d, context, flat_layers

MATCH, MERGE, FP8_NORM, ADD_NORM, NORM, *KERNELS = [rule.name for rule in default_rules()]
FUSED_ADD_NORM = torch.ops.graphfuse.all_reduce_add_rms_norm.default


@pytest.fixture(scope="module")
def group():
    with fake_tp(4) as group:
        yield group


@pytest.fixture(scope="module")
def other_group(group):
    return dist.new_group([0, 1])


def run(module, group, rules=None, *, fuel=None, dump=None, **settings):
    config = FuseConfig(rules=rules, **settings)
    rules = select_rules(default_rules() if rules is None else rules, config)
    return run_passes(module, rules, context(group), config, fuel=fuel, dump=dump)


def count(module, op):
    return sum(node.target is op for node in module.graph.nodes)


# --- which rules run, and in which order ------------------------------------------------------------------------------


def test_rules_are_tried_in_their_order(group):
    """The shorter pattern is none of the longer one's sites, so the order shows in who is asked first."""
    asked = []

    def watch(rule):
        return dataclasses.replace(rule, match=lambda *args: asked.append(rule.name) or rule.match(*args))

    run(flat_layers(1, group.group_name), group, [watch(FUSE_RMS_NORM), watch(FUSE_ADD_RMS_NORM)])
    assert asked == [NORM, ADD_NORM]


def test_a_disabled_rule_does_not_run_and_the_report_says_so(group):
    result = run(flat_layers(2, group.group_name), group, disabled_rules={ADD_NORM})
    assert [site.status for site in result.sites] == ["declined"] * 2
    assert f"the rule {ADD_NORM} is switched off (disabled_rules)" in [d.reason for d in result.sites[0].declines]
    assert list(result.rules) == [MATCH, MERGE, FP8_NORM, NORM, *KERNELS]


def test_an_unknown_rule_is_an_error_that_lists_the_known_ones():
    with pytest.raises(
        UnknownRuleError, match=f"disabled_rules names 'nrom', which .* Known: {MATCH}, {MERGE}, {FP8_NORM}, {ADD_NORM}"
    ):
        select_rules(default_rules(), FuseConfig(disabled_rules={"nrom"}))


def test_two_rules_of_one_name_are_an_error():
    with pytest.raises(UnknownRuleError, match=f"Two rules are called '{NORM}'"):
        select_rules([*default_rules(), FUSE_RMS_NORM], FuseConfig())


def drop_relu(graph, site, _context):
    site.parts.replace_all_uses_with(site.parts.args[0])
    graph.erase_node(site.parts)


def match_relu(node, _context):
    value = node.meta["val"]
    return Site(node, "nothing", None, value.dtype, value.shape[-1], node)


NO_RELU = Rule(
    name="no_relu",
    anchor=lambda node: node.target is aten.relu.default,
    match=match_relu,
    applies=lambda _site, _context: None,
    rewrite=drop_relu,
)


def with_relu(group):
    b = Builder()
    x, residual, weight = b.input(4, HIDDEN), b.input(4, HIDDEN), b.input(HIDDEN)
    total = b(aten.add.Tensor, b(aten.relu.default, residual), b.all_reduce(x, group.group_name))
    return b.output(b.rms_norm(total, weight))


def test_a_rule_of_the_user_runs_behind_the_built_in_ones(group):
    module = with_relu(group)
    result = run(module, group, [*default_rules(), NO_RELU])
    assert list(result.rules) == [MATCH, MERGE, FP8_NORM, ADD_NORM, NORM, *KERNELS, "no_relu"]
    assert result.rules["no_relu"]["matches"] == 1
    assert count(module, aten.relu.default) == 0
    assert count(module, FUSED_ADD_NORM) == 1


def test_a_relaxed_rule_runs_only_in_the_relaxed_tier(group):
    relaxed = dataclasses.replace(FUSE_ADD_RMS_NORM, tier=Tier.RELAXED)
    skipped = run(flat_layers(1, group.group_name), group, [relaxed])
    assert skipped.sites[0].outcome() == f"the rule {ADD_NORM} is a relaxed one (tier='relaxed' allows it)"
    allowed = run(flat_layers(1, group.group_name), group, [relaxed], tier="relaxed")
    assert allowed.sites[0].op == ADD_NORM


def test_fusion_off_rewrites_nothing(group):
    module = flat_layers(2, group.group_name)
    before = str(module.graph)
    result = run(module, group, fusion="off")
    assert str(module.graph) == before
    assert {site.outcome() for site in result.sites} == {"fusion is switched off (fusion='off')"}


# --- fuel, counters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuel", [0, 1, 2, 3, 9])
def test_fuel_stops_after_so_many_rewrites(group, fuel):
    module = flat_layers(3, group.group_name)
    result = run(module, group, fuel=fuel)
    fused = min(fuel, 3)
    assert [site.status for site in result.sites] == ["fused"] * fused + ["declined"] * (3 - fused)
    assert all(site.outcome() == "stopped by GRAPHFUSE_FUEL" for site in result.sites[fused:])
    assert count(module, c10d.all_reduce.default) == 3 - fused


class TwoSums(torch.nn.Module):
    """Its second sum is of a value that is whole: an error in a model, which the proof of placements would name."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        for _ in range(2):
            h = x + torch.distributed._functional_collectives.all_reduce(x, "sum", self.group)
            x = torch.nn.functional.rms_norm(h, (HIDDEN,), None, 1e-6)
        return x


UNPROVED = FuseConfig(verify_placements=False)


def test_fuel_comes_from_the_environment(group, monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_FUEL", "1")
    report = trace(TwoSums(group), torch.ones(6, HIDDEN), group, config=UNPROVED).report
    assert [site.status for site in report.sites] == ["fused", "declined"]


def test_fuel_that_is_no_number_is_an_error(group, monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_FUEL", "-1")
    with pytest.raises(ConfigError, match="GRAPHFUSE_FUEL='-1' is not a number of rewrites"):
        trace(TwoSums(group), torch.ones(6, HIDDEN), group)


def test_counters_and_times(group):
    result = run(flat_layers(3, group.group_name), group)
    counts = {name: (r["matches"], r["declines"]) for name, r in result.rules.items()}
    assert not any(counts.pop(name)[0] for name in KERNELS)
    assert counts == {MATCH: (0, 0), MERGE: (0, 3), FP8_NORM: (0, 3), ADD_NORM: (3, 0), NORM: (0, 0)}
    assert all(0 <= r["seconds"] <= result.seconds for r in result.rules.values())


def test_time_is_linear_in_the_depth(group):
    def seconds(num_layers):
        module = flat_layers(num_layers, group.group_name)
        started = time.perf_counter()
        result = run(module, group)
        assert sum(site.status == "fused" for site in result.sites) == num_layers
        return time.perf_counter() - started

    seconds(5)
    short, long = (min(seconds(num_layers) for _ in range(3)) for num_layers in (20, 100))
    assert long < 3 * 5 * short  # quadratic would be 25 times
    assert long < 2.0


# --- wrong rules are noticed ------------------------------------------------------------------------------------------


def match_any(node, ctx):
    found = sum_over_compiled_group(node, ctx)
    if isinstance(found, Decline):
        return found
    return Site(node, "wrong", None, found.dtype, found.hidden_size, found)


def drop(graph, site, _context):
    site.parts.wait.replace_all_uses_with(site.parts.partial)
    graph.erase_node(site.parts.wait)
    graph.erase_node(site.parts.node)


def bypass(_graph, site, _context):
    """The reduction stays in the graph, and nobody reads it."""
    site.parts.wait.replace_all_uses_with(site.parts.partial)


def read_past(graph, site, _context):
    """The sum stays reduced, and the value that should read it reads the partial one."""
    wait = site.parts.wait
    reader = next(iter(wait.users))
    with graph.inserting_before(reader):
        early = graph.call_function(aten.neg.default, (site.parts.partial,))
    early.meta = dict(site.parts.partial.meta)
    reader.args = tuple(argument if argument is wait else early for argument in reader.args)


def squash(graph, site, _context):
    """Something non-linear in front of the reduction."""
    partial = site.parts.partial
    with graph.inserting_after(partial):
        squashed = graph.call_function(aten.tanh.default, (partial,))
    squashed.meta = dict(partial.meta)
    partial.replace_all_uses_with(squashed, delete_user_cb=lambda user: user is not squashed)


def double(graph, site, ctx):
    wait = site.parts.wait
    with graph.inserting_after(wait):
        again = graph.call_function(c10d.all_reduce.default, (wait, "sum", ctx.groups.name))
    with graph.inserting_after(again):
        second = graph.call_function(c10d.wait_tensor.default, (again,))
    wait.replace_all_uses_with(second, delete_user_cb=lambda user: user is not again)


def change(index, argument):
    def rewrite(_graph, site, _context):
        args = list(site.parts.node.args)
        args[index] = argument
        site.parts.node.args = tuple(args)

    return rewrite


def wrong_rule(rewrite):
    return Rule("wrong", all_reduce, match_any, lambda _site, _context: None, rewrite)


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        (drop, r"the partial sum 'mm_default' over ranks \[0, 1, 2, 3\] is no longer reduced"),
        (bypass, r"the partial sum 'mm_default' over ranks \[0, 1, 2, 3\] is no longer reduced"),
        (read_past, r"the partial sum 'mm_default' is read by 'neg\w*' before it is reduced"),
        (squash, r"the partial sum 'mm_default' over ranks \[0, 1, 2, 3\] is no longer reduced"),
        (double, r"the partial sum 'wait_tensor_default' over ranks \[0, 1, 2, 3\] is reduced once more than before"),
        (
            change(1, "max"),
            r"'mm_default' .* no longer reduced; the partial max 'mm_default' .* once more than before",
        ),
    ],
    ids=["drops", "bypasses", "reads_past", "squashes", "doubles", "other_op"],
)
def test_a_rule_that_changes_a_reduction_is_caught(group, rewrite, message):
    with pytest.raises(ReductionProofError, match=f"Rewriting changed the reductions of the graph: .*{message}"):
        run(flat_layers(1, group.group_name), group, [wrong_rule(rewrite)])


def test_a_rule_that_moves_a_reduction_to_another_group_is_caught(group, other_group):
    moved = wrong_rule(change(2, other_group.group_name))
    with pytest.raises(ReductionProofError, match=r"'mm_default' over ranks \[0, 1\] is reduced once more than before"):
        run(flat_layers(1, group.group_name), group, [moved])


def test_without_verify_nothing_is_proven(group):
    module = flat_layers(1, group.group_name)
    run(module, group, [wrong_rule(drop)], verify=False)
    assert count(module, c10d.all_reduce.default) == 0


def test_a_fused_op_over_another_group_is_caught(group, other_group):
    def rewrite(graph, site, ctx):
        FUSE_ADD_RMS_NORM.rewrite(graph, site, ctx)
        (fused,) = (node for node in graph.nodes if node.target is FUSED_ADD_NORM)
        fused.args = (*fused.args[:-1], other_group.group_name)

    with pytest.raises(ReductionProofError, match=r"'mm_default' over ranks \[0, 1\] is reduced once more"):
        run(flat_layers(1, group.group_name), group, [dataclasses.replace(FUSE_ADD_RMS_NORM, rewrite=rewrite)])


def test_a_fused_op_that_the_rule_does_not_declare_is_caught(group):
    undeclared = dataclasses.replace(FUSE_ADD_RMS_NORM, reduces=frozenset())
    with pytest.raises(ReductionProofError, match=r"'mm_default' .* is no longer reduced"):
        run(flat_layers(1, group.group_name), group, [undeclared])


def test_a_partial_sum_that_a_rule_replaces_is_still_followed(group):
    """An all_reduce of a norm's output (no matrix between), and one of a value that a user's rule computes anew."""
    report = trace(TwoSums(group), torch.ones(6, HIDDEN), group, config=UNPROVED).report
    assert [site.status for site in report.sites] == ["fused", "fused"]

    b = Builder()
    x = b.input(4, HIDDEN)
    module = b.output(b.all_reduce(b(aten.relu.default, x), group.group_name))
    run(module, group, [NO_RELU])
    assert count(module, aten.relu.default) == 0
    assert not module._replace_hooks


def test_a_rule_that_reduces_the_residual_is_caught(group):
    """Operands of the add taken the wrong way round: the partial is not summed, the residual is, four times over."""

    def rewrite(graph, site, ctx):
        FUSE_ADD_RMS_NORM.rewrite(graph, site, ctx)
        (fused,) = (node for node in graph.nodes if node.target is FUSED_ADD_NORM)
        fused.args = (fused.args[1], fused.args[0], *fused.args[2:])

    with pytest.raises(ReductionProofError, match=r"'mm_default' .* no longer reduced; .* once more than before"):
        run(flat_layers(1, group.group_name), group, [dataclasses.replace(FUSE_ADD_RMS_NORM, rewrite=rewrite)])


@pytest.mark.parametrize("answer", [None, "yes"])
def test_a_match_that_returns_neither_a_site_nor_a_decline_is_named(group, answer):
    rule = Rule("odd", all_reduce, lambda _node, _context: answer, lambda _site, _context: None, drop)
    with pytest.raises(RuleError, match=f"The rule 'odd' fails .* match returned {answer!r}, not a Site"):
        run(flat_layers(1, group.group_name), group, [rule])


def test_a_rewrite_that_fails_is_named(group):
    def rewrite(_graph, _site, _context):
        raise KeyError("oops")

    with pytest.raises(RuleError, match=r"The rule 'wrong' fails where it rewrites .* KeyError: 'oops'"):
        run(flat_layers(1, group.group_name), group, [wrong_rule(rewrite)])
