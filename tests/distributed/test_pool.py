"""The pool of ranks itself: groups, results, errors and timeouts."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import RankError, RankPool


def place(group):
    return dist.get_rank(group), dist.get_world_size(group), torch.get_num_threads()


def total(group, base):
    x = base + dist.get_rank(group)
    dist.all_reduce(x, group=group)
    return x


def fail_on_rank_one(group):
    if dist.get_rank(group) == 1:
        raise ValueError("broken on purpose")
    dist.barrier(group)


def pid(_group):
    return os.getpid()


def hang(group):
    if dist.get_rank(group) == 0:
        time.sleep(60)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_a_task_runs_on_the_first_ranks_with_their_group(ranks, tp):
    assert ranks.run(tp, place) == [(rank, tp, 1) for rank in range(tp)]
    for result in ranks.run(tp, total, torch.ones(3)):
        assert torch.equal(result, torch.full((3,), float(tp + tp * (tp - 1) // 2)))


def test_the_same_processes_serve_every_task(ranks):
    assert ranks.run(3, pid) == ranks.run(4, pid)[:3]


def test_errors_carry_the_traceback_timeouts_end_and_the_pool_works_on():
    pool = RankPool()
    try:
        with pytest.raises(RankError, match=r"(?s)fail_on_rank_one at TP 2.*rank 1:.*broken on purpose"):
            pool.run(2, fail_on_rank_one)
        with pytest.raises(RankError, match=r"no answer within 1.0 s from ranks \[0\]"):
            pool.run(2, hang, timeout=1.0)
        assert len(pool.run(2, pid)) == 2
    finally:
        pool.close()


def test_an_impossible_size_is_refused(ranks):
    with pytest.raises(ValueError, match="the pool has 4 ranks"):
        ranks.run(5, pid)
