"""The kernel of `graphfuse::norm_rotary`, on the CPU through Triton's interpreter: see `interpreted_norm_rotary.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "interpreted_norm_rotary.py"


def test_the_interpreted_kernel_equals_the_formula():
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert "38 passed" in child.stdout
