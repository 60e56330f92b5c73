"""Sampling on a GPU: repeatable to the bit, and the same tokens as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphfuse.generation.drawing import token_weights
from graphfuse.generation.sampler import Sampler, Uniforms
from graphfuse.generation.sampling import SamplingParams

pytestmark = pytest.mark.gpu

V = 151_936
EOS = frozenset({11, 12})
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=40, min_p=0.02),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, min_tokens=20, logprobs=3),
]
SLOTS = [1, 2, 3, 4, 5]


def started(device: str, params=PARAMS) -> Sampler:
    sampler = Sampler(len(params) + 1, V, torch.device(device))
    for slot, each in enumerate(params, 1):
        sampler.begin(slot, each, range(0, 3000, 7), EOS)
    return sampler


def uniforms_for(step: int) -> Tensor:
    return torch.tensor([Uniforms(seed, step).next() for seed in SLOTS], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_equal_those_of_the_cpu(dtype):
    generator = torch.Generator().manual_seed(0)
    cpu, gpu = started("cpu"), started("cuda")
    bitmask = torch.randint(-(2**31), 2**31, (5, V // 32), generator=generator).to(torch.int32)
    for step in range(40):
        logits = (3 * torch.randn(5, V, generator=generator)).to(dtype)
        mask = bitmask if step % 2 else None
        expected = cpu(logits, SLOTS, [step] * 5, uniforms_for(step), mask)
        actual = gpu(logits.cuda(), SLOTS, [step] * 5, uniforms_for(step).cuda(), None if mask is None else mask.cuda())
        assert actual.tokens.tolist() == expected.tokens.tolist()
        torch.testing.assert_close(actual.logprob.cpu(), expected.logprob, atol=1e-4, rtol=1e-4)  # sums of V terms


def test_candidates_are_found_as_on_the_cpu():
    params = [SamplingParams(temperature=1.0, top_k=k, top_p=0.95) for k in (1, 20, 1000)]
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(3)).bfloat16()  # with many equals
    cpu, gpu = started("cpu", params), started("cuda", params)
    for step in range(20):
        uniforms = uniforms_for(step)[:3]
        expected = cpu(logits, [1, 2, 3], [step] * 3, uniforms).tokens
        assert gpu(logits.cuda(), [1, 2, 3], [step] * 3, uniforms.cuda()).tokens.tolist() == expected.tolist()


def test_scans_do_not_depend_on_the_order_of_the_threads():
    logits = 3 * torch.randn(32, V, generator=torch.Generator().manual_seed(1)).cuda()
    temperature = torch.ones(32, device="cuda")
    first = token_weights(logits, temperature).cumsum(-1)
    assert all(torch.equal(token_weights(logits, temperature).cumsum(-1), first) for _ in range(50))


def test_the_host_waits_for_the_gpu_nowhere():
    sampler = started("cuda")
    logits = torch.randn(5, V, device="cuda")
    uniforms = uniforms_for(0).cuda()
    bitmask = torch.full((5, V // 32), -1, dtype=torch.int32, device="cuda")
    sampler(logits, SLOTS, [0] * 5, uniforms, bitmask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler(logits, SLOTS, [1] * 5, uniforms, bitmask)
        sampler.begin(2, PARAMS[-1], [1, 2, 3], EOS)
        sampler(logits, SLOTS, [30] * 5, uniforms, bitmask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
