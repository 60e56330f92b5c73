"""Routers become one op on GPUs; what only looks like one is left alone, with the reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.fx import GraphModule

from graphfuse import FuseConfig
from graphfuse.facts import Facts
from graphfuse.ops.route_experts import why_not
from graphfuse.passes.driver import PassResult, run_passes
from graphfuse.passes.route_experts import ROUTE_EXPERTS
from graphfuse.passes.rule import Context, Decline, Site
from graphfuse.testing import Trace, assert_golden, fake_tp, trace
from tests.passes.graphs import aten, context
from tests.passes.routers import LEFT_ALONE, MATCHED, Block, E, Formula, K, best, graph, ours, softmax, tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "experts"
H200 = Facts.from_json(Path(__file__).parents[2] / "configs" / "facts" / "h200_x2.json")
ON_GPUS = dataclasses.replace(context(None), facts=lambda: H200)
F32 = torch.float32
NAME = "route_experts"


def rewritten(module: GraphModule, where: Context = ON_GPUS, **settings) -> PassResult:
    return run_passes(module, [ROUTE_EXPERTS], where, FuseConfig(**settings))


def traced(router: nn.Module, **settings) -> Trace:
    config = FuseConfig(**{"rules": (ROUTE_EXPERTS,), **settings})
    return trace(Block(router), (tokens(),), None, config=config, facts=H200)


def found(module: GraphModule) -> Site | Decline:
    """What the rule says of the last topk of a graph."""
    *_, topk = (node for node in module.graph.nodes if ROUTE_EXPERTS.anchor(node))
    return ROUTE_EXPERTS.match(topk, ON_GPUS)


def count(module: GraphModule, target) -> int:
    return sum(node.target is target for node in module.graph.nodes)


def routed(module: GraphModule) -> list[tuple]:
    """The arguments of each op behind the logits; a bias is named."""
    target = torch.ops.graphfuse.route_experts.default
    found = [node.args[1:] for node in module.graph.nodes if node.target is target]
    return [tuple("bias" if isinstance(arg, torch.fx.Node) else arg for arg in args) for args in found]


# --- what becomes one op ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MATCHED)
def test_a_router_becomes_one_op_with_the_same_results(name):
    case = MATCHED[name]
    module, values = graph(case.router())
    before = module(*values)
    assert rewritten(module).rules[NAME]["matches"] == 1
    assert routed(module) == [(K, *case.arguments)]
    left = (aten.topk.default, aten.exp.default, aten.sigmoid.default, aten.div.Tensor, aten.gather.default)
    assert not any(count(module, target) for target in left)
    for got, want in zip(module(*values), before, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_golden_graphs(name):
    assert_golden(traced(MATCHED[name].router()).after, GOLDEN / f"route_{name}.after.txt")


def check(formula, arguments: tuple, dtype: torch.dtype = torch.bfloat16) -> GraphModule:
    """A formula becomes the op with these arguments, and gives the same numbers."""
    module, values = graph(Formula(formula, dtype))
    before = module(*values)
    rewritten(module)
    assert routed(module) == [(K, *arguments)]
    assert count(module, aten.topk.default) == 0
    for got, want in zip(module(*values), before, strict=True):
        assert torch.equal(got, want)
    return module


def test_scores_that_are_read_elsewhere_are_computed_there_still():
    def formula(logits, _bias):
        scores = softmax(logits)
        weights, ids = best(scores)
        return ids, weights / weights.sum(-1, keepdim=True), scores.mean(0)

    assert count(check(formula, ("softmax", None, True, 0.0, 1.0, F32)), aten.exp.default) == 1


def read_before_the_sum(logits, _bias):
    weights, ids = best(softmax(logits))
    return ids, weights / weights.sum(-1, keepdim=True), weights.amax()


def test_what_follows_a_value_with_another_reader_stays_as_it_is():
    module = check(read_before_the_sum, ("softmax", None, False, 0.0, 1.0, F32))
    assert count(module, aten.div.Tensor) == 1
    assert_golden(traced(Formula(read_before_the_sum)).after, GOLDEN / "route_read_before_the_sum.after.txt")


def test_a_factor_before_the_sum_does_not_change_places_with_it():
    def formula(logits, _bias):
        weights, ids = best(softmax(logits))
        weights = weights * 3.0
        return ids, weights / (weights.sum(-1, keepdim=True) + 0.5)

    assert count(check(formula, ("softmax", None, False, 0.0, 3.0, F32)), aten.div.Tensor) == 1


def test_a_second_factor_stays():
    def formula(logits, _bias):
        weights, ids = best(softmax(logits))
        return ids, (weights * 3.0) * 2.0

    assert count(check(formula, ("softmax", None, False, 0.0, 3.0, F32)), aten.mul.Tensor) == 1


def test_weights_that_are_rounded_before_the_factor_stay_rounded():
    def formula(logits, _bias):
        weights, ids = best(softmax(logits))
        return ids, weights.half() * 3.0

    assert count(check(formula, ("softmax", None, False, 0.0, 1.0, torch.float16)), aten.mul.Tensor) == 1


def test_logits_in_float32_and_a_bias_as_a_row():
    def formula(logits, bias):
        scores = torch.sigmoid(logits)
        ids = best(bias[None] + scores)[1]
        return ids, scores.gather(-1, ids)

    check(formula, ("sigmoid", "bias", False, 0.0, 1.0, F32), F32)


def test_ids_that_are_cast_for_the_experts():
    def formula(logits, _bias):
        weights, ids = best(softmax(logits))
        return ids.int(), weights

    check(formula, ("softmax", None, False, 0.0, 1.0, F32))


def test_each_layer_by_itself():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(ours()), Block(ours(normalise=False))])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)[0]
            return x

    config = FuseConfig(rules=(ROUTE_EXPERTS,))
    result = trace(Two(), (tokens(),), None, config=config, facts=H200)
    assert [arguments[3] for arguments in routed(result.after)] == [True, False]
    assert result.report.rules[NAME]["matches"] == 2


# --- what stays as it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_look_alike_is_left_alone_with_the_reason(name):
    router, reason = LEFT_ALONE[name]
    module, _ = graph(router)
    outcome = found(module)
    assert isinstance(outcome, Decline), outcome
    assert reason in outcome.reason
    before = str(module.graph)
    assert rewritten(module).rules[NAME]["matches"] == 0
    assert str(module.graph) == before


def test_on_the_cpu_nothing_changes():
    module, _ = graph(ours())
    before = str(module.graph)
    result = rewritten(module, context(None))
    assert (result.rules[NAME]["matches"], result.rules[NAME]["declines"]) == (0, 1)
    assert str(module.graph) == before
    reason = ROUTE_EXPERTS.applies(found(module), context(None))
    assert isinstance(reason, Decline) and "the group computes on the CPU" in reason.reason


def test_what_the_kernel_cannot_do_is_the_reason(monkeypatch):
    monkeypatch.setattr("graphfuse.passes.route_experts.why_not", lambda *sizes: f"{sizes} is out of order")
    module, _ = graph(ours())
    assert ROUTE_EXPERTS.applies(found(module), ON_GPUS) == Decline(f"({E}, {K}) is out of order")


def test_the_kernel_has_room_for_so_many_experts():
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    assert why_not(1024, 16) is None
    assert why_not(1025, 8) == "8 of 1025 experts are chosen, and the kernel has room for 16 of 1024"
    assert why_not(128, 17) is not None


class Sampler(nn.Module):
    def forward(self, logits):
        weights, ids = best(softmax(logits))
        return ids.gather(1, torch.multinomial(weights, 1))


def test_a_choice_of_other_things_than_experts_is_left_alone():
    config = FuseConfig(rules=(ROUTE_EXPERTS,))
    result = trace(Sampler(), (torch.rand(6, E),), None, config=config, facts=H200)
    assert count(result.after, aten.topk.default) == 1
    assert result.report.rules[NAME]["declines"] == 1
    assert found(result.after) == Decline("no layer of experts reads what is chosen")


def test_the_switched_off_rule_is_a_reason_of_neither_experts_nor_reductions():
    class Summed(Block):
        def forward(self, x):
            return fc.all_reduce(super().forward(x)[0], "sum", group)

    with fake_tp(2) as group:
        config = FuseConfig(disabled_rules={NAME}, verify_placements=False)
        report = trace(Summed(ours()), (tokens(),), group, config=config, facts=H200).report
    assert NAME not in report.rules
    assert "switched off" not in str(report)
    assert report.sites[0].declines
