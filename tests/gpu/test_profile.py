"""`graphfuse profile` on two GPUs: nearly all of the device's time has a module, and steps are CUDA graphs."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.documents import ROOT, run
from tests.gpu.compiled_model import LLAMA, QWEN3_MOE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE], ids=lambda config: config.model_type)
def test_nearly_all_of_the_time_is_attributed(config, tmp_path):
    config.architectures = ["LlamaForCausalLM" if config is LLAMA else "Qwen3MoeForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path)
    options = ("--random-weights", "--batch", 4, "--input-len", 256, "--json")
    printed = run(
        sys.executable, "-m", "graphfuse.cli.main", "profile", "--model", tmp_path, "--tp", 2, *options, folder=ROOT
    )
    profile = json.loads(printed)
    assert profile["timed"] == "steps as CUDA graphs"
    for phase in profile["phases"].values():
        for variant in phase.values():
            assert variant["attributed"] >= 0.98
    step = profile["phases"]["step"]
    assert step["fused"]["us"] < step["unfused"]["us"]
