"""Models of transformers that are whole are sharded by `graphfuse.compile`, or refused with the reason."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import graphfuse
from graphfuse.errors import ConfigError, UnsupportedModelError
from graphfuse.module_paths import plain_path
from graphfuse.testing import fake_tp

IDS = torch.arange(10).reshape(2, 5)


def llama(**changes) -> LlamaForCausalLM:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))
    return model.eval().requires_grad_(False)


def logits_of_whole_and_compiled(group, tie, over_mesh):
    whole, model = llama(tie_word_embeddings=tie), llama(tie_word_embeddings=tie)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)) if over_mesh else None
    compiled = graphfuse.compile(model, mesh if over_mesh else group, config=graphfuse.FuseConfig(fusion="require"))
    got, want = compiled(IDS).logits, whole(IDS).logits
    local = compiled.model.layers[0].self_attn.q_proj.weight.to_local()
    return got, want, tuple(local.shape), model.lm_head.weight is model.model.embed_tokens.weight, compiled.report


@pytest.mark.parametrize("tie", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
@pytest.mark.parametrize("over_mesh", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["group", "mesh"])
def test_a_whole_model_is_sharded_over_the_group_and_fused(ranks, tie, over_mesh):
    """The pool has four processes, of which the group holds two."""
    for got, want, shape, tied, report in ranks.run(2, logits_of_whole_and_compiled, tie, over_mesh, timeout=200):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert shape == (16, 32)
        assert tied == tie
        assert report.totals == {"all_reduce": 5, "fused": 5, "merged": 0, "declined": 0}
        assert report.model == "transformers' LlamaForCausalLM, sharded by its plan"
        assert "model: transformers' LlamaForCausalLM" in str(report)


def test_a_model_that_is_sharded_is_left_as_it_is():
    with fake_tp(2) as group:
        model = llama()
        graphfuse.compile(model, group)
        before = dict(model.named_parameters())
        assert isinstance(before["model.layers.0.self_attn.q_proj.weight"], DTensor)
        graphfuse.compile(model, group)
        assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_without_a_group_nothing_is_sharded():
    model = llama()
    compiled = graphfuse.compile(model, example_inputs=IDS)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert compiled.report.model == "transformers' LlamaForCausalLM"


class Parallel(nn.Linear):
    """A user's own layer, which reduces by itself."""


def test_a_model_sharded_by_hand_is_left_as_it_is():
    with fake_tp(2) as group:
        model = llama()
        for layer in model.model.layers:
            layer.self_attn.o_proj = Parallel(32, 32, bias=False)
        graphfuse.compile(model, group)
        assert not any(isinstance(p, DTensor) for p in model.parameters())


class OfTheUser(GPT2LMHeadModel):
    """A class of the user's own has no plan, and may reduce by itself."""


def test_a_model_without_a_plan_is_refused_unless_it_is_of_the_users_own_making():
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)
    with fake_tp(2) as group:
        with pytest.raises(UnsupportedModelError, match=r"no tensor-parallel plan for GPT2LMHeadModel.*tp_group=None"):
            graphfuse.compile(GPT2LMHeadModel(config), group)
        graphfuse.compile(OfTheUser(config), group)


def test_heads_that_do_not_divide_are_refused():
    message = r"2 key-value heads, which .* cannot divide over 4 ranks"
    with fake_tp(4) as group, pytest.raises(UnsupportedModelError, match=message):
        graphfuse.compile(llama(), group)


def test_a_quantised_model_is_refused():
    model = llama()
    model.config.quantization_config, model.hf_quantizer = {"quant_method": "gptq"}, object()
    with (
        fake_tp(2) as group,
        pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM is quantised \('gptq'\).*distributed_config="),
    ):
        graphfuse.compile(model, group)


def test_an_old_version_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.17.0")
    with (
        fake_tp(2) as group,
        pytest.raises(UnsupportedModelError, match=r"transformers 5\.17\.0 .* Install transformers 5\.24 or newer"),
    ):
        graphfuse.compile(llama(), group)


def test_kernels_of_the_hub_are_refused():
    model = llama()
    model._use_kernels = True
    with pytest.raises(ConfigError, match=r"loaded with use_kernels=True, .* Load it without\."):
        graphfuse.compile(model)


def test_modules_behind_a_wrapped_forward_have_their_plain_path():
    raw = "L['args'][0]._modules['layers']._modules['0']._modules['attn'].forward.__closure__[2].cell_contents.__self__"
    assert plain_path(raw + "._modules['o_proj']") == "layers.0.attn.o_proj"
