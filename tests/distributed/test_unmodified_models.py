"""Models that know nothing of graphfuse are fused by the same call, on two gloo ranks: every reduction that meets the
residual stream, the final norm's included, and the outputs are the eager module's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import graphfuse
from tests.distributed import unmodified_models as models

# DTensor takes unbacked sizes from torch 2.13 on.
ONE_GRAPH = TorchVersion(torch.__version__) >= "2.13"
SHAPES = ((2, 5), (1, 1), (3, 2))
MORE_SHAPES = (*SHAPES, (1, 7), (3, 1), (2, 2))


def logits(out: Any) -> torch.Tensor:
    return getattr(out, "logits", out)


def compare(whole: nn.Module, sharded: nn.Module, over: Any, shapes: Any) -> tuple[list[float], dict, int]:
    """Largest difference from the whole eager model for each shape, the report, and the number of graphs."""
    compiled = graphfuse.compile(sharded, over, config=graphfuse.FuseConfig(fusion="require"))
    differences = []
    for seed, (batch, length) in enumerate(shapes):
        torch.manual_seed(seed)
        ids = torch.randint(0, models.VOCAB, (batch, length))
        with torch.no_grad():
            differences.append((logits(compiled(ids)) - logits(whole(ids))).abs().max().item())
    return differences, compiled.report.to_json(), compiled.report.num_graphs


def sites(report: dict) -> list[tuple[str, str, str]]:
    return [(site["module"], site["norm"], site["op"]) for site in report["sites"]]


def parallelized(group, norm, shard_embedding, shapes):
    whole, sharded, mesh = models.perceptrons(group, norm, shard_embedding)
    return compare(whole, sharded, mesh if shard_embedding else group, shapes)


@pytest.mark.parametrize("norm", [models.Norm, nn.RMSNorm], ids=["own norm", "nn.RMSNorm"])
def test_a_parallelized_module_is_fused_whole_in_one_graph(ranks, norm):
    for differences, report, num_graphs in ranks.run(2, parallelized, norm, False, MORE_SHAPES):
        assert max(differences) < 1e-5
        assert num_graphs == 1 if ONE_GRAPH else num_graphs <= 4
        assert sites(report) == [
            ("layers.0.down", "layers.1.norm", "all_reduce_add_rms_norm"),
            ("layers.1.down", "layers.2.norm", "all_reduce_add_rms_norm"),
            ("layers.2.down", "norm", "all_reduce_add_rms_norm"),
        ]
        if ONE_GRAPH:
            (flat,) = report["notes"]
            assert flat.startswith("layers were traced flat: ")
        else:
            flat, dynamic = report["notes"]
            assert flat.startswith("layers were traced flat: ")
            assert dynamic.startswith("batch and length are not one graph: ")


@pytest.mark.parametrize("shapes", [SHAPES[:2], pytest.param(MORE_SHAPES, marks=pytest.mark.slow)], ids=len)
def test_a_sharded_embedding_costs_graphs_and_the_report_says_so(ranks, shapes):
    """torch's sharded embedding asks whether sizes are 1. The reduction behind it meets the first norm."""
    for differences, report, num_graphs in ranks.run(2, parallelized, models.Norm, True, shapes):
        assert max(differences) < 1e-5
        assert 2 <= num_graphs <= 4
        assert report["graphs"] == num_graphs
        assert sites(report)[0] == ("embed", "layers.0.norm", "all_reduce_rms_norm")
        assert sites(report)[-1] == ("layers.2.down", "norm", "all_reduce_add_rms_norm")
        assert report["totals"] == {"all_reduce": 4, "fused": 4, "merged": 0, "declined": 0}
        flat, dynamic = report["notes"]
        assert flat.startswith("layers were traced flat: ")
        assert dynamic.startswith("batch and length are not one graph: ")
        assert "unmodified_models.py" in dynamic and "self.embed(ids)" in dynamic


def of_transformers(group, family, shapes):
    return compare(*models.transformers_model(group, family, num_layers=2), shapes)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_transformers_model_sharded_by_its_own_plan_is_fused_whole(ranks, family):
    for differences, report, num_graphs in ranks.run(2, of_transformers, family, SHAPES[:2], timeout=150):
        assert max(differences) < 1e-5
        assert 1 <= num_graphs <= 2
        mlp = "mlp.down_proj" if family == "llama" else "mlp.experts"
        expected = [("model.embed_tokens", "model.layers.0.input_layernorm", "all_reduce_rms_norm")]
        for i in range(2):
            layer, after = f"model.layers.{i}", f"model.layers.{i + 1}.input_layernorm" if i == 0 else "model.norm"
            expected += [
                (f"{layer}.self_attn.o_proj", f"{layer}.post_attention_layernorm", "all_reduce_add_rms_norm"),
                (f"{layer}.{mlp}", after, "all_reduce_add_rms_norm"),
            ]
        assert sites(report) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_transformers_model_has_at_most_four_graphs(ranks, family):
    for differences, report, num_graphs in ranks.run(2, of_transformers, family, MORE_SHAPES, timeout=280):
        assert max(differences) < 1e-5
        assert 2 <= num_graphs <= 4
        assert report["totals"] == {"all_reduce": 5, "fused": 5, "merged": 0, "declined": 0}
