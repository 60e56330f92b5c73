"""The Triton kernels of MoE layers, on the CPU through Triton's interpreter: see `interpreted_moe*.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CASES = [str(FOLDER / name) for name in ("interpreted_moe.py", "interpreted_moe_sort.py")]


@pytest.mark.parametrize(
    "which",
    [
        pytest.param(("-m", "not slow"), id="quick cases"),
        pytest.param(("-m", "slow", "-k", "not unsorted"), id="slow cases, sorted", marks=pytest.mark.slow),
        pytest.param(("-m", "slow", "-k", "unsorted"), id="slow cases, unsorted", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(1500)
def test_the_interpreted_kernels_are_as_close_to_float64_as_the_plain_path(which):
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    command = [sys.executable, "-m", "pytest", *which, "-p", "no:cacheprovider", "-p", "no:xdist", *CASES]
    child = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=1400
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout


def test_without_triton_the_module_imports_and_says_why_it_cannot_run():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from graphfuse.ops import moe_triton\n"
        "from tests.kernels.moe_layers import make_inputs, make_layer\n"
        "layer = make_layer()\n"
        "reason = moe_triton.can_run(make_inputs(layer, 2, 2)[0], layer.weights, layer.dtype, 'silu')\n"
        "assert 'Triton' in reason, reason"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=FOLDER.parents[1])
