"""What is said of checkpoints that are damaged, incomplete or of another model."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphfuse.errors import CheckpointError
from graphfuse.models.causal_lm import CausalLM
from graphfuse.weights.load import load
from tests.weights.conftest import assert_same_logits, edit, shard


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
        ({"num_key_value_heads": 4}, "has 6 attention heads for 4 key-value heads"),
        ({"num_hidden_layers": 10**9}, "has num_hidden_layers=1000000000, more than any model's"),
        ({"n_layer": 10**9}, "has n_layer=1000000000, more than any model's"),
        ({"text_config": {"hidden_size": 10**12}}, "has hidden_size=1000000000000, more than any model's"),
        ({"num_labels": 10**9}, "has num_labels=1000000000, more than any model's"),
        ({"num_hidden_layers": 400}, "has num_hidden_layers=400, but the checkpoint has"),
        ({"sliding_window": "wide"}, "has sliding_window='wide'"),
        ({"sliding_window": 0}, "has sliding_window=0"),
        ({"rms_norm_eps": float("nan")}, "has rms_norm_eps=nan"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "a llama model that cannot be made here"),
        ({"dtype": "float8_e4m3fn"}, "asks for torch.float8_e4m3fn, which is not implemented"),
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


def test_a_parameter_that_nothing_fills_is_named(saved, monkeypatch):
    plan = CausalLM.checkpoint_plan

    def without_norm(self, names):
        return [p for p in plan(self, names) if p.name != "model.norm.weight"]

    monkeypatch.setattr(CausalLM, "checkpoint_plan", without_norm)
    monkeypatch.setattr(CausalLM, "ignores", lambda self, name: True)
    with pytest.raises(CheckpointError, match=r"No tensor of the checkpoint fills 'norm\.weight'"):
        load(saved["llama"].path)
