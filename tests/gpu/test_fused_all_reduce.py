"""The fused all-reduce on two real GPUs; each test is a script under torchrun, so that a hang can be ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

STRESS = Path(__file__).with_name("fused_all_reduce_stress.py")
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(180)
def test_ten_thousand_mixed_calls_and_a_failing_rank():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [*LAUNCH, str(STRESS), "--calls", "10000"]
    child = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-6000:]
    result = json.loads(next(line for line in child.stdout.splitlines() if line.startswith("{")))
    assert result["ok"]
    assert result["eager_calls"] + result["replayed_calls"] >= 10_000
    assert result["replayed_calls"] > 1_000


@pytest.mark.timeout(180)
def test_compiled_models_are_served_by_flashinfer_and_as_exact_as_eager_ones():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [*LAUNCH, str(Path(__file__).with_name("compiled_model.py"))]
    child = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-6000:]
