"""Triton kernels of longer sequences, on the CPU through the interpreter: see `interpreted_recurrent_chunks.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "interpreted_recurrent_chunks.py"


def test_the_interpreted_kernels_equal_the_ops():
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert "35 passed" in child.stdout
