"""A rank whose peer has died on the other GPU ends within ten seconds, and says which rank it was."""

import sys

import pytest
import torch

from tests.gpu.test_fused_all_reduce import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("allreduce", ["symm_mem", "reference"])
def test_every_row_of_the_failure_matrix(allreduce):
    result = run("failures.py", "--allreduce", allreduce, launch=[sys.executable], timeout=380)
    assert len(result["rows"]) == 9
    assert [row for row in result["rows"] if not row["good"]] == []
