"""Shapes of MoE layers from tiny configs of every family, as a checkpoint's config.json holds them."""

import json

import pytest
from transformers import CONFIG_MAPPING

from graphfuse.errors import CheckpointError, ConfigError
from graphfuse.tuning.moe_inputs import FORMS, form_of
from graphfuse.tuning.moe_shapes import MODELS, workloads_of_model, workloads_of_shape
from graphfuse.tuning.moe_tiles import MoeShape

ROUTED = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "hidden_size": 64}
DEEPSEEK = {**{k: v for k, v in ROUTED.items() if k != "num_experts"}, "n_routed_experts": 16}
GPT_OSS = {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 48, "hidden_size": 64}
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 16]}


def compressed(**weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def saved(folder, model_type, fields, section=None, **top):
    """A checkpoint's config of this family; within a section of a multimodal one if there is one."""
    config = CONFIG_MAPPING[model_type](**({section: {**fields, **section_type(model_type)}} if section else fields))
    config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **top}))
    return str(folder)


def section_type(model_type):
    kinds = {"mistral3": "mistral4", "kimi_k25": "deepseek_v3"}
    return {"model_type": kinds[model_type]} if model_type in kinds else {}


@pytest.mark.parametrize(
    ("model_type", "fields", "section"),
    [
        ("qwen3_moe", {**ROUTED, "intermediate_size": 999}, None),
        ("qwen3_next", {**ROUTED, "shared_expert_intermediate_size": 99}, None),
        ("qwen3_5_moe", ROUTED, "text_config"),
        ("qwen3_5_moe_text", ROUTED, None),
        ("mistral4", DEEPSEEK, None),
        ("mistral3", DEEPSEEK, "text_config"),
        ("deepseek_v3", DEEPSEEK, None),
        ("deepseek_v32", DEEPSEEK, None),
        ("glm4_moe", DEEPSEEK, None),
        ("glm4_moe_lite", DEEPSEEK, None),
        ("glm_moe_dsa", DEEPSEEK, None),
        ("kimi_k25", DEEPSEEK, "text_config"),
    ],
)
def test_every_family_has_its_four_numbers(tmp_path, model_type, fields, section):
    (workload,) = workloads_of_model(saved(tmp_path, model_type, fields, section), 2)
    assert workload.shape == MoeShape(16, 24, 64, 4)
    assert workload.form == "bf16"


def test_gpt_oss_has_biases_and_its_mxfp4_weights_run_as_bf16(tmp_path):
    folder = saved(tmp_path, "gpt_oss", GPT_OSS, quantization_config={"quant_method": "mxfp4"})
    (workload,) = workloads_of_model(folder, 2)
    assert (workload.shape, workload.form) == (MoeShape(16, 24, 64, 4), "bf16_bias_interleaved")
    with pytest.raises(ConfigError, match="biases, which run in bf16 only"):
        workloads_of_model(folder, 2, ["fp8"])


@pytest.mark.parametrize("section", [None, "text_config", "language_config"])
def test_a_family_that_transformers_lacks_is_read_without_its_code(tmp_path, section):
    fields = {"model_type": "kimi_k2", **DEEPSEEK, "auto_map": {"AutoConfig": "configuration.KimiConfig"}}
    config = {"model_type": "kimi_vl", section: fields} if section else fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert workloads_of_model(str(tmp_path), 1)[0].shape == MoeShape(16, 48, 64, 4)


@pytest.mark.parametrize(
    ("quantisation", "form", "block_shape"),
    [
        (FP8, "fp8_tensor", None),
        ({**FP8, "activation_scheme": "dynamic"}, "fp8_channel", None),
        (BLOCK_FP8, "fp8_block", (24, 16)),
        (compressed(num_bits=8, type="float", strategy="tensor"), "fp8_tensor", None),
        (compressed(num_bits=8, type="float", strategy="channel"), "fp8_channel", None),
        (compressed(num_bits=8, type="float", strategy="block", block_structure=[8, 16]), "fp8_block", (8, 16)),
    ],
)
def test_the_number_format_is_that_of_the_checkpoint(tmp_path, quantisation, form, block_shape):
    folder = saved(tmp_path, "qwen3_moe", ROUTED, quantization_config=quantisation)
    (workload,) = workloads_of_model(folder, 1)
    assert workload.form == form in FORMS
    assert workload.shape == MoeShape(16, 48, 64, 4, "fp8_w8a8", block_shape)


def test_another_number_format_can_be_asked_for(tmp_path):
    folder = saved(tmp_path, "qwen3_moe", ROUTED, quantization_config=BLOCK_FP8)
    forms = [workload.form for workload in workloads_of_model(folder, 1, ["bf16", "fp8", "bf16"])]
    assert forms == ["bf16", "fp8_tensor"]
    with pytest.raises(ConfigError, match=r"--dtype int4 is not known\. Use bf16, fp8, fp8_block"):
        workloads_of_model(folder, 1, ["int4"])


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({"quant_method": "awq"}, "has weights quantised by 'awq', for which there is nothing to tune"),
        (compressed(num_bits=4, type="int", strategy="group"), "quantised by 'compressed-tensors'"),
        ({**BLOCK_FP8, "weight_block_size": [0, 1]}, r"has blocks of \[0, 1\]"),
    ],
)
def test_other_number_formats_are_refused(tmp_path, quantisation, message):
    with pytest.raises(CheckpointError, match=message):
        workloads_of_model(saved(tmp_path, "qwen3_moe", ROUTED, quantization_config=quantisation), 1)


def test_ranks_that_cannot_share_an_expert_are_refused(tmp_path):
    folder = saved(tmp_path, "qwen3_moe", ROUTED, quantization_config=BLOCK_FP8)
    with pytest.raises(ConfigError, match="intermediate size 48, which 5 ranks cannot share evenly"):
        workloads_of_model(folder, 5)
    with pytest.raises(ConfigError, match=r"12 intermediate values on each of 4 ranks, which splits a block"):
        workloads_of_model(folder, 4)
    with pytest.raises(ConfigError, match="--tp 0 is not a number of ranks"):
        workloads_of_model(folder, 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_experts": None}, "has no num_experts or n_routed_experts or num_local_experts"),
        ({"num_experts_per_tok": 17}, "chooses 17 of 16 experts"),
        ({"hidden_size": -1}, "has hidden_size=-1, which cannot be"),
        ({"moe_intermediate_size": "48"}, "has moe_intermediate_size='48', which cannot be"),
    ],
)
def test_configs_that_cannot_be_are_refused(tmp_path, changed, message):
    fields = {"model_type": "of_another_time", **ROUTED, **changed}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    with pytest.raises(CheckpointError, match=message):
        workloads_of_model(str(tmp_path), 1)


def test_a_dense_model_has_nothing_to_tune(tmp_path):
    folder = saved(tmp_path, "llama", {"hidden_size": 64, "num_hidden_layers": 1})
    with pytest.raises(CheckpointError, match="as every model with routed experts has"):
        workloads_of_model(folder, 1)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_damaged_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        workloads_of_model(str(tmp_path), 1)


@pytest.mark.parametrize(
    ("name", "tp", "expected"),
    [
        ("qwen3-30b-a3b", 2, [MoeShape(128, 384, 2048, 8)]),
        ("Qwen3-Next-80B-A3B", 2, [MoeShape(512, 256, 2048, 10)]),
        ("mistral-small-4-119b", 2, [MoeShape(128, 1024, 4096, 4), MoeShape(128, 1024, 4096, 4, "fp8_w8a8")]),
        ("deepseek-v3", 8, [MoeShape(256, 256, 7168, 8, "fp8_w8a8", (128, 128))]),
        ("glm-4.5-air", 2, [MoeShape(128, 704, 4096, 8)]),
        ("gpt-oss-120b", 2, [MoeShape(128, 1440, 2880, 4)]),
    ],
)
def test_known_models_need_no_checkpoint(name, tp, expected):
    found = workloads_of_model(name, tp)
    assert [workload.shape for workload in found] == expected
    for workload in found:
        assert workload.form in (form_of(workload.shape), "bf16_bias_interleaved")


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_known_model_runs_on_so_many_ranks(tp):
    for name in MODELS:
        assert workloads_of_model(name, tp)


def test_an_unknown_model_is_an_error_that_names_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"neither a folder with a config\.json nor one of qwen3-30b-a3b, "):
        workloads_of_model(str(tmp_path / "missing"), 1)


def test_a_shape_can_be_given_as_numbers():
    bf16, blocks = workloads_of_shape("128,384,2048,8", ["bf16", "fp8_block"])
    assert (bf16.shape, bf16.form) == (MoeShape(128, 384, 2048, 8), "bf16")
    assert (blocks.shape, blocks.form) == (MoeShape(128, 384, 2048, 8, "fp8_w8a8", (128, 128)), "fp8_block")
    assert bf16.title == "E=128, N=384, H=2048, top-8, bf16"
    for text in ("", "128,384,2048", "128,384,2048,x", "4,384,2048,8", "128,0,2048,8", "1,2,3,4,5"):
        with pytest.raises(ConfigError, match=r"is not a shape\. Give experts"):
            workloads_of_shape(text)
