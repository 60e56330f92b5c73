"""Triton kernels on the CPU, through Triton's interpreter: `interpreted_*.py` in processes with TRITON_INTERPRET=1.

Here are those that run whole; others have tests of their own, which divide them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CASES = {
    "norm_rotary": "the formula of normalised and rotated heads",
    "recurrent_chunks": "gated DeltaNet over longer sequences",
    "recurrent_steps": "gated DeltaNet of single tokens",
    "route": "the formulas of routers",
    "skinny_product": "a linear layer",
}


@pytest.mark.parametrize("name", CASES, ids=lambda name: f"{name}: {CASES[name]}")
def test_the_kernels_equal(name):
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(
        [*command, str(FOLDER / f"interpreted_{name}.py")], env=environment, capture_output=True, text=True, timeout=250
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout and "skipped" not in child.stdout
