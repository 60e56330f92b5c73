"""A term that every rank has whole, between a reduction and the residual: one rank adds it, so that they are fused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import graphfuse
from graphfuse.testing import assert_golden, fake_tp
from tests.passes.test_merge_reductions import Case, Layer, traced

GOLDEN = Path(__file__).parents[1] / "golden"

FUSED = [
    Case("whole_term", lambda m, a, b, h: m.sum(a) + h.sin(), reductions=1),
    Case("whole_term_and_views", lambda m, a, b, h: (m.sum(a.unsqueeze(0)) + h.unsqueeze(0)).squeeze(0), reductions=1),
]
LEFT_ALONE = [
    Case("term_of_this_rank", lambda m, a, b, h: m.sum(a) + h * m.scale, reductions=1),
    Case("sum_read_twice", lambda m, a, b, h: (s := m.sum(a) + h) * s.sin(), reductions=1),
    Case("scaled_term", lambda m, a, b, h: torch.add(m.sum(a), h, alpha=0.5), reductions=1),
]


@pytest.fixture(scope="module")
def groups():
    with fake_tp(4) as group:
        yield group, dist.new_group([0, 1])


@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_a_whole_term_is_added_by_one_rank(case, groups):
    """`trace` proves the placements of both graphs: a partial sum plus a whole value would be a fault."""
    result = traced(case, groups)
    (site,) = result.report.sites
    assert site.op == "all_reduce_add_rms_norm"
    assert_golden(result.after, GOLDEN / "fused" / f"{case.name}.after.txt")


@pytest.mark.parametrize("case", LEFT_ALONE, ids=lambda case: case.name)
def test_what_may_differ_between_ranks_or_is_read_twice_is_left_alone(case, groups):
    (site,) = traced(case, groups, sharded="scale").report.sites
    assert site.status == "declined"


def test_a_term_of_unknown_placement_is_left_alone(groups, monkeypatch):
    monkeypatch.delattr(Layer, "placements")
    (site,) = traced(FUSED[0], groups).report.sites
    assert site.status == "declined"


def outputs(group, name):
    """Eager and compiled results of the layer on this rank's shards, and the fused op."""
    (case,) = [case for case in FUSED if case.name == name]
    torch.manual_seed(0)
    layer = Layer(case, group, group).requires_grad_(False)
    h, residual = torch.randn(6, 64), torch.randn(6, 64)
    torch.manual_seed(1 + dist.get_rank(group))
    a, b = torch.randn(6, 64), torch.randn(6, 64)
    with graphfuse.compile(layer, group) as compiled:
        return layer(a, b, h, residual), compiled(a, b, h, residual), [site.op for site in compiled.report.sites]


@pytest.mark.parametrize("name", [FUSED[0].name, pytest.param(FUSED[1].name, marks=pytest.mark.slow)])
def test_ranks_compute_what_the_layer_does(ranks, name):
    for eager, fused, ops in ranks.run(2, outputs, name, timeout=150):
        assert ops == ["all_reduce_add_rms_norm"]
        for want, got in zip(eager, fused, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
