"""Tiny configs of Qwen2 and of the mixtures of experts that attend as Llama does.

Sizes divide nothing at two and four ranks, and differ, so that one part's is never taken for another's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Glm4MoeConfig,
    GptOssConfig,
    MiniMaxM2Config,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
)

COMMON: dict[str, Any] = {"num_hidden_layers": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
HALF: dict[str, Any] = {"head_dim": 8, "partial_rotary_factor": 0.5}
FOUR: dict[str, Any] = {"rotary_dim": 4}  # the name of old configs
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}


def glm4_moe() -> PretrainedConfig:
    """A dense layer before two sparse ones; half of each head is rotated."""
    return Glm4MoeConfig(
        hidden_size=40, intermediate_size=46, num_attention_heads=6, num_key_value_heads=2, vocab_size=63,
        n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=10,
        n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=1.7, use_qk_norm=True, attention_bias=True,
        **COMMON, **HALF,
    )  # fmt: skip


def glm4_moe_plain() -> PretrainedConfig:
    """As GLM-4.5-Air: no norm of queries and keys, one group of experts; no bias either."""
    config = glm4_moe()
    config.use_qk_norm, config.attention_bias = False, False
    config.n_group, config.topk_group, config.norm_topk_prob = 1, 1, False
    return config


def gpt_oss() -> PretrainedConfig:
    """Six heads over two key-value heads; 44 inner entries, so that at four ranks no part ends with a block of 32."""
    return GptOssConfig(
        hidden_size=64, intermediate_size=44, num_attention_heads=6, num_key_value_heads=2, head_dim=8, vocab_size=61,
        sliding_window=3, num_local_experts=5, num_experts_per_tok=2, swiglu_limit=1.5, rope_parameters=YARN, **COMMON,
    )  # fmt: skip


def gpt_oss_packed() -> PretrainedConfig:
    """Inner and hidden sizes in whole blocks of 32, as MXFP4 has them; no part of four is."""
    config = gpt_oss()
    config.intermediate_size = 64
    return config


def minimax_m2() -> PretrainedConfig:
    return MiniMaxM2Config(
        hidden_size=40, intermediate_size=22, num_attention_heads=6, num_key_value_heads=2, head_dim=8, vocab_size=61,
        num_local_experts=7, num_experts_per_tok=3, **COMMON, **FOUR,
    )  # fmt: skip


def mixtral() -> PretrainedConfig:
    return MixtralConfig(
        hidden_size=40, intermediate_size=26, num_attention_heads=6, num_key_value_heads=3, vocab_size=62,
        sliding_window=3, num_local_experts=5, num_experts_per_tok=2, **COMMON,
    )  # fmt: skip


def qwen2() -> PretrainedConfig:
    return Qwen2Config(
        hidden_size=40, intermediate_size=46, num_attention_heads=5, num_key_value_heads=1, vocab_size=63,
        use_sliding_window=True, sliding_window=3, max_window_layers=2, tie_word_embeddings=True, **COMMON,
    )  # fmt: skip


def qwen2_moe() -> PretrainedConfig:
    """A dense layer between two sparse ones."""
    return Qwen2MoeConfig(
        hidden_size=40, intermediate_size=46, num_attention_heads=5, num_key_value_heads=5, vocab_size=62,
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=10, shared_expert_intermediate_size=22,
        mlp_only_layers=[1], norm_topk_prob=False, **COMMON,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    f.__name__: f for f in (glm4_moe, glm4_moe_plain, gpt_oss, gpt_oss_packed, minimax_m2, mixtral, qwen2, qwen2_moe)
}
