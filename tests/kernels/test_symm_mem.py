"""The symm_mem kernels between processes on the CPU, through Triton's interpreter: see `interpreted_symm_mem.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVERY_CASE = ("forms", "every_bit_pattern", "changing_sizes", "quantised", "repeats", "absent_peer")
# What more than two ranks could break: the order of summing, who owns a row, cells of several senders.
CASES_OF_MANY_RANKS = ("changing_sizes", "quantised", "repeats")


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(2, EVERY_CASE, id="2 ranks"),
        pytest.param(3, CASES_OF_MANY_RANKS, id="3 ranks", marks=pytest.mark.slow),
        pytest.param(3, ("forms",), id="3 ranks, every form", marks=pytest.mark.slow),
        pytest.param(4, ("forms", *CASES_OF_MANY_RANKS), id="4 ranks", marks=pytest.mark.slow),
    ],
)
def test_the_interpreted_kernels_reduce_and_normalise_as_documented(world_size, cases):
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.interpreted_symm_mem", str(world_size), *cases]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("GRAPHFUSE_COMM_TIMEOUT", None)  # late ranks are waited for without an end
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-4000:]
    assert [line.split(":")[0] for line in child.stdout.splitlines() if line.endswith(" s")] == list(cases)


def test_the_modules_import_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from graphfuse.comm.symm_mem import SymmMemBackend\n"
        "import graphfuse.kernels.one_shot_all_reduce, graphfuse.kernels.two_shot_all_reduce\n"
        "assert 'Triton is not installed' in SymmMemBackend().refusal(None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
