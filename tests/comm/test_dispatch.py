"""Dispatch, with a made-up backend on gloo ranks: by message bytes, always reduced, FP8 by the backend or after it."""

import pytest
import torch
import torch.distributed as dist

from graphfuse.comm import dispatch
from graphfuse.comm import pool as pool_module
from graphfuse.comm.call import FusedCall
from graphfuse.comm.pool import Pool
from graphfuse.errors import BackendUnavailableError
from graphfuse.kernels.norm_epilogue import quantize_fp8
from tests.comm.fake_backend import FLOAT, ROW, FakeBackend, decision


def dispatched(group, breaks=False):
    """Calls of 4, 5 and 0 tokens, of another hidden size, and in float64, through the process's pool."""
    backend = FakeBackend()
    pool_module.process_pool, before = Pool({"flashinfer": backend}), pool_module.process_pool
    try:
        pool_module.prepare(group, decision(4), **FLOAT)
        backend.made[0].breaks = breaks
        results = []
        for tokens, hidden, dtype in [(4, 8, None), (5, 8, None), (0, 8, None), (4, 16, None), (2, 8, torch.float64)]:
            x = torch.ones(tokens, hidden, dtype=dtype)
            normed, summed = dispatch.run(FusedCall(x, None, None, 1e-6), group.group_name)
            reduced = torch.equal(summed, x * dist.get_world_size(group))
            results.append((bool((normed == 42.0).any()), reduced))
        return results
    except BackendUnavailableError as error:
        return str(error)
    finally:
        pool_module.process_pool = before


def test_dispatch_goes_by_message_bytes_and_every_choice_reduces(ranks):
    for results in ranks.run(2, dispatched):
        assert [fused for fused, _ in results] == [True, False, False, False, False]
        assert all(reduced for _, reduced in results)


def test_a_backend_that_fails_in_the_middle_is_an_error_and_not_another_backend_on_one_rank(ranks):
    assert ranks.run(2, dispatched, True) == ["broken in the middle"] * 2


def test_choose_takes_the_first_range_that_holds_the_message():
    ranges = decision(4).ranges
    assert dispatch.choose(ranges, 4 * ROW).backend == "flashinfer"
    assert dispatch.choose(ranges, 4 * ROW + 1).backend == "reference"
    assert dispatch.choose(ranges[:1], 4 * ROW + 1) is None


def in_fp8(group, quantises, tokens, form):
    """One call of hidden size 128 with FP8 outputs; up to 2 tokens go to the backend."""
    backend = FakeBackend(quantises=quantises)
    pool_module.process_pool, before = Pool({"flashinfer": backend}), pool_module.process_pool
    try:
        pool_module.prepare(group, decision(2 * 128 // 8), **{**FLOAT, "hidden_size": 128})
        x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(1))
        call = FusedCall(x, None, None, 1e-6, fp8=form, scale=torch.tensor(0.25) if form == "static" else None)
        normed, summed, *quantised = dispatch.run(call, group.group_name)
        assert torch.equal(summed, x * dist.get_world_size(group))
        as_if = [quantize_fp8(value, form, call.scale) for value in (normed, -normed)]
        equal = [all(torch.equal(*pair) for pair in zip(quantised, pair_of, strict=True)) for pair_of in as_if]
        return bool((normed == 42.0).all()), equal, backend.made[0].calls
    finally:
        pool_module.process_pool = before


@pytest.mark.parametrize("form", ["static", "token", "group"])
def test_a_backend_that_quantises_does_so_itself(ranks, form):
    for fused, (_, by_the_backend), calls in ranks.run(2, in_fp8, True, 2, form):
        assert fused and by_the_backend  # it quantises the negative value, recognisably
        assert calls == [("oneshot", form)]


@pytest.mark.parametrize("form", ["static", "token", "group"])
def test_what_a_backend_does_not_quantise_is_quantised_after_it(ranks, form):
    for fused, (of_normed, _), calls in ranks.run(2, in_fp8, False, 2, form):
        assert fused and of_normed
        assert calls == [("oneshot", None)]


@pytest.mark.parametrize("form", ["static", "token", "group"])
def test_the_references_result_is_quantised_after_it(ranks, form):
    for fused, (of_normed, _), calls in ranks.run(2, in_fp8, True, 3, form):
        assert not fused and of_normed
        assert calls == []
