"""`experts_implementation="graphfuse"` computes what transformers' own implementations do, eagerly and compiled."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.fx import GraphModule

import graphfuse
import graphfuse.integrations.transformers as integration
from graphfuse.errors import ConfigError
from graphfuse.facts import Facts
from graphfuse.passes.expert_layers import is_expert_layer
from graphfuse.passes.grouped_experts import is_grouped_product
from graphfuse.testing import trace
from graphfuse.tuning.moe_table import MoeTable
from graphfuse.tuning.moe_tiles import MoeShape
from tests.documents import ROOT
from tests.integrations.models import FAMILIES, IDS, logits, model, sharded

H200 = Facts.from_json(ROOT / "configs" / "facts" / "h200_x2.json")


@pytest.fixture(autouse=True)
def registered():
    integration.register()


def count(module: GraphModule, kind) -> int:
    return sum(map(kind, module.graph.nodes))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_transformers_eager_experts_do(family):
    want = logits(model(family, "eager"))
    mine = model(family, "graphfuse")
    assert want.std() > 0.5
    assert (logits(mine) - want).abs().max() < 1e-5
    compiled = graphfuse.compile(mine)
    assert (logits(compiled) - want).abs().max() < 1e-5
    assert len(compiled.report.moe) == 2
    assert compiled.report.rules["match_grouped_experts"] | {"seconds": 0} == {
        "matches": 0,
        "declines": 0,
        "seconds": 0,
    }


@pytest.mark.parametrize(("family", "implementation"), [("qwen3_moe", "graphfuse"), ("gpt_oss", "grouped_mm")])
def test_either_implementation_is_lowered_on_a_gpu(family, implementation):
    traced = trace(model(family, implementation), {"input_ids": IDS, "use_cache": False}, None, facts=H200)
    assert count(traced.before, is_expert_layer) == (2 if implementation == "graphfuse" else 0)
    assert count(traced.after, is_expert_layer) == 2
    assert count(traced.after, is_grouped_product) == 0
    assert [layer.status for layer in traced.report.moe] == ["lowered"] * 2
    assert [layer.module for layer in traced.report.moe] == [f"model.layers.{i}.mlp.experts" for i in range(2)]


@pytest.mark.parametrize("by", [pytest.param("inner", marks=pytest.mark.slow), "expert"])
def test_sharded_by_transformers_plan_it_computes_the_whole(ranks, by):
    for whole, eager, compiled, report in ranks.run(2, sharded, by, timeout=120):
        assert (eager - whole).abs().max() < 1e-5
        assert (compiled - whole).abs().max() < 1e-5
        assert report["totals"] == {"all_reduce": 5, "fused": 5, "merged": 0, "declined": 0}
        sizes = [(layer["experts"], layer["intermediate"]) for layer in report["moe"]]
        assert sizes == [(4, 8) if by == "inner" else (2, 16)] * 2


def test_registering_twice_changes_nothing_but_the_folder(tmp_path):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    names = set(ALL_EXPERTS_FUNCTIONS)
    integration.register(tmp_path)
    assert set(ALL_EXPERTS_FUNCTIONS) == names
    assert ALL_EXPERTS_FUNCTIONS["graphfuse"].keywords == {"moe_config_dir": str(tmp_path)}


def test_a_folder_that_is_not_there_is_said_when_it_is_given(tmp_path):
    with pytest.raises(ConfigError, match="none' is not a folder"):
        integration.register(tmp_path / "none")


def test_experts_that_the_op_does_not_know_run_on_grouped_mm_and_say_so_once(caplog):
    integration._warn.cache_clear()
    caplog.set_level(logging.WARNING)
    want, got = (
        logits(model("qwen3_moe", "eager", hidden_act="relu")),
        model("qwen3_moe", "graphfuse", hidden_act="relu"),
    )
    assert (logits(got) - want).abs().max() < 1e-5
    (record,) = (record for record in caplog.records if record.name == integration.__name__)
    assert "Qwen3MoeExperts computes something that graphfuse's experts do not know" in record.getMessage()


def test_the_clamp_of_gpt_oss_is_read_from_the_module():
    experts = model("gpt_oss", "graphfuse").model.layers[0].mlp.experts
    assert integration._formula(experts) == ("swiglu_oai", 7.0)
    experts.limit = 3.5
    assert integration._formula(experts) == ("swiglu_oai", 3.5)
    experts.alpha = 1.6
    assert integration._formula(experts) is None


def fp8_experts(block_size, scheme: str) -> torch.nn.Module:
    """transformers' FP8 experts of random numbers, and scales of the form that a checkpoint has."""
    from transformers import AutoConfig
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    wrapped = use_experts_implementation(
        type("Experts", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS
    )
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 4}
    config = AutoConfig.for_model("qwen3_moe", **sizes, experts_implementation="graphfuse")
    experts = wrapped(config, block_size=block_size, activation_scheme=scheme).requires_grad_(False)
    torch.manual_seed(0)
    for name, parameter in experts.named_parameters():
        values = torch.rand(parameter.shape) + 0.5 if "scale" in name else torch.randn(parameter.shape)
        largest = {"gate_up_proj_activation_scale": 0.02, "down_proj_activation_scale": 2.0}.get(name, 1.0)
        parameter.data = (values * largest).to(parameter.dtype)
    return experts


def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[E, N, K] in float64; scales of [E, blocks of N, blocks of K]."""
    n, k = weight.shape[1] // scale.shape[1], weight.shape[2] // scale.shape[2]
    return weight.double() * scale.double().repeat_interleave(n, 1).repeat_interleave(k, 2)


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
@pytest.mark.parametrize("block_size", [(16, 16), None], ids=["blocks", "tensors"])
def test_fp8_experts_run_on_the_op_with_their_scales(block_size, scheme):
    """Their own kernels need a GPU, so the yardstick is float64 with the same weights; activations round to FP8."""
    experts = fp8_experts(block_size, scheme)
    x, ids, weights = torch.randn(6, 32), torch.tensor([[0, 1], [1, 2], [2, 3]] * 2), torch.rand(6, 2)
    gate_up = dequantised(experts.gate_up_proj, experts.gate_up_proj_scale_inv)
    down = dequantised(experts.down_proj, experts.down_proj_scale_inv)
    want = torch.zeros(6, 32, dtype=torch.float64)
    for token in range(6):
        for choice in range(2):
            gate, up = (gate_up[ids[token, choice]] @ x[token].double()).chunk(2)
            middle = torch.nn.functional.silu(gate) * up
            want[token] += weights[token, choice].double() * (down[ids[token, choice]] @ middle)
    with torch.no_grad():
        got = experts(x, ids, weights)
    assert (got - want).norm() < 0.1 * want.norm()


def test_fp4_experts_are_left_to_transformers():
    experts = fp8_experts((16, 16), "dynamic")
    experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj.to(torch.int8), requires_grad=False)
    assert integration._fp8_arguments(experts) is None


def test_eager_experts_on_a_gpu_take_the_table_of_their_shape_once(monkeypatch, tmp_path):
    from graphfuse.tuning import moe_files

    looked = []
    find = moe_files.find_table
    monkeypatch.setattr(
        moe_files, "find_table", lambda *args, **kw: looked.append((*args, kw["folder"])) or find(*args, **kw)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    integration._kernel.cache_clear()
    place = False, torch.device("cuda", 0), str(tmp_path)
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    plain, blocks = MoeShape(4, 24, 32, 2), MoeShape(4, 24, 32, 2, "fp8_w8a8", (128, 128))
    for transposed, down, dtype, shape in (
        (False, (4, 32, 24), bf16, plain),
        (True, (4, 24, 32), bf16, plain),
        (False, (4, 32, 24), bf16, plain),
        (False, (4, 32, 24), fp8, blocks),
    ):
        table = MoeTable.from_text(integration._kernel(down, transposed, 2, bf16, dtype, shape.block_shape, *place))
        assert table.shape == shape
    assert looked == [(shape, "NVIDIA H200", str(tmp_path)) for shape in (plain, plain, blocks)]
