"""Tiny configs of the models with latent attention.

Five heads need padding at two and four ranks. The rotary part is small beside the rest, norms' epsilon is large enough
to show in which norm it stands, and contexts are short enough that positions pass the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    Kimi_K25Config,
    Mistral3Config,
    Mistral4Config,
    PretrainedConfig,
)

SIZES: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 44,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "kv_lora_rank": 12,
    "q_lora_rank": 14,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}


def deepseek_v3() -> PretrainedConfig:
    """Groups of experts, biases, YaRN; the first layer is dense."""
    return DeepseekV3Config(
        **SIZES, n_routed_experts=8, n_group=4, topk_group=2, first_k_dense_replace=1, attention_bias=True,
        rope_parameters=YARN,
    )  # fmt: skip


def deepseek_plain() -> PretrainedConfig:
    """What DeepSeek-V3's config can leave out: the queries' latent, interleaved pairs, groups, normalised weights."""
    sizes = {**SIZES, "q_lora_rank": None, "n_shared_experts": 1}
    return DeepseekV3Config(
        **sizes, n_routed_experts=6, n_group=1, topk_group=1, first_k_dense_replace=2, rope_interleave=False,
        norm_topk_prob=False, num_mtp_layers=0,
    )  # fmt: skip


def mistral4() -> PretrainedConfig:
    """Softmax scores, no dense layers, queries that grow behind position 3."""
    rope = {**YARN, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}
    return Mistral4Config(
        **SIZES, n_routed_experts=7, n_group=1, topk_group=1, first_k_dense_replace=0, rope_parameters=rope,
        architectures=["Mistral4ForCausalLM"],
    )  # fmt: skip


def glm4_moe_lite() -> PretrainedConfig:
    """Layers' kinds are listed."""
    kinds = ["dense", "sparse", "sparse"]
    return Glm4MoeLiteConfig(**SIZES, n_routed_experts=6, n_group=1, topk_group=1, mlp_layer_types=kinds)


def kimi_k25() -> PretrainedConfig:
    """A wrapper of several modalities around a DeepSeek-V3."""
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 2,
        "pos_emb_height": 2, "pos_emb_width": 2,
    }  # fmt: skip
    return Kimi_K25Config(
        text_config=deepseek_v3().to_dict(), vision_config=vision, projection_hidden_size=8,
        tie_word_embeddings=False, architectures=["Kimi_K25ForConditionalGeneration"],
    )  # fmt: skip


def mistral3() -> PretrainedConfig:
    """The same around a Mistral 4."""
    vision = {
        "model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "head_dim": 4, "patch_size": 2, "image_size": 4,
    }  # fmt: skip
    return Mistral3Config(
        text_config=mistral4().to_dict(), vision_config=vision, tie_word_embeddings=False,
        architectures=["Mistral3ForConditionalGeneration"],
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    f.__name__: f for f in (deepseek_v3, deepseek_plain, mistral4, glm4_moe_lite, kimi_k25, mistral3)
}
