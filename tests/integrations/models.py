"""Tiny transformers models with experts, of the same weights whatever runs them; whole, or sharded by their plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphfuse
import graphfuse.integrations.transformers as integration

FAMILIES = ("qwen3_moe", "gpt_oss")
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
}
_MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4},
}
IDS = torch.arange(10).reshape(2, 5)


def model(family: str, implementation: str, **more: Any) -> nn.Module:
    """Every parameter random, biases included, and large enough that logits spread by more than one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_SIZES, **_MORE[family], **more})
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation=implementation)
    torch.manual_seed(3)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.4)
    return made.eval().requires_grad_(False)


def logits(of: Any) -> Tensor:
    with torch.no_grad():
        return of(IDS, use_cache=False).logits


def sharded(group: Any, by: str) -> tuple[Tensor, Tensor, Tensor, dict]:
    """Logits of a whole model on "eager", of one sharded by its plan on "graphfuse", of that compiled; and its report.

    Args:
        by: "inner": each expert's intermediate dimension is divided; "expert": experts are.
    """
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    integration.register()
    whole, part = logits(model("qwen3_moe", "eager")), model("qwen3_moe", "graphfuse")
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    size = group.size()
    plans = part._resolve_parallel_plans(DistributedConfig(tp_size=size, ep_size=size if by == "expert" else 1))
    apply_tensor_parallelism(part, mesh, plans[0])
    if by == "expert":
        apply_expert_parallelism(part, mesh, mesh, plans[1])
    compiled = graphfuse.compile(part, group)
    return whole, logits(part), logits(compiled), compiled.report.to_json()
