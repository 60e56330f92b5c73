"""Transfer rules, one op at a time, against what they claim: each case is run on the parts of its inputs that some
ranks would hold, and the parts of its result, put together as the predicted placement says, are the whole's result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from graphfuse.ops.fp8_linear import FP8, fp8_linear, quantise_fp8
from graphfuse.passes.groups import Groups
from graphfuse.passes.placement.lattice import (
    PARTIAL,
    REPLICATED,
    Kind,
    Lookup,
    Partial,
    Placement,
    Replicated,
    Shard,
    Unknown,
)
from graphfuse.passes.verify_placements import PlacementReport, check

WORLD = 3
GROUPS = Groups("tp", tuple(range(WORLD)))
R, P = REPLICATED, PARTIAL
aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    name: str
    forward: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[tuple[tuple[int, ...], Placement], ...]
    outcome: Placement


def case(name, forward, *inputs, gives):
    return Case(name, forward, inputs, gives)


def own_attention(q, k, v, sinks=None):
    positions = torch.arange(q.shape[1]).expand(q.shape[:2])
    return torch.ops.graphfuse.attention(q, k, v, positions, None, None, 0.5, None, sinks)


def latent_attention(q_nope, q_rope, latent, k_rope, kv_up):
    positions = torch.arange(latent.shape[1]).expand(latent.shape[:2])
    return torch.ops.graphfuse.mla_attention(q_nope, q_rope, latent, k_rope, kv_up, positions, None, None, 0.5)


def sparse_attention(q_nope, q_rope, latent, k_rope, kv_up):
    positions, selected = torch.arange(5).expand(2, 5), torch.tensor([0, -1]).expand(2, 5, 2).int()
    return torch.ops.graphfuse.mla_attention(
        q_nope, q_rope, latent, k_rope, kv_up, positions, None, None, 0.5, selected=selected
    )


def selection(q, k, weights):
    """As a mask of what is selected: in which order it comes is left open."""
    positions = torch.arange(k.shape[1]).expand(k.shape[:2])
    found = torch.ops.graphfuse.select_tokens(q, k, weights.float(), positions, None, 2)
    return (found[..., None] == torch.arange(k.shape[1])).any(2).double()


def chosen(logits, *bias):
    """The weights of the chosen experts."""
    return torch.ops.graphfuse.route_experts(logits.float(), 2, "sigmoid", *(b.float() for b in bias))[0].double()


def rotated(*tensors):
    """Keys behind their norm and rotation."""
    return torch.ops.graphfuse.norm_rotary(*(t.float() for t in tensors))[1].double()


ANGLES = (((2, 5, 1, 2), R),) * 2
LATENTS = ((2, 5, 7), R), ((2, 5, 2), R)
SUMMED_LATENTS = (((2, 5, 6, 4), R), ((2, 5, 6, 2), R), ((2, 5, 7), P), ((2, 5, 2), R), ((6 * 7, 7), R))
QUERIES, KEYS = ((2, 5, 6, 4), Shard(2)), ((2, 5, 3, 4), Shard(2))


def rounded(x: Tensor, form: str) -> Tensor:
    """What the rounded values stand for."""
    quantised, scale = quantise_fp8(x, form, None)
    return (quantised.double().unflatten(-1, (scale.shape[-1], -1)) * scale.double()[..., None]).flatten(-2)


def eight_bits(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    quantised, x_scale = quantise_fp8(x, "group", None)
    return fp8_linear(quantised, x_scale, weight.to(FP8), scale.abs().float(), None, None, torch.float64)


X, HEADS = ((6, 12), Shard(1)), ((2, 6, 5, 4), Shard(1))
WHOLE, SUMMAND, ROWS = ((6, 12), R), ((6, 12), P), ((6, 12), Shard(0))

CASES = [
    # matrix products
    case("column parallel", torch.mm, ((4, 5), R), ((5, 6), Shard(1)), gives=Shard(1)),
    case("row parallel", torch.mm, ((4, 6), Shard(1)), ((6, 5), Shard(0)), gives=P),
    case("rows of tokens", torch.mm, ((6, 5), Shard(0)), ((5, 4), R), gives=Shard(0)),
    case("a partial sum times a whole matrix", torch.mm, ((4, 6), P), ((6, 5), R), gives=P),
    case("a whole matrix times a partial sum", torch.mm, ((4, 6), R), ((6, 5), P), gives=P),
    case("linear", F.linear, ((2, 4, 5), R), ((6, 5), Shard(0)), gives=Shard(2)),
    case("linear with a sharded bias", F.linear, ((4, 5), R), ((6, 5), Shard(0)), ((6,), Shard(0)), gives=Shard(1)),
    case("addmm", torch.addmm, ((6,), Shard(0)), ((4, 5), R), ((5, 6), Shard(1)), gives=Shard(1)),
    case("heads times heads", torch.bmm, ((6, 4, 5), Shard(0)), ((6, 5, 4), Shard(0)), gives=Shard(0)),
    case("bmm over a sharded dimension", torch.bmm, ((2, 4, 6), Shard(2)), ((2, 6, 4), Shard(1)), gives=P),
    case("mv", torch.mv, ((4, 6), Shard(1)), ((6,), Shard(0)), gives=P),
    case("depthwise", lambda x, w: F.conv1d(x, w, groups=x.shape[1]), ((2, 6, 9), Shard(1)), ((6, 1, 3), Shard(0)),
         gives=Shard(1)),
    # products of FP8
    case("rounded shard", lambda x: rounded(x, "group"), ((4, 384), Shard(1)), gives=Shard(1)),
    case("rounded rows", lambda x: rounded(x, "token"), ROWS, gives=Shard(0)),
    case("column parallel in FP8", eight_bits, ((4, 5), R), ((6, 5), Shard(0)), ((6,), Shard(0)), gives=Shard(1)),
    case("row parallel in FP8", eight_bits, ((4, 384), Shard(1)), ((5, 384), Shard(1)), ((5,), R), gives=P),
    case("rows of tokens in FP8", eight_bits, ((6, 5), Shard(0)), ((4, 5), R), ((4,), R), gives=Shard(0)),
    # elementwise
    case("sum of partial sums", torch.add, SUMMAND, SUMMAND, gives=P),
    case("difference of partial sums", torch.sub, SUMMAND, SUMMAND, gives=P),
    case("scaled partial sum", lambda x: -x * 0.5 / 3, SUMMAND, gives=P),
    case("partial sum times a whole gate", torch.mul, SUMMAND, ((6, 1), R), gives=P),
    case("partial sum over a whole value", lambda x, y: x / (y * y + 1), SUMMAND, WHOLE, gives=P),
    case("partial sum where a mask says", lambda x, y: torch.where(y > 0, x, 0.0), SUMMAND, WHOLE, gives=P),
    case("either partial sum", lambda x, y, m: torch.where(m > 0, x, y), SUMMAND, SUMMAND, WHOLE, gives=P),
    case("masked partial sum", lambda x, y: x.masked_fill(y > 0, 0.0), SUMMAND, WHOLE, gives=P),
    case("partial sum and nothing", lambda x: x + torch.zeros(x.shape), SUMMAND, gives=P),
    case("any function of a shard", lambda x: torch.tanh(x) * x.exp(), X, gives=Shard(1)),
    case("broadcast over a shard", lambda x, y: x * y, HEADS, ((5, 4), R), gives=Shard(1)),
    case("any function of whole values", lambda x, y: torch.relu(x) * y, WHOLE, WHOLE, gives=Replicated()),
    case("a full mask over a shard", lambda x: torch.where(x > 0, torch.zeros_like(x), x), X, gives=Shard(1)),
    case("an expanded value over a shard", lambda x, y: x + y.expand(x.shape), X, ((6, 1), R), gives=Shard(1)),
    # reductions
    case("sum over the shard", lambda x: x.sum(1), X, gives=P),
    case("mean over the shard", lambda x: x.mean(-1, keepdim=True), X, gives=Partial("avg")),
    case("maximum over the shard", lambda x: x.amax(-1), X, gives=Partial("max")),
    case("minimum over the shard", lambda x: x.amin(-1), X, gives=Partial("min")),
    case("sum over all", lambda x: x.sum(), X, gives=P),
    case("sum beside the shard", lambda x: x.sum(0), X, gives=Shard(0)),
    case("mean beside the shard", lambda x: x.mean(0, keepdim=True), X, gives=Shard(1)),
    case("sum of a partial sum", lambda x: x.sum(-1), SUMMAND, gives=P),
    case("softmax beside the shard", lambda x: torch.softmax(x, 0), X, gives=Shard(1)),
    case("top-k beside the shard", lambda x: x.topk(2, dim=0)[0], X, gives=Shard(1)),
    case("running sum of a partial sum", lambda x: x.cumsum(0), SUMMAND, gives=P),
    case("norm of each head", lambda x: F.layer_norm(x, (4,)), HEADS, gives=Shard(1)),
    # our attention, with its sinks
    case("attention", lambda q, k, v: own_attention(q, k, v), QUERIES, KEYS, KEYS, gives=Shard(2)),
    case("attention with sinks", own_attention, QUERIES, KEYS, KEYS, ((6,), Shard(0)), gives=Shard(2)),
    case("whole attention with sinks", own_attention, ((2, 5, 6, 4), R), ((2, 5, 3, 4), R), ((2, 5, 3, 4), R),
         ((6,), R), gives=Replicated()),
    case("rotated heads", rotated, QUERIES, KEYS, *ANGLES, ((4,), R), ((4,), R), gives=Shard(2)),
    case("whole rotated heads", rotated, ((2, 5, 6, 4), R), ((2, 5, 3, 4), R), *ANGLES, gives=R),
    case("latent attention", latent_attention, QUERIES, ((2, 5, 6, 2), Shard(2)), *LATENTS, ((6 * 7, 7), Shard(0)),
         gives=Shard(2)),
    case("whole latent attention", latent_attention, ((2, 5, 6, 4), R), ((2, 5, 6, 2), R), *LATENTS, ((6 * 7, 7), R),
         gives=Replicated()),
    case("sparse latent attention", sparse_attention, QUERIES, ((2, 5, 6, 2), Shard(2)), *LATENTS,
         ((6 * 7, 7), Shard(0)), gives=Shard(2)),
    case("selection of tokens", selection, ((2, 5, 6, 4), R), ((2, 5, 4), R), ((2, 5, 6), R), gives=Replicated()),
    case("choice of experts", chosen, WHOLE, gives=Replicated()),
    case("choice of experts of this rank's tokens", chosen, ROWS, gives=Shard(0)),
    # views
    case("split into heads", lambda x: x.view(x.shape[0], -1, 2), X, gives=Shard(1)),
    case("heads behind tokens", lambda x: x.view(2, 3, -1, 2).transpose(1, 2), X, gives=Shard(1)),
    case("merged heads", lambda x: x.transpose(1, 2).reshape(2, 5, -1), HEADS, gives=Shard(2)),
    case("batches of heads", lambda x: x.reshape(-1, 5, 4), HEADS, gives=Shard(0, 2)),
    case("batches of heads and back", lambda x: x.reshape(-1, 5, 4).view(2, -1, 5, 4), HEADS, gives=Shard(1)),
    case("a head each", lambda x: x.view(6, -1, 4), X, gives=Shard(1)),
    case("scores of a head each", lambda q, k: torch.bmm(q.reshape(-1, 5, 4), k.reshape(-1, 5, 4).transpose(1, 2)),
         ((2, 3, 5, 4), Shard(1)), ((2, 3, 5, 4), Shard(1)), gives=Shard(0, 2)),
    case("scores of a head each and back", lambda q, k: torch.bmm(
        q.reshape(-1, 5, 4), k.reshape(-1, 5, 4).transpose(1, 2)).view(2, -1, 5, 5).softmax(-1),
        ((2, 3, 5, 4), Shard(1)), ((2, 3, 5, 4), Shard(1)), gives=Shard(1)),
    case("product of a head each", lambda x, w: x.transpose(1, 2).reshape(10, -1) @ w, ((2, 3, 5, 4), Shard(1)),
         ((12, 7), Shard(0)), gives=P),
    case("unsqueezed", lambda x: x.unsqueeze(1), X, gives=Shard(2)),
    case("squeezed", lambda x: x.unsqueeze(0).squeeze(0), X, gives=Shard(1)),
    case("selected beside the shard", lambda x: x[2], X, gives=Shard(0)),
    case("sliced beside the shard", lambda x: x[1:3], X, gives=Shard(1)),
    case("halves of each head", lambda x: torch.cat([-x[..., 2:], x[..., :2]], -1), HEADS, gives=Shard(1)),
    case("joined beside the shard", lambda x: torch.cat([x, x]), X, gives=Shard(1)),
    case("shards and zeros", lambda x: F.pad(x, (0, 0, 1, 0)), X, gives=Shard(1)),
    case("stacked", lambda x, y: torch.stack([x, y]), X, X, gives=Shard(2)),
    case("repeated heads", lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(2, -1, 5, 4), HEADS,
         gives=Shard(1)),
    case("flipped beside the shard", lambda x: x.flip(0), X, gives=Shard(1)),
    case("moved partial sums", lambda x: F.pad(x.t().reshape(3, -1)[1:], (0, 2)), SUMMAND, gives=P),
    case("joined partial sums", lambda x, y: torch.cat([x, y]), SUMMAND, SUMMAND, gives=P),
    case("a part of a partial sum replaced by one", lambda x, y: torch.slice_scatter(x, y, 0, 0, 6), SUMMAND, SUMMAND,
         gives=P),
    # indices
    case("rows of a partial sum", lambda x: x[torch.tensor([2, 0])], SUMMAND, gives=P),
    case("rows of a shard", lambda x: x[torch.tensor([2, 0, 1])], X, gives=Shard(1)),
    case("columns looked up", lambda w: F.embedding(torch.tensor([2, 0]), w), X, gives=Shard(1)),
    case("gathered beside the shard", lambda x: x.index_select(0, torch.tensor([3, 3])), X, gives=Shard(1)),
    case("rows of a partial sum zeroed", lambda x: x.index_put((torch.tensor([1]),), torch.zeros(12, dtype=x.dtype)),
         SUMMAND, gives=P),
]  # fmt: skip


def whole(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def parts(x: Tensor, placement: Placement) -> list[Tensor]:
    if isinstance(placement, Shard):
        return list(x.chunk(WORLD, placement.dim))
    if isinstance(placement, Partial):
        shares = [torch.randn_like(x) for _ in range(WORLD - 1)]
        return [*shares, x - sum(shares)]
    return [x] * WORLD


def together(values: list[Tensor], placement: Placement) -> Tensor:
    if isinstance(placement, Partial):
        stacked = torch.stack(values)
        return {"sum": stacked.sum, "avg": stacked.mean, "max": stacked.amax, "min": stacked.amin}[placement.op](0)
    if isinstance(placement, Shard):
        dim, outer = placement.dim, int(placement.outer)
        return torch.cat([v.unflatten(dim, (outer, -1)) for v in values], dim + 1).flatten(dim, dim + 1)
    return values[0]


def follow(forward, inputs: list[Tensor], placements: list[Placement], **options) -> PlacementReport:
    graph = make_fx(forward, tracing_mode="fake")(*inputs).graph
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    return check(graph, dict(zip(names, placements, strict=True)), GROUPS, **options)


def result(report: PlacementReport) -> Placement:
    return list(report.values.values())[-1]  # type: ignore[return-value]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_result_is_what_its_placement_says(case):
    torch.manual_seed(0)
    inputs = [whole(shape) for shape, _ in case.inputs]
    placements = [placement for _, placement in case.inputs]
    split = [parts(x, p) for x, p in zip(inputs, placements, strict=True)]
    report = follow(case.forward, [part[0] for part in split], placements)
    assert not report.unknown
    assert {fault.kind for fault in report.faults} <= {Kind.OUTPUT}  # of course these partial results are returned
    assert str(result(report)) == str(case.outcome)
    results = [case.forward(*(part[rank] for part in split)) for rank in range(WORLD)]
    torch.testing.assert_close(together(results, case.outcome), case.forward(*inputs))


def violation(kind: Kind, name: str, forward, *inputs):
    return pytest.param(kind, forward, inputs, id=name)


VIOLATIONS = [
    violation(Kind.NON_LINEAR, "relu", torch.relu, SUMMAND),
    violation(Kind.NON_LINEAR, "square", lambda x: x.pow(2), SUMMAND),
    violation(Kind.NON_LINEAR, "product of two", torch.mul, SUMMAND, SUMMAND),
    violation(Kind.NON_LINEAR, "in the denominator", lambda x, y: y / x, SUMMAND, WHOLE),
    violation(Kind.NON_LINEAR, "compared", lambda x: x > 0, SUMMAND),
    violation(Kind.NON_LINEAR, "cast to integers", lambda x: x.to(torch.int64), SUMMAND),
    violation(Kind.NON_LINEAR, "softmax", lambda x: torch.softmax(x, -1), SUMMAND),
    violation(Kind.NON_LINEAR, "largest", lambda x: x.amax(-1), SUMMAND),
    violation(Kind.NON_LINEAR, "sorted", lambda x: x.sort(-1)[0], SUMMAND),
    violation(Kind.NON_LINEAR, "arg-max", lambda x: x.argmax(-1), SUMMAND),
    violation(Kind.NON_LINEAR, "layer norm", lambda x: F.layer_norm(x, (12,)), SUMMAND),
    violation(Kind.NON_LINEAR, "times a sharded matrix", torch.mm, SUMMAND, ((12, 6), Shard(1))),
    violation(Kind.NON_LINEAR, "matrix product of two", torch.mm, SUMMAND, ((12, 6), P)),
    violation(Kind.NON_LINEAR, "attention", lambda q: F.scaled_dot_product_attention(q, q, q), ((2, 3, 4, 8), P)),
    violation(Kind.NON_LINEAR, "sinks", lambda q, s: own_attention(q, q, q, s), ((2, 5, 6, 4), R), ((6,), P)),
    violation(Kind.NON_LINEAR, "keys that are rotated", rotated, ((2, 5, 6, 4), R), ((2, 5, 3, 4), P), *ANGLES),
    violation(Kind.NON_LINEAR, "latents", latent_attention, *SUMMED_LATENTS),
    violation(Kind.NON_LINEAR, "selected by a sum", selection, ((2, 5, 6, 4), R), ((2, 5, 4), P), ((2, 5, 6), R)),
    violation(Kind.NON_LINEAR, "experts chosen by a sum", chosen, SUMMAND),
    violation(Kind.NON_LINEAR, "scaled maximum", lambda x: x * 2, ((6, 12), Partial("max"))),
    violation(Kind.NON_LINEAR, "rounded to FP8", lambda x: rounded(x, "token"), SUMMAND),
    violation(Kind.RESIDUAL, "residual", torch.add, SUMMAND, WHOLE),
    violation(Kind.RESIDUAL, "taken away from a residual", torch.sub, WHOLE, SUMMAND),
    violation(Kind.RESIDUAL, "shard added", torch.add, SUMMAND, ROWS),
    violation(Kind.BIAS, "bias", torch.add, SUMMAND, ((12,), R)),
    violation(Kind.BIAS, "constant", lambda x: x + 1, SUMMAND),
    violation(Kind.BIAS, "epsilon on one rank's mean", lambda x: x.mean(-1, keepdim=True) + 1e-6, X),
    violation(Kind.BIAS, "bias of a row-parallel product", F.linear, X, ((4, 12), Shard(1)), ((4,), R)),
    violation(Kind.GATE, "gate of this rank", torch.mul, SUMMAND, ((6, 12), Shard(0))),
    violation(Kind.GATE, "chosen by this rank", lambda x, y: torch.where(y > 0, x, 0.0), SUMMAND, ROWS),
    violation(Kind.MIXED, "partly whole", lambda x, y: torch.cat([x, y]), SUMMAND, WHOLE),
    violation(Kind.MIXED, "one branch whole", lambda x, y: torch.where(y > 0, x, y), SUMMAND, WHOLE),
    violation(Kind.MIXED, "padded with ones", lambda x: F.pad(x, (1, 0), value=1.0), SUMMAND),
    violation(Kind.MIXED, "a slice written", lambda x, y: torch.slice_scatter(x, y, 0, 0, 6), SUMMAND, WHOLE),
    violation(Kind.OUTPUT, "returned", lambda x: x.clone(), SUMMAND),
    violation(Kind.OUTPUT, "looked up and returned", lambda w: F.embedding(torch.tensor([0]), w), ROWS),
]


@pytest.mark.parametrize(("kind", "forward", "inputs"), VIOLATIONS)
def test_what_is_not_linear_in_a_partial_sum_is_a_fault(kind, forward, inputs):
    report = follow(forward, [torch.ones(shape) for shape, _ in inputs], [placement for _, placement in inputs])
    assert report.faults[0].kind is kind, report.faults


@pytest.mark.parametrize(
    ("forward", "inputs", "reason"),
    [
        (torch.mm, (X, ((12, 4), R)), "sharded along a dimension in which the other one is whole"),
        (torch.mm, (ROWS, ((12, 4), Shard(1))), "along different dimensions"),
        (
            eight_bits,
            (((4, 384), Shard(1)), ((6, 384), Shard(1)), ((6,), Shard(0))),
            "not divided as what they belong to",
        ),
        (torch.add, (X, WHOLE), "one operand is a shard, and another one of its size is the same"),
        (torch.add, (X, ROWS), "its operands are sharded along different dimensions"),
        (lambda x: torch.softmax(x, 1), (X,), "softmax along a sharded dimension"),
        (lambda x: x.cumsum(1), (X,), "cumsum along a sharded dimension"),
        (lambda x: x.argmax(1), (X,), "a reduction of a sharded dimension that cannot be completed"),
        (own_attention, (QUERIES, KEYS, KEYS, ((6,), R)), "heads are shard(2), but sinks replicated"),
        (rotated, (QUERIES, ((2, 5, 3, 4), Shard(3)), *ANGLES), "heads that are shard(3) are rotated"),
        (rotated, (QUERIES, KEYS, *ANGLES, ((4,), Shard(0)), ((4,), R)), "by a shard of the angles"),
        (latent_attention, (QUERIES, ((2, 5, 6, 2), Shard(2)), *LATENTS, ((6 * 7, 7), R)), "but kv_up replicated"),
        (latent_attention, (QUERIES, ((2, 5, 6, 2), R), *LATENTS, ((6 * 7, 7), Shard(0))), "not all divided by heads"),
        (selection, (QUERIES, ((2, 5, 4), R), ((2, 5, 6), Shard(2))), "tokens are selected by a shard"),
        (chosen, (X,), "experts are chosen by a shard"),
        (chosen, (WHOLE, ((12,), Shard(0))), "experts are chosen by a shard"),
        (lambda x: x[:, 0], (X,), "a part of a sharded dimension is taken"),
        (lambda x: torch.linalg.inv(x[:, :6]), (X,), "there is no rule for"),
        (lambda x: x * torch.rand(6, 12), (WHOLE,), "there is no rule for rand"),
        (
            lambda w: F.embedding(torch.tensor([0]), w) * 2.0 + 1.0,
            (ROWS,),
            "rows looked up in a sharded table are used",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_rule_covers_is_unknown_with_its_reason(forward, inputs, reason):
    report = follow(forward, [torch.ones(shape) for shape, _ in inputs], [placement for _, placement in inputs])
    assert {fault.kind for fault in report.faults} <= {Kind.OUTPUT}
    assert reason in report.unknown[0].reason
    assert report.num_unknown >= 1
    assert isinstance(result(report), Unknown)


def test_an_input_of_which_nothing_is_said_is_unknown_and_so_is_all_that_is_computed_from_it():
    graph = make_fx(lambda x: torch.relu(x) + 1, tracing_mode="fake")(torch.ones(3)).graph
    report = check(graph, {}, GROUPS)
    assert [u.reason for u in report.unknown] == ["nothing says how this input is divided over the ranks"]
    assert (report.num_proved, report.num_unknown) == (0, 3)
    assert not report.faults


def test_rows_of_a_sharded_table_are_a_partial_sum_once_masked():
    def masked(ids, table):
        here = ids < 4
        return torch.where(here[:, None], F.embedding(torch.where(here, ids, 0), table), 0.0)

    report = follow(masked, [torch.tensor([1, 5]), torch.ones(4, 3)], [R, Shard(0)])
    assert result(report) == P
    report = follow(lambda ids, w: F.embedding(ids, w) * (ids < 4)[:, None], [torch.tensor([1]), torch.ones(4, 3)],
                    [R, Shard(0)])  # fmt: skip
    assert result(report) == P
    report = follow(lambda ids, w: F.embedding(ids, w) * 2.0, [torch.tensor([1]), torch.ones(4, 3)], [R, Shard(0)])
    assert result(report) == Lookup()
