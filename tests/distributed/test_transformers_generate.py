"""transformers' own `generate` with a static cache decodes through the backend: same tokens, fused sites."""

from __future__ import annotations

import pytest
import torch

import graphfuse
from tests.distributed import unmodified_models as models

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
