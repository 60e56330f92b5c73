"""Loads on a real engine of a tiny model: what is timed, and that there is room for all of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from graphfuse.config import FuseConfig
from graphfuse.errors import ConfigError, GenerationError
from graphfuse.generation.build import Sizes, build_engine
from graphfuse.generation.engine import Engine
from graphfuse.models import registry
from graphfuse.models.causal_lm import CausalLM
from graphfuse.tuning.generate_load import first_token, random_prompts, run_batch, run_offline, warm_up
from graphfuse.tuning.generate_plan import FUSED, PAGE_SIZE, UNFUSED, OfflineLoad, Plan
from graphfuse.weights.random_weights import randomise

CPU = torch.device("cpu")
VOCAB = 64


def plan(batches: tuple[int, ...] = (1,), input_len: int = 20, output_len: int = 8, **more) -> Plan:
    defaults = {"offline": None, "repeats": 1, "max_step_tokens": 64, "bandwidth": 4.3, "time_limit": None}
    return Plan(batches, input_len, output_len, (FUSED, UNFUSED), **defaults | more)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCAB,
    )  # fmt: skip
    made = registry.build(config, None, torch.float32, "cpu").requires_grad_(False)
    randomise(made)
    return made


def engine_for(model: CausalLM, found: Plan, fit: int = 1 << 20) -> Engine:
    sizes = Sizes(found.max_batch_size, found.max_length, found.cache_tokens(fit), PAGE_SIZE, found.max_step_tokens)
    return build_engine(model, None, FuseConfig(watch=False), sizes, eos=frozenset(), compile=False).engine


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 9),
    input_len=st.integers(1, 50),
    output_len=st.integers(2, 12),
    max_step_tokens=st.integers(18, 60),
    seed=st.integers(0, 3),
)
def test_the_whole_batch_decodes_in_every_timed_step(model, batch, input_len, output_len, max_step_tokens, seed):
    """`run_batch` asserts that no sequence has ended, and the engine that its cache has room without preempting."""
    wanted = plan((batch,), input_len, output_len, max_step_tokens=max_step_tokens)
    engine = engine_for(model, wanted)
    (workload,) = wanted.workloads
    warm_up(engine, workload, VOCAB, CPU)
    run = run_batch(engine, random_prompts(batch, input_len, VOCAB, seed), workload, device=CPU)
    assert len(run.steps) == workload.num_timed >= 1
    assert workload.num_timed + workload.num_left_out == output_len - 1
    assert len(run.ttft) == batch and all(0 < seconds < 60 for seconds in run.ttft)
    assert engine.scheduler.num_preempted == engine.scheduler.num_shared_tokens == engine.num_unfinished == 0
    assert run.context >= input_len + workload.num_left_out + (workload.num_timed + 1) / 2


def test_the_context_is_that_of_the_middle_of_what_is_timed(model):
    wanted = plan((1,), input_len=20, output_len=14)  # 13 steps, 4 of which are left out
    run = run_batch(engine_for(model, wanted), random_prompts(1, 20, VOCAB, 0), wanted.workloads[0], device=CPU)
    assert run.context == 20 + 4 + 5


def test_energy_is_that_of_the_timed_steps(model):
    wanted, readings = plan((2,)), iter([100.0, 103.5])
    engine = engine_for(model, wanted)
    prompts = random_prompts(2, 20, VOCAB, 0)
    run = run_batch(engine, prompts, wanted.workloads[0], device=CPU, joules=lambda: next(readings))
    assert run.joules == 3.5


def test_an_offline_load_ends_with_every_token(model):
    wanted = plan(offline=OfflineLoad(7, 5, 4))
    engine = engine_for(model, wanted)
    assert run_offline(engine, random_prompts(7, 5, VOCAB, 0), 4, CPU) > 0
    assert engine.stats.prefill_tokens == 7 * 5
    assert engine.stats.decode_tokens == 7 * 3 and engine.num_unfinished == 0


def test_the_first_token_and_the_step_behind_it(model):
    engine = engine_for(model, plan())
    to_first, step = first_token(engine, random_prompts(1, 20, VOCAB, 0)[0], CPU)
    assert to_first > 0 and step > 0 and engine.num_unfinished == 0


def test_logits_that_are_not_finite_end_the_measurement(model):
    wanted = plan((2,))
    engine = engine_for(model, wanted)
    weight, model.norm.weight.data = model.norm.weight.data, torch.full_like(model.norm.weight.data, torch.nan)
    try:
        with pytest.raises(GenerationError, match="NaN"):
            run_batch(engine, random_prompts(2, 20, VOCAB, 0), wanted.workloads[0], device=CPU)
    finally:
        model.norm.weight.data = weight


def test_prompts_are_the_same_for_a_seed_and_begin_differently_for_another():
    assert random_prompts(3, 40, 1000, 5) == random_prompts(3, 40, 1000, 5)
    first = [tuple(prompt[:PAGE_SIZE]) for seed in (5, 6) for prompt in random_prompts(3, 40, 1000, seed)]
    assert len(set(first)) == 6


def test_an_engine_has_room_for_the_largest_batch_and_for_as_much_of_the_offline_load_as_fits():
    found = plan((2, 5), offline=OfflineLoad(300, 30, 10), max_step_tokens=1024)
    assert found.max_batch_size == 256
    batch = 5 * -(-found.workloads[1].length // PAGE_SIZE) * PAGE_SIZE
    assert found.cache_tokens(batch) == batch
    assert found.cache_tokens(batch + 100) == batch + 100
    assert found.cache_tokens(1 << 30) == 256 * 48
    with pytest.raises(ConfigError, match=f"A batch of 5 needs a cache of {batch} tokens for each engine"):
        found.cache_tokens(batch - 1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"batches": (33,)}, "Steps of 64 tokens leave too little room .* 33 sequences. Use at least 66"),
        ({"output_len": 1}, "1 output token leaves no step to time"),
    ],
)
def test_what_cannot_be_measured_is_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        plan(**more)
