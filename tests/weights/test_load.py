"""Loading: file layouts, experts' name forms, dtypes, devices, implementations, and the hub."""

from __future__ import annotations

import io
import json
import logging

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, GPT2Config

from graphfuse.errors import CheckpointError, ConfigError, GroupError, UnsupportedModelError
from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.sharding import TensorParallel
from graphfuse.weights import load as load_module
from graphfuse.weights import stream
from graphfuse.weights.load import load
from tests.models import tiny
from tests.weights.conftest import assert_same_logits, edit, shard


def fuse_experts(tensors: dict[str, torch.Tensor]) -> None:
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [[tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for part in ("gate", "up", "down")] for e in range(5)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
        tensors[f"{prefix}.down_proj"] = torch.stack([down for _, _, down in each])


def test_a_sharded_checkpoint_with_an_index(saved, copy_of):
    folder = copy_of("llama")
    shard(folder)
    assert_same_logits(folder, saved["llama"])


def test_experts_saved_one_by_one_and_fused_give_the_same_model(saved, copy_of):
    assert_same_logits(saved["qwen3_moe"].path, saved["qwen3_moe"])
    folder = copy_of("qwen3_moe")
    edit(folder, fuse_experts)
    assert_same_logits(folder, saved["qwen3_moe"])


def shard_sums(group, folder):
    """What each rank holds of the experts."""
    model = load(folder, group)
    return [
        (layer.mlp.experts.gate_up_proj.double().sum(), layer.mlp.experts.down_proj.double().sum())
        for layer in (model.layers[0], model.layers[2])
    ]


def test_ranks_hold_the_same_experts_from_either_form(ranks, saved, copy_of):
    folder = copy_of("qwen3_moe")
    edit(folder, fuse_experts)
    assert ranks.run(3, shard_sums, folder) == ranks.run(3, shard_sums, saved["qwen3_moe"].path)


def test_a_tied_head_may_stand_in_the_file_too(saved, copy_of):
    folder = copy_of("qwen3")
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_same_logits(folder, saved["qwen3"])


def test_old_checkpoints_hold_the_rotary_frequencies(saved, copy_of):
    folder = copy_of("llama")
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert_same_logits(folder, saved["llama"])


def test_pieces_smaller_than_a_tensor_give_the_same_weights(saved, monkeypatch):
    want = load(saved["llama"].path).state_dict()
    monkeypatch.setattr(stream, "BUFFER_BYTES", 300)
    for name, tensor in load(saved["llama"].path).state_dict().items():
        assert torch.equal(tensor, want[name])


def test_the_dtype_is_the_configs_unless_another_is_asked_for(saved, copy_of):
    folder = copy_of("llama")
    assert load(folder).lm_head.weight.dtype == torch.float32
    assert load(folder, dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    assert load(folder).norm.weight.dtype == torch.float16
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    edit(folder, lambda t: t.update({name: x.bfloat16() for name, x in t.items()}))
    model = load(folder)
    assert model.norm.weight.dtype == torch.bfloat16
    assert model.new_kv_caches(1, 2)[0][0].dtype == torch.bfloat16


def test_transformers_implementation_and_its_choice_for_unknown_families(saved, tmp_path, caplog):
    assert not isinstance(load(saved["llama"].path, implementation="transformers"), CausalLM)
    AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no model definition for 'gpt2'"):
        load(tmp_path, implementation="graphfuse")
    with caplog.at_level(logging.WARNING, logger="graphfuse"):
        model = load(tmp_path)
    assert type(model).__name__ == "GPT2LMHeadModel" and not model.training
    (record,) = [r for r in caplog.records if r.name == "graphfuse"]
    assert record.message.startswith("Loading transformers' model of") and "'gpt2'" in record.message
    with pytest.raises(ConfigError, match="Use one of auto, graphfuse, transformers"):
        load(tmp_path, implementation="vllm")


def transformers_logits(group, folder, ids):
    model = load(folder, group, implementation="transformers")
    with torch.no_grad():
        return tuple(model.model.layers[0].mlp.down_proj.weight.to_local().shape), model(ids).logits


@pytest.mark.parametrize("tp", [4, 2], ids=["all processes", "some of the processes"])
def test_transformers_shards_by_its_own_plan(ranks, tmp_path, tp):
    config = tiny.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, vocab_size=64,
        num_hidden_layers=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        want = model(ids).logits
    for shape, logits in ranks.run(tp, transformers_logits, tmp_path, ids):
        assert shape == (32, 64 // tp)
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, "bf16", 16])
def test_a_dtype_that_weights_cannot_have_is_refused_with_those_they_can(saved, dtype):
    with pytest.raises(ConfigError, match=r"is no dtype of weights\. Pass one of .*torch\.bfloat16"):
        load(saved["llama"].path, dtype=dtype)


def test_a_device_that_is_not_there_is_refused(saved, monkeypatch):
    for device in ("gpu", "cuda:x", 1.5):
        with pytest.raises(ConfigError, match=r"is no device of this PyTorch\. Pass 'cpu', 'cuda'"):
            load(saved["llama"].path, device=device)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device='cuda', but there is no cuda device here\. Pass 'cpu'"):
        load(saved["llama"].path, device="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"device='cuda:9', but the cuda devices here are 0 to 1"):
        load(saved["llama"].path, device="cuda:9")


def test_a_group_of_a_wrong_type_is_refused(saved):
    with pytest.raises(GroupError, match=r"tp_group is of type int\. Pass a ProcessGroup"):
        load(saved["llama"].path, 2)


def test_a_hub_id_goes_through_the_hubs_cache(saved, monkeypatch):
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, "*.safetensors" in allow_patterns, "*.bin" in allow_patterns))
        return str(saved["llama"].path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert isinstance(load("someone/some-model"), CausalLM)
    assert asked == [("someone/some-model", True, False)]


def test_a_hub_that_does_not_answer_is_a_checkpoint_error(monkeypatch):
    def snapshot_download(name, allow_patterns):
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=r"'someone/some-model' is no local folder, .*OSError: offline"):
        load("someone/some-model")


def test_a_local_folder_never_touches_the_hub(saved, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_a, **_k: pytest.fail("asked the hub"))
    load(saved["llama"].path)


@pytest.mark.parametrize(("rank", "terminal", "drawn"), [(0, True, True), (1, True, False), (0, False, False)])
def test_only_rank_zero_on_a_terminal_draws_a_bar(saved, monkeypatch, rank, terminal, drawn):
    screen = io.StringIO()
    monkeypatch.setattr(load_module, "Console", lambda stderr: Console(file=screen, force_terminal=terminal))
    monkeypatch.setattr(TensorParallel, "of", lambda group: TensorParallel(None, 2, rank))
    load(saved["llama"].path)
    assert ("Loading llama" in screen.getvalue()) == drawn
