"""What quantization_config says, and what is said of one that cannot be served."""

from __future__ import annotations

import pytest

from graphfuse.errors import UnsupportedModelError
from graphfuse.models.quantisation import Fp8Scheme, read_quantisation
from tests.models import tiny
from tests.models.tiny_fp8 import FORMS, compressed


def read(values):
    config = tiny.config("llama")
    config.quantization_config = values
    return read_quantisation(config)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read(form):
    found = read(FORMS[form].config)
    assert found.scheme_of("model.layers.0.mlp.down_proj") == Fp8Scheme(FORMS[form].weights, FORMS[form].activations)
    assert found.scheme_of("lm_head") is None
    assert found.has_blocks == (FORMS[form].weights == "block")


def test_an_unquantised_checkpoint_has_none():
    assert read_quantisation(tiny.config("llama")) is None


@pytest.mark.parametrize(
    ("pattern", "name", "ignored"),
    [
        ("model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.o_proj", True),
        ("model.layers.1.self_attn", "model.layers.1.self_attn.o_proj", True),
        ("model.layers.1", "model.layers.10.self_attn.o_proj", False),
        ("self_attn.o_proj", "model.layers.1.self_attn.o_proj", True),
        ("gate", "model.layers.1.mlp.gate_proj", False),
        ("model.language_model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj", True),
        (r"re:.*mlp\.gate$", "model.layers.1.mlp.gate", True),
        (r"re:.*mlp\.gate$", "model.layers.1.mlp.gate_proj", False),
        ("re:.*self_attn.*", "model.layers.1.self_attn.o_proj", True),
    ],
)
def test_weights_are_left_out_by_name_part_or_expression(pattern, name, ignored):
    values = {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": [pattern]}
    assert (read(values).scheme_of(name) is None) == ignored


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
TENSOR, TOKEN = {"strategy": "tensor"}, {"strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"quant_method": "awq"}, "quant_method='awq'"),
        ({**FP8, "weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
        ({**FP8, "fmt": "e5m2"}, "fmt='e5m2'"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        ({**FP8, "activation_scheme": "static", "weight_block_size": [128, 128]}, "static activations with blocks"),
        (compressed({"num_bits": 4}, TOKEN), "'num_bits': 4"),
        (compressed({"strategy": "group"}, TOKEN), "weights by 'group'"),
        (compressed(TENSOR, {"strategy": "tensor", "dynamic": True}), "activations by 'tensor', dynamic=True"),
        (compressed(TENSOR, TOKEN, kv_cache_scheme={"num_bits": 8}), "a quantised KV cache"),
        (compressed(TENSOR, TOKEN, ignore=["re:(.*)+x"]), "repeats too much"),
        (compressed(TENSOR, TOKEN, ignore=["re:["]), "the pattern 're:\\['"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": 3}}, "quantization_config="),
        ({**FP8, "weight_block_size": 128}, "quantization_config="),
        ({**FP8, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head'"),
        ("fp8", "quantization_config='fp8'"),
    ],
)
def test_what_is_not_implemented_is_named(values, reason):
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*; known is FP8 .*Use another checkpoint"):
        read(values)
