"""Every rank of a group generates the same tokens by itself, at any group size."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from graphfuse.comm.timeout import TIMEOUT_VARIABLE
from graphfuse.errors import GroupError
from graphfuse.generation import LLM, SamplingParams
from graphfuse.generation.sampler import Sampled, Sampler

PROMPTS = ["The capital", "A", "One two three four five six seven. The cat sat on the mat."]
PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=1),
    SamplingParams(max_tokens=12, temperature=1.2, top_k=50, seed=2),
]
UNSEEDED = SamplingParams(max_tokens=12, temperature=1.0)


def completions(group, folder):
    llm = LLM(folder, group, device="cpu", compile=False)
    return llm.generate(PROMPTS, PARAMS), llm.generate(PROMPTS, UNSEEDED)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_ranks_agree_with_each_other_and_with_a_single_process(ranks, checkpoint, tp):
    results = ranks.run(tp, completions, checkpoint)
    assert all(result == results[0] for result in results)
    assert results[0][0] == completions(None, checkpoint)[0]


def sampled_unlike(group, folder):
    """Rank 1 samples other tokens than rank 0; while debugging that is noticed."""
    sample = Sampler.__call__

    def other(self, *args):
        return Sampled(sample(self, *args).tokens + group.rank())

    with mock.patch.dict(os.environ, {TIMEOUT_VARIABLE: "30"}):
        llm = LLM(folder, group, device="cpu", compile=False)
        good = llm.generate(PROMPTS, PARAMS[0])
        with mock.patch.object(Sampler, "__call__", other):
            try:
                llm.generate(PROMPTS, PARAMS[0])
            except GroupError as error:
                return len(good), str(error)
    return len(good), None


def test_while_debugging_ranks_compare_the_tokens_of_each_step(ranks, checkpoint):
    for count, error in ranks.run(2, sampled_unlike, checkpoint):
        assert count == 3
        assert error is not None and "The ranks differ in what they have sampled: the token of text " in error
