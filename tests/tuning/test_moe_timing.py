"""Timing of MoE layers: refused without a GPU; on one, a time is that of the work, whatever is timed beside it."""

import pytest
import torch

from graphfuse.errors import BackendUnavailableError
from graphfuse.tuning.moe_timing import record, replay_rounds, time_calls, time_candidates


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_without_a_gpu_nothing_is_timed_and_no_call_is_made():
    for timed in (lambda: time_calls([pytest.fail]), lambda: time_candidates({"a": [pytest.fail]})):
        with pytest.raises(BackendUnavailableError, match="there is no CUDA GPU here"):
            timed()


@pytest.mark.gpu
def test_a_time_is_that_of_a_copy_over_the_memorys_rate():
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    half = 1 << 29
    times = time_candidates(
        {
            "whole": [lambda: target.copy_(source)] * 2,
            "half": [lambda: target[:half].copy_(source[:half]), lambda: target[half:].copy_(source[half:])],
        }
    )
    assert times["whole"] == pytest.approx(2 * times["half"], rel=0.05)
    assert times["whole"] == pytest.approx(time_calls([lambda: target.copy_(source)]), rel=0.05)
    assert 2 * source.numel() / times["whole"] / 1e3 > 500, "GB/s, at least half of what any supported GPU has"


@pytest.mark.gpu
def test_recordings_share_a_pool_and_give_a_time_a_round():
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    pool = torch.cuda.graph_pool_handle()
    times = replay_rounds({name: record([lambda: x @ x] * 4, pool) for name in "ab"}, rounds=5)
    assert [len(each) for each in times.values()] == [5, 5]
    assert min(times["a"]) == pytest.approx(min(times["b"]), rel=0.1)
