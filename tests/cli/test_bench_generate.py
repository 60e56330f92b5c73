"""`graphfuse bench generate` on the CPU: what it measures of a tiny model, what it prints, writes and refuses."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_profile import random_moe  # noqa: F401  (a config without weights)
from tests.generation.conftest import checkpoint  # noqa: F401  (the tiny Llama)

LOAD = ("--device", "cpu", "--input-len", 12, "--output-len", 5, "--repeats", 2)


@pytest.mark.slow
def test_fused_and_unfused_take_turns_on_two_ranks(graphfuse, random_moe, tmp_path):  # noqa: F811
    options = ("--compare", "--batch", "1,3", "--offline", "4:6:3", "--output", tmp_path / "r.json")
    done = graphfuse(
        "bench", "generate", "--model", random_moe, "--random-weights", "--tp", 2, *LOAD, *options,
        "--plot", tmp_path / "p.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for text in ("decoding behind prompts of 12 tokens", "4 prompts at once, 6 tokens in and 3 out", "cold start, s"):
        assert text in done.stdout
    assert "unfused: 5 all-reduces, 0 fused" in done.stdout and "\nfused: 5 all-reduces, 5 fused" in done.stdout
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["ranks"], result["weights"], result["dtype"]) == (2, "random", "float32")
    assert [(row["batch"], row["variant"]) for row in result["rows"]] == [
        (1, "fused"), (1, "unfused"), (3, "fused"), (3, "unfused"),
    ]  # fmt: skip
    for row in result["rows"]:
        assert len(row["tpot_ms_rounds"]) == 2 and min(row["tpot_ms_rounds"]) > 0
        assert row["ttft_ms_p99"] >= row["ttft_ms_p50"] > 0
        assert row["reductions"] == 5 and row["busy_share"] is row["reduction_us"] is row["joules_per_token"] is None
    assert set(result["ratios"]) == {"batch 1", "batch 3", "offline"}
    assert [len(each["seconds"]) for each in result["offline"]] == [2, 2]
    for cold in result["cold_start"].values():
        assert cold["graph_capture_s"] is None and cold["prepare_s"] > 0 and cold["first_token_s"] > 0
    assert result["notes"] == []


def test_a_checkpoint_on_one_rank_and_a_limit_of_time(graphfuse, checkpoint, tmp_path):  # noqa: F811
    options = ("--no-fusion", "--batch", "2", "--time-limit", 0.001, "--output", tmp_path / "r.json")
    done = graphfuse("bench", "generate", "--model", checkpoint, *LOAD, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["ranks"], result["weights"], list(result["cold_start"])) == (1, "checkpoint", ["unfused"])
    assert result["rows"] == []
    assert result["notes"] == ["The time limit of 0.001 s ended the measurement before batch 2."]
    assert result["notes"][0] in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--output-len", 1), "--output-len 1 leaves nothing to measure. Use 2 or more."),
        (("--repeats", 0), "--repeats 0 leaves nothing to measure. Use 1 or more."),
        (("--batch", "1,x"), "--batch 1,x is not a list of sizes. Give numbers from 1 with commas between."),
        (("--dtype", "int8"), "--dtype int8 is not known. Use float32, bfloat16, float16."),
        (
            ("--offline", "256:512"),
            "--offline 256:512 is not PROMPTS:IN:OUT. Give three numbers, as in 256:512:256.",
        ),
        (
            ("--compare", "--no-fusion"),
            "--compare measures with and without fusion. Leave --no-fusion out.",
        ),
        (("--layers", 2), "--layers leaves out a part of a checkpoint. Use it with --random-weights."),
        (("--bandwidth", 0), "--bandwidth 0 is no rate of a memory. Give TB/s."),
        (
            ("--batch", 2000),
            "Steps of 2048 tokens leave too little room for prompts beside the tokens of 2000 sequences. "
            "Use at least 4000.",
        ),
        (("--plot", "picture.txt"), "picture.txt does not name a picture. End it with .png, .svg or .pdf."),
        (("--executor", "other"), "executor='other' is not known. Use one of 'auto', 'inductor', 'eager'."),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(graphfuse, options, message):
    done = graphfuse("bench", "generate", "--model", "nothing-here", "--device", "cpu", "--tp", 2, *options)
    assert (done.returncode, done.stderr) == (1, f"graphfuse: {message}\n")
