"""transformers' grouped products become one `moe_experts`; what only looks like them is left alone, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from graphfuse import FuseConfig
from graphfuse.passes.driver import PassResult, run_passes
from graphfuse.passes.grouped_experts import is_grouped_product
from graphfuse.passes.match_grouped_experts import MATCH_GROUPED_EXPERTS
from graphfuse.testing import Trace, assert_golden, trace
from tests.passes.experts import LEFT_ALONE, MATCHED, Case, Chain, E, H, I, K, graph, inputs
from tests.passes.graphs import context

GOLDEN = Path(__file__).parents[1] / "golden" / "experts"
MATCH = "match_grouped_experts"
OFF = FuseConfig(disabled_rules={MATCH})


def traced(case: Case, config: FuseConfig | None = None) -> Trace:
    return trace(Chain(case).eval().requires_grad_(False), inputs(case), None, config=config)


def ops(module) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def products(module) -> int:
    return sum(map(is_grouped_product, module.graph.nodes))


def rewritten(module: GraphModule, **settings) -> PassResult:
    return run_passes(module, [MATCH_GROUPED_EXPERTS], context(None), FuseConfig(**settings))


@pytest.mark.parametrize("case", MATCHED, ids=lambda case: case.name)
def test_the_chain_becomes_one_op_and_gives_the_same_numbers(case):
    """In float32 and float64 the results differ by rounding alone."""
    for seed, num_tokens in enumerate((1, 40)):
        module, values = graph(case, num_tokens, seed)
        chain = module(*values)
        (layer,) = rewritten(module).experts
        assert (layer.experts, layer.intermediate, layer.hidden, layer.top_k) == (E, I, H, K)
        assert products(module) == 0
        for want, got in zip(chain, module(*values), strict=True):
            assert got.dtype == want.dtype
            assert (got.double() - want.double()).abs().max() < (1e-5 if want.dtype.itemsize >= 4 else 0.02)


@pytest.mark.parametrize("name", ["silu", "gpt_oss_held", "weights_in_float32"])
def test_golden_graphs(name):
    result = traced(next(case for case in MATCHED if case.name == name))
    assert products(result.before) == 2
    assert products(result.after) == 0
    assert not any("sort" in op or "histc" in op or "index" in op for op in ops(result.after))
    assert_golden(result.after, GOLDEN / f"{name}.after.txt")


@pytest.mark.parametrize("case", LEFT_ALONE, ids=lambda case: case.name)
def test_a_look_alike_is_left_alone_with_the_reason(case):
    module, _ = graph(case)
    before = str(module.graph)
    (layer,) = rewritten(module).experts
    assert str(module.graph) == before
    assert layer.status == "declined"
    assert "the grouped products are not transformers' experts: " in layer.outcome()
    assert case.reason in layer.outcome()


def test_products_that_are_no_experts_are_left_alone():
    class Lone(nn.Module):
        def forward(self, rows, matrices, offsets):
            return torch.ops.transformers.grouped_mm_fallback(rows, matrices, offsets)

    args = torch.rand(6, H), torch.rand(4, H, 8), torch.tensor([1, 2, 4, 6], dtype=torch.int32)
    (layer,) = trace(Lone(), args, None).report.moe
    assert "the offsets of the grouped product" in layer.outcome()


def test_the_switched_off_rule_is_the_reason():
    result = traced(MATCHED[0], OFF)
    assert products(result.after) == 2
    (layer,) = result.report.moe
    assert layer.outcome() == f"not lowered: the rule {MATCH} is switched off (disabled_rules)"
    assert f"experts: 1 layer of another form: {layer.outcome()}" in " ".join(str(result.report).split())


def test_fusion_off_leaves_the_chain():
    result = traced(MATCHED[0], FuseConfig(fusion="off"))
    assert products(result.after) == 2
    assert "fusion is switched off (fusion='off')" in result.report.moe[0].outcome()


def test_fuel_stops_in_front_of_the_chain(monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_FUEL", "0")
    result = traced(MATCHED[0])
    assert products(result.after) == 2
    assert result.report.moe[0].outcome() == "not lowered: stopped by GRAPHFUSE_FUEL"


def test_a_dump_is_written_for_the_rule(tmp_path):
    traced(MATCHED[0], FuseConfig(dump=str(tmp_path)))
    (before,), (after,) = (list(tmp_path.glob(f"*{name}.py")) for name in ("before", MATCH))
    assert "moe_experts" not in before.read_text()
    assert "torch.ops.graphfuse.moe_experts.default" in after.read_text()
