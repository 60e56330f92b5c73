"""The sort of choices by expert, run by `test_moe_kernels.py` in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from graphfuse.kernels.moe_sort import ONE_PROGRAM, sort_choices
from tests.kernels.interpreter_as_gpus import arithmetic_of_gpus


@pytest.fixture(autouse=True)
def arithmetic_and_memory_of_gpus():
    torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote
    with arithmetic_of_gpus():
        yield


def expected(ids, first, num_experts, block_m):
    """(expert, number of choices) of each block."""
    found = []
    for expert in range(num_experts):
        choices = (ids.flatten() == first + expert).nonzero().flatten().tolist()
        found += [(expert, min(block_m, len(choices) - at)) for at in range(0, len(choices), block_m)]
    return found


def check(ids, first, num_experts, block_m):
    order, blocks, num_blocks = sort_choices(ids, first, num_experts, block_m, {"DEPENDENT_LAUNCH": False})
    flat, listed, seen = ids.flatten().long(), [], []
    for expert, start, end in blocks[: 3 * num_blocks].view(-1, 3).tolist():
        if expert < 0:
            continue
        rows = order[start : min(start + block_m, end)].tolist()
        assert (flat[rows] == first + expert).all()
        listed.append((expert, len(rows)))
        seen += rows
    assert sorted(listed) == sorted(expected(ids, first, num_experts, block_m))
    held = ((flat >= first) & (flat < first + num_experts)).nonzero().flatten().tolist()
    assert sorted(seen) == held  # each choice of a held expert once


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (33, 8), (130, 10)])
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_every_choice_of_a_held_expert_is_in_one_block_of_it(shape, block_m, ids_dtype):
    generator = torch.Generator().manual_seed(0)
    for num_experts in (1, 7, 64):
        for first, total in ((0, num_experts), (3, num_experts + 9)):
            ids = torch.randint(0, total, shape, generator=generator).to(ids_dtype)
            check(ids, first, num_experts, block_m)


@pytest.mark.parametrize("expert", [0, 4, 5, 7, -1])
def test_one_expert_takes_all(expert):
    check(torch.full((40, 3), expert, dtype=torch.int32), 2, 4, 16)


def test_more_choices_than_one_program_sorts():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-1, 12, (ONE_PROGRAM // 4 + 5, 4), generator=generator).int()
    for first, num_experts, block_m in ((0, 12, 64), (3, 5, 128), (0, 1, 256)):
        check(ids, first, num_experts, block_m)
    check(torch.full_like(ids, 4), 0, 6, 64)
