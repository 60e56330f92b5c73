"""Transfer rules of the ops with a recurrent state: run on the heads or channels that some ranks would hold, the parts
of the result, put together, are the whole's result."""

from __future__ import annotations

import pytest
import torch

from graphfuse.passes.placement.lattice import PARTIAL, REPLICATED, Kind, Shard, Unknown
from tests.passes.test_placement_rules import follow, parts, result, together


def tokens():
    return torch.arange(5).expand(2, 5), torch.full((2,), 5)


def convolution(x, weight):
    return torch.ops.graphfuse.causal_conv(x, weight, *tokens(), None)


def delta_rule(q, k, v, g, beta):
    return torch.ops.graphfuse.gated_delta(q, k, v, g, beta, *tokens(), None)


HEADS = ((2, 5, 3, 4), (2, 5, 3, 4), (2, 5, 6, 2), (2, 5, 6), (2, 5, 6))
CASES = [(convolution, ((2, 5, 12), (12, 4)), (Shard(2), Shard(0))), (delta_rule, HEADS, (Shard(2),) * 5)]


@pytest.mark.parametrize(("op", "shapes", "divided"), CASES)
@pytest.mark.parametrize("is_divided", [True, False])
def test_each_heads_or_channels_state_is_its_own(op, shapes, divided, is_divided):
    inputs = [torch.randn(shape) for shape in shapes]
    placements = divided if is_divided else [REPLICATED] * len(inputs)
    outcome = result(follow(op, inputs, placements))
    assert outcome == (Shard(2) if is_divided else REPLICATED)
    ranks = zip(*(parts(x, placement) for x, placement in zip(inputs, placements, strict=True)), strict=True)
    torch.testing.assert_close(together([op(*rank) for rank in ranks], outcome), op(*inputs))


@pytest.mark.parametrize(("op", "shapes", "divided"), CASES)
def test_a_partial_sum_must_not_reach_the_state(op, shapes, divided):
    inputs = [torch.randn(shape) for shape in shapes]
    report = follow(op, inputs, [PARTIAL, *[REPLICATED] * (len(inputs) - 1)])
    assert report.faults[0].kind is Kind.NON_LINEAR


@pytest.mark.parametrize(("op", "shapes", "divided"), CASES)
def test_parts_that_are_divided_unlike_are_told(op, shapes, divided):
    inputs = [torch.randn(shape) for shape in shapes]
    report = follow(op, inputs, [*divided[:-1], REPLICATED])
    assert isinstance(result(report), Unknown)
    assert "not all divided alike" in report.unknown[0].reason
