"""With deterministic algorithms on, a run gives the same bits as the run before it."""

from __future__ import annotations

import hashlib

import pytest
import torch

import graphfuse
from graphfuse import FuseConfig, SamplingParams
from graphfuse.generation import LLM
from graphfuse.models import registry
from tests.models import tiny

PROMPTS = ["The capital", "A", "One two three four five six seven."]
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=3)


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def one_run(group, family, executor):
    torch.manual_seed(5)
    config = tiny.config(family)
    model = registry.build(config, group, torch.bfloat16, "cpu").eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(7 + torch.distributed.get_rank(group))
    for parameter in model.parameters():
        parameter.normal_(generator=generator)
    with graphfuse.compile(model, group, config=FuseConfig(executor=executor)) as compiled:
        ids = torch.arange(34).reshape(2, 17) % 60
        return digest(compiled(ids)), digest(compiled(ids[:1, :3])), digest(compiled(ids))


def logits(group, family, executor):
    torch.use_deterministic_algorithms(True)
    try:
        return one_run(group, family, executor)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_logits_are_bitwise_equal_from_run_to_run_and_call_to_call(ranks, family, executor):
    runs = [ranks.run(2, logits, family, executor, timeout=280) for _ in range(2)]
    assert runs[0] == runs[1]
    first, other, again = runs[0][0]
    assert first == again != other


def completions(group, folder):
    torch.use_deterministic_algorithms(True)
    try:
        with LLM(folder, group, device="cpu") as llm:
            return [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
    finally:
        torch.use_deterministic_algorithms(False)


def test_sampled_completions_are_equal_from_run_to_run_and_rank_to_rank(ranks, checkpoint):
    first, second = ranks.run(2, completions, checkpoint), ranks.run(2, completions, checkpoint)
    assert first[0] == first[1] == second[0] == second[1]
