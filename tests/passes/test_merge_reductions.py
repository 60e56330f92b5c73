"""Routed and shared experts cost one reduction: what merges, what does not and why, and that the function stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor, nn

from graphfuse import FuseConfig
from graphfuse.errors import ReductionProofError
from graphfuse.passes import default_rules
from graphfuse.passes.merge_reductions import MERGE_REDUCTIONS
from graphfuse.passes.verify_placements import SOURCE
from graphfuse.testing import Trace, assert_golden, fake_tp, trace
from tests.passes.zoo import HIDDEN, llama

GOLDEN = Path(__file__).parents[1] / "golden" / "merged"


@dataclass(frozen=True)
class Case:
    name: str
    forward: Callable[[Layer, Tensor, Tensor, Tensor], Tensor | tuple[Tensor, ...]]
    """(layer, partial a, partial b, hidden states h equal on every rank) → what is added to the residual."""
    reason: str = ""
    """Why it does not merge; empty: it does."""
    reductions: int = 2


class Layer(nn.Module):
    """The end of a mixture-of-experts layer and the norm of the next one. It says what is divided over the ranks: the
    inner activations `a` and `b` of two experts, and the projections that make partial sums of them."""

    def __init__(self, case: Case, group: dist.ProcessGroup, other: dist.ProcessGroup, sharded: str = "") -> None:
        super().__init__()
        self.case, self.group, self.other, self.sharded = case, group, other, sharded
        self.down_a = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 8)
        self.down_b = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 8)
        self.gate = nn.Parameter(torch.randn(1, HIDDEN) / 8)
        self.scale = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def placements(self) -> dict[str, int | None]:
        whole = dict.fromkeys(("gate", "scale", "weight", "h", "residual"))
        return {**whole, "down_a": 0, "down_b": 0, "a": 1, "b": 1} | ({self.sharded: 0} if self.sharded else {})

    def sum(self, x: Tensor) -> Tensor:
        return fc.all_reduce(x, "sum", self.group)

    def sum_in_place(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def forward(self, a: Tensor, b: Tensor, h: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        mixed = self.case.forward(self, a @ self.down_a, b @ self.down_b, h)
        total = residual + mixed
        return llama(total, self.weight), total


def sigmoid_gate(m: Layer, h: Tensor) -> Tensor:
    return torch.sigmoid(h @ m.gate.t())


MERGED = [
    Case("deepseek", lambda m, a, b, h: m.sum(a) + m.sum(b)),
    Case("qwen3_next", lambda m, a, b, h: m.sum(a) + sigmoid_gate(m, h) * m.sum(b)),
    Case("gate_behind", lambda m, a, b, h: m.sum(a) * sigmoid_gate(m, h) + m.sum(b)),
    Case("scaled", lambda m, a, b, h: m.sum(a) * 2.5 + m.sum(b) / 3.0),
    Case("difference", lambda m, a, b, h: m.sum(a) - m.sum(b)),
    Case("views", lambda m, a, b, h: m.sum(a.unsqueeze(0)).squeeze(0) + sigmoid_gate(m, h) * m.sum(b)),
    Case("weighted_by_a_parameter", lambda m, a, b, h: m.sum(a) + m.scale * m.sum(b)),
    Case("in_place", lambda m, a, b, h: m.sum_in_place(a) + sigmoid_gate(m, h) * m.sum_in_place(b)),
    Case("three_terms", lambda m, a, b, h: m.sum(a) + (m.sum(b) + 0.5 * m.sum(h * a)), reductions=3),
    Case("shared_first", lambda m, a, b, h: (m.sum(h * a) + m.sum(b)) + m.sum(a), reductions=3),
]
APART = [
    Case("alone", lambda m, a, b, h: m.sum(a) + h, "not a reduced value", reductions=1),
    Case("non_linear", lambda m, a, b, h: m.sum(a) + torch.relu(m.sum(b)), "relu"),
    Case("product", lambda m, a, b, h: m.sum(a) * m.sum(b), "not a reduced value"),
    Case("divisor", lambda m, a, b, h: m.sum(a) + h / m.sum(b), "div"),
    Case("other_group", lambda m, a, b, h: m.sum(a) + fc.all_reduce(b, "sum", m.other), "ranks"),
    Case("maximum", lambda m, a, b, h: m.sum(a) + fc.all_reduce(b, "max", m.group), "max"),
    Case("read_twice", lambda m, a, b, h: m.sum(a) + (s := m.sum(b)) + s.sin(), "another user"),
    Case("other_width", lambda m, a, b, h: m.sum(a) + m.sum(b[:, :1]), "broadcast"),
    Case("wider_dtype", lambda m, a, b, h: (m.sum(a).double() + m.sum(b.double())).float(), "convert_element_type"),
]


@pytest.fixture(scope="module")
def groups():
    with fake_tp(4) as group:
        yield group, dist.new_group([0, 1])


def traced(case: Case, groups, *, sharded: str = "", rules=None, dtype=torch.float32) -> Trace:
    shapes = [torch.ones(6, HIDDEN, dtype=dtype) for _ in range(4)]
    compiled, other = groups
    model = Layer(case, compiled, other, sharded).to(dtype).requires_grad_(False)
    config = FuseConfig(verify_placements=case not in APART)  # some of these are wrong on several ranks
    return trace(model, shapes, compiled, rules=rules, config=config)


def num_reductions(module) -> int:
    ops = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    return sum("all_reduce.default" in op or "all_reduce_add_rms_norm" in op for op in ops)


@pytest.mark.parametrize("case", MERGED, ids=lambda case: case.name)
def test_one_reduction_is_left_and_it_is_fused_with_the_norm(case, groups):
    result = traced(case, groups)
    assert result.report.totals == {
        "all_reduce": case.reductions,
        "fused": 1,
        "merged": case.reductions - 1,
        "declined": 0,
    }
    assert num_reductions(result.after) == 1
    assert_golden(result.after, GOLDEN / f"{case.name}.txt")


@pytest.mark.parametrize("case", APART, ids=lambda case: case.name)
def test_what_is_no_sum_of_reductions_stays_apart_with_the_reason(case, groups):
    result = traced(case, groups, rules=[MERGE_REDUCTIONS])
    assert result.report.totals["merged"] == 0
    assert num_reductions(result.after) == case.reductions
    assert any(case.reason in decline.reason for site in result.report.sites for decline in site.declines)


def test_a_gate_that_is_not_proved_equal_on_every_rank_does_not_merge(groups):
    result = traced(MERGED[6], groups, sharded="scale", rules=[MERGE_REDUCTIONS])
    assert result.report.totals["merged"] == 0
    assert "equal on every rank" in result.report.sites[-1].outcome()


def test_the_report_says_into_which_reduction(groups):
    sites = traced(MERGED[0], groups).report.sites
    assert [site.status for site in sites] == ["merged", "fused"]
    assert sites[0].outcome() == "into (top)"
    assert sites[0].to_json()["merged_into"] == "(top)"


def test_a_factor_may_be_a_reduced_value_itself(groups):
    """That one stays: it is equal on every rank only because it was reduced."""
    case = Case("factor", lambda m, a, b, h: m.sum(a) + m.sum(b) * m.sum(h * a))
    result = traced(case, groups)
    assert result.report.totals == {"all_reduce": 3, "fused": 1, "merged": 1, "declined": 1}


def run(result: Trace, seed: int, dtype: torch.dtype, which: str) -> list[Tensor]:
    """Run a graph on all ranks at once, in one process: a collective sums the values that every rank has there. Gives
    the results, which must be equal on all ranks."""
    graph = getattr(result, which).graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    ranks = [dict(zip(inputs, inputs_of(inputs, rank, seed, dtype), strict=True)) for rank in range(4)]
    for node in graph.nodes:
        if node.op == "output":
            results = [[env[arg] for arg in node.args[0] if arg is not None] for env in ranks]
            assert all(torch.equal(x, y) for other in results for x, y in zip(results[0], other, strict=True))
            return results[0]
        if node.op != "call_function":
            continue
        arguments = [torch.fx.node.map_arg((node.args, node.kwargs), lambda n, env=env: env[n]) for env in ranks]
        if "all_reduce" in str(node.target):
            outputs = [rounded_once([args[0] for args, _ in arguments])] * len(ranks)
        elif "wait_tensor" in str(node.target):
            outputs = [args[0] for args, _ in arguments]
        else:
            outputs = [node.target(*args, **kwargs) for args, kwargs in arguments]
        for env, output in zip(ranks, outputs, strict=True):
            env[node] = output
    raise AssertionError("the graph has no output")


@pytest.mark.parametrize("case", MERGED, ids=lambda case: case.name)
def test_every_rank_computes_the_same_function_and_as_exactly(case, groups):
    exact, rounded = (
        traced(case, groups, rules=[MERGE_REDUCTIONS], dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    errors = {"before": 0.0, "after": 0.0}
    for seed in range(4):
        truth, merged = (run(exact, seed, torch.float64, which) for which in ("before", "after"))
        for x, t in zip(merged, truth, strict=True):
            torch.testing.assert_close(x, t, rtol=1e-12, atol=1e-12)
        for which in errors:
            outputs = run(rounded, seed, torch.bfloat16, which)
            errors[which] += sum(float((x.double() - t).norm() / t.norm()) for x, t in zip(outputs, truth, strict=True))
    assert errors["after"] <= 1.05 * errors["before"]  # as many roundings of the same size, or fewer


def rounded_once(parts: list[Tensor]) -> Tensor:
    """The sum over the ranks as symm_mem and FlashInfer give it, and NCCL between two ranks."""
    return torch.stack(parts).double().sum(0).to(parts[0].dtype)


def inputs_of(nodes: list[torch.fx.Node], rank: int, seed: int, dtype: torch.dtype) -> list[Tensor | int]:
    """What is divided differs by rank, all else does not. Values that bfloat16 holds, whatever the dtype."""
    values: list[Tensor | int] = []
    for index, node in enumerate(nodes):
        if not isinstance(node.meta["val"], Tensor):
            values.append(6)
            continue
        shape = [6 if not isinstance(size, int) else size for size in node.meta["val"].shape]
        own = node.meta[SOURCE] in ("a", "b", "down_a", "down_b")
        generator = torch.Generator().manual_seed(1000 * seed + 10 * index + (rank if own else 9))
        values.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(torch.bfloat16).to(dtype))
    return values


def test_a_merge_that_forgets_a_term_is_found_by_the_proof(groups):
    def forget(graph, site, context):
        reduced = MERGE_REDUCTIONS.rewrite(graph, site, context)
        total = reduced.args[0]
        reduced.args = (total.args[0], *reduced.args[1:])
        graph.erase_node(total)
        return reduced

    broken = dataclasses.replace(MERGE_REDUCTIONS, rewrite=forget)
    with pytest.raises(ReductionProofError, match="is no longer reduced"):
        traced(MERGED[0], groups, rules=[broken])


def test_the_rule_comes_behind_that_of_experts_and_before_the_fusions():
    assert [rule.name for rule in default_rules()][1:3] == ["merge_reductions", "all_reduce_add_rms_norm_fp8"]
