"""`graphfuse bench generate` on two GPUs: CUDA graphs decode, the profiler sees kernels, the roofline is a bound."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.documents import ROOT, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-next-80b-a3b", "qwen3-8b"])
def test_published_models_cut_to_some_layers(model, tmp_path):
    options = ("--random-weights", "--layers", 4, "--compare", "--repeats", 2, "--batch", "1,8")
    lengths = ("--input-len", 256, "--output-len", 40, "--offline", "32:128:32")
    run(
        sys.executable, "-m", "graphfuse.cli.main", "bench", "generate", "--model", model, "--tp", 2,
        *options, *lengths, "--output", tmp_path / "result.json", folder=ROOT, timeout=280,
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["attention"] == {
        "prefill": "FlashAttention, by torch", "decode": "graphfuse's Triton kernel for paged caches",
    }  # fmt: skip
    assert result["notes"] == [] and set(result["ratios"]) == {"batch 1", "batch 8", "offline"}
    assert result["all_reduces"]["fused"]["fused"] > result["all_reduces"]["unfused"]["fused"] == 0
    for row in result["rows"]:
        assert 0 < row["roofline_share"] < 1, row
        assert 0.3 < row["busy_share"] <= 1 and row["kernels"] > 20, row
        assert row["kernel_ms"] <= row["profiled_step_ms"], row
    for cold in result["cold_start"].values():
        assert cold["graph_capture_s"] > 0 and cold["compile_s"] > 0
