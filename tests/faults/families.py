"""Families as graphs on four ranks: graphfuse's own models, and transformers' models under their own plans.

Tiny, on the "meta" device, in a fake group; `trace` has proved each before and behind the passes when it returns.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphfuse.models import registry
from graphfuse.testing import Trace, trace
from tests.models import tiny

WORLD = 4
OWN = ("llama", "mistral", "qwen3", "qwen3_moe")
OF_TRANSFORMERS = ("llama", "mistral", "qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe", "gpt_oss")

_SIZES = {
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
_MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "deepseek_v3": {
        **_ROUTED,
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "glm4_moe": {**_ROUTED, "n_group": 1, "topk_group": 1},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


def own(family: str, group: dist.ProcessGroup, *, cached: bool = False) -> Trace:
    """graphfuse's model of a family."""
    model = registry.build(tiny.config(family), group, torch.bfloat16, "meta")
    ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    last = torch.zeros(2, dtype=torch.int64, device="meta")
    inputs = (ids, ids, model.new_kv_caches(4, 16), last) if cached else (ids,)
    return trace(model, inputs, group)


def of_transformers(family: str, group: dist.ProcessGroup) -> Trace:
    """transformers' model of a family."""
    ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    return trace(sharded(family, group), {"input_ids": ids, "use_cache": False}, group)


def sharded(family: str, group: dist.ProcessGroup) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    sizes = {**_SIZES, **_MORE.get(family, {})}
    if family == "deepseek_v3":
        del sizes["head_dim"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.bfloat16)
    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=group.size()))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    return apply_tensor_parallelism(model.eval().requires_grad_(False), mesh, plan)


@functools.cache
def traced(name: str, group: dist.ProcessGroup) -> Trace:
    """By name: "own llama", "own llama cached", "transformers' llama"."""
    whose, family, *more = name.split()
    return own(family, group, cached=bool(more)) if whose == "own" else of_transformers(family, group)
