"""Collectives and graphfuse's own ops as transfer rules: what each may be given, over which ranks, what it gives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from graphfuse.errors import ReductionProofError
from graphfuse.passes.groups import Groups
from graphfuse.passes.placement.lattice import (
    PARTIAL,
    REPLICATED,
    Kind,
    Lookup,
    Partial,
    Placement,
    Shard,
    Unknown,
)
from graphfuse.passes.verify_placements import PlacementReport, check
from graphfuse.testing import fake_tp
from tests.passes.graphs import HIDDEN, TOKENS, Builder, aten, c10d

R, P, U = REPLICATED, PARTIAL, Unknown("a test says so")
ours = torch.ops.graphfuse


@pytest.fixture(scope="module")
def groups():
    with fake_tp(4) as group:
        yield {
            "compiled": group.group_name,
            "same ranks": dist.new_group([0, 1, 2, 3]).group_name,
            "half of the ranks": dist.new_group([0, 1]).group_name,
            "this rank": dist.new_group([0]).group_name,
            "of": Groups.of(group),
        }


def follow(groups, op, *placements: Placement, shape=(TOKENS, HIDDEN), rest=(), **options) -> PlacementReport:
    """One op of inputs with these placements, and of `rest`."""
    b = Builder()
    inputs = [b.input(*shape) for _ in placements]
    node = b(op, *inputs, *rest)
    b.graph.output((node,))
    known = {x.name: placement for x, placement in zip(inputs, placements, strict=True)}
    return check(b.graph, known, groups["of"], **options)


def outcome(report: PlacementReport):
    return list(report.values.values())[-1]


def kinds(report: PlacementReport) -> list[Kind]:
    return [fault.kind for fault in report.faults if fault.kind is not Kind.OUTPUT]


@pytest.mark.parametrize(
    ("op", "placement", "gives"),
    [
        ("sum", P, R),
        ("avg", Partial("avg"), R),
        ("max", Partial("max"), R),
        ("min", Partial("min"), R),
        ("max", R, R),
        ("avg", R, R),
        ("sum", U, R),
        ("sum", R, Kind.TWICE),
        ("sum", Shard(0), Kind.WRONG_OP),
        ("avg", P, Kind.WRONG_OP),
        ("max", P, Kind.WRONG_OP),
        ("sum", Partial("max"), Kind.WRONG_OP),
        ("sum", Partial("avg"), Kind.WRONG_OP),
        ("sum", Lookup(), Kind.LOOKUP),
    ],
)
@pytest.mark.parametrize("over", ["compiled", "same ranks"])
def test_an_all_reduce(groups, op, placement, gives, over):
    report = follow(groups, c10d.all_reduce.default, placement, rest=(op, groups[over]))
    if isinstance(gives, Kind):
        assert kinds(report) == [gives]
    else:
        assert not report.faults and outcome(report) == gives


def test_a_sum_over_some_of_the_ranks_is_over_the_wrong_group(groups):
    report = follow(groups, c10d.all_reduce.default, P, rest=("sum", groups["half of the ranks"]))
    assert kinds(report) == [Kind.WRONG_GROUP]
    assert "over ranks [0, 1]; the partial(sum) is one over ranks [0, 1, 2, 3]" in report.faults[0].text


@pytest.mark.parametrize("placement", [P, R, Shard(1)])
def test_a_sum_over_another_dimension_of_the_mesh_changes_no_placement(groups, placement):
    report = follow(groups, c10d.all_reduce.default, placement, rest=("sum", groups["this rank"]))
    assert outcome(report) == placement and not kinds(report)


def test_a_group_that_nobody_knows_leaves_nothing_known(groups):
    report = follow(groups, c10d.all_reduce.default, P, rest=("sum", "a group of others"))
    assert not report.faults and "which this process does not know" in report.unknown[0].reason


@pytest.mark.parametrize(
    ("op", "rest", "placement", "gives"),
    [
        (c10d.reduce_scatter_tensor.default, ("sum", 4), P, Shard(0)),
        (c10d.reduce_scatter_tensor.default, ("sum", 4), R, Kind.TWICE),
        (c10d.reduce_scatter_tensor.default, ("sum", 4), Shard(0), Kind.WRONG_OP),
        (c10d.all_gather_into_tensor.default, (4,), Shard(0), R),
        (c10d.all_gather_into_tensor.default, (4,), Shard(1), R),
        (c10d.all_gather_into_tensor.default, (4,), P, Kind.WRONG_OP),
        (c10d.broadcast.default, (0,), R, R),
        (c10d.broadcast.default, (0,), P, Kind.WRONG_OP),
        (c10d.all_to_all_single.default, ([1] * 4, [1] * 4), P, Kind.WRONG_OP),
        (c10d.wait_tensor.default, None, P, P),
    ],
)
def test_other_collectives(groups, op, rest, placement, gives):
    report = follow(groups, op, placement, rest=() if rest is None else (*rest, groups["compiled"]))
    if isinstance(gives, Kind):
        assert kinds(report) == [gives]
    else:
        assert not kinds(report) and outcome(report) == gives


def test_coalesced_collectives_answer_for_each_tensor(groups):
    b = Builder()
    x, y = b.input(4, 8), b.input(4, 8)
    both = b.graph.call_function(c10d.all_reduce_coalesced.default, ([x, y], "sum", groups["compiled"]))
    both.meta["val"] = [x.meta["val"], y.meta["val"]]
    b.graph.output((both,))
    assert outcome(check(b.graph, {x.name: P, y.name: P}, groups["of"])) == (R, R)
    assert kinds(check(b.graph, {x.name: P, y.name: R}, groups["of"])) == [Kind.TWICE]


@pytest.mark.parametrize(
    ("x", "residual", "gives"),
    [(P, R, (R, R)), (R, R, Kind.TWICE), (P, P, Kind.RESIDUAL), (Shard(1), R, Kind.WRONG_OP), (U, R, (R, R))],
)
def test_the_fused_op_sums_its_first_argument_and_reads_the_second_whole(groups, x, residual, gives):
    rest = (None, 1e-6, 0.0, False, False, groups["compiled"])
    report = follow(groups, ours.all_reduce_add_rms_norm.default, x, residual, rest=rest)
    if isinstance(gives, Kind):
        assert kinds(report) == [gives]
    else:
        assert not report.faults and outcome(report) == gives


def test_the_fused_op_over_the_wrong_group(groups):
    rest = (None, 1e-6, 0.0, False, groups["half of the ranks"])
    assert kinds(follow(groups, ours.all_reduce_rms_norm.default, P, rest=rest)) == [Kind.WRONG_GROUP]


def test_an_op_that_a_rule_says_reduces(groups):
    own = torch.library.custom_op(
        "placement_test::sum", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    own.register_fake(torch.empty_like)
    op = torch.ops.placement_test.sum.default
    assert "there is no rule for sum of partial(sum)" in follow(groups, op, P).unknown[0].reason
    assert outcome(follow(groups, op, P, reducing=[op])) == R
    assert kinds(follow(groups, op, R, reducing=[op])) == [Kind.TWICE]


HEADS, WHOLE = Shard(2), R


@pytest.mark.parametrize(
    ("q", "k", "v", "gives"),
    [
        (HEADS, HEADS, HEADS, HEADS),
        (R, R, R, R),
        (P, HEADS, HEADS, Kind.NON_LINEAR),
        (HEADS, HEADS, P, Kind.NON_LINEAR),
    ],
)
def test_attention_keeps_heads(groups, q, k, v, gives):
    b = Builder()
    inputs = [b.input(2, 5, 4, 8) for _ in range(3)]
    positions = b(aten.zeros.default, [2, 5], dtype=torch.int64)
    b.graph.output((b(ours.attention.default, *inputs, positions, None, None, 1.0, None),))
    known = {x.name: p for x, p in zip(inputs, (q, k, v), strict=True)}
    report = check(b.graph, known, groups["of"])
    assert kinds(report) == [gives] if isinstance(gives, Kind) else outcome(report) == gives


@pytest.mark.parametrize(
    ("tokens", "gate_up", "down", "bias", "gives"),
    [
        (R, Shard(1), Shard(2), None, P),
        (R, Shard(0), Shard(0), None, P),
        (R, R, R, None, R),
        (R, R, R, R, R),
        (P, Shard(1), Shard(2), None, Kind.NON_LINEAR),
        (R, Shard(1), Shard(2), R, Kind.BIAS),
        (R, Shard(1), R, None, "experts whose two matrices are divided unlike each other"),
    ],
)
def test_experts_give_a_partial_sum(groups, tokens, gate_up, down, bias, gives):
    b = Builder()
    x, up, dn = b.input(6, 16), b.input(4, 8, 16), b.input(4, 16, 4)
    ids, weights, added = b(aten.zeros.default, [6, 2], dtype=torch.int64), b.input(6, 2), b.input(4, 16)
    op = ours.moe_experts.default
    b.graph.output((b(op, x, up, dn, ids, weights, 4, down_bias=None if bias is None else added),))
    known = {x.name: tokens, up.name: gate_up, dn.name: down, weights.name: R, added.name: R}
    report = check(b.graph, known, groups["of"])
    if isinstance(gives, Kind):
        assert kinds(report) == [gives]
    elif isinstance(gives, str):
        assert gives in report.unknown[0].reason
    else:
        assert outcome(report) == gives


def test_a_fault_is_drawn_from_where_the_partial_sum_is_made_to_where_it_goes_wrong(groups):
    b = Builder()
    x, w, residual = b.input(4, 8), b.input(8, 8), b.input(4, 8)
    partial = b(aten.mm.default, x, w)
    partial.meta["graphfuse_path"] = "layers.0.mlp.down_proj"
    moved = b(aten.view.default, partial, [4, 8])
    total = b(aten.add.Tensor, residual, moved)
    total.meta["graphfuse_path"] = "layers.0"
    b.graph.output((total,))
    report = check(b.graph, {x.name: Shard(1), w.name: Shard(0), residual.name: R}, groups["of"])
    with pytest.raises(ReductionProofError) as raised:
        report.require_no_faults("The traced model is wrong", "Mend it.")
    assert str(raised.value).splitlines() == [
        "The traced model is wrong:",
        "layers.0: add joins a partial(sum) and a whole value",
        "  mm_default = mm(arg0_1: shard(1), arg1_1: shard(0))  [4, 8]  partial(sum)  in layers.0.mlp.down_proj",
        "  -> view_default = view(mm_default)  [4, 8]  partial(sum)",
        "  -> add_tensor = add(arg2_1: replicated, view_default: partial(sum))  [4, 8]  in layers.0  <-- here",
        "Mend it.",
    ]
