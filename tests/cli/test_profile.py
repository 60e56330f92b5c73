"""`graphfuse profile` on two CPU ranks, and what it prints and draws."""

from __future__ import annotations

import json

import pytest

from graphfuse.profiling.labels import CATEGORIES
from tests.generation.conftest import checkpoint  # noqa: F401  (the tiny Llama)


@pytest.fixture(scope="module")
def random_moe(tmp_path_factory) -> str:
    """A config without weights."""
    folder = tmp_path_factory.mktemp("tiny-moe")
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.slow
def test_a_checkpoint_on_two_ranks(graphfuse, checkpoint, tmp_path):  # noqa: F811
    options = (
        "--batch",
        2,
        "--input-len",
        6,
        "--steps",
        2,
        "--trace",
        tmp_path / "t.json",
        "--plot",
        tmp_path / "p.png",
    )
    done = graphfuse("profile", "--model", checkpoint, "--tp", 2, "--device", "cpu", *options)
    assert done.returncode == 0, done.stderr
    for text in ("prefill of [2, 6]", "step of [2, 1]", "layers.*.mlp.down_proj", "reduction + norm", "idle gaps"):
        assert text in done.stdout
    assert "unfused: 5 all-reduces, 0 fused" in done.stdout and "\nfused: 5 all-reduces, 5 fused" in done.stdout
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    for variant, op in (("unfused", "_c10d_functional.wait_tensor"), ("fused", "graphfuse.all_reduce_add_rms_norm")):
        trace = json.loads((tmp_path / f"t.{variant}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"]]
        # A step's and the prefill's, once for each of the calls.
        assert names.count(f"layers.1.mlp.down_proj [reduction: {op}]") == 2 + 2


@pytest.mark.slow
def test_random_weights_need_no_checkpoint(graphfuse, random_moe):
    options = ("--random-weights", "--input-len", 4, "--steps", 3, "--json")
    done = graphfuse("profile", "--model", random_moe, "--tp", 2, "--device", "cpu", *options)
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)
    assert (profile["kind"], profile["ranks"], profile["steps"]) == ("graphfuse profile", 2, 3)
    for phase in ("prefill", "step"):
        for variant in ("unfused", "fused"):
            found = profile["phases"][phase][variant]
            assert set(found["categories"]) == set(CATEGORIES)
            assert found["categories"]["experts"] > 0 and found["categories"]["sampling"] > 0
            assert found["attributed"] > 0.9
            parts = sum(found["categories"].values()) + found["unattributed"] + found["idle"]
            assert parts == pytest.approx(found["us"], rel=1e-3)
            assert sum(module["us"] for module in found["modules"]) == pytest.approx(
                sum(found["categories"].values()), rel=1e-3
            )
        downs = [m for m in profile["phases"][phase]["fused"]["modules"] if m["category"] == "reduction"]
        assert {m["module"]: m["layers"] for m in downs}["layers.*.self_attn.o_proj"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "0"), "--steps 0 leaves nothing to run. Use 1 or more."),
        (("--dtype", "int8"), "--dtype int8 is not known. Use float32, bfloat16, float16."),
        (("--plot", "picture.txt"), "picture.txt does not name a picture. End it with .png, .svg or .pdf."),
        (
            ("--trace", "nowhere/t.json"),
            "--trace 'nowhere/t.json' is in no folder. Make the folder, or give another file.",
        ),
        (("--executor", "other"), "executor='other' is not known. Use one of 'auto', 'inductor', 'eager'."),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(graphfuse, options, message):
    done = graphfuse("profile", "--model", "nothing-here", "--device", "cpu", *options)
    assert (done.returncode, done.stderr) == (1, f"graphfuse: {message}\n")
