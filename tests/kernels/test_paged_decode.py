"""The Triton kernels of paged decoding, on the CPU through Triton's interpreter: see `interpreted_paged_*.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


GQA, MLA = "interpreted_paged_decode.py", "interpreted_paged_latent_decode.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("cases", "which"),
    [
        (GQA, "not slow"),
        pytest.param(GQA, "slow", marks=pytest.mark.slow),
        pytest.param(MLA, "not slow", marks=pytest.mark.slow),
    ],
)
def test_the_interpreted_kernels_equal_attention_in_float64(cases, which):
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / cases)]
    command += ["-m", which]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout
