"""Sampling on a GPU: repeatable to the bit, and the same tokens as on the CPU."""

from __future__ import annotations

import pytest
import torch

from graphfuse.generation.sampler import Sampler, token_weights
from graphfuse.generation.sampling import SamplingParams

pytestmark = pytest.mark.gpu

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=40),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_equal_those_of_the_cpu(dtype):
    generator = torch.Generator().manual_seed(0)
    cpu, gpu = (Sampler(PARAMS, [1, 2, 3, 4], torch.device(d)) for d in ("cpu", "cuda"))
    for step in range(50):
        logits = (3 * torch.randn(4, 151_936, generator=generator)).to(dtype)
        assert gpu(logits.cuda(), step).tolist() == cpu(logits, step).tolist()


def test_scans_do_not_depend_on_the_order_of_the_threads():
    logits = 3 * torch.randn(32, 151_936, generator=torch.Generator().manual_seed(1)).cuda()
    temperature = torch.ones(32, device="cuda")
    first = token_weights(logits, temperature).cumsum(-1)
    assert all(torch.equal(token_weights(logits, temperature).cumsum(-1), first) for _ in range(50))


def test_a_step_waits_for_the_gpu_only_where_tokens_are_read():
    sampler = Sampler(PARAMS, [1, 2, 3, 4], torch.device("cuda"))
    logits = torch.randn(4, 1000, device="cuda")
    sampler(logits, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler(logits, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
