"""Every rank of a group generates the same tokens by itself, at any group size."""

from __future__ import annotations

import pytest

from graphfuse.generation import LLM, SamplingParams

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
