"""A checkpoint from anywhere: no code of its own is run, nothing outside of its folder is read."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from graphfuse.errors import CheckpointError, UnsupportedModelError
from graphfuse.explain import explain_checkpoint
from graphfuse.generation.tokenize import load_tokenizer
from graphfuse.weights.load import load
from tests.fuzz.box import CODE
from tests.fuzz.watch import Watch
from tests.generation.conftest import make_tokenizer
from tests.weights.conftest import assert_same_logits, shard

AUTO_MAP = {"AutoConfig": "code.Canary", "AutoModelForCausalLM": "code.CanaryForCausalLM"}


def change(file: Path, **values) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | values))


@pytest.fixture
def mark(tmp_path) -> Path:
    """What the code of a checkpoint would leave behind."""
    return tmp_path / "code-was-run"


@pytest.fixture
def hostile(copy_of, mark) -> Path:
    folder = copy_of("llama")
    (folder / "code.py").write_text(CODE.format(mark=str(mark)))
    return folder


@pytest.mark.parametrize("implementation", ["auto", "graphfuse", "transformers"])
def test_code_for_a_known_kind_of_model_is_not_run(saved, hostile, mark, implementation):
    change(hostile / "config.json", auto_map=AUTO_MAP)
    assert load(hostile, implementation=implementation).config.model_type == "llama"
    assert_same_logits(hostile, saved["llama"])
    assert not mark.exists()


@pytest.mark.parametrize("use", [load, lambda folder: explain_checkpoint(folder, 2)], ids=["load", "explain"])
def test_a_model_that_needs_its_own_code_is_refused_without_a_question(hostile, mark, use, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    change(hostile / "config.json", auto_map=AUTO_MAP, model_type="canary")
    with pytest.raises(
        CheckpointError, match=r"brings code of its own, which graphfuse never runs\. .*trust_remote_code"
    ):
        use(hostile)
    assert not mark.exists()


@pytest.mark.parametrize("use", [load, lambda folder: explain_checkpoint(folder, 2)], ids=["load", "explain"])
def test_code_for_a_known_kind_of_config_that_is_no_language_model_is_not_run(hostile, mark, use, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    (hostile / "config.json").write_text(json.dumps({"model_type": "vit", "auto_map": AUTO_MAP}))
    with pytest.raises((CheckpointError, UnsupportedModelError), match="transformers cannot"):
        use(hostile)
    assert not mark.exists()


def test_the_code_would_leave_its_mark_if_it_were_run(hostile, mark):
    """Else the tests above could not fail. In a process of its own: what was run stays in transformers' memory."""
    change(hostile / "config.json", auto_map=AUTO_MAP, model_type="canary")
    script = "import sys, transformers; transformers.AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)"
    environment = {**os.environ, "HF_MODULES_CACHE": str(hostile.parent / "modules")}
    subprocess.run([sys.executable, "-c", script, hostile], check=True, env=environment, timeout=120)
    assert mark.exists()


def test_a_tokenizer_that_needs_its_own_code_is_refused_without_a_question(hostile, mark, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    change(
        hostile / "tokenizer_config.json",
        tokenizer_class="CanaryTokenizer",
        auto_map={"AutoTokenizer": [None, "code.CanaryTokenizer"]},
    )
    with pytest.raises(CheckpointError, match="has no tokenizer that can be read"):
        load_tokenizer(hostile)
    assert not mark.exists()


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.mark.parametrize("implementation", ["auto", "graphfuse", "transformers"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickled_weights_are_never_opened(hostile, mark, name, implementation):
    (hostile / "model.safetensors").unlink()
    (hostile / name).write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(CheckpointError, match=rf"only pickled weights \({name}\)"):
        load(hostile, implementation=implementation)
    assert not mark.exists()


def test_pickled_weights_beside_safetensors_are_left_alone(saved, hostile, mark):
    (hostile / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(mark)))
    assert_same_logits(hostile, saved["llama"])
    load(hostile, implementation="transformers")
    assert not mark.exists()


def test_an_index_that_names_pickled_weights_is_refused(hostile, mark):
    shard(hostile)
    (hostile / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(mark)))
    index = hostile / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("a.safetensors", "pytorch_model.bin"))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is truncated or not a safetensors file"):
        load(hostile, implementation="transformers")
    assert not mark.exists()


def test_an_adapter_is_not_applied_by_transformers_unasked(hostile):
    (hostile / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../outside"}))
    with pytest.raises(CheckpointError, match="holds an adapter"):
        load(hostile, implementation="transformers")


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["kernels-community/flash-attn", {"text_config": "org/kernel"}], ids=str)
def test_a_kernel_that_transformers_would_download_and_run_is_refused(hostile, field, value):
    change(hostile / "config.json", **{field: value})
    for use in (load, lambda folder: load(folder, implementation="transformers"), lambda f: explain_checkpoint(f, 2)):
        with pytest.raises(CheckpointError, match=f"{field}=.*a kernel that transformers would download and run"):
            use(hostile)


# Links


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_link_that_leads_out_of_the_folder_is_refused(hostile, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / name).write_bytes((hostile / name).read_bytes() if (hostile / name).exists() else b"{}")
    (hostile / name).unlink(missing_ok=True)
    (hostile / name).symlink_to(outside / name)
    watch = Watch(outside)
    with pytest.raises(CheckpointError, match=rf"{name} is a link to .*outside/{name}, which is outside of the folder"):
        load(hostile)
    assert watch.opened() == []


def test_a_link_to_a_template_outside_is_refused(hostile, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (hostile / "additional_chat_templates").mkdir()
    (hostile / "additional_chat_templates" / "tool.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tool.jinja is a link to .*secret, which is outside"):
        load(hostile)


def test_links_in_a_circle_are_an_error_of_the_folder(hostile):
    (hostile / "model.safetensors").unlink()
    (hostile / "model.safetensors").symlink_to(hostile / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot be read|holds neither"):
        load(hostile)


def test_links_within_the_folder_and_to_the_folder_are_followed(saved, copy_of, tmp_path):
    folder = copy_of("llama")
    (folder / "data").mkdir()
    (folder / "model.safetensors").rename(folder / "data" / "weights")
    (folder / "model.safetensors").symlink_to("data/weights")
    (tmp_path / "link").symlink_to(folder)
    assert_same_logits(tmp_path / "link", saved["llama"])


def test_the_hubs_cache_is_made_of_links_and_can_be_loaded(saved, copy_of, tmp_path):
    """models--org--name/snapshots/<revision>/<file> → ../../blobs/<hash>"""
    folder, repository = copy_of("llama"), tmp_path / "hub" / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(repository / "blobs" / f"hash{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash{number}")
    assert_same_logits(snapshot, saved["llama"])


# Names of files inside of files


@pytest.mark.parametrize("implementation", ["graphfuse", "transformers"])
def test_a_config_never_leads_to_weights_elsewhere(saved, hostile, tmp_path, implementation):
    (tmp_path / "outside").mkdir()
    other = {name: tensor + 1 for name, tensor in load_file(hostile / "model.safetensors").items()}
    save_file(other, tmp_path / "outside" / "model.safetensors", metadata={"format": "pt"})
    watch = Watch(tmp_path / "outside")
    change(hostile / "config.json", transformers_weights="../outside/model.safetensors")
    if implementation == "graphfuse":
        assert_same_logits(hostile, saved["llama"])
    else:
        with pytest.raises(CheckpointError, match="must reference a file inside"):
            load(hostile, implementation=implementation)
    assert watch.opened() == []


@pytest.mark.parametrize(
    "values",
    [
        {"gguf_file": "../outside/vocab.json"},
        {"tokenizer_class": "GemmaTokenizer", "vocab_file": "../outside/vocab.json"},
        {"tokenizer_class": "GPT2Tokenizer", "init_inputs": ["OUT/vocab.json", "OUT/merges.txt"]},
        {"tokenizer_class": "GPT2Tokenizer", "init_inputs": [["OUT/vocab.json"], {"x": "OUT/merges.txt"}]},
    ],
    ids=["gguf", "vocabulary", "inputs", "nested inputs"],
)
def test_a_tokenizer_never_leads_to_files_elsewhere(hostile, tmp_path, values):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "vocab.json").write_text('{"a": 0}')
    (outside / "merges.txt").write_text("#version\n")
    watch = Watch(outside)
    text = json.dumps(values).replace("OUT", str(outside)).replace("../outside", str(outside))
    (hostile / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match="a path of its own, which would be opened wherever it leads"):
        load_tokenizer(hostile)
    assert watch.opened() == []


def test_paths_that_published_tokenizers_carry_along_are_not_followed_and_no_error(hostile, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "tokenizer.json").write_text("{}")
    watch = Watch(tmp_path / "outside")
    make_tokenizer().save_pretrained(hostile)
    change(
        hostile / "tokenizer_config.json",
        tokenizer_file=str(tmp_path / "outside" / "tokenizer.json"),
        special_tokens_map_file="/root/.cache/special_tokens_map.json",
        name_or_path="/models/base",
    )
    assert load_tokenizer(hostile)("The")["input_ids"]
    assert watch.opened() == []
