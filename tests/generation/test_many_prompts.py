"""Many prompts: of a real model, against transformers one by one; and of a tiny one, in memory that does not grow."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from graphfuse.generation import LLM, Job, SamplingParams
from tests import smollm2

MAX_TOKENS = 24
GAP = 1e-3
"""Tokens whose logits are nearer than this may change places when sums are taken in another order."""

TEXT = (
    "the capital of France is a city with many bridges and old streets where people walk in spring while music plays "
    "numbers one two three four five six seven a story about a sailor who counts waves and writes letters to the moon"
)


def make_prompts(count: int) -> list[str]:
    """From one word to some hundred tokens; some begin alike."""
    rng, known = random.Random(0), TEXT.split()
    beginning = f"Here is what you should know before you answer. {TEXT}"
    prompts = []
    for i in range(count):
        words = " ".join(rng.choice(known) for _ in range(rng.choice([1, 3, 9, 30, 120])))
        prompts.append(f"{beginning} {words}" if i % 4 == 0 else words)
    return prompts


def tokens_of(group, folder, prompts, order, sizes):
    """Task of one rank: the tokens of each prompt, prompts in this order; and how often one was preempted."""
    llm = LLM(folder, group, device="cpu", dtype=torch.float32, **sizes)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    jobs = (Job(i, prompts[i], params) for i in order)
    found = {key: completions[0].token_ids for key, completions in llm.complete(jobs)}
    assert llm.report is not None and llm.report.num_graphs == 1
    return found, llm.stats


@pytest.mark.slow
@pytest.mark.timeout(1200)
@smollm2.installed
def test_greedy_tokens_of_a_real_model_are_those_of_transformers(ranks):
    folder, prompts = smollm2.build(), make_prompts(64)
    order = list(range(64))
    roomy = ranks.run(2, tokens_of, folder, prompts, order, {"max_batch_size": 16}, timeout=600.0)
    random.Random(1).shuffle(order)
    # Little more than the longest prompt: sequences must give way to each other.
    small = {"max_batch_size": 7, "cache_tokens": 288, "page_size": 8, "max_step_tokens": 50}
    tight = ranks.run(2, tokens_of, folder, prompts, order, small, timeout=600.0)
    assert roomy[0][0] == roomy[1][0] and tight[0][0] == tight[1][0]
    assert roomy[0][1].shared_tokens > 0 and tight[0][1].num_preempted > 0

    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    num_near = 0
    for i, prompt in enumerate(prompts):
        prompt_ids = tokenizer(prompt)["input_ids"]
        for found in {tuple(roomy[0][0][i]), tuple(tight[0][0][i])}:
            # Greedy is: each token is the likeliest behind those before it. One pass finds out for all of them.
            with torch.no_grad():
                logits = model(torch.tensor([prompt_ids + list(found)])).logits[0, len(prompt_ids) - 1 : -1]
            behind = logits.amax(-1) - logits.gather(1, torch.tensor(found)[:, None])[:, 0]
            assert behind.max() < GAP, f"prompt {i}: {found}, which are {behind.tolist()} behind the likeliest"
            num_near += int((behind > 0).any())
            ended = found[-1] == model.generation_config.eos_token_id
            assert ended or len(found) == MAX_TOKENS
    assert num_near <= 8, "near ties are rare"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_prompts(checkpoint):
    llm = LLM(checkpoint, device="cpu", compile=False, max_batch_size=64)
    params = SamplingParams(max_tokens=2)
    after_warm_up = None
    for done, _ in enumerate(llm.complete(Job(i, [5 + i % 300, 7, i % 251], params) for i in range(10_000))):
        if done == 2000:
            gc.collect()
            after_warm_up = resident_bytes()
    gc.collect()
    assert after_warm_up is not None
    assert resident_bytes() - after_warm_up < 50 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
