"""Lowered experts of a whole model on one GPU, and on two where there are two."""

import sys

import pytest
import torch

from tests.gpu.test_fused_all_reduce import run

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_with_lowered_experts_is_as_exact_as_the_eager_one(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA GPUs")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = run("moe_model.py", launch=launch)
    assert result["ok"]
    assert {layer["status"] for layer in result["moe"]} == {"lowered"}
