"""Start-up does not grow with depth: repeated layers are traced, rewritten and compiled once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, time, torch, graphfuse
from torch._dynamo.utils import counters
from transformers import LlamaConfig, Qwen3MoeConfig
from graphfuse.models import registry
from graphfuse.testing import fake_tp

family, num_layers, executor = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=96)
moe = dict(moe_intermediate_size=32, head_dim=16, num_experts=4, num_experts_per_tok=2)
config = LlamaConfig(**sizes) if family == "llama" else Qwen3MoeConfig(**sizes, **moe)
with fake_tp(2) as group:
    model = registry.build(config, group, torch.bfloat16, "cpu").requires_grad_(False)
    compiled = graphfuse.compile(model, group, config=graphfuse.FuseConfig(executor=executor))
    ids = torch.zeros(1, 8, dtype=torch.long)
    first, steady = [], []
    for spent in (first, steady):
        started = time.process_time()
        compiled(ids)
        spent.append(time.process_time() - started)
totals, notes = compiled.report.totals, compiled.report.notes
missed = counters["inductor"]["fxgraph_cache_miss"]
print(json.dumps({"seconds": first[0] - steady[0], "missed": missed, "totals": totals, "notes": notes}))
"""


def start(family: str, num_layers: int, executor: str, cache) -> dict:
    """A fresh process: CPU seconds of the first forward less those of a steady one. Others' load does not count."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, family, str(num_layers), executor],
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",  # threads that wait for work spend time of the process too
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["totals"] == {
        "all_reduce": 2 * num_layers + 1,
        "fused": 2 * num_layers + 1,
        "merged": 0,
        "declined": 0,
    }
    assert found["notes"] == []
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_tracing_32_layers_takes_at_most_twice_what_4_take(family, tmp_path):
    few, many = (start(family, layers, "eager", tmp_path)["seconds"] for layers in (4, 32))
    assert many <= 2 * few, (few, many)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_compiling_32_layers_takes_at_most_one_and_a_half_times_what_8_take_and_a_warm_start_compiles_nothing(
    family, tmp_path
):
    few, many = (start(family, layers, "inductor", tmp_path / str(layers)) for layers in (8, 32))
    assert few["missed"] == many["missed"] == 1
    assert many["seconds"] <= 1.5 * few["seconds"], (few, many)
    warm = start(family, 32, "inductor", tmp_path / "32")
    assert warm["missed"] == 0
    assert warm["seconds"] <= many["seconds"] / 2, (warm, many)
