"""`benchmarks/transformers_generate.py`: random weights sharded in place, variants in turn, a result that grows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from graphfuse.tuning.transformers_bench import COMPILED, EAGER, GRAPHFUSE, Bench, Plan
from graphfuse.weights.random_transformers import random_transformers_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "transformers_generate.py"
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def measured(group, folder, variants, time_limit=None):
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = random_transformers_model(folder, 1, mesh, torch.float32, torch.device("cpu"))
    rotary = model.model.rotary_emb.inv_freq.tolist()
    weights = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in model.named_parameters()}
    sums = {name: weight.double().sum().item() for name, weight in weights.items()}
    experts = tuple(weights["model.layers.0.mlp.experts.down_proj"].shape)
    bench = Bench("tiny", model, group, Plan([2], 5, 3, 2, variants, time_limit), time.perf_counter())
    grown = []
    bench.run(lambda: grown.append(len(bench.rows)))
    bench.release()
    return rotary, sums, experts, bench.rows, bench.ratios, bench.reports, bench.notes, grown


def test_variants_in_turn_on_weights_drawn_in_place(ranks, folder):
    first, second = ranks.run(2, measured, folder, (EAGER, GRAPHFUSE), timeout=200)
    rotary, sums, experts, rows, ratios, reports, notes, grown = first
    torch.testing.assert_close(torch.tensor(rotary), 1e4 ** -(torch.arange(8) / 8))
    assert experts == (4, 64, 16)
    assert sums["model.layers.0.mlp.gate.weight"] == second[1]["model.layers.0.mlp.gate.weight"]
    assert sums["model.layers.0.self_attn.q_proj.weight"] != second[1]["model.layers.0.self_attn.q_proj.weight"]
    assert [(row["variant"], row["batch"], row["same_tokens_as_eager"]) for row in rows] == [
        (EAGER, 2, 1.0),
        (GRAPHFUSE, 2, 1.0),
    ]
    assert all(len(row["step_ms_rounds"]) == 2 and row["tokens_per_s"] > 0 for row in rows)
    assert list(ratios) == ["tiny, batch 2, over eager"]
    assert reports["tiny, batch 2"]["totals"] == {"all_reduce": 3, "fused": 3, "merged": 0, "declined": 0}
    assert not notes
    assert grown == [2]


def test_nothing_is_begun_after_the_time_limit(ranks, folder):
    *_, rows, _, _, notes, _ = ranks.run(2, measured, folder, (EAGER, GRAPHFUSE), -1.0, timeout=200)[0]
    assert not rows
    assert notes == ["The time limit of -1 s ended the measurement of tiny before batch 2."]


@pytest.mark.slow
def test_the_script_starts_its_ranks_and_writes_the_result(folder, tmp_path):
    file = tmp_path / "result.json"
    arguments = ["--models", folder, "--tp", "2", "--device", "cpu", "--layers", "1", "--batch", "1", "--prompt", "5"]
    arguments += ["--new", "3", "--rounds", "1", "--output", str(file)]
    found = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stderr
    result = json.loads(file.read_text())
    assert [row["variant"] for row in result["rows"]] == [EAGER, COMPILED, GRAPHFUSE]
    assert all(row["same_tokens_as_eager"] == 1.0 for row in result["rows"])
    assert {"decode", "whole"} == set(next(iter(result["ratios"].values())))
    assert result["versions"]["transformers"] and result["date"]
