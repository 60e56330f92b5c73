"""The attention and experts ops on a GPU: the same numbers as on the CPU, and CUDA-graph capture."""

from __future__ import annotations

import pytest
import torch

from graphfuse.ops.attention import attention
from graphfuse.ops.moe import moe_experts

pytestmark = pytest.mark.gpu


def qkv(batch, length, dtype=torch.bfloat16, heads=8, kv_heads=2, head_dim=64):
    shape = (batch, length)
    return [torch.randn(*shape, n, head_dim, dtype=dtype, device="cuda") for n in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_and_decode_equal_the_cpu(window, dtype):
    lengths = [9, 4, 1]
    caches = [torch.zeros(4, 32, 2, 64, dtype=dtype, device="cuda") for _ in range(2)]
    host = [c.cpu().float() for c in caches]
    tol = 1e-4 if dtype == torch.float32 else 2e-2

    def both(q, k, v, positions):
        got = attention(q, k, v, positions.cuda(), *caches, 0.125, window)
        want = attention(q.cpu().float(), k.cpu().float(), v.cpu().float(), positions, *host, 0.125, window)
        torch.testing.assert_close(got.cpu().float(), want, atol=tol, rtol=tol)

    both(*qkv(3, 9, dtype), torch.arange(9).repeat(3, 1))
    for step in range(3):
        both(*qkv(3, 1, dtype), torch.tensor([[n + step] for n in lengths]))
    both(*qkv(3, 4, dtype), torch.arange(12, 16).repeat(3, 1))  # a chunk that does not start at zero


def test_a_decode_step_replays_in_a_cuda_graph_as_positions_advance():
    q, k, v = qkv(2, 1)
    positions = torch.tensor([[3], [7]], device="cuda")
    caches = [torch.randn(2, 16, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    copies = [c.clone() for c in caches]
    attention(q, k, v, positions, *[c.clone() for c in caches], 0.125, None)  # warm up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, positions, *caches, 0.125, None)
    for _ in range(3):
        for t in (q, k, v):
            t.normal_()
        positions += 1
        graph.replay()
        torch.testing.assert_close(out, attention(q, k, v, positions, *copies, 0.125, None))
    assert all(torch.equal(a, b) for a, b in zip(caches, copies, strict=True))


def experts(num_tokens, num_experts=16, top_k=4, hidden=256, inner=128):
    def random(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") / 8

    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).cuda()
    weights = torch.rand(num_tokens, top_k, device="cuda")
    return (
        random(num_tokens, hidden),
        random(num_experts, 2 * inner, hidden),
        random(num_experts, hidden, inner),
        ids,
        weights,
    )


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_equal_the_cpu_in_float32(num_tokens, layout, biased):
    args = experts(num_tokens)
    biases = [torch.randn(16, n, dtype=torch.bfloat16, device="cuda") if biased else None for n in (256, 256)]
    got = moe_experts(*args, 16, gate_up_layout=layout, gate_up_bias=biases[0], down_bias=biases[1])
    host = [t.cpu().float() if t.is_floating_point() else t.cpu() for t in args]
    host_biases = [None if b is None else b.cpu().float() for b in biases]
    want = moe_experts(*host, 16, gate_up_layout=layout, gate_up_bias=host_biases[0], down_bias=host_biases[1])
    torch.testing.assert_close(got.cpu().float(), want, atol=2e-2 * float(want.abs().max()), rtol=0)


def test_experts_held_elsewhere_contribute_nothing():
    tokens, gate_up, down, ids, weights = experts(33)
    whole = moe_experts(tokens, gate_up, down, ids, weights, 16)
    shares = [
        moe_experts(tokens, gate_up[a:b], down[a:b], ids, weights, 16, first_expert=a) for a, b in [(0, 5), (5, 16)]
    ]
    torch.testing.assert_close(sum(shares).float(), whole.float(), atol=2e-2 * float(whole.abs().max()), rtol=0)


def test_experts_replay_in_a_cuda_graph_as_ids_change():
    args = experts(5)
    moe_experts(*args, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_experts(*args, 16)
    for _ in range(3):
        args[0].normal_()
        args[3].copy_(torch.stack([torch.randperm(16)[:4] for _ in range(5)]))
        graph.replay()
        torch.testing.assert_close(out, moe_experts(*args, 16))


def test_float16_and_float32_take_the_reference():
    for dtype in (torch.float16, torch.float32):
        args = [t.to(dtype) if t.dtype == torch.bfloat16 else t for t in experts(6)]
        host = [t.cpu().float() if t.is_floating_point() else t.cpu() for t in args]
        want = moe_experts(*host, 16)
        torch.testing.assert_close(moe_experts(*args, 16).cpu().float(), want, atol=1e-2, rtol=1e-2)
