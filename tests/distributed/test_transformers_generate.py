"""transformers' `generate` with a static cache decodes through the backend: same tokens, fused sites. Called on a
compiled model it does so by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import graphfuse
from graphfuse.errors import ConfigError
from tests.distributed import unmodified_models as models
from tests.transformers_matrix import tiny

pytestmark = pytest.mark.slow


def generate(group, mode):
    from transformers import CompileConfig

    whole, sharded, _ = models.transformers_model(group, "llama", num_layers=2)
    for model in (whole, sharded):
        model.generation_config.pad_token_id = 0
    ids = torch.arange(10).reshape(2, 5)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    want = whole.generate(ids, **settings)
    compile_config = CompileConfig(backend="graphfuse", fullgraph=True, **({"mode": mode} if mode else {}))
    compile_config._compile_all_devices = True  # transformers compiles on GPUs only, unless told
    got = sharded.generate(ids, cache_implementation="static", compile_config=compile_config, **settings)
    report = graphfuse.last_report()
    return want.tolist(), got.tolist(), report.to_json() if report else None


@pytest.mark.parametrize("mode", [None, "default"], ids=["mode of transformers", "default mode"])
def test_generate_decodes_through_the_backend(ranks, mode):
    for want, got, report in ranks.run(2, generate, mode, timeout=200):
        assert got == want
        assert report["totals"] == {"all_reduce": 5, "fused": 5, "merged": 0, "declined": 0}
        assert report["sites"][-1]["norm"] == "model.norm"
        ignored = [note for note in report["notes"] if "the eager executor ignores it" in note]
        assert len(ignored) == (0 if mode else 1)


def generate_compiled(group, family, calls):
    """Tokens of the whole model and of the compiled one for each call's settings; the report; is it the model's?"""
    whole = tiny.build(family, torch.float32)
    compiled = graphfuse.compile(tiny.build(family, torch.float32), group)
    ids = torch.arange(3, 13).reshape(2, 5)
    tokens = []
    for settings in calls:
        greedy = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **settings}
        if greedy.pop("as one config", False):
            greedy = {"generation_config": GenerationConfig(**greedy, pad_token_id=0)}
        tokens.append((whole.generate(ids, **greedy).tolist(), compiled.generate(ids, **greedy).tolist()))
    report = compiled.report.to_json()
    attributes = compiled.config.model_type, str(compiled.device), compiled.generation_config.eos_token_id
    compiled.close()
    torch._dynamo.reset()  # all models of a process share the code that transformers compiles, and its recompile limit
    try:
        compiled.generate(ids)
    except ConfigError as error:
        return tokens, report, attributes, str(error)


CALLS: tuple[dict[str, Any], ...] = ({}, {"as one config": True}, {"disable_compile": True}, {"num_beams": 2})


def test_a_compiled_model_generates_by_its_own_decode_step(ranks):
    for tokens, report, attributes, error in ranks.run(2, generate_compiled, "llama", CALLS, timeout=280):
        for want, got in tokens:
            assert got == want
        assert report["totals"] == {"all_reduce": 5, "fused": 5, "merged": 0, "declined": 0}
        assert report["model"] == "transformers' LlamaForCausalLM, sharded by its plan"
        assert attributes == ("llama", "cpu", 2)
        assert error == "This compiled model is closed. Call graphfuse.compile again."


FAMILIES = ("qwen3_moe", "gemma2", "olmo2", "granite", "glm4", "gpt_oss", "phi3", "mixtral", "cohere2")


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_of_other_families(ranks, family):
    for tokens, report, *_ in ranks.run(2, generate_compiled, family, [{}], timeout=280):
        assert tokens[0][0] == tokens[0][1]
        assert 2 <= report["graphs"] <= 4  # the prompt's; sliding caches count in Python: one for each state of that
