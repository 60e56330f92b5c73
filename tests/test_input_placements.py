"""Where the proof of placements starts: what is known of a model's parameters and arguments, and what its answer is in
reports, errors and settings."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import GraphModule

import graphfuse
from graphfuse import FuseConfig
from graphfuse.errors import ConfigError, ReductionProofError
from graphfuse.models import registry
from graphfuse.testing import assert_fused, fake_tp, trace
from tests.conftest import H, Model, ids
from tests.distributed.unmodified_models import Perceptrons
from tests.models import tiny

ON = FuseConfig(verify_placements=True)


@pytest.fixture(scope="module")
def group():
    with fake_tp(2) as group:
        yield group


def placements(module: GraphModule) -> dict[str, str]:
    """By what an input is called: its placement."""
    inputs = (node for node in module.graph.nodes if node.op == "placeholder")
    return {
        node.meta["graphfuse_source"]: str(node.meta["graphfuse_placement"])
        for node in inputs
        if "graphfuse_placement" in node.meta and isinstance(node.meta["val"], torch.Tensor)
    }


def test_graphfuses_models_say_how_each_parameter_and_the_caches_are_divided(group):
    model = registry.build(tiny.config("qwen3_moe"), group, torch.bfloat16, "meta")
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    inputs = (tokens, tokens.clone(), model.new_kv_caches(4, 16))
    found = placements(trace(model, inputs, group).before)
    assert found["input_ids"] == found["positions"] == "replicated"
    assert found["kv_caches[0][0]"] == found["kv_caches[2][1]"] == "shard(2)"
    assert found["embed_tokens.weight"] == "shard(0)"
    assert found["layers.2.self_attn.qkv_proj.weight"] == "shard(0)"
    assert found["layers.2.self_attn.o_proj.weight"] == "shard(1)"
    assert found["layers.2.self_attn.q_norm.weight"] == "replicated"
    assert found["layers.2.mlp.gate.weight"] == "replicated"
    assert found["layers.2.mlp.experts.gate_up_proj"] == "shard(1)"
    assert found["layers.2.mlp.experts.down_proj"] == "shard(2)"
    assert found["rotary.inv_freq"] == found["norm.weight"] == "replicated"
    assert set(model.placements()) >= {name for name, _ in model.named_parameters()}


def test_dtensors_say_it_themselves_and_other_parameters_of_their_model_are_whole(group):
    model = Perceptrons(num_layers=1).requires_grad_(False)
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)
    traced = trace(model, (ids(2, 5),), group)
    found = placements(traced.before)
    assert found["layers.0.up.weight"] == "shard(0)"
    assert found["layers.0.down.weight"] == "shard(1)"
    assert found["ids"] == found["layers.0.norm.weight"] == found["head.weight"] == "replicated"
    assert traced.report.placements["unknown"] == 0


def test_of_a_plain_module_nothing_is_known_which_is_said_and_is_no_fault(group):
    traced = trace(Model(group=group), (ids(2, 5),), group)
    assert placements(traced.before) == {}
    found = traced.report.placements
    assert found["faults"] == []
    assert found["unknown"] > 0
    assert {r["reason"] for r in found["reasons"]} == {"nothing says how this input is divided over the ranks"}


class Told(nn.Module):
    """A row-parallel product that says so."""

    def __init__(self, group, told=None, reduces=True):
        super().__init__()
        self.proj, self.group, self.told, self.reduces = nn.Linear(H, H, bias=False), group, told, reduces
        self.norm = nn.RMSNorm(H)
        self.requires_grad_(False)

    def placements(self):
        return self.told or {"proj.weight": 1, "norm.weight": None, "x": 1, "residual": None}

    def forward(self, x, residual):
        y = self.proj(x)
        return self.norm(residual + (fc.all_reduce(y, "sum", self.group) if self.reduces else y))


INPUTS = torch.ones(4, H), torch.ones(4, H)


def test_any_module_may_say_it(group):
    traced = trace(Told(group), INPUTS, group)
    assert placements(traced.before) == {
        "proj.weight": "shard(1)",
        "norm.weight": "replicated",
        "x": "shard(1)",
        "residual": "replicated",
    }
    assert traced.report.placements["unknown"] == 0
    assert_fused(Told(group), INPUTS, group, fused=1)


def test_a_parameter_that_placements_leaves_out_is_unknown(group):
    report = trace(Told(group, {"proj.weight": 1, "x": 1}), INPUTS, group).report
    assert [r["reason"] for r in report.placements["reasons"]] == ["the model's placements() does not name it"]


def test_a_model_that_forgets_a_reduction_is_an_error_that_draws_it(group):
    with pytest.raises(ReductionProofError) as raised:
        trace(Told(group, reduces=False), INPUTS, group)
    first, place, *chain, advice = str(raised.value).splitlines()
    assert first == "The traced model is wrong on several ranks, before any rewriting:"
    assert advice.startswith("Mend the model")
    assert place == "the top of the model: add joins a partial(sum) and a whole value"
    assert chain[0].endswith("partial(sum)  in proj")
    assert chain[-1].endswith("<-- here")


def test_weights_that_are_whole_make_the_reduction_one_too_many(group):
    whole = {"proj.weight": None, "norm.weight": None, "x": None, "residual": None}
    with pytest.raises(ReductionProofError, match="sums a value that is equal on every rank: it grows 2 times"):
        trace(Told(group, whole), INPUTS, group)


def test_compile_proves_when_it_is_asked_to(group):
    model = Told(group, reduces=False)
    inputs = INPUTS
    assert not graphfuse.compile(model, group, example_inputs=inputs).report.placements
    with pytest.raises(ReductionProofError, match="before any rewriting"):
        graphfuse.compile(model, group, example_inputs=inputs, config=ON)
    report = graphfuse.compile(Told(group), group, example_inputs=inputs, config=ON).report
    assert report.placements["unknown"] == 0
    assert report.seconds["placements"] > 0
    assert f"placements: proved {report.placements['proved']} values, 0 unknown" in str(report)
    assert report.to_json()["placements"] == report.placements


def test_tracing_proves_unless_it_is_told_not_to(group):
    off = FuseConfig(verify_placements=False)
    assert not trace(Told(group, reduces=False), INPUTS, group, config=off).report.placements


def test_the_switch_is_checked():
    with pytest.raises(ConfigError, match="verify_placements='yes' is not known"):
        FuseConfig(verify_placements="yes")
