"""How many tokens fit: what is there, divided by what a token takes, and what was asked for if that is less."""

from __future__ import annotations

import pytest
import torch

from graphfuse.generation import LLM, memory
from graphfuse.models import registry
from tests.models import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_next"])
def test_bytes_are_those_of_the_caches(family):
    model = registry.build(tiny.config(family))
    for num_tokens, num_states in ((7, 0), (0, 3), (5, 2)):
        caches = model.new_paged_caches(num_tokens, 1, num_states)
        assert memory.cache_bytes(model, num_tokens, num_states) == sum(t.nbytes for pair in caches for t in pair)


def test_states_come_off_what_is_there_and_the_rest_is_for_tokens(monkeypatch):
    model = registry.build(tiny.config("qwen3_next"))
    per_token, states = memory.cache_bytes(model, 1, 0), memory.cache_bytes(model, 0, 9)
    monkeypatch.setattr(memory, "_free_on_cpu", lambda group: states + 10 * per_token + per_token - 1)
    fit = memory.tokens_that_fit(model, None, num_states=9, max_step_tokens=8, max_length=64, device=CPU)
    assert fit == 10
    monkeypatch.setattr(memory, "_free_on_cpu", lambda group: states // 2)
    assert memory.tokens_that_fit(model, None, num_states=9, max_step_tokens=8, max_length=64, device=CPU) == 0


def test_a_llm_takes_what_fits_but_no_more_than_its_batch_can_fill(checkpoint, monkeypatch):
    roomy = LLM(checkpoint, device="cpu", compile=False, max_batch_size=3)
    assert (roomy.cache_tokens, roomy.max_length) == (3 * 128, 128)
    monkeypatch.setattr("graphfuse.generation.build.tokens_that_fit", lambda *args, **kwargs: 75)
    tight = LLM(checkpoint, device="cpu", compile=False, max_batch_size=3)
    assert (tight.cache_tokens, tight.max_length) == (64, 64)


def test_on_the_cpu_it_is_a_share_of_what_is_available_and_at_most_a_gibibyte():
    free = memory._free_on_cpu(None)
    assert 0 < free <= memory.CPU_MOST


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize(("num_tokens", "max_length"), [(40, 64), (40, 17), (18, 17), (1, 64)])
def test_the_largest_step_can_be_computed_in_little_memory(family, num_tokens, max_length):
    model = registry.build(tiny.config(family)).requires_grad_(False)
    inputs = memory.largest_step(model, 5, num_tokens, max_length, CPU)
    assert sum(inputs["spans"][:, 0]) == num_tokens and (inputs["spans"].sum(1) == max_length).all()
    assert model(**inputs).shape == (5, model.config.vocab_size)
    assert all(len(t) == (len(inputs["spans"]) + 1 if m.has_state else 2)
               for m, pair in zip(model.mixers, inputs["kv_caches"], strict=True) for t in pair)  # fmt: skip
