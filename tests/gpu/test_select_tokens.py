"""Sparse attention on a GPU: the same selections and numbers as on the CPU, and ragged decoding in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphfuse.ops.mla import mla_attention
from graphfuse.ops.select_tokens import select_tokens

pytestmark = pytest.mark.gpu
HEADS, NOPE, ROPE, VALUE, RANK, SCALE = 8, 128, 64, 128, 512, 192**-0.5
INDEX_HEADS, INDEX_SIZE, TOP_K, PAGE_SIZE = 64, 128, 20, 16


def inputs(total, dtype=torch.bfloat16) -> list[Tensor]:
    shapes = [(HEADS, NOPE), (HEADS, ROPE), (RANK,), (ROPE,), (INDEX_HEADS, INDEX_SIZE), (INDEX_SIZE,)]
    tokens = [torch.randn(1, total, *shape, dtype=dtype, device="cuda") for shape in shapes]
    return [*tokens, torch.randn(1, total, INDEX_HEADS, device="cuda")]


def new_caches(num_pages, dtype=torch.bfloat16):
    return [torch.zeros(num_pages, PAGE_SIZE, s, dtype=dtype, device="cuda") for s in (RANK, ROPE, INDEX_SIZE)]


def random_kv_up(dtype=torch.bfloat16):
    return torch.randn(HEADS * (NOPE + VALUE), RANK, dtype=dtype, device="cuda") * RANK**-0.5


def attend(tokens, up, positions, caches, **where):
    selected = select_tokens(*tokens[4:], positions, caches[2], TOP_K, **where)
    return mla_attention(*tokens[:4], up, positions, *caches[:2], SCALE, selected=selected, **where), selected


def place(spans, table):
    """positions and the rest of a ragged call of sequences 0, 1, ... with these (length, before)."""
    positions = torch.cat([torch.arange(before, before + length) for length, before in spans])
    rows = torch.arange(len(spans)).repeat_interleave(torch.tensor([length for length, _ in spans]))
    entries = table[rows, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    return positions[None].cuda(), {"entries": entries.cuda(), "pages": table.cuda(), "spans": torch.tensor(spans)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_and_tokens_equal_the_cpu(dtype):
    table = torch.randperm(12).view(3, 4) + 1
    caches, up = new_caches(13, dtype), random_kv_up(dtype)
    host = [c.cpu().double() for c in caches]
    tol = 1e-4 if dtype == torch.float32 else 3e-2
    for spans in ([(40, 0), (9, 0), (21, 0)], [(1, 40), (1, 9), (1, 21)], [(1, 41), (12, 10), (20, 22)]):
        tokens = inputs(sum(length for length, _ in spans), dtype)
        positions, where = place(spans, table)
        got, selected = attend(tokens, up, positions, caches, **where)
        there = {name: t.cpu() for name, t in where.items()}
        copies = [*(t.cpu().double() for t in tokens[:6]), tokens[6].cpu()]
        want, expected = attend(copies, up.cpu().double(), positions.cpu(), host, **there)
        assert torch.equal(selected.cpu().sort().values, expected.sort().values)
        torch.testing.assert_close(got.cpu().double(), want, atol=tol, rtol=tol)


def test_a_decode_step_replays_in_a_cuda_graph_as_positions_advance():
    table = torch.randperm(8).view(2, 4) + 1
    tokens, up = inputs(2), random_kv_up()
    caches = [torch.randn_like(c) for c in new_caches(9)]
    copies = [c.clone() for c in caches]
    positions, where = place([(1, 17), (1, 44)], table)
    attend(tokens, up, positions, [c.clone() for c in caches], **where)  # warm up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend(tokens, up, positions, caches, **where)
    for step in range(1, 5):  # the first sequence comes to have more tokens than are selected
        for t in tokens:
            t.normal_()
        now, there = place([(1, 17 + step), (1, 44 + step)], table)
        positions.copy_(now)
        where["entries"].copy_(there["entries"])
        graph.replay()
        torch.testing.assert_close(out, attend(tokens, up, now, copies, **there)[0])
    assert all(torch.equal(a, b) for a, b in zip(caches, copies, strict=True))
