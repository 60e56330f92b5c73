"""Models without a checkpoint: published configs by name, cut to some layers, with random weights."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig

from graphfuse.errors import ConfigError
from graphfuse.models import registry
from graphfuse.testing import fake_tp
from graphfuse.weights.config import read_config
from graphfuse.weights.random_weights import config_folder, published, random_model, randomise

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    return str(tmp_path)


@pytest.mark.parametrize("name", published())
def test_every_published_config_is_of_a_family_that_is_defined_here(name):
    config = read_config(config_folder(name.upper()))
    assert (
        len(registry.build(config, None, torch.bfloat16, "meta").layers) == config.get_text_config().num_hidden_layers
    )


def test_a_folder_of_a_published_name_comes_first(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / published()[0]).mkdir()
    assert config_folder(published()[0]).resolve() == tmp_path / published()[0]


def test_the_dtype_is_that_which_is_asked_for_else_the_configs_else_bfloat16(folder, tmp_path):
    assert random_model(folder, None, None, CPU).dtype == torch.bfloat16
    assert random_model(folder, None, torch.float16, CPU).dtype == torch.float16
    (tmp_path / "config.json").write_text(json.dumps(MOE | {"dtype": "float32"}))
    assert random_model(folder, None, None, CPU).dtype == torch.float32


def test_logits_are_finite_and_neither_all_alike_nor_large(folder):
    logits = random_model(folder, None, torch.bfloat16, CPU)(torch.arange(12).view(2, 6)).float()
    assert logits.isfinite().all() and 0.1 < logits.std() < 10


def test_what_is_whole_is_alike_on_every_rank_and_what_is_divided_is_not():
    found = []
    for rank in range(2):
        with fake_tp(2, rank=rank) as group:
            model = registry.build(AutoConfig.for_model(**MOE), group, torch.float32, "cpu")
            randomise(model)
            found.append((dict(model.named_parameters()), model.placements()))
    (first, placements), (second, _) = found
    assert first.keys() == second.keys()
    divided = {name for name in first if placements.get(name) is not None}
    assert "layers.0.mlp.experts.down_proj" in divided and "layers.0.mlp.gate.weight" in first.keys() - divided
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]) == (name not in divided), name


def test_two_parameters_of_one_shape_differ_and_variance_is_one_over_inputs():
    model = registry.build(AutoConfig.for_model(**MOE | {"hidden_size": 256}), None, torch.float32, "cpu")
    randomise(model)
    first, second = (layer.mlp.experts.gate_up_proj for layer in model.layers)
    assert not torch.equal(first, second) and not torch.equal(first[0], first[1])
    assert float(first.std()) == pytest.approx(256**-0.5, rel=0.05)
    again = first.clone()
    randomise(model)
    assert torch.equal(first, again)
    randomise(model, seed=1)
    assert not torch.equal(first, again)


def test_fp8_weights_are_random_and_their_scales_one():
    config = read_config(config_folder("mistral-small-4-119b"))
    text = config.get_text_config()
    small = {"hidden_size": 64, "n_routed_experts": 4, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    small |= {"vocab_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32, "num_attention_heads": 2}
    for field, value in small.items():
        setattr(text, field, value)
    model = registry.build(config, None, torch.bfloat16, "cpu")
    randomise(model)
    experts = model.layers[0].mlp.experts
    assert experts.gate_up_proj.dtype == torch.float8_e4m3fn
    values = experts.gate_up_proj.float()
    assert values.isfinite().all() and float(values.std()) == pytest.approx(64**-0.5, rel=0.1)
    scales = [p for name, p in model.named_parameters() if name.endswith("scale")]
    assert scales and all((p == 1).all() for p in scales)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_only_some_layers(folder, num_layers):
    assert len(random_model(folder, None, None, CPU, num_layers=num_layers).layers) == num_layers


def test_layers_of_several_kinds_are_the_first_ones():
    from graphfuse.weights.random_weights import keep_layers

    config = read_config(config_folder("qwen3-next-80b-a3b"))
    kinds = config.layer_types
    keep_layers(config, 5)
    assert (config.num_hidden_layers, config.layer_types) == (5, kinds[:5])


@pytest.mark.parametrize("num_layers", [0, 3])
def test_more_layers_than_there_are_is_an_error(folder, num_layers):
    with pytest.raises(ConfigError, match=f"The model has 2 layers, not {num_layers}. Take a number from 1 to that."):
        random_model(folder, None, None, CPU, num_layers=num_layers)
