"""Single tokens of recurrent mixers on a GPU: the kernels against plain torch, at once and replayed."""

from __future__ import annotations

import pytest
import torch

from graphfuse.kernels.causal_conv_step import causal_conv_step
from graphfuse.kernels.gated_delta_step import gated_delta_step
from graphfuse.ops.causal_conv import causal_conv
from graphfuse.ops.gated_delta import _EPS, gated_delta

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

KEY_HEADS, HEADS, SIZE, CHANNELS, TAPS = 8, 16, 128, 4096, 4  # Qwen3-Next-80B-A3B on two ranks


def inputs(num_rows, dtype):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(num_rows, *shape, generator=generator)

    delta = [
        normal(KEY_HEADS, SIZE).to(dtype), normal(KEY_HEADS, SIZE).to(dtype), normal(HEADS, SIZE).to(dtype),
        -normal(HEADS).exp(), normal(HEADS).sigmoid().to(dtype),
    ]  # fmt: skip
    positions = torch.arange(num_rows)  # the first one starts anew
    states = torch.randperm(num_rows, generator=generator) + 1
    return delta, normal(CHANNELS).to(dtype), positions, states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 128])
def test_kernels_equal_plain_torch_eagerly_and_replayed(dtype, num_rows):
    delta, x, positions, states = inputs(num_rows, dtype)
    spans = torch.ones(num_rows, 2, dtype=torch.int64)
    weight = torch.randn(CHANNELS, TAPS).to(dtype)
    state, window = (
        torch.randn(num_rows + 1, HEADS, SIZE, SIZE),
        torch.randn(num_rows + 1, CHANNELS, TAPS - 1).to(dtype),
    )
    on_gpu = [t.cuda() for t in (*delta, x, positions, states, state, window, weight)]
    *gpu_delta, gpu_x, gpu_positions, gpu_states, gpu_state, gpu_window, gpu_weight = on_gpu

    def step():
        y = gated_delta_step(*gpu_delta, gpu_positions, gpu_states, gpu_state, _EPS)
        return y, causal_conv_step(gpu_x, gpu_weight, gpu_positions, gpu_states, gpu_window)

    def expected():
        y = gated_delta(*(t[None] for t in delta), positions[None], None, state, states, spans)[0]
        return y, causal_conv(x[None], weight, positions[None], None, window, states, spans)[0]

    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-4
    for got, want in zip(step(), expected(), strict=True):
        torch.testing.assert_close(got.cpu(), want, atol=1e-3, rtol=rtol)
    graph = torch.cuda.CUDAGraph()
    kept = gpu_state.clone(), gpu_window.clone()
    with torch.cuda.graph(graph):
        results = step()
    gpu_state.copy_(kept[0])
    gpu_window.copy_(kept[1])
    graph.replay()
    for got, want in zip(results, expected(), strict=True):
        torch.testing.assert_close(got.cpu(), want, atol=1e-3, rtol=rtol)
    torch.testing.assert_close(gpu_state.cpu(), state, atol=1e-3, rtol=1e-3)
    assert torch.equal(gpu_window.cpu(), window)
