"""The Triton add + RMSNorm kernel, on the CPU through Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("interpreted_add_rms_norm.py")


def test_the_interpreted_kernel_matches_the_eager_formula():
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout


def test_the_module_imports_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from graphfuse.kernels import add_rms_norm as kernel\n"
        "assert not kernel.available()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
