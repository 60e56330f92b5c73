"""A profile of one process, without the command line."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphfuse.config import FuseConfig
from graphfuse.errors import UnsupportedModelError
from graphfuse.models import registry
from graphfuse.profiling.calls import PAGE_SIZE, PREFILL, STEP, Calls, model_for
from graphfuse.profiling.measure import Plan, measure

CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)


@pytest.mark.parametrize(
    "transformers", [pytest.param(False, id="ours"), pytest.param(True, id="transformers", marks=pytest.mark.slow)]
)
def test_one_rank_has_nothing_to_fuse(transformers):
    ours = registry.build(CONFIG, None, torch.float32, "cpu")
    theirs = LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 1})).eval()
    model = (theirs if transformers else ours).requires_grad_(False)
    profile, traces = measure(model, "tiny", None, CPU, Plan(2, 6, steps=2), FuseConfig(watch=False))
    assert profile.all_reduces["fused"]["all_reduce"] == 0
    assert (profile.ranks, profile.dtype, profile.executor) == (1, "float32", "eager")
    for variants in profile.phases.values():
        assert min(found.attributed for found in variants.values()) > 0.9
        assert variants["fused"].categories["attention"] > 0
    assert all(trace["traceEvents"] for trace in traces.values())


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 6, PAGE_SIZE, 2 * PAGE_SIZE + 3])
def test_a_step_continues_what_the_prefill_read(length):
    torch.manual_seed(0)
    model = registry.build(CONFIG, None, torch.float32, "cpu").requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    calls = Calls(model, model, 3, length, CPU)
    text = calls._arguments[PREFILL]["input_ids"].view(3, length)
    for phase in (PREFILL, STEP):
        calls.run(phase)
        expected = model(text)[:, -1].argmax(-1, keepdim=True)
        assert torch.equal(calls._token, expected[:, 0])
        text = torch.cat((text, expected), 1)


def test_random_weights_are_alike_on_every_rank_and_in_range(tmp_path):
    CONFIG.architectures = ["LlamaForCausalLM"]
    CONFIG.save_pretrained(tmp_path)
    first, second = (model_for(str(tmp_path), None, torch.bfloat16, CPU, random_weights=True) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    logits = first(torch.arange(12).view(2, 6))
    assert logits.isfinite().all() and 0.1 < logits.float().std() < 10


def test_random_weights_are_for_families_that_are_defined_here(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    with pytest.raises(UnsupportedModelError):
        model_for(str(tmp_path), None, None, CPU, random_weights=True)
