"""Two full-width layers of Qwen3-MoE on real GPUs: experts are lowered to the Triton kernels, and the compiled model's
error is not above the eager one's.

The yardstick is the same model with the same weights in float32.

    torchrun --nproc-per-node 1 tests/gpu/moe_model.py

Prints one JSON object; exits with 1 when a check fails.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig

import graphfuse
from graphfuse.models import registry

QWEN3_30B_A3B = Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    vocab_size=32000,
)
SIZES = ((1, 1), (2, 64), (3, 17), (1, 2048), (64, 1))


def random_weights(model: torch.nn.Module, device: torch.device) -> None:
    """Each rank its own shards, all of them the same router and norms."""
    shared = torch.Generator(device).manual_seed(2)
    own = torch.Generator(device).manual_seed(100 + dist.get_rank())
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5, generator=shared)
        else:
            parameter.normal_(0, 0.03, generator=shared if name.endswith("mlp.gate.weight") else own)


def main() -> int:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    group, config = dist.group.WORLD, QWEN3_30B_A3B
    model = registry.build(config, group, torch.bfloat16, device).requires_grad_(False)
    random_weights(model, device)
    exact = registry.build(config, group, torch.float32, device).requires_grad_(False)
    exact.load_state_dict(model.state_dict())
    # A choice of experts that is a tie to rounding turns out either way: single rows say little, so all are summed.
    off, agree = torch.zeros(3, dtype=torch.float64), True  # squares of: compiled - exact, eager - exact, exact
    with graphfuse.compile(model, group) as compiled, torch.no_grad():
        for batch, length in SIZES:
            ids = torch.randint(0, 32000, (batch, length), generator=torch.Generator().manual_seed(length)).to(device)
            got, want, eager = (m(ids).float() for m in (compiled, exact, model))
            off += torch.tensor([float(y.double().square().sum()) for y in (got - want, eager - want, want)])
            others = [torch.empty_like(got) for _ in range(dist.get_world_size())]
            dist.all_gather(others, got.contiguous())
            agree &= all(torch.equal(got, other) for other in others)
        report = compiled.report.to_json()
        text = str(compiled.report)
    compiled_error, eager_error = (off[:2] / off[2]).sqrt().tolist()
    ok = (
        agree
        and compiled_error <= 1.1 * eager_error
        and len(report["moe"]) == config.num_hidden_layers
        and all(layer["status"] == "lowered" for layer in report["moe"])
    )
    if rank == 0:
        result = {"ok": ok, "ranks_agree": agree, "relative_error": compiled_error, "eager_relative_error": eager_error}
        print(json.dumps({**result, "moe": report["moe"], "totals": report["totals"], "text": text}), flush=True)
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
