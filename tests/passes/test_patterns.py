"""Every row of the table of patterns, as graphs before and after: what fuses, what does not, and why."""

from __future__ import annotations

import dataclasses
import pkgutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from graphfuse.passes import default_rules
from graphfuse.passes.fuse_add_rms_norm import FUSE_ADD_RMS_NORM
from graphfuse.passes.fuse_rms_norm import FUSE_RMS_NORM
from graphfuse.testing import Trace, assert_golden, fake_tp, trace
from tests.passes.adversarial import DISGUISED, LOOK_ALIKES
from tests.passes.zoo import FUSED, HIDDEN, LEFT_ALONE, Case, Module

KEEPS_A_ROOT = ("two_norms", "norm_of_norm", "weightless_too")
"""Cases where a second norm, or the weightless form, is read as well and stays plain."""

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def groups():
    with fake_tp(4) as group:
        yield {"compiled": group, "same ranks": dist.new_group([0, 1, 2, 3]), "fewer ranks": dist.new_group([0, 1])}


def traced(case: Case, groups: dict[str, dist.ProcessGroup], rules=None) -> Trace:
    inputs = (torch.ones(6, HIDDEN, dtype=case.dtype), torch.ones(6, HIDDEN, dtype=case.dtype))
    return trace(Module(case, groups["compiled"], groups[case.group]), inputs, groups["compiled"], rules=rules)


def ops(graph_module) -> list[str]:
    return [str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("case", FUSED + DISGUISED, ids=lambda case: case.name)
def test_pattern_is_fused(case, groups):
    result = traced(case, groups)
    assert [site.op for site in result.report.sites] == [case.op] * len(result.report.sites)
    assert not any("all_reduce.default" in op or "wait_tensor" in op for op in ops(result.after))
    assert not any("rsqrt" in op or "sqrt" in op for op in ops(result.after)) or case.name in KEEPS_A_ROOT
    assert_golden(result.before, GOLDEN / "fused" / f"{case.name}.before.txt")
    assert_golden(result.after, GOLDEN / "fused" / f"{case.name}.after.txt")


@pytest.mark.parametrize("case", LEFT_ALONE + LOOK_ALIKES, ids=lambda case: case.name)
def test_pattern_is_left_alone_with_a_reason(case, groups):
    result = traced(case, groups)
    (site,) = result.report.sites
    assert site.status == "declined"
    assert case.reason in site.outcome()
    assert ops(result.after) == ops(result.before)
    assert_golden(result.after, GOLDEN / "left_alone" / f"{case.name}.txt")


@pytest.mark.parametrize("rule", [FUSE_ADD_RMS_NORM, FUSE_RMS_NORM], ids=lambda rule: rule.name)
def test_without_its_rule_a_pattern_is_not_fused(rule, groups):
    """Each rule is needed: its own cases stay unfused, or become another op, when it is missing."""
    others = [r for r in default_rules() if r.name != rule.name]
    case = next(case for case in FUSED if case.op == rule.name)
    (site,) = traced(case, groups, rules=others).report.sites
    assert site.op != rule.name


# --- a rule that matches too much is noticed --------------------------------------------------------------------------

BY_NAME = {case.name: case for case in LEFT_ALONE + LOOK_ALIKES}

NEEDS_APPLIES = [
    "fp32_weight",
    "fp32_weight_and_output",
    "fp32_residual",
    "broadcast_residual",
    "scalar_residual",
    "bias_then_norm",
    "weight_from_activations",
    "rounded_twice",
]

WEAKER_CHECKS = [
    ("groups.Groups.why_not", lambda _self, _name: None, "other_group"),
    ("rms_norm.widens", lambda _cast: True, "through_fp16"),
    ("rms_norm.widens", lambda _cast: True, "down_and_up"),
    ("rms_norm.gate_of", lambda _output: None, "gated"),
    ("rms_norm._rounded_on_the_way", lambda _step, _dtype: None, "in_float64"),
    ("reciprocal_root._is_square", lambda node, x: node.args[0] is x, "cube"),
    ("reciprocal_root._divides_by", lambda node, total, _size: node.args[0] is total, "sum_over_another_size"),
    ("graph_reading.keeps_rows", lambda _view: True, "per_head_weightless"),
    ("graph_reading.same_shape", lambda _a, _b: True, "broadcast_residual"),
]


def is_noticed(case: Case, groups: dict[str, dist.ProcessGroup], rules=None) -> bool:
    """Whether a case that must be left alone (as it is, above) is fused now, or its graph does not even hold."""
    try:
        return traced(case, groups, rules).report.totals["fused"] > 0
    except Exception:
        return True


@pytest.mark.parametrize("name", NEEDS_APPLIES)
def test_a_rule_without_its_check_is_noticed(name, groups):
    careless = [dataclasses.replace(rule, applies=lambda _site, _context: None) for rule in default_rules()]
    assert is_noticed(BY_NAME[name], groups, careless)


@pytest.mark.parametrize(
    ("check", "weaker", "name"), WEAKER_CHECKS, ids=[f"{check}-{name}" for check, _, name in WEAKER_CHECKS]
)
def test_a_weaker_match_is_noticed(check, weaker, name, groups, monkeypatch):
    place, attribute = f"graphfuse.passes.{check}".rsplit(".", 1)
    monkeypatch.setattr(pkgutil.resolve_name(place), attribute, weaker)
    if check == "graph_reading.same_shape":  # bound by name where it is used
        monkeypatch.setattr("graphfuse.passes.fuse_add_rms_norm.same_shape", weaker)
    assert is_noticed(BY_NAME[name], groups)


def test_a_match_that_ignores_scaled_adds_is_noticed(groups):
    """The scale is dropped when the add says so by a keyword that the matcher does not see."""

    def without_alpha(node, context):
        for wait in node.users:
            for add in wait.users:
                add.kwargs = {}
        return FUSE_ADD_RMS_NORM.match(node, context)

    careless = [dataclasses.replace(FUSE_ADD_RMS_NORM, match=without_alpha)]
    assert is_noticed(BY_NAME["scaled_residual"], groups, careless)
