"""Each kind of mixer through the engine: what transformers generates, and the same whatever executes the graph."""

from __future__ import annotations

import pytest
import torch

from graphfuse.config import FuseConfig
from graphfuse.generation import LLM, SamplingParams
from tests.generation.conftest import make_tokenizer
from tests.models import tiny

PROMPTS = ["The capital", "A", "One two three four five six seven. The cat sat on the mat. " * 3, "日本 🙂"]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
FAMILIES = ("mistral", "qwen3_moe", "qwen3_next", "deepseek_v3", "deepseek_v32", "gpt_oss")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint with a tokenizer, and what transformers continues each prompt with; once a family."""
    known = {}

    def make(family):
        if family not in known:
            folder, tokenizer, config = tmp_path_factory.mktemp(family), make_tokenizer(), tiny.config(family)
            config.vocab_size, config.max_position_embeddings = len(tokenizer), 256
            model = tiny.model_of(config).eval()
            tiny.randomise(model, torch.Generator().manual_seed(0))
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            expected = []
            for prompt in PROMPTS:
                ids = torch.tensor([tokenizer(prompt)["input_ids"]])
                output = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0)
                expected.append(output[0, ids.shape[1] :].tolist())
            known[family] = folder, expected
        return known[family]

    return make


@pytest.mark.parametrize("family", ["mistral", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES[1:])])
def test_tokens_are_those_of_transformers_in_chunks_and_small_pages(made, family):
    folder, expected = made(family)
    sizes = {"max_batch_size": 3, "max_step_tokens": 11, "page_size": 4, "cache_tokens": 160}
    llm = LLM(folder, device="cpu", compile=False, **sizes)
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_serves_all_steps(made, family, executor):
    folder, expected = made(family)
    with LLM(folder, device="cpu", config=FuseConfig(executor=executor)) as llm:
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected
        assert llm.report.num_graphs == 1


def tokens_of(group, folder):
    llm = LLM(folder, group, device="cpu", max_batch_size=2, max_step_tokens=30, page_size=8)
    found = [c.token_ids for c in llm.generate(PROMPTS, GREEDY)]
    return found, [site.status for site in llm.report.sites]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_agree_and_every_reduction_is_fused(ranks, made, family, tp):
    folder, expected = made(family)
    for found, statuses in ranks.run(tp, tokens_of, folder, timeout=200.0):
        assert found == expected
        assert set(statuses) <= {"fused", "merged"} and statuses
