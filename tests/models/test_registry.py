"""Which configs have a model, and what the errors say of those that have none."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import GPT2Config, LlamaConfig

from graphfuse.errors import UnsupportedModelError
from graphfuse.models import registry
from graphfuse.models.layers import rotate
from graphfuse.models.llama import LlamaForCausalLM, MistralForCausalLM
from graphfuse.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3SlidingDecoderLayer
from graphfuse.models.qwen3_moe import (
    Qwen3MoeDenseDecoderLayer,
    Qwen3MoeForCausalLM,
    Qwen3MoeSparseDecoderLayer,
)
from tests.models import tiny


@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("llama", LlamaForCausalLM),
        ("mistral", MistralForCausalLM),
        ("qwen3", Qwen3ForCausalLM),
        ("qwen3_moe", Qwen3MoeForCausalLM),
    ],
)
def test_each_family_resolves(family, model):
    assert registry.resolve(tiny.config(family)) is model


def test_an_unknown_family_is_told_the_known_ones():
    with pytest.raises(
        UnsupportedModelError,
        match=r"'gpt2'; known.*llama, .*mistral, .*qwen3, .*\(`graphfuse models` .* Load .*transf",
    ):
        registry.resolve(GPT2Config())


def test_a_classifier_is_not_a_language_model():
    config = LlamaConfig(architectures=["LlamaForSequenceClassification"])
    with pytest.raises(UnsupportedModelError, match=r"'llama' \(LlamaForSequenceClassification\)"):
        registry.resolve(config)


def test_a_checkpoint_quantised_in_another_way_is_refused():
    config = tiny.config("llama")
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UnsupportedModelError, match=r"not implemented: quant_method='gptq'; known is FP8"):
        registry.resolve(config)


def test_a_changing_rotary_embedding_is_refused():
    config = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match=r"'dynamic' is not implemented; known: default, linear, llama3"):
        registry.build(config, device="meta")


def test_a_partial_rotary_embedding_leaves_the_rest_of_each_head_as_it_is():
    rope = {**tiny.LLAMA3_ROPE, "partial_rotary_factor": 0.5}
    model = registry.build(LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=rope))
    cos, sin = model.rotary(torch.tensor([[3]]))
    assert cos.shape == (1, 1, 1, 4)
    x = torch.randn(1, 1, 2, 8)
    rotated = rotate(x, cos, sin)
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    assert torch.equal(rotated[..., :4], rotate(x[..., :4], cos, sin))
    assert not torch.allclose(rotated[..., :4], x[..., :4])


def test_a_rotary_embedding_of_another_size_than_its_part_of_a_head_is_refused():
    rope = {**tiny.LLAMA3_ROPE, "partial_rotary_factor": 0.4}  # 3 of 8 dimensions, which have no pairs
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match="covers 4 of 3 dimensions"):
        registry.build(config, device="meta")


def test_an_unknown_activation_is_refused():
    config = LlamaConfig(hidden_act="relu2")
    with pytest.raises(UnsupportedModelError, match=r"'relu2' is not implemented; known: silu, gelu"):
        registry.build(config, device="meta")


def test_layers_that_differ_are_of_different_classes():
    kinds = [type(layer) for layer in registry.build(tiny.config("qwen3"), device="meta").layers]
    assert kinds == [Qwen3DecoderLayer, Qwen3DecoderLayer, Qwen3SlidingDecoderLayer]
    kinds = [type(layer) for layer in registry.build(tiny.config("qwen3_moe"), device="meta").layers]
    assert kinds == [Qwen3MoeSparseDecoderLayer, Qwen3MoeDenseDecoderLayer, Qwen3MoeSparseDecoderLayer]
    config = tiny.config("qwen3_moe")
    config.mlp_only_layers, config.decoder_sparse_step = [], 2
    kinds = [type(layer) for layer in registry.build(config, device="meta").layers]
    assert kinds == [Qwen3MoeDenseDecoderLayer, Qwen3MoeSparseDecoderLayer, Qwen3MoeDenseDecoderLayer]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "qwen3_moe"])
def test_models_run_on_meta_and_on_fake_tensors(family):
    config = tiny.config(family)
    model = registry.build(config, dtype=torch.bfloat16, device="meta")
    ids = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    assert model(ids).shape == (2, 5, config.vocab_size)
    with FakeTensorMode():
        model = registry.build(config, dtype=torch.bfloat16)
        ids = torch.zeros(2, 5, dtype=torch.int64)
        last = torch.zeros(2, dtype=torch.int64)
        logits = model(ids, None, model.new_kv_caches(2, 5), last)
        assert (logits.shape, logits.dtype) == ((2, config.vocab_size), torch.bfloat16)


def test_a_tied_head_shares_the_embedding():
    model = registry.build(tiny.config("qwen3"))
    assert model.lm_head.weight is model.embed_tokens.weight
