"""Loading: file layouts, experts' name forms, dtypes, implementations, and what is said of damage."""

from __future__ import annotations

import io
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from graphfuse.errors import CheckpointError, ConfigError, GroupError, UnsupportedModelError
from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.sharding import TensorParallel
from graphfuse.weights import load as load_module
from graphfuse.weights import stream
from graphfuse.weights.load import load
from tests.models import tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, tiny.Checkpoint]:
    folder = tmp_path_factory.mktemp("saved")
    return {family: tiny.save(family, folder / family) for family in ("llama", "qwen3", "qwen3_moe")}


@pytest.fixture
def copy_of(saved, tmp_path):
    def copy(family: str) -> Path:
        return Path(shutil.copytree(saved[family].path, tmp_path / family))

    return copy


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_same_logits(folder: Path, checkpoint: tiny.Checkpoint) -> None:
    with torch.no_grad():
        got = load(folder)(checkpoint.batch.input_ids)
    assert float((got - checkpoint.logits).abs().max()) < 1e-4


def shard(folder: Path) -> None:
    """Rewrite a single file as two and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


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


def test_transformers_shards_by_its_own_plan(ranks, tmp_path):
    config = tiny.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, vocab_size=64,
        num_hidden_layers=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        want = model(ids).logits
    for shape, logits in ranks.run(4, transformers_logits, tmp_path, ids):
        assert shape == (32, 16)
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5)


def subgroup_error(group, folder):
    try:
        load(folder, group, implementation="transformers")
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def test_transformers_needs_the_group_of_all_processes(ranks, saved):
    for message in ranks.run(2, subgroup_error, saved["llama"].path):
        assert message.startswith("GroupError: transformers shards over all 4 processes, but the group has 2.")


def test_a_missing_tensor_is_named(copy_of):
    folder = copy_of("llama")
    edit(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(CheckpointError, match=r"llama has no tensor 'model.layers.1.self_attn.k_proj.weight'"):
        load(folder)


def test_an_unexpected_tensor_is_named(copy_of):
    folder = copy_of("llama")
    edit(folder, lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.ones(2), "z": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.7.mlp.up_proj.weight', which .* \(and 1 more\)"):
        load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(copy_of):
    folder = copy_of("llama")
    edit(folder, lambda t: t.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' in .*model.safetensors has shape \[47\].*\[48\]"):
        load(folder)


def test_an_unreadable_dtype_is_named(copy_of):
    folder = copy_of("llama")
    edit(folder, lambda t: t.update({"model.norm.weight": torch.ones(48).to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' in .* has dtype F8_E4M3; readable are F64"):
        load(folder)


def test_a_truncated_file_is_named_with_a_tensor_it_cuts(copy_of):
    folder = copy_of("llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=r"model.safetensors is truncated: tensor 'model.\S+' ends behind the file"
    ):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 64, (5).to_bytes(8, "little") + b"{oops"])
def test_a_damaged_header_is_an_error_of_the_file(copy_of, content):
    folder = copy_of("llama")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors (is truncated or not|is damaged)"):
        load(folder)


def test_a_file_that_safetensors_refuses_is_an_error_of_the_file(copy_of):
    folder = copy_of("llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        load(folder)


def test_an_index_that_names_a_missing_file_or_tensor(copy_of):
    folder = copy_of("llama")
    shard(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["extra"] = "a.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"says that 'extra' is in a.safetensors, but it is not"):
        load(folder)
    content["weight_map"]["extra"] = "c.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"names the file 'c.safetensors', which is not there"):
        load(folder)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index.json is damaged"):
        load(folder)


def test_a_tensor_that_the_index_does_not_list_is_named_unless_the_model_ignores_it(saved, copy_of):
    folder = copy_of("llama")
    shard(folder)
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    original = load_file(folder / "a.safetensors")
    save_file(original | rotary, folder / "a.safetensors")
    assert_same_logits(folder, saved["llama"])
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"a.safetensors has the tensor 'lm_head.weight', which .* does not list"):
        load(folder)
    content["weight_map"]["lm_head.weight"] = "a.safetensors"
    index.write_text(json.dumps(content))
    name = next(name for name, file in content["weight_map"].items() if file == "b.safetensors")
    save_file(original | {name: torch.zeros(48)}, folder / "a.safetensors")
    with pytest.raises(CheckpointError, match=rf"'{name}' is in b.safetensors, but a.safetensors holds it too"):
        load(folder)


@pytest.mark.parametrize("elsewhere", ["../other/a.safetensors", "..", "/a.safetensors", "sub/a.safetensors", "..\\a"])
def test_an_index_never_leads_out_of_its_folder(copy_of, elsewhere):
    folder = copy_of("llama")
    shard(folder)
    (folder.parent / "other").mkdir()
    shutil.copy(folder / "a.safetensors", folder.parent / "other")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"a.safetensors"', json.dumps(elsewhere)))
    with pytest.raises(CheckpointError, match=r"which is no name of a file beside it"):
        load(folder)


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_attention_heads": 0}, "has num_attention_heads=0. It must be at least 1"),
        ({"num_key_value_heads": 0}, "has num_key_value_heads=0. It must be at least 1"),
        ({"num_hidden_layers": -1}, "has num_hidden_layers=-1. It must be at least 1"),
        ({"num_attention_heads": 5}, "is not a multiple of the number of attention heads"),
        ({"hidden_size": "wide"}, "field 'hidden_size'"),
        ({"rope_parameters": 5}, "field 'rope_parameters'"),
        ({"architectures": 5}, "has architectures=5. It must be a list"),
        ({"dtype": "int8"}, "has dtype=torch.int8, which weights cannot have"),
        ({"dtype": "bfloat"}, "no attribute 'bfloat'"),
        ({"hidden_act": "nope"}, "transformers cannot load"),
    ],
    ids=str,
)
def test_a_value_of_the_config_that_cannot_be_is_named(copy_of, values, message):
    folder = copy_of("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert message in str(caught.value)


def test_pickled_weights_are_refused(copy_of):
    folder = copy_of("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model.bin\), which can run code"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load(folder)


def test_folders_and_configs_that_cannot_be_used(tmp_path, saved):
    with pytest.raises(CheckpointError, match="There is no folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"is a file\. Pass the folder"):
        load(saved["llama"].path / "config.json")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load(tmp_path)


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


def test_a_parameter_that_nothing_fills_is_named(saved, monkeypatch):
    plan = CausalLM.checkpoint_plan

    def without_norm(self, names):
        return [p for p in plan(self, names) if p.name != "model.norm.weight"]

    monkeypatch.setattr(CausalLM, "checkpoint_plan", without_norm)
    monkeypatch.setattr(CausalLM, "ignores", lambda self, name: True)
    with pytest.raises(CheckpointError, match=r"No tensor of the checkpoint fills 'norm\.weight'"):
        load(saved["llama"].path)


@pytest.mark.parametrize(("rank", "terminal", "drawn"), [(0, True, True), (1, True, False), (0, False, False)])
def test_only_rank_zero_on_a_terminal_draws_a_bar(saved, monkeypatch, rank, terminal, drawn):
    screen = io.StringIO()
    monkeypatch.setattr(load_module, "Console", lambda stderr: Console(file=screen, force_terminal=terminal))
    monkeypatch.setattr(TensorParallel, "of", lambda group: TensorParallel(None, 2, rank))
    load(saved["llama"].path)
    assert ("Loading llama" in screen.getvalue()) == drawn
