"""Models trace to one graph for every batch and length, and repeated layers to one region.

Everything is traced on two fake ranks in one other process: a fake group cannot live beside the pool's store, and a
layer class that was marked as a region stays so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import mark_unbacked
from torch.testing._internal.distributed.fake_pg import FakeStore
from graphfuse.models import registry
from tests.models import tiny


def inputs(batch, length):
    ids = torch.zeros(batch, length, dtype=torch.int64)
    positions = torch.arange(length).repeat(batch, 1)
    last = torch.full((batch,), length - 1)
    for t in (ids, positions):
        mark_unbacked(t, 0, shape_id="batch")
        mark_unbacked(t, 1, shape_id="length")
    mark_unbacked(last, 0, shape_id="batch")
    return ids, positions, last


def trace(family, cached):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        calls = [node for node in graph.graph.nodes if "invoke_subgraph" in str(node.target)]
        graphs.append([len(calls), len({node.args[0].target for node in calls})])
        return aot_autograd(fw_compiler=lambda g, _: g.forward)(graph, example_inputs)

    model = registry.build(tiny.config(family), dist.group.WORLD)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    caches = model.new_kv_caches(4, 9) if cached else None
    vocab = model.config.vocab_size
    with torch.no_grad():
        for batch, length in ((1, 1), (2, 7), (3, 1)):
            ids, positions, last = inputs(batch, length)
            got = compiled(ids, positions, caches, last if cached else None)
            assert got.shape == ((batch, vocab) if cached else (batch, length, vocab))
    return graphs


dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
families = sys.argv[1:]
found = {f"{family} with caches": trace(family, True) for family in families}
found["without caches"] = trace(families[0], False)
for family in families:
    for layer in {type(layer) for layer in registry.build(tiny.config(family), device="meta").layers}:
        layer.forward = torch.compiler.nested_compile_region(layer.forward)
    found[f"{family} as regions"] = trace(family, True)
print(json.dumps(found))
"""


def trace(*families: str) -> dict[str, list[list[int]]]:
    """For each kind of call: one [calls of regions, different regions] a graph."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *families],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def traced() -> dict[str, list[list[int]]]:
    return trace("llama", "mistral", "qwen3", "qwen3_moe")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "qwen3_moe"])
def test_one_graph_serves_every_batch_and_length(traced, family):
    assert traced[f"{family} with caches"] == [[0, 0]]


def test_one_graph_serves_every_batch_and_length_without_caches(traced):
    assert traced["without caches"] == [[0, 0]]


def test_repeated_layers_are_one_region_called_again(traced):
    assert traced["llama as regions"] == [[3, 1]]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_layers_of_another_kind_are_no_calls_of_the_same_region(traced, family):
    """Two layers of three are alike; the third is a region of its own, which torch 2.13 inlines, being called once."""
    assert traced[f"{family} as regions"] in ([[2, 1]], [[3, 2]])


@pytest.mark.slow
def test_latent_attention_is_one_graph_and_its_layers_are_regions():
    traced = trace("deepseek_v3", "mistral4")
    assert traced["deepseek_v3 with caches"] == traced["mistral4 with caches"] == traced["without caches"] == [[0, 0]]
    assert traced["deepseek_v3 as regions"] in ([[2, 1]], [[3, 2]])
    assert traced["mistral4 as regions"] == [[3, 1]]


@pytest.mark.slow
def test_sparse_attention_is_one_graph_and_each_kind_of_its_layers_is_a_region():
    """Layers that give a selection and layers that are given one: of five, the third and the dense ones are alone."""
    traced = trace("deepseek_v32", "glm_moe_dsa_shared")
    assert traced["deepseek_v32 with caches"] == traced["without caches"] == [[0, 0]]
    assert traced["glm_moe_dsa_shared with caches"] == [[0, 0]]
    assert traced["deepseek_v32 as regions"] in ([[2, 1]], [[3, 2]])
    assert traced["glm_moe_dsa_shared as regions"] in ([[2, 1]], [[5, 4]])


@pytest.mark.slow
def test_models_with_a_state_are_one_graph_and_each_kind_of_their_layers_is_a_region():
    """Of the four layers, three kinds and two; kinds that are called once may be inlined."""
    traced = trace("qwen3_next", "qwen3_5")
    assert traced["qwen3_next with caches"] == traced["qwen3_5 with caches"] == traced["without caches"] == [[0, 0]]
    assert traced["qwen3_next as regions"] in ([[2, 1]], [[4, 3]])
    assert traced["qwen3_5 as regions"] in ([[3, 1]], [[4, 2]])
