"""`graphfuse bench moe` and the plot of its result as a user runs them."""

import json

import pytest
import torch

from graphfuse.cli.bench_moe import workloads_of
from graphfuse.cli.main import app
from tests.tuning.moe_results import QWEN, result, row

PNG = b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "llama"], "--shape llama is not known. Use qwen3-30b-a3b-tp2-bf16, "),
        (["--model", "llama"], "--model llama is neither a folder with a config.json nor one of "),
        (["--model", "qwen3-30b-a3b", "--shape", "glm-4.5-air-tp2-bf16"], "--shape and --model both say"),
        (["--model", "qwen3-30b-a3b", "--tp", "5"], "which 5 ranks cannot share evenly"),
        (["--tp", "2"], "Give --model too"),
        (["--tokens", "0,1"], "--tokens 0,1 is not a list of sizes"),
        (["--plot", "plot.txt"], "plot.txt does not name a picture"),
        (["--moe-config-dir", "nowhere"], "--moe-config-dir nowhere is not a folder"),
        (["--routing", "even"], "The routing 'even' is not known. Use uniform or skewed."),
        pytest.param(
            [], "there is no CUDA GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU"),
        ),
    ],
    ids=lambda value: " ".join(value) or "no GPU" if isinstance(value, list) else "",
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_measured(capfd, arguments, message):
    with pytest.raises(SystemExit) as ended:
        app(["bench", "moe", *arguments])
    out, err = capfd.readouterr()
    assert ended.value.code == 1
    assert message in err and err.count("\n") == 1
    assert out == ""


def test_shapes_are_the_usual_ones_those_named_or_those_of_a_model(monkeypatch, tmp_path):
    assert len(workloads_of([], None, 1)) == 8
    assert list(workloads_of(["glm-4.5-air-tp2-bf16"], None, 1)) == ["glm-4.5-air-tp2-bf16"]
    forms = {name: workload.form for name, workload in workloads_of([], "mistral-small-4-119b", 4).items()}
    assert forms == {"mistral-small-4-119b-tp4-bf16": "bf16", "mistral-small-4-119b-tp4-fp8_tensor": "fp8_tensor"}
    config = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
              "hidden_size": 64, "num_hidden_layers": 1}  # fmt: skip
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(folder)
    (name,) = workloads_of([], ".", 2)
    assert name == "tiny-tp2-bf16"


def test_a_shape_that_is_not_known_is_one_line_and_no_traceback(graphfuse):
    done = graphfuse("bench", "moe", "--shape", "llama")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_a_plot_is_drawn_of_a_result_beside_recorded_figures(graphfuse, tmp_path):
    file, picture = tmp_path / "result.json", tmp_path / "plot.png"
    result(row(1, tuned=20.0), row(64, tuned=90.0), shapes=(QWEN,)).write(file)
    peers = "benchmarks/peers/moe_vllm_0_22_h200.json"
    done = graphfuse("bench", "plot", file, "--output", picture, "--peers", peers)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(PNG)


def test_recorded_figures_of_moe_layers_do_not_go_with_another_result(graphfuse, tmp_path):
    peers, other = "benchmarks/peers/moe_vllm_0_22_h200.json", "benchmarks/results/allreduce_h200x2.json"
    done = graphfuse("bench", "plot", other, "--output", tmp_path / "plot.png", "--peers", peers)
    assert done.returncode == 1
    assert "--peers holds figures of MoE layers" in done.stderr
