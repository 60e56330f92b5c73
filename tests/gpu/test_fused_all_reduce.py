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

HERE = Path(__file__).parent
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


ROOT = HERE.parent.parent


def run(script, *arguments, launch=LAUNCH, timeout=170):
    """What the script prints as JSON."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [*launch, str(HERE / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-6000:]
    return json.loads(next(line for line in child.stdout.splitlines() if line.startswith("{")))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("backend", "calls"), [("flashinfer", 10_000), ("symm_mem", 100_000)])
def test_mixed_calls_of_changing_sizes_and_a_failing_rank(backend, calls):
    result = run("fused_all_reduce_stress.py", "--backend", backend, "--calls", str(calls))
    assert result["ok"]
    assert result["eager_calls"] + result["replayed_calls"] >= calls
    assert result["replayed_calls"] > calls / 10


@pytest.mark.timeout(180)
def test_a_million_calls_with_late_ranks_lose_no_word():
    result = run("symm_mem_order.py", "--calls", "1000000")
    assert result["calls"] >= 1_000_000
    assert result["wrong_words"] == 0
    assert result["delays"] > 10_000


@pytest.mark.timeout(330)
def test_every_world_size_against_float64():
    result = run("symm_mem_worlds.py", "--points", "200", launch=[sys.executable], timeout=300)
    assert result["points"] == 200
    assert set(result["worlds"]) == {"2", "3", "4", "5", "6", "7", "8"}


@pytest.mark.timeout(180)
def test_compiled_models_are_served_by_fused_kernels_and_as_exact_as_eager_ones():
    run("compiled_model.py")
