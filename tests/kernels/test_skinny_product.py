"""The kernel of linear layers of few rows, through Triton's interpreter: see `interpreted_skinny_product.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "interpreted_skinny_product.py"


def test_the_interpreted_kernels_equal_a_linear_layer():
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout
