"""`explain_checkpoint`: the report of a checkpoint that is not there, on a host that is not there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from transformers import Dots1Config, GPT2Config, LlamaConfig, Olmo2Config, Qwen3MoeConfig

from graphfuse.errors import CheckpointError, ConfigError, SchemaError, UnsupportedModelError
from graphfuse.explain import explain_checkpoint

FACTS = Path(__file__).parents[1] / "configs" / "facts"
TINY = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


def saved(config, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path):
    return saved(LlamaConfig(**TINY, dtype="bfloat16", architectures=["LlamaForCausalLM"]), tmp_path)


def test_a_host_with_nvlink_is_served_by_flashinfer(llama):
    report = explain_checkpoint(llama, 8, FACTS / "h100_x8.json")
    assert report.totals == {"all_reduce": 5, "fused": 5, "merged": 0, "declined": 0}
    assert report.sites[0].backends[0]["backend"] == "flashinfer"


def test_a_host_without_nvlink_is_told_why_symm_mem_serves(llama):
    report = explain_checkpoint(llama, 4, FACTS / "h100_pcie_x4_without_nvlink.json")
    assert report.totals["fused"] == 5
    assert [entry["backend"] for entry in report.sites[0].backends] == ["symm_mem", "reference"]
    assert any("NVLink does not connect every pair" in reason for reason in report.gate["reasons"])


def test_more_ranks_than_the_host_has_gpus_are_several_hosts(llama):
    report = explain_checkpoint(llama, 16, FACTS / "h100_x8.json")
    assert "several hosts" in report.sites[0].outcome()


def test_one_rank_has_nothing_to_reduce(llama):
    report = explain_checkpoint(llama, 1)
    assert report.totals["all_reduce"] == 0
    assert not report.placements


def test_every_value_is_proved_to_be_reduced_once(llama):
    report = explain_checkpoint(llama, 2)
    assert report.placements["unknown"] == 0
    assert f"placements: proved {report.placements['proved']} values, 0 unknown" in str(report)


def test_mistakes_are_named(llama, tmp_path):
    with pytest.raises(ConfigError, match="tp=0 is no number of ranks"):
        explain_checkpoint(llama, 0)
    with pytest.raises(CheckpointError, match=r"There is no folder .*nothing\. Check the path, or pass a hub id"):
        explain_checkpoint(tmp_path / "nothing", 2)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        explain_checkpoint(FACTS, 2)
    with pytest.raises(SchemaError):
        explain_checkpoint(llama, 2, llama / "config.json")


def test_of_a_repository_on_the_hub_only_the_config_is_asked_for(llama, monkeypatch):
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert explain_checkpoint("someone/some-model", 2).totals["fused"] == 5
    assert asked == [("someone/some-model", ["config.json"])]


def test_a_family_of_transformers_is_explained_with_its_own_plan(tmp_path):
    config = Olmo2Config(**TINY, tie_word_embeddings=False, dtype="bfloat16", architectures=["Olmo2ForCausalLM"])
    report = explain_checkpoint(saved(config, tmp_path), 2)
    assert report.totals["all_reduce"] >= 4
    assert {site.op for site in report.sites if site.module.endswith("o_proj")} == {"all_reduce_rms_norm"}
    # Its attention is whole, and the part of it that a rank multiplies is cut out at a place that depends on the rank.
    assert {entry["module"].rpartition(".")[2] for entry in report.placements["reasons"]} == {"o_proj"}


def test_the_experts_of_a_family_of_transformers_are_lowered(tmp_path):
    config = Dots1Config(
        **TINY, num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
        head_dim=16, n_shared_experts=1, first_k_dense_replace=1, dtype="bfloat16", architectures=["Dots1ForCausalLM"],
    )  # fmt: skip
    report = explain_checkpoint(saved(config, tmp_path), 2, FACTS / "h200_x2.json")
    (layer,) = report.moe
    assert (layer.module, layer.experts, layer.intermediate, layer.status) == (
        "model.layers.1.mlp.experts", 8, 32, "lowered",
    )  # fmt: skip
    assert report.totals["merged"] == 1  # its shared experts' reduction
    assert not report.placements["faults"]


def test_a_family_that_nobody_can_shard_is_an_error_that_says_what_was_tried(tmp_path):
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=64, architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModelError, match=r"no model definition for 'gpt2'.*cannot shard"):
        explain_checkpoint(saved(config, tmp_path), 2)


@pytest.mark.slow
def test_a_full_width_model_of_48_layers_takes_less_than_half_a_minute(tmp_path):
    config = Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        vocab_size=151936,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )
    started = time.process_time()  # the tracing is single-threaded; other load does not count
    report = explain_checkpoint(saved(config, tmp_path), 4, FACTS / "h100_x8.json")
    assert time.process_time() - started < 30
    assert report.totals == {"all_reduce": 97, "fused": 97, "merged": 0, "declined": 0}
    assert len(report.moe) == 48
