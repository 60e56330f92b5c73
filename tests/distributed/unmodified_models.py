"""Models that know nothing of graphfuse: what `test_unmodified_models.py` shards and compiles on its ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HIDDEN, VOCAB = 32, 64


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        return self.weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(HIDDEN) if norm is nn.RMSNorm else norm()
        self.up = nn.Linear(HIDDEN, 64, bias=False)
        self.down = nn.Linear(64, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Perceptrons(nn.Module):
    """Embedding, blocks with a residual stream, final norm, head."""

    def __init__(self, num_layers: int = 3, norm: type[nn.Module] = Norm) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(norm) for _ in range(num_layers))
        self.norm = norm(HIDDEN) if norm is nn.RMSNorm else norm()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def perceptrons(
    group: Any, norm: type[nn.Module], shard_embedding: bool = False
) -> tuple[nn.Module, nn.Module, DeviceMesh]:
    """The same model twice, whole and sharded by `parallelize_module`, and the mesh."""
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    whole = Perceptrons(norm=norm)
    torch.manual_seed(0)
    sharded = Perceptrons(norm=norm)
    plan: dict[str, Any] = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    if shard_embedding:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(sharded, mesh, plan)
    return whole.requires_grad_(False), sharded.requires_grad_(False), mesh


def transformers_model(group: Any, family: str, num_layers: int) -> tuple[nn.Module, nn.Module, DeviceMesh]:
    """A tiny model of transformers twice, whole and sharded by its own plan, and the mesh."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    if family == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = AutoConfig.for_model(family, **sizes)
    kind = {"experts_implementation": "grouped_mm"} if family == "qwen3_moe" else {}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(
            AutoModelForCausalLM.from_config(config, dtype=torch.float32, **kind).eval().requires_grad_(False)
        )
    whole, sharded = models
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    plan, _, _ = sharded._resolve_parallel_plans(DistributedConfig(tp_size=group.size()))
    apply_tensor_parallelism(sharded, mesh, plan)
    return whole, sharded, mesh
