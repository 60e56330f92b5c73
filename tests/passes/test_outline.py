"""Outlining: what repeats becomes one subgraph, what only seems to repeat does not, and the results stay the same."""

from __future__ import annotations

import copy
import operator
import time

import pytest
import torch
from torch.fx import GraphModule

from graphfuse import FuseConfig
from graphfuse.ops import fused_all_reduce  # noqa: F401  (registers the op)
from graphfuse.passes import default_rules
from graphfuse.passes.driver import run_passes
from graphfuse.passes.outline import invoke_subgraph, outline
from graphfuse.testing import fake_tp
from tests.passes.graphs import HIDDEN, TOKENS, Builder, aten, context, flat_layers

FUSED_ADD_NORM = torch.ops.graphfuse.all_reduce_add_rms_norm.default


def layer(b, x, weight, *, scale=1.0, op=aten.tanh.default):
    """Twenty-two nodes: a relu, which marks the layer, a constant, and ten sums, each through an activation."""
    x = b(aten.mul.Tensor, b(aten.relu.default, x), scale)
    for _ in range(10):
        x = b(op, b(aten.add.Tensor, x, weight))
    return x


def calls(module, name="graphfuse_region_0"):
    return [n for n in module.graph.nodes if n.target is invoke_subgraph and n.args[0].target == name]


def num_calls_inside(module, name="graphfuse_region_0"):
    return sum(n.op == "call_function" for n in getattr(module, name).graph.nodes)


def assert_same_results(module, outlined):
    """Both give the same results, and write the same to their inputs."""
    inputs = [torch.randn(tuple(n.meta["val"].shape)) for n in module.graph.nodes if n.op == "placeholder"]
    mine, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    with torch.no_grad():
        for a, b in zip(outlined(*mine), module(*theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def outlined_copy(module: GraphModule) -> tuple[GraphModule, dict[str, int]]:
    other = copy.deepcopy(module)
    return other, outline(other)


def stack(make_layer, num_layers, *, finish=None):
    """`make_layer(b, i, x, weight)` so many times; each layer has a weight of its own among the inputs."""
    b = Builder(torch.float32)
    x = b.input(TOKENS, HIDDEN)
    weights = [b.input(HIDDEN) for _ in range(num_layers)]
    for i, weight in enumerate(weights):
        x = make_layer(b, i, x, weight)
    return b.output(*(finish(b, x) if finish else (x,)))


def test_repeated_layers_become_calls_of_one_subgraph():
    module = stack(lambda b, i, x, w: layer(b, x, w), 6)
    other, made = outlined_copy(module)
    (count,) = made.values()
    assert count == len(calls(other)) >= 4
    assert num_calls_inside(other) == 22
    assert_same_results(module, other)


def test_a_graph_without_repeats_is_untouched():
    module = stack(lambda b, i, x, w: layer(b, x, w), 1)
    before = str(module.graph)
    assert outline(module) == {}
    assert str(module.graph) == before


def test_constants_that_differ_from_layer_to_layer_prevent_merging():
    module = stack(lambda b, i, x, w: layer(b, x, w, scale=1.5 + i), 6)
    assert outline(module) == {}


def test_one_layer_with_another_constant_stays_out():
    module = stack(lambda b, i, x, w: layer(b, x, w, scale=7.0 if i == 4 else 2.0), 8)
    other, _ = outlined_copy(module)
    assert calls(other)
    assert "7.0" in str(other.graph) and "7.0" not in str(other.graphfuse_region_0.graph)
    assert_same_results(module, other)


def test_two_kinds_of_layers_in_a_pattern():
    """A A B A A B ...: the period is three layers; what is left at the ends may repeat in itself."""
    kinds = (aten.tanh.default, aten.tanh.default, aten.sigmoid.default)
    module = stack(lambda b, i, x, w: layer(b, x, w, op=kinds[i % 3]), 12)
    other, made = outlined_copy(module)
    assert made["graphfuse_region_0"] in (3, 4)
    assert num_calls_inside(other) == 66
    assert_same_results(module, other)


def test_each_kind_of_layer_has_a_subgraph_of_its_own_and_a_kind_that_comes_back_has_the_same():
    """First dense layers, then others, as in DeepSeek-V3; and a stack that returns to the first kind."""
    kinds = [aten.tanh.default] * 4 + [aten.sigmoid.default] * 6 + [aten.tanh.default] * 4
    module = stack(lambda b, i, x, w: layer(b, x, w, op=kinds[i]), len(kinds))
    other, made = outlined_copy(module)
    assert set(made) == {"graphfuse_region_0", "graphfuse_region_1"}
    assert sum(made.values()) >= len(kinds) - 4
    assert all(num_calls_inside(other, name) == 22 for name in made)
    assert_same_results(module, other)


@pytest.mark.parametrize(("dropout", "merged"), [(0.0, True), (0.5, False)])
def test_attention_draws_no_random_numbers_without_dropout(dropout, merged):
    sdpa = aten._scaled_dot_product_flash_attention_for_cpu.default

    def attend(b, x, weight):
        heads = b(aten.clone.default, b(aten.view.default, x, [1, 1, TOKENS, HIDDEN]))
        attended = b(operator.getitem, b(sdpa, heads, heads, heads, dropout), 0)
        return layer(b, b(aten.add.Tensor, x, b(aten.view.default, attended, [TOKENS, HIDDEN])), weight)

    module = stack(lambda b, i, x, w: attend(b, x, w), 6)
    outline(module)
    inside = [n for n in module.graphfuse_region_0.graph.nodes if n.target is sdpa] if merged else []
    assert bool(inside) == merged
    assert sum(n.target is sdpa for n in module.graph.nodes) == (6 if not merged else 6 - len(calls(module)))


def test_layers_that_are_wired_differently_are_not_merged():
    """Same ops at the same places; every second layer reads the model's input instead of the layer before."""

    def build():
        b = Builder(torch.float32)
        first = x = b.input(TOKENS, HIDDEN)
        weights = [b.input(HIDDEN) for _ in range(8)]
        for i, weight in enumerate(weights):
            y = layer(b, x, weight)
            x = b(aten.add.Tensor, y, b(aten.relu.default, first if i % 3 == 1 else x))
        return b.output(x)

    module = build()
    other, _ = outlined_copy(module)
    assert_same_results(module, other)


def test_a_value_read_far_behind_its_layer_is_a_result():
    def build():
        b = Builder(torch.float32)
        x = b.input(TOKENS, HIDDEN)
        weights = [b.input(HIDDEN) for _ in range(6)]
        kept = []
        for weight in weights:
            kept.append(b(aten.relu.default, x))
            x = layer(b, kept[-1], weight)
        return b.output(x, *kept)

    module = build()
    other, _ = outlined_copy(module)
    assert len(calls(other)) >= 4
    assert_same_results(module, other)


def test_no_cut_between_an_op_and_its_several_results():
    def sorted_layer(b, i, x, w):
        both = b(aten.topk.default, x, HIDDEN)  # in the first layer it reads an input: the repeat starts behind it
        return layer(b, b(aten.add.Tensor, b(operator.getitem, both, 0), b(operator.getitem, both, 1)), w)

    module = stack(sorted_layer, 6)
    other, _ = outlined_copy(module)
    assert calls(other)
    for call in calls(other):
        assert all(isinstance(operand.meta["val"], torch.Tensor) for operand in call.args[2:])
        assert all(isinstance(val, torch.Tensor) for val in call.meta["val"])
    assert_same_results(module, other)


def test_no_view_leaves_a_subgraph():
    """The caller takes results for memory of their own, and reuses that of an operand it sees no more."""

    def viewed(b, i, x, w):
        rows = b(aten.view.default, x, [2, TOKENS // 2, HIDDEN])
        y = layer(b, rows, w)
        return b(aten.view.default, b(aten.add.Tensor, y, rows), [TOKENS, HIDDEN])

    module = stack(viewed, 6)
    other, _ = outlined_copy(module)
    assert calls(other)
    (output,) = (n for n in other.graphfuse_region_0.graph.nodes if n.op == "output")
    assert all(result.target is not aten.view.default for result in output.args[0])
    assert_same_results(module, other)


def test_writes_to_inputs_stay_where_they_are():
    def written(b, x):
        inputs = [n for n in b.graph.nodes if n.op == "placeholder"][1:]
        for weight in inputs:
            b(aten.copy_.default, weight, b(aten.add.Tensor, weight, 1.0))
        return (x,)

    module = stack(lambda b, i, x, w: layer(b, x, w), 40, finish=written)
    other, _ = outlined_copy(module)
    assert calls(other)
    assert sum(n.target is aten.copy_.default for n in other.graph.nodes) == 40
    assert_same_results(module, other)


def test_writes_in_every_layer_are_not_moved():
    def writing(b, i, x, w):
        x = layer(b, x, w)
        b(aten.copy_.default, w, b(aten.mul.Tensor, w, 2.0))
        return x

    module = stack(writing, 6)
    other, made = outlined_copy(module)
    assert made == {} or "copy_" not in str(other.graphfuse_region_0.graph)
    assert_same_results(module, other)


def test_random_numbers_are_not_merged():
    def random(b, i, x, w):
        return b(aten.add.Tensor, layer(b, x, w), b(aten.rand_like.default, x))

    module = stack(random, 6)
    made = outline(module)
    assert made == {} or "rand_like" not in str(module.graphfuse_region_0.graph)


def test_a_collective_is_not_parted_from_its_wait():
    with fake_tp(4) as group:
        module = stack(lambda b, i, x, w: layer(b, b.all_reduce(x, group.group_name), w), 6)
        assert outline(module)
        names = [str(n.target) for n in module.graphfuse_region_0.graph.nodes if n.op == "call_function"]
    wait = next(i for i, name in enumerate(names) if "wait_tensor" in name)
    assert wait > 0 and "all_reduce" in names[wait - 1]


def test_fused_layers_are_outlined():
    """The graph as it comes out of the passes. A layer is four nodes there, so that several make a region."""
    with fake_tp(4) as group:
        module = flat_layers(30, group.group_name)
        run_passes(module, default_rules(), context(group), FuseConfig())
        assert outline(module) == {"graphfuse_region_0": len(calls(module))}
    fused = [n for n in module.graphfuse_region_0.graph.nodes if n.target is FUSED_ADD_NORM]
    assert len(fused) * len(calls(module)) >= 20


def test_time_is_linear_in_the_depth():
    def seconds(num_layers):
        module = stack(lambda b, i, x, w: layer(b, x, w), num_layers)
        started = time.perf_counter()
        assert outline(module)
        return time.perf_counter() - started

    short, long = (min(seconds(num_layers) for _ in range(3)) for num_layers in (20, 100))
    assert long < 3 * 5 * short  # quadratic would be 25 times


@pytest.mark.slow
def test_inductor_compiles_an_outlined_graph():
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    def viewed(b, i, x, w):
        rows = b(aten.view.default, x, [2, TOKENS // 2, HIDDEN])
        return b(aten.view.default, b(aten.add.Tensor, layer(b, rows, w), rows), [TOKENS, HIDDEN])

    module, other = stack(viewed, 6), stack(viewed, 6)
    assert outline(other)
    placeholders = [n for n in other.graph.nodes if n.op == "placeholder"]
    inputs = [torch.randn(tuple(n.meta["val"].shape)) for n in placeholders]
    with torch.no_grad(), V.set_fake_mode(placeholders[0].meta["val"].fake_mode):
        compiled = compile_fx_inner(other, [n.meta["val"] for n in placeholders], is_inference=True)
    with torch.no_grad():
        (found,), (expected,) = compiled([t.clone() for t in inputs]), module(*inputs)
    torch.testing.assert_close(found, expected)
