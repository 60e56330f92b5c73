"""The Triton kernels of paged decoding, on the CPU through Triton's interpreter: see `interpreted_paged_*.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "cases",
    ["interpreted_paged_decode.py", pytest.param("interpreted_paged_latent_decode.py", marks=pytest.mark.slow)],
)
def test_the_interpreted_kernels_equal_attention_in_float64(cases):
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout
