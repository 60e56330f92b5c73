"""The reference backend: complete, rounded like the model's own code, equal on every rank, for any size of group."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from graphfuse.comm import dispatch
from graphfuse.comm.call import FusedCall
from graphfuse.comm.reference import add_rms_norm, run


def tensors(rank, shape, dtype):
    """A partial sum that differs by rank, and a residual and weight that do not."""
    own = torch.Generator().manual_seed(rank + 1)
    common = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=own).to(dtype)
    residual = torch.randn(shape, generator=common).to(dtype)
    weight = (1 + torch.randn(shape[-1], generator=common)).to(dtype)
    return x, residual, weight


def llama_norm(hidden_states, weight, eps):
    """As transformers writes it for Llama: the cast stands before the weight."""
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    return weight * hidden_states.to(input_dtype)


def gemma_norm(hidden_states, weight, eps):
    """As transformers writes it for Gemma and Qwen3-Next: one more, and the cast stands last."""
    output = hidden_states.float() * torch.rsqrt(hidden_states.float().pow(2).mean(-1, keepdim=True) + eps)
    return (output * (1.0 + weight.float())).type_as(hidden_states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_add_and_norm_are_the_models_own_bit_by_bit(dtype):
    x, residual, weight = tensors(0, (5, 96), dtype)
    normed, summed = add_rms_norm(x, residual, weight, 1e-5, 0.0, True)
    assert torch.equal(summed, residual + x)
    assert torch.equal(normed, llama_norm(residual + x, weight, 1e-5))
    assert torch.equal(add_rms_norm(x, None, weight, 1e-6, 1.0, False)[0], gemma_norm(x, weight, 1e-6))


def test_float64_stays_float64():
    x, residual, weight = tensors(0, (5, 96), torch.float64)
    f = residual + x
    expected = weight * f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(add_rms_norm(x, residual, weight, 1e-5, 0.0, True)[0], expected, rtol=1e-14, atol=0)


def unfused_and_fused(group, dtype, shape):
    """The unfused chain and the op on the same tensors; x must come out as it went in."""
    results = []
    for with_residual, cast_before_weight in itertools.product([True, False], [True, False]):
        x, residual, weight = tensors(dist.get_rank(group), shape, dtype)
        before = x.clone()
        reduced = x.clone()
        dist.all_reduce(reduced, group=group)
        summed = residual + reduced if with_residual else reduced
        norm = llama_norm if cast_before_weight else gemma_norm
        weight_bias = 0.0 if cast_before_weight else 1.0
        call = FusedCall(x, residual if with_residual else None, weight, 1e-5, weight_bias, cast_before_weight)
        fused = run(call, group)
        assert torch.equal(x, before)
        dispatched = dispatch.run(call, group.group_name)
        results.append(((norm(summed, weight, 1e-5), summed), fused, dispatched))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_it_equals_the_unfused_chain_on_every_rank(ranks, tp, dtype):
    answers = ranks.run(tp, unfused_and_fused, dtype, (2, 3, 32))
    for rank_results in answers:
        for (unfused, fused, dispatched), first in zip(rank_results, answers[0], strict=True):
            for a, b, c, other_rank in zip(unfused, fused, dispatched, first[1], strict=True):
                assert torch.equal(a, b)
                assert torch.equal(b, c)
                assert torch.equal(b, other_rank)


def test_an_empty_batch_has_empty_results(ranks):
    for results in ranks.run(2, unfused_and_fused, torch.float32, (0, 32)):
        assert results[0][1][0].shape == results[0][1][1].shape == (0, 32)


def without_weight(group):
    x, residual, _ = tensors(dist.get_rank(group), (3, 32), torch.float32)
    return run(FusedCall(x, residual, None, 1e-5, weight_bias=1.0), group)


def test_without_a_weight_the_bias_of_the_weight_is_not_used(ranks):
    normed, summed = ranks.run(2, without_weight)[0]
    torch.testing.assert_close(normed, summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-5))


def with_dead_x(group, with_residual):
    x, residual, weight = tensors(dist.get_rank(group), (6, 32), torch.float32)
    before = x.clone()
    call = FusedCall(x, residual if with_residual else None, weight, 1e-5)
    alive = run(call, group)
    unchanged = torch.equal(x, before)
    dead = run(replace(call, x_is_dead=True), group)
    return unchanged, [torch.equal(a, b) for a, b in zip(alive, dead, strict=True)], torch.equal(x, before)


def test_only_a_dead_input_is_reduced_in_place_and_the_results_are_the_same(ranks):
    for unchanged, same, still in ranks.run(2, with_dead_x, True):
        assert unchanged and all(same)
        assert not still


def test_without_a_residual_the_sum_is_a_result_of_its_own(ranks):
    for unchanged, same, still in ranks.run(2, with_dead_x, False):
        assert unchanged and all(same) and still
