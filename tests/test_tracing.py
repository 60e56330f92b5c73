"""Tracing: one graph for every batch and length, a few where a model needs to know a size, and errors that name the
line where a model cannot be traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import graphfuse
from graphfuse import FuseConfig
from graphfuse.compiler import CompiledModel
from graphfuse.errors import GraphBreakError
from graphfuse.testing import fake_tp, trace
from tests import broken_forwards
from tests.conftest import Calls, H, Layer, Model, ids

# --- one graph ------------------------------------------------------------------------------------------------------


def test_one_graph_serves_every_batch_and_length(model):
    compiled = graphfuse.compile(model)
    counters.clear()
    for batch, length in ((2, 7), (1, 1), (1, 7), (5, 1), (2, 2), (7, 7)):
        torch.testing.assert_close(compiled(ids(batch, length)), model(ids(batch, length)))
    assert compiled.report.num_graphs == 1
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["graph_break"] == {}
    assert compiled.report.notes == []


def test_the_first_call_may_have_sizes_of_one(model):
    compiled = graphfuse.compile(model, example_inputs=ids(1, 1))
    torch.testing.assert_close(compiled(ids(3, 5)), model(ids(3, 5)))
    assert compiled.report.num_graphs == 1


def test_sizes_that_were_equal_by_chance_are_told_apart_once():
    """Batch and number of rows agree in the first call; the second call shows that they are two quantities."""
    both = Calls(lambda self, x, y: (x @ self.weight, y * 2))
    compiled = graphfuse.compile(both)
    for rows in ((3, 3), (3, 4), (1, 5), (6, 6)):
        x, y = torch.ones(rows[0], H), torch.ones(rows[1], H)
        torch.testing.assert_close(compiled(x, y), both(x, y))
    assert compiled.report.num_graphs == 2


def test_a_broadcast_token_dimension_steps_down_to_dynamic_sizes():
    """Positions [1, S] for ids [B, S]: no unbacked size can say so. The report does."""
    add = Calls(lambda self, x, positions: x @ self.weight + positions[..., None])
    compiled = graphfuse.compile(add)
    for batch in (1, 3, 2, 1):
        x, positions = torch.ones(batch, 5, H), torch.arange(5)[None]
        torch.testing.assert_close(compiled(x, positions), add(x, positions))
    assert compiled.report.num_graphs == 2
    first, second = compiled.report.notes
    assert first.startswith("batch and length are not one graph: ")
    assert second.startswith("there may be more than four graphs: ")


def test_a_model_that_asks_for_its_size_gets_at_most_four_graphs_and_a_note():
    def forward(self, x):
        return x @ self.weight if x.shape[0] > 1 else x - 1

    model = Calls(forward)
    compiled = graphfuse.compile(model)
    for rows in (3, 1, 2, 9):
        torch.testing.assert_close(compiled(torch.ones(rows, H)), model(torch.ones(rows, H)))
    assert 2 <= compiled.report.num_graphs <= 4
    (note,) = compiled.report.notes
    assert "batch and length are not one graph" in note
    assert "x.shape[0] > 1" in note


def test_models_of_one_class_do_not_disturb_each_other():
    """More of them than Dynamo allows graphs for one piece of code, of different sizes."""
    limit = torch._dynamo.config.recompile_limit
    models = [Calls(lambda self, x, cache: x @ self.weight + cache[0].sum(0)) for _ in range(limit + 2)]
    compiled = [graphfuse.compile(model) for model in models]
    for size, one in enumerate(compiled, 1):
        x, cache = torch.ones(3, H), [torch.ones(size, H)]
        torch.testing.assert_close(one(x, cache), x @ torch.ones(H, H) + float(size))
    graphs = []
    traced = CompiledModel(models[0], None, FuseConfig(), capture=lambda before, _after: graphs.append(before))
    traced.trace([torch.ones(3, H), [torch.ones(limit + 9, H)]])
    values = [n.meta["val"] for n in graphs[0].graph.nodes if n.op == "placeholder"]
    assert f"torch.Size([{limit + 9}, {H}])" in [str(v.shape) for v in values if isinstance(v, Tensor)]
    assert all(one.report.num_graphs == 1 for one in compiled)


def test_marks_of_the_caller_stay_and_ours_go(model):
    tokens, marked, static = ids(2, 5), ids(2, 6), ids(2, 7)
    torch._dynamo.mark_dynamic(marked, 1)
    torch._dynamo.mark_static(static, 1)
    before = [dict(t.__dict__) for t in (tokens, marked, static)]
    compiled = graphfuse.compile(model)
    for tensor in (tokens, marked):
        torch.testing.assert_close(compiled(tensor), model(tensor))
    assert compiled.report.num_graphs == 1
    torch.testing.assert_close(compiled(static), model(static))
    assert [dict(t.__dict__) for t in (tokens, marked, static)] == before
    assert compiled.report.num_graphs == 2  # one of length 7 alone, as its owner wishes


def test_one_tensor_as_two_arguments():
    both = Calls(lambda self, x, y: x @ self.weight + y)
    compiled = graphfuse.compile(both)
    for rows in (3, 1, 4):
        x = torch.ones(rows, H)
        torch.testing.assert_close(compiled(x, x), both(x, x))
        assert not any(name.startswith("_dynamo") for name in x.__dict__)


class OnHiddenStates(nn.Module):
    """Takes hidden states `[B, S, H]`."""

    def __init__(self, group) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(group) for _ in range(3))
        self.norm = nn.RMSNorm(H)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def test_layers_of_hidden_states_are_regions_too():
    with fake_tp(2) as group:
        report = trace(OnHiddenStates(group), torch.randn(2, 3, H), group).report
    assert report.totals["fused"] == 3
    assert report.notes == []


@pytest.mark.slow
def test_inductor_compiles_hidden_states_of_any_batch_and_length():
    model = OnHiddenStates(None)
    compiled = graphfuse.compile(model, config=FuseConfig(executor="inductor"))
    for shape in ((2, 3), (1, 1), (1, 4)):
        x = torch.randn(*shape, H)
        torch.testing.assert_close(compiled(x), model(x))


def test_a_batch_without_tokens_has_a_result_without_tokens():
    compiled = graphfuse.compile(OnHiddenStates(None))
    assert compiled(torch.randn(0, 3, H)).shape == (0, 3, H)
    assert compiled(torch.randn(2, 3, H)).shape == (2, 3, H)
    assert compiled(torch.randn(2, 0, H)).shape == (2, 0, H)
    assert compiled.report.num_graphs == 1


# --- what cannot be traced ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "reason", "line"),
    [
        (broken_forwards.data_dependent, "Data-dependent branching", "in data_dependent (if x.sum() > 0:)"),
        (broken_forwards.prints, "print", 'in prints (print("here"))'),
    ],
)
def test_a_graph_break_names_the_line_and_the_remedy(forward, reason, line):
    with pytest.raises(GraphBreakError) as raised:
        graphfuse.compile(Calls(forward), example_inputs=torch.ones(2, H))
    message = str(raised.value)
    assert message.startswith("The model cannot be traced as one graph: ")
    assert reason in message
    assert f"{broken_forwards.__file__}:{forward.__code__.co_firstlineno + 1} {line}" in message
    assert "Rewrite that line with tensor operations, or move it out of forward." in message
    assert raised.value.__cause__ is not None


def test_a_break_in_a_layer_is_named_like_any_other():
    class Breaking(Layer):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                x = -x
            return super().forward(x)

    model = Model()
    model.layers = nn.ModuleList(Breaking() for _ in range(3))
    with pytest.raises(GraphBreakError, match=r"test_tracing\.py:\d+ in forward \(if x\.sum\(\) > 0:\)"):
        graphfuse.compile(model.requires_grad_(False), example_inputs=ids(2, 3))


@pytest.mark.parametrize(
    ("forward", "error", "message"),
    [
        (broken_forwards.raises, LookupError, "no such expert"),
        (broken_forwards.asserts, AssertionError, "five columns, please"),
        (broken_forwards.wrong_shapes, RuntimeError, r"2x16 and 3x16"),
        (lambda self, x: x + self.nope, AttributeError, "nope"),
    ],
    ids=["raise", "assert", "shapes", "attribute"],
)
def test_an_error_of_the_model_is_raised_as_it_is(forward, error, message):
    """With its own type, message and traceback."""
    compiled = graphfuse.compile(Calls(forward))
    with pytest.raises(error, match=message) as raised:
        compiled(torch.ones(2, H))
    assert any(entry.frame.code.raw is forward.__code__ for entry in raised.traceback)
    assert raised.value.__cause__ is None
    assert not compiled.report.traced


def test_after_a_failed_call_another_may_succeed():
    def forward(self, x):
        if x.dtype == torch.float64:
            raise TypeError("not in double precision")
        return x @ self.weight

    compiled = graphfuse.compile(Calls(forward))
    with pytest.raises(TypeError, match="not in double precision"):
        compiled(torch.ones(2, H, dtype=torch.float64))
    for rows in (2, 1):
        torch.testing.assert_close(compiled(torch.ones(rows, H)), torch.ones(rows, H) @ torch.ones(H, H))
    assert compiled.report.num_graphs == 1
    assert compiled.report.notes == []
    with pytest.raises(TypeError, match="not in double precision"):
        compiled(torch.ones(2, H, dtype=torch.float64))
    torch.testing.assert_close(compiled(torch.ones(3, H)), torch.ones(3, H) @ torch.ones(H, H))
