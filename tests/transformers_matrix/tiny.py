"""A tiny config of any architecture of transformers: its defaults, with every size that it has made small.

Sizes are known by the names of fields, whatever the architecture; a field that is None by default stays so, since it
then switches a part off. Lists with an entry for each layer are cut to a few layers that show each kind. What is left
over stands in `_MORE`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 96
_LAYERS = 2

_SIZES: dict[str, int | float] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "output_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "ple_embed_dim"), 64),
    **dict.fromkeys(
        ("intermediate_size", "intermediate_size_mlp", "dense_intermediate_size", "ffn_hidden_size", "n_inner"), 128
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "expert_ffn_hidden_size",
            "shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "prefix_dense_intermediate_size",
        ),
        32,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_layers_per_stack"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "swa_v_head_dim", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(
        ("rotary_dim", "qk_rope_head_dim", "gated_norm_rank", "hidden_size_per_layer_input", "laurel_rank"), 8
    ),
    "qk_head_dim": 24,
    **dict.fromkeys(("q_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("kv_lora_rank", "loop_gate_rank", "moe_latent_size", "hc_lowrank"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "zero_expert_num"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "model_max_length"), 64),
    "original_max_position_embeddings": 64,
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "keep_window_size"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size", "mamba_dt_rank"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 8),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("index_n_heads", "index_topk", "index_topk_blocks"), 4),
    "index_head_dim": 16,
    "index_block_size": 4,
    "max_window_layers": 1,
    **dict.fromkeys(("hc_mult", "hc_count"), 2),
    "d_rel": 4,
    "rel_extent": 16,
    "residual_multiplier": 0.22,  # Granite's: 1 by default would hide it
    "embedding_multiplier": 12.0,
}


def _layers(*kinds: str) -> dict[str, Any]:
    return {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}


_MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        **_layers("sliding_attention", "full_attention"),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            "full_attention": None,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        **_layers("sliding_attention", "sliding_attention", "full_attention"),
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
    },
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "granitemoehybrid": _layers("linear_attention", "full_attention"),
    "granitemoeshared": {"shared_intermediate_size": 32},
    "granitemoe_swa": {"shared_intermediate_size": 32},
    "gemma3n_text": {
        **_layers("sliding_attention", "full_attention"),
        "num_kv_shared_layers": 0,
        "intermediate_size": 128,
        "activation_sparsity_pattern": [0.95, 0.0],
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "lfm2_moe": _layers("conv", "full_attention"),
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
}
"""What names and defaults do not tell."""


def architectures() -> list[str]:
    """The model types of causal language models whose config has a tensor-parallel plan."""
    return sorted(
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)
    )


def config(model_type: str) -> PretrainedConfig:
    """The tiny config."""
    given = CONFIG_MAPPING[model_type]().to_dict()
    chosen = _small(given)
    latent = "kv_lora_rank" in chosen  # expands to as many key-value heads as there are heads
    if latent or given.get("num_key_value_heads") == given.get("num_attention_heads"):
        chosen["num_key_value_heads"] = 4
    if latent and given.get("head_dim") == given["qk_rope_head_dim"]:
        chosen["head_dim"] = chosen["qk_rope_head_dim"]
    chosen |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
    chosen |= _few_layers(given)
    chosen |= _MORE.get(model_type, {})
    return AutoConfig.for_model(model_type, **chosen)


def _small(given: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: size for name, size in _SIZES.items() if isinstance(given.get(name), int | float) and given[name]}
    parts = {name: _small(part) for name, part in given.items() if name.endswith("_config") and isinstance(part, dict)}
    return {**sizes, **{name: part for name, part in parts.items() if name != "per_layer_config"}}


def _few_layers(given: dict[str, Any]) -> dict[str, Any]:
    """The first layer of each kind, of at most four kinds, and at least two layers."""
    depth, each = given.get("num_hidden_layers"), given.get("per_layer_config") or {}
    lists = {name: v for name, v in given.items() if isinstance(v, list) and len(v) == depth}
    if not lists and not each:
        return {}
    own = {int(i): v for i, v in each.items()}
    kinds: dict[str, int] = {}
    for i in range(depth):
        kinds.setdefault(str([[v[i] for v in lists.values()], own.get(i)]), i)
    kept = list(kinds.values())[:4]
    kept = kept if len(kept) > 1 else [kept[0], kept[0]]
    chosen: dict[str, Any] = {name: [v[i] for i in kept] for name, v in lists.items()}
    if each:
        heads = {"num_key_value_heads": 4, "head_dim": 24} if "kv_lora_rank" in given else {}
        small = {i: {**v, **_small(v), **heads} for i, v in own.items()}
        chosen["per_layer_config"] = {new: small[old] for new, old in enumerate(kept) if old in small}
    return {**chosen, "num_hidden_layers": len(kept)}


def build(model_type: str, dtype: torch.dtype, device: str = "cpu") -> Any:
    """The model with random weights in evaluation mode; the same on each call. Its experts are transformers' grouped
    products, which trace as one graph."""
    torch.manual_seed(0)
    made = config(model_type)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(made, dtype=dtype)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    if device != "meta":
        randomise(model)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Every parameter random: matrices spread so that logits do, vectors moved from where they start."""
    generator = torch.Generator().manual_seed(1)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.add_(0.1 * noise(parameter))
        else:
            parameter.copy_(noise(parameter) * parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point():
            buffer.add_(0.1 * noise(buffer))
