"""A compiled model on real GPUs: fused kernels serve it, Inductor runs it, its error is not above the eager model's.

The yardstick is the same model with the same weights in float32.

    torchrun --nproc-per-node 2 tests/gpu/compiled_model.py

Prints one JSON object; exits with 1 when a check fails.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, Qwen3MoeConfig

import graphfuse
from graphfuse.models import registry

LLAMA = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=6,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=32000,
    max_position_embeddings=4096,
)
QWEN3_MOE = Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim
    hidden_size=2048,
    intermediate_size=4096,
    moe_intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=16,
    num_experts_per_tok=4,
    vocab_size=32000,
)


def check(config, group, device, executor: str, allreduce: str) -> dict:
    model = registry.build(config, group, torch.bfloat16, device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(2)) + 0.5)
        else:
            parameter.normal_(0, 0.03, generator=generator)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            dist.broadcast(parameter, 0)
    started = time.perf_counter()
    fuse_config = graphfuse.FuseConfig(executor=executor, allreduce=allreduce)
    with graphfuse.compile(model, group, config=fuse_config) as compiled, torch.no_grad():
        exact = registry.build(config, group, torch.float32, device).requires_grad_(False)
        exact.load_state_dict(model.state_dict())
        worst, eager_worst, agree = 0.0, 0.0, True
        for batch, length in ((2, 64), (1, 1), (3, 17), (1, 2048), (4, 1)):
            ids = torch.randint(0, 32000, (batch, length), generator=torch.Generator().manual_seed(length)).to(device)
            positions = torch.arange(length, device=device).repeat(batch, 1)
            got, want = compiled(ids, positions).float(), exact(ids, positions)
            eager = model(ids, positions).float()
            if length == 64:
                first = time.perf_counter() - started
            worst = max(worst, float((got - want).norm() / want.norm()))
            eager_worst = max(eager_worst, float((eager - want).norm() / want.norm()))
            others = [torch.empty_like(got) for _ in range(dist.get_world_size())]
            dist.all_gather(others, got.contiguous())
            agree &= all(torch.equal(got, other) for other in others)
        report = compiled.report.to_json()
    return {
        "model": config.model_type,
        "executor": executor,
        "allreduce": allreduce,
        "totals": report["totals"],
        "graphs": report["graphs"],
        "served_by": report["sites"][-1]["backends"],
        "notes": report["notes"],
        "seconds": report["seconds"],
        "first_call_s": round(first, 1),
        "relative_error": worst,
        "eager_relative_error": eager_worst,
        "ranks_agree": agree,
        "reasons": report["gate"]["reasons"],
    }


def main() -> int:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    results = [
        check(config, dist.group.WORLD, device, executor, allreduce)
        for config, executor, allreduce in (
            (LLAMA, "eager", "auto"),
            (LLAMA, "inductor", "symm_mem"),
            (LLAMA, "inductor", "flashinfer"),
            (QWEN3_MOE, "inductor", "auto"),
        )
    ]
    for r in results:
        wanted = "symm_mem" if r["allreduce"] == "auto" else r["allreduce"]  # by the table, on H200
        fused = r["totals"]["fused"] == r["totals"]["all_reduce"] > 0
        r["ok"] = bool(
            fused
            and r["graphs"] == 1
            and r["ranks_agree"]
            and r["relative_error"] <= 1.1 * r["eager_relative_error"]
            and r["served_by"][0]["backend"] == wanted
        )
    if rank == 0:
        print(json.dumps({"ok": all(r["ok"] for r in results), "runs": results}), flush=True)
    dist.destroy_process_group()
    return 0 if all(r["ok"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
