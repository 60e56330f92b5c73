"""Who else reads a value: the partial sum, whose memory a fused op may use, and several reductions that meet.

Also the shapes at which things could be mistaken for one another: T == H, H == 1, T == 1.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives as fc
from torch import nn

from graphfuse import FuseConfig
from graphfuse.ops import fused_all_reduce  # noqa: F401  (registers the ops)
from graphfuse.passes import default_rules
from graphfuse.passes.driver import run_passes
from graphfuse.testing import fake_tp, trace
from tests.passes.graphs import HIDDEN, TOKENS, Builder, aten, c10d, context
from tests.passes.zoo import llama

FUSED_ADD_NORM = torch.ops.graphfuse.all_reduce_add_rms_norm.default
X_IS_DEAD = 6


@pytest.fixture(scope="module")
def group():
    with fake_tp(4) as group:
        yield group


def fuse(module, group):
    """The sites, and the fused ops of the graph."""
    sites = run_passes(module, default_rules(), context(group), FuseConfig()).sites
    return sites, [node for node in module.graph.nodes if node.target is FUSED_ADD_NORM]


def site(group, make_partial, extra=lambda b, partial: ()):
    """A graph with one site; `extra` gives further results of the graph from the builder and the partial sum."""
    b = Builder()
    a, matrix, residual, weight = b.input(TOKENS, 32), b.input(32, HIDDEN), b.input(TOKENS, HIDDEN), b.input(HIDDEN)
    partial = make_partial(b, a, matrix)
    more = extra(b, partial)
    total = b(aten.add.Tensor, residual, b.all_reduce(partial, group.group_name))
    module = b.output(b.rms_norm(total, weight), *more)
    _, (fused,) = fuse(module, group)
    return fused


def mm(b, a, matrix):
    return b(aten.mm.default, a, matrix)


def viewed_mm(b, a, matrix):
    return b(aten.view.default, b(aten.mm.default, a, matrix), [TOKENS, HIDDEN])


# --- whose memory the partial sum is ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make_partial", [mm, viewed_mm])
def test_a_matrix_product_that_only_the_reduction_reads_is_dead(group, make_partial):
    assert site(group, make_partial).args[X_IS_DEAD] is True


@pytest.mark.parametrize(
    "extra",
    [
        lambda b, partial: (partial,),
        lambda b, partial: (b(aten.relu.default, partial),),
        lambda b, partial: (b(aten.view.default, partial, [TOKENS * HIDDEN]),),
        lambda b, partial: (b(aten.relu.default, b(aten.slice.Tensor, partial, 0, 0, 1)),),
    ],
    ids=["output", "another_op", "view_is_an_output", "view_is_read"],
)
def test_a_partial_sum_with_another_reader_is_alive(group, extra):
    assert site(group, mm, extra).args[X_IS_DEAD] is False


@pytest.mark.parametrize(
    "make_partial",
    [
        lambda b, a, matrix: b.input(TOKENS, HIDDEN),
        lambda b, a, matrix: b(aten.view.default, b.input(TOKENS * HIDDEN), [TOKENS, HIDDEN]),
        lambda b, a, matrix: b(aten.slice.Tensor, b(aten.mm.default, b.input(2 * TOKENS, 32), matrix), 0, 0, TOKENS),
        lambda b, a, matrix: b(aten.relu.default, b(aten.mm.default, a, matrix)),
    ],
    ids=["input", "view_of_an_input", "part_of_a_product", "elementwise"],
)
def test_what_may_be_memory_of_something_else_is_alive(group, make_partial):
    assert site(group, make_partial).args[X_IS_DEAD] is False


def test_the_residual_is_a_view_of_the_partial_sum(group):
    b = Builder()
    partial, weight = mm(b, b.input(TOKENS, 32), b.input(32, HIDDEN)), b.input(HIDDEN)
    residual = b(aten.view.default, partial, [TOKENS, HIDDEN])
    total = b(aten.add.Tensor, residual, b.all_reduce(partial, group.group_name))
    _, (fused,) = fuse(b.output(b.rms_norm(total, weight)), group)
    assert fused.args[X_IS_DEAD] is False


# --- several reductions -----------------------------------------------------------------------------------------------


def test_two_reductions_that_are_added_are_merged_and_fused(group):
    """AR(a) + AR(b) → norm: one reduction of a + b."""
    b = Builder()
    first, second, weight = b.input(TOKENS, HIDDEN), b.input(TOKENS, HIDDEN), b.input(HIDDEN)
    total = b(aten.add.Tensor, b.all_reduce(first, group.group_name), b.all_reduce(second, group.group_name))
    module = b.output(b.rms_norm(total, weight))
    sites, _ = fuse(module, group)
    assert [s.status for s in sites] == ["merged", "fused"]
    assert sites[1].op == "all_reduce_rms_norm"
    (fused,) = (n for n in module.graph.nodes if n.target is torch.ops.graphfuse.all_reduce_rms_norm.default)
    assert sources(fused.args[0]) == {first, second}


def sources(node):
    """The inputs that a value is computed from."""
    return {node} if node.op == "placeholder" else set().union(*map(sources, node.all_input_nodes))


def test_a_reduction_of_a_reduction(group):
    b = Builder()
    x, residual, weight = b.input(TOKENS, HIDDEN), b.input(TOKENS, HIDDEN), b.input(HIDDEN)
    once = b.all_reduce(x, group.group_name)
    total = b(aten.add.Tensor, residual, b.all_reduce(once, group.group_name))
    sites, (fused,) = fuse(b.output(b.rms_norm(total, weight)), group)
    assert [s.status for s in sites] == ["declined", "fused"]
    assert fused.args[0] is once


def test_a_wait_with_two_readers_and_two_waits(group):
    b = Builder()
    x, residual, weight = b.input(TOKENS, HIDDEN), b.input(TOKENS, HIDDEN), b.input(HIDDEN)
    reduced = b(c10d.all_reduce.default, x, "sum", group.group_name)
    one, two = b(c10d.wait_tensor.default, reduced), b(c10d.wait_tensor.default, reduced)
    total = b(aten.add.Tensor, residual, one)
    sites, fused = fuse(b.output(b.rms_norm(total, weight), two), group)
    assert not fused
    assert sites[0].outcome() == "its result is read before the reduction has finished"


def test_an_in_place_reduction_whose_input_is_read_elsewhere(group):
    """`all_reduce_` writes into the partial sum, which others then read reduced."""
    b = Builder()
    x, residual, weight = mm(b, b.input(TOKENS, 32), b.input(32, HIDDEN)), b.input(TOKENS, HIDDEN), b.input(HIDDEN)
    reduced = b(c10d.wait_tensor.default, b(c10d.all_reduce_.default, x, "sum", group.group_name))
    other = b(aten.relu.default, x)
    module = b.output(b.rms_norm(b(aten.add.Tensor, residual, reduced), weight), other)
    sites, fused = fuse(module, group)
    assert not fused
    assert sites[0].outcome() == "it reduces in place, and the input is read elsewhere"


def test_a_long_chain_of_reductions_and_norms(group):
    """AR → norm → AR → norm ..., each norm's output the next partial sum."""
    b = Builder()
    x, weight = b.input(TOKENS, HIDDEN), b.input(HIDDEN)
    for _ in range(100):
        x = b.rms_norm(b.all_reduce(x, group.group_name), weight)
    sites, _ = fuse(b.output(x), group)
    assert [s.op for s in sites] == ["all_reduce_rms_norm"] * 100


def test_a_weight_made_behind_the_sum_moves_in_front_of_it(group):
    """The sum has a reader in front of the weight, so the fused op cannot simply stand behind the weight."""
    b = Builder()
    x, residual, weight = b.input(TOKENS, HIDDEN), b.input(TOKENS, HIDDEN), b.input(HIDDEN)
    total = b(aten.add.Tensor, residual, b.all_reduce(x, group.group_name))
    early = b(aten.relu.default, total)
    late = b(aten.mul.Tensor, b(aten.view.default, weight, [1, HIDDEN]), 3)
    module = b.output(b.rms_norm(total, b(aten.view.default, late, [HIDDEN])), early)
    _, (fused,) = fuse(module, group)  # the driver ends with graph.lint(), which checks the order
    assert fused.args[2].target is aten.view.default


# --- shapes -----------------------------------------------------------------------------------------------------------


class Static(nn.Module):
    def __init__(self, group, norm):
        super().__init__()
        self.group, self.norm = group, norm

    def forward(self, x, residual, weight):
        return self.norm(residual + fc.all_reduce(x, "sum", self.group), weight)


def fused_op(group, tokens, hidden_size, weight_shape, norm=llama):
    """The report's site and the fused op for static shapes."""
    b = Builder()
    x, residual, weight = b.input(tokens, hidden_size), b.input(tokens, hidden_size), b.input(*weight_shape)
    total = b(aten.add.Tensor, residual, b.all_reduce(x, group.group_name))
    (site,), fused = fuse(b.output(b.rms_norm(total, weight)), group)
    return site, fused


def test_square_activations_do_not_confuse_rows_with_columns(group):
    _, (fused,) = fused_op(group, HIDDEN, HIDDEN, (HIDDEN,))
    assert fused.args[2].op == "placeholder"
    _, (fused,) = fused_op(group, HIDDEN, HIDDEN, (HIDDEN, 1))  # one factor a row: no weight
    assert fused.args[2] is None


def test_a_factor_for_each_element_is_no_weight(group):
    _, (fused,) = fused_op(group, TOKENS, HIDDEN, (TOKENS, HIDDEN))
    assert fused.args[2] is None


@pytest.mark.parametrize(("tokens", "hidden_size"), [(1, HIDDEN), (4, 1), (1, 1)])
def test_one_row_and_one_column(group, tokens, hidden_size):
    """At H = 1 the mean has the shape of the value itself."""
    _, (fused,) = fused_op(group, tokens, hidden_size, (hidden_size,))
    assert fused.args[2].op == "placeholder"
    assert tuple(fused.meta["val"][0].shape) == (tokens, hidden_size)


def test_one_row_of_activations_as_a_factor(group):
    """[1, H] at T = 1 could be a weight; what it is called does not matter, but a vector it is not."""
    site, fused = fused_op(group, 1, HIDDEN, (1, HIDDEN))
    assert not fused
    assert site.outcome() == "the norm's weight is not a vector as long as the last dimension"


@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_static_shapes_trace_alike(group, tokens):
    inputs = (torch.ones(tokens, 64), torch.ones(tokens, 64), torch.ones(64))
    assert trace(Static(group, llama), inputs, group).report.totals["fused"] == 1
