"""Tiny configs of the families with gated DeltaNet. At TP 4 the two key-value heads are copied, and so are key heads of
DeltaNet where there are fewer than ranks; three of them need padding at two ranks. Outputs of DeltaNet may be close to
zero, and the norm behind them enlarges their rounding errors as far as its epsilon lets it."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PretrainedConfig, Qwen3_5Config, Qwen3_5MoeConfig, Qwen3NextConfig

_KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_COMMON = {
    "num_hidden_layers": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-3, "layer_types": _KINDS,
    "hidden_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 6,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 14,
}  # fmt: skip
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
           "num_position_embeddings": 16}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


def qwen3_next() -> PretrainedConfig:
    return Qwen3NextConfig(
        vocab_size=61, intermediate_size=44, norm_topk_prob=True, mlp_only_layers=[1], rope_parameters=_ROPE,
        linear_num_key_heads=3, linear_num_value_heads=6, **_EXPERTS, **_COMMON,
    )  # fmt: skip


def qwen3_5() -> PretrainedConfig:
    text = {
        **_COMMON, "vocab_size": 62, "intermediate_size": 44, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True},
    }  # fmt: skip
    return Qwen3_5Config(
        text_config=text, vision_config=_VISION, tie_word_embeddings=True,
        architectures=["Qwen3_5ForConditionalGeneration"],
    )  # fmt: skip


def qwen3_5_moe() -> PretrainedConfig:
    text = {
        **_COMMON, **_EXPERTS, "vocab_size": 63, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True},
    }  # fmt: skip
    return Qwen3_5MoeConfig(
        text_config=text, vision_config=_VISION, architectures=["Qwen3_5MoeForConditionalGeneration"]
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {f.__name__: f for f in (qwen3_next, qwen3_5, qwen3_5_moe)}
