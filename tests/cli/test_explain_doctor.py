"""`graphfuse explain` and `graphfuse doctor` print what the library finds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from graphfuse.cli.main import app
from tests.cli.conftest import REPOSITORY


def test_explain_tells_of_another_host_without_weights(graphfuse, checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    facts = REPOSITORY / "configs" / "facts" / "h100_x8.json"
    page = tmp_path / "page.html"
    result = graphfuse("explain", "--model", tmp_path, "--tp", 8, "--device-facts", facts, "--json", "--html", page)
    assert result.returncode == 0, result.stderr
    assert f"Report page: {page}" in result.stderr
    assert f"{tmp_path.name} at TP 8" in page.read_text() and '"all_reduce": 5' in page.read_text()
    report = json.loads(result.stdout)
    assert report["totals"]["all_reduce"] == 5  # the embedding, two in each layer
    assert report["gate"]["facts"]["world_size"] == 8


def test_doctor_lists_versions_as_json(graphfuse):
    result = graphfuse("doctor", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["versions"]["torch"]


MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 1,
       "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
       "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}  # fmt: skip
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}


def test_explain_reads_tuned_configs_from_a_folder(tmp_path, capfd):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    facts = REPOSITORY / "configs" / "facts" / "h200_x2.json"
    command = ["explain", "--model", str(tmp_path), "--tp", "2", "--device-facts", str(facts), "--json"]

    def experts(*more: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as ended:
            app([*command, *more])
        output = capfd.readouterr()
        assert ended.value.code in (None, 0), output.err
        (layer,) = json.loads(output.out)["moe"]
        return layer

    assert experts()["config"] == "heuristic"
    file = tmp_path / "E=8,N=16,device_name=NVIDIA_H200.json"
    file.write_text(json.dumps({"1": TILE}))
    layer = experts("--moe-config-dir", str(tmp_path))
    assert (layer["config"], layer["files"]) == (file.name, [str(file)])


def test_explain_says_which_folder_of_configs_is_not_there(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        app(["explain", "--model", str(tmp_path), "--tp", "2", "--moe-config-dir", str(tmp_path / "none")])
    assert ended.value.code == 1
    assert "none' is not a folder" in capfd.readouterr().err
