"""Linear layers of few rows on a GPU: as close to float64 as torch's, in CUDA graphs, behind other kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphfuse.kernels.skinny_product import skinny_product
from graphfuse.ops.linear import MOST_SKINNY_ROWS, OP

pytestmark = pytest.mark.gpu

SHAPES = [(2560, 2048), (128, 2048), (32, 2048), (4096, 6144), (2048, 256), (1000, 2880), (12288, 4096)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def inputs(rows, outputs, num_inputs, dtype=torch.bfloat16):
    x = torch.randn(rows, num_inputs + 64, device="cuda").to(dtype)[:, :num_inputs]
    weight = torch.randn(outputs, num_inputs, device="cuda").to(dtype) / num_inputs**0.5
    return x, weight, torch.randn(outputs, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 32])
@pytest.mark.parametrize(("outputs", "num_inputs"), SHAPES)
def test_as_close_to_float64_as_torch(rows, outputs, num_inputs, dtype):
    x, weight, bias = inputs(rows, outputs, num_inputs, dtype)
    truth = F.linear(x.double(), weight.double(), bias.double())
    ours, theirs = skinny_product(x, weight, bias), F.linear(x, weight, bias)
    ours_off, theirs_off = ((y.double() - truth).norm() for y in (ours, theirs))
    assert ours_off <= 1.02 * theirs_off


@pytest.mark.parametrize("rows", [1, 8, MOST_SKINNY_ROWS, MOST_SKINNY_ROWS + 1])
def test_a_chain_of_layers_in_a_graph_waits_for_what_is_in_front(rows):
    """Each layer reads what the one before writes, and memory is used again and again."""
    layers = [inputs(rows, 2048, 2048)[1] for _ in range(24)]
    x = torch.zeros(rows, 2048, device="cuda").bfloat16()

    def chain(product):
        y = x
        for weight in layers:
            y = torch.tanh(product(y, weight))
        return y

    chain(OP)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(OP)
    for _ in range(50):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(got, chain(F.linear), atol=0.05, rtol=0.05)
        first = got.clone()
        graph.replay()
        assert torch.equal(first, got)
