"""Norm and rotation in front of attention become one op: what is found, what is not, and that nothing else changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import graphfuse
from graphfuse import FuseConfig
from graphfuse.facts import Facts
from graphfuse.models import registry
from graphfuse.models.layers import rotate
from graphfuse.passes.fuse_norm_rotary import FUSE_NORM_ROTARY, anchor
from graphfuse.passes.graph_reading import argument, aten, is_call
from graphfuse.passes.outline import outline
from graphfuse.passes.rule import Decline, Site
from graphfuse.testing import Trace, assert_golden, fake_tp, graph_text, trace
from tests.models.tiny import config
from tests.passes.graphs import context
from tests.passes.rotations import FUSED, LEFT_ALONE, D, Form, Layer, both, inputs, normalised

GOLDEN = Path(__file__).parents[1] / "golden" / "rotary"
H200 = Facts.from_json(Path(__file__).parents[2] / "configs" / "facts" / "h200_x2.json")
ANYWHERE = dataclasses.replace(FUSE_NORM_ROTARY, applies=lambda _site, _context: None)
"""On the CPU, too, where the op is the formula: results must be equal bit for bit."""
NO_CONTEXT = context(None)

GOLDENS = ("llama", "qwen3", "qwen3_next")
FORMULA = {aten.cat.default, aten.neg.default, aten.rsqrt.default, aten.mean.dim, aten.add.Tensor, aten.mul.Tensor}


def graph_of(form: Form, rotated: int, dtype: torch.dtype = torch.bfloat16) -> tuple[GraphModule, Node]:
    """The aten graph of a layer, without compiling it, and its attention."""
    module = make_fx(Layer(form, dtype))(*inputs(rotated, dtype))
    (node,) = filter(anchor, module.graph.nodes)
    return module, node


def traced(form: Form, rotated: int = D, facts: Facts = H200, dtype: torch.dtype = torch.bfloat16) -> Trace:
    return trace(Layer(form, dtype), inputs(rotated, dtype), None, facts=facts)


def ops(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if is_call(node, torch.ops.graphfuse.norm_rotary.default)]


@pytest.mark.parametrize("name", FUSED)
def test_a_rotation_becomes_one_op_that_gives_the_same(name):
    form, rotated, norm = FUSED[name]
    module, attends = graph_of(form, rotated)
    site = FUSE_NORM_ROTARY.match(attends, NO_CONTEXT)
    assert isinstance(site, Site)
    FUSE_NORM_ROTARY.rewrite(module.graph, site, NO_CONTEXT)
    module.graph.eliminate_dead_code()
    module.recompile()
    (node,) = ops(module)
    given = tuple(argument(node, part) for part in ("eps", "weight_bias", "cast_before_weight"))
    assert given == (norm or (0.0, 0.0, True)) and (argument(node, "q_weight") is not None) == bool(norm)
    assert not FORMULA & {n.target for n in module.graph.nodes}
    assert torch.equal(module(*inputs(rotated))[0], Layer(form)(*inputs(rotated))[0])


@pytest.mark.parametrize("name", GOLDENS)
def test_the_graph_of_a_rotation(name):
    assert_golden(traced(*FUSED[name][:2]).after, GOLDEN / f"{name}.txt")


def test_a_compiled_model_gives_the_same():
    form, rotated, _ = FUSED["qwen3_next"]
    settings = FuseConfig(rules=(ANYWHERE,), executor="eager", watch=False)
    with graphfuse.compile(Layer(form), None, config=settings) as compiled, torch.no_grad():
        got, want = compiled(*inputs(rotated)), Layer(form)(*inputs(rotated))
        assert compiled.report.rules["norm_rotary"]["matches"] == 1
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize(
    ("facts", "dtype", "reason"),
    [(Facts("cpu", 1), torch.bfloat16, "on the CPU"), (H200, torch.float64, "no kernel for torch.float64")],
)
def test_on_the_cpu_and_in_float64_graphs_stay_as_they_are(facts, dtype, reason):
    result = traced(both(rotate), D, facts, dtype)
    assert graph_text(result.after) == graph_text(result.before)
    context = dataclasses.replace(NO_CONTEXT, facts=lambda: facts)
    site = FUSE_NORM_ROTARY.match(graph_of(both(rotate), D, dtype)[1], context)
    assert isinstance(site, Site)
    refusal = FUSE_NORM_ROTARY.applies(site, context)
    assert isinstance(refusal, Decline) and reason in refusal.reason


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_no_such_rotation_is_left_alone_with_a_reason(name):
    form, rotated, reason = LEFT_ALONE[name]
    outcome = FUSE_NORM_ROTARY.match(graph_of(form, rotated)[1], NO_CONTEXT)
    assert isinstance(outcome, Decline) and reason in outcome.reason


def test_a_declined_graph_stays_as_it_is():
    result = traced(*LEFT_ALONE["rotated_keys_are_read"][:2])
    assert result.report.rules["norm_rotary"]["declines"] == 1
    assert graph_text(result.after) == graph_text(result.before)


def test_a_norm_that_is_none_stays_and_what_it_gives_is_rotated():
    def layer_norm(x, weight):
        return F.layer_norm(x, (D,), weight)

    site = FUSE_NORM_ROTARY.match(graph_of(normalised(layer_norm), D)[1], NO_CONTEXT)
    assert isinstance(site, Site)
    q, *others = site.parts.arguments
    assert "layer_norm" in str(q.args[0].target) and len(others) == 3


# --- models -----------------------------------------------------------------------------------------------------------

FAMILIES = {
    "llama": (3, False, (0.0, 0.0, True)),
    "qwen3": (3, True, (1e-5, 0.0, True)),
    "glm4_moe": (3, True, (1e-5, 0.0, True)),
    "gpt_oss": (3, False, (0.0, 0.0, True)),
    "minimax_m2": (3, False, (0.0, 0.0, True)),
    "qwen3_next": (1, True, (1e-3, 1.0, False)),
    "deepseek_v3": (0, False, None),
}
"""Layers with ordinary attention, whether these have a norm over each head, and what the op is told of it."""


@pytest.fixture(scope="module")
def group():
    with fake_tp(2) as group:
        yield group


def model_of(family: str, group, facts: Facts = H200) -> Trace:
    ids = torch.zeros(1, 6, dtype=torch.int64), torch.arange(6)[None]
    model = lambda: registry.build(config(family), group, torch.bfloat16, torch.device("meta"))  # noqa: E731
    return trace(model, ids, group, facts=facts)


SLOW = ("glm4_moe", "gpt_oss", "minimax_m2", "deepseek_v3")


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f in SLOW)) for f in FAMILIES])
def test_every_layer_of_our_models_has_the_op(family, group):
    num_layers, has_norm, norm = FAMILIES[family]
    result = model_of(family, group)
    found = ops(result.after)
    assert len(found) == result.report.rules["norm_rotary"]["matches"] == num_layers
    assert result.report.rules["norm_rotary"]["declines"] == 0
    for node in found:
        assert tuple(argument(node, part) for part in ("eps", "weight_bias", "cast_before_weight")) == norm
        assert (argument(node, "q_weight") is not None) == has_norm
    if family == "llama":  # layers with the op are alike, as those without it are
        assert list(outline(result.after).values()) == [2]
        (region,) = (sub for name, sub in result.after.named_children() if name.startswith("graphfuse_region"))
        assert len(ops(region)) == 1
