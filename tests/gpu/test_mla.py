"""Latent attention on a GPU: the same numbers as on the CPU at DeepSeek-V3's head sizes, and CUDA-graph capture."""

from __future__ import annotations

import pytest
import torch

from graphfuse.ops.mla import mla_attention

pytestmark = pytest.mark.gpu
HEADS, NOPE, ROPE, VALUE, RANK, SCALE = 8, 128, 64, 128, 512, 192**-0.5


def inputs(batch, length, dtype=torch.bfloat16):
    shapes = [(HEADS, NOPE), (HEADS, ROPE), (RANK,), (ROPE,)]
    return [torch.randn(batch, length, *shape, dtype=dtype, device="cuda") for shape in shapes]


def new_caches(batch, length, dtype=torch.bfloat16):
    return [torch.zeros(batch, length, size, dtype=dtype, device="cuda") for size in (RANK, ROPE)]


def random_kv_up(dtype=torch.bfloat16):
    return torch.randn(HEADS * (NOPE + VALUE), RANK, dtype=dtype, device="cuda") * RANK**-0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_and_decode_equal_the_cpu(dtype):
    lengths = [9, 4, 1]
    caches, kv_up = new_caches(4, 32, dtype), random_kv_up(dtype)
    host = [c.cpu().double() for c in caches]
    tol = 1e-4 if dtype == torch.float32 else 3e-2

    def both(tokens, positions):
        got = mla_attention(*tokens, kv_up, positions.cuda(), *caches, SCALE)
        want = mla_attention(*[t.cpu().double() for t in tokens], kv_up.cpu().double(), positions, *host, SCALE)
        torch.testing.assert_close(got.cpu().double(), want, atol=tol, rtol=tol)

    both(inputs(3, 9, dtype), torch.arange(9).repeat(3, 1))
    for step in range(3):
        both(inputs(3, 1, dtype), torch.tensor([[n + step] for n in lengths]))
    both(inputs(3, 4, dtype), torch.arange(12, 16).repeat(3, 1))  # a chunk that does not start at zero


def test_a_decode_step_replays_in_a_cuda_graph_as_positions_advance():
    tokens, kv_up = inputs(2, 1), random_kv_up()
    positions = torch.tensor([[3], [7]], device="cuda")
    caches = [torch.randn_like(c) for c in new_caches(2, 16)]
    copies = [c.clone() for c in caches]
    mla_attention(*tokens, kv_up, positions, *[c.clone() for c in caches], SCALE)  # warm up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mla_attention(*tokens, kv_up, positions, *caches, SCALE)
    for _ in range(3):
        for t in tokens:
            t.normal_()
        positions += 1
        graph.replay()
        torch.testing.assert_close(out, mla_attention(*tokens, kv_up, positions, *copies, SCALE))
    assert all(torch.equal(a, b) for a, b in zip(caches, copies, strict=True))
