"""Every row of the table of patterns, as graphs before and after: what fuses, what does not, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from graphfuse.passes import default_rules
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


@pytest.mark.parametrize("rule", default_rules(), ids=lambda rule: rule.name)
def test_without_its_rule_a_pattern_is_not_fused(rule, groups):
    """Each rule is needed: its own cases stay unfused, or become another op, when it is missing."""
    others = [r for r in default_rules() if r.name != rule.name]
    case = next(case for case in FUSED if case.op == rule.name)
    (site,) = traced(case, groups, rules=others).report.sites
    assert site.op != rule.name
