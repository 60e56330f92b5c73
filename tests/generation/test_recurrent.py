"""Models with a recurrent state generate what transformers generates: whatever stands beside a row or behind its end,
and whatever the rows of the cache held before."""

from __future__ import annotations

import pytest
import torch

from graphfuse.generation import LLM, SamplingParams
from tests.generation.conftest import make_tokenizer
from tests.models import tiny
from tests.models.tiny_delta import qwen3_next

LONG = "One two three four five six seven. The cat sat on the mat. " * 4  # more tokens than a chunk of the prefill
PROMPTS = ["The capital", LONG, "A", "日本 🙂"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-qwen3-next")
    tokenizer, config = make_tokenizer(), qwen3_next()
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 256
    model = tiny.model_of(config).eval()
    tiny.randomise(model, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def greedy(folder):
    """What transformers continues a prompt with, each by itself."""
    model = tiny.model_of(qwen3_next()).from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")

    def continued(token_ids: list[int], max_tokens: int) -> list[int]:
        output = model.generate(
            torch.tensor([token_ids]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        return output[0, len(token_ids) :].tolist()

    return continued


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_greedy_tokens_of_an_unequal_batch_are_those_of_transformers(folder, greedy, compile):
    llm = LLM(folder, device="cpu", compile=compile, max_batch_size=4)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    completions = llm.generate(PROMPTS, params)
    assert len(completions[1].prompt_token_ids) > 64
    for completion in completions:
        assert completion.token_ids == greedy(completion.prompt_token_ids, 12)
    again = llm.generate(PROMPTS[::-1], params)  # each row of the cache held another text
    assert [c.token_ids for c in again] == [c.token_ids for c in completions][::-1]


def completions(group, folder):
    llm = LLM(folder, group, device="cpu", compile=False)
    return [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_agree_with_each_other_and_with_a_single_process(ranks, folder, tp):
    results = ranks.run(tp, completions, folder)
    assert all(result == completions(None, folder) for result in results)
