"""`graphfuse generate` on two CPU ranks that it starts itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import psutil

from graphfuse.generation import LLM, SamplingParams
from tests.cli.conftest import COMMAND, clean_environment
from tests.generation.conftest import MAX_POSITIONS


def write_lines(path, *records):
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path


def test_a_file_with_bad_lines_is_completed_on_two_ranks(graphfuse, checkpoint, tmp_path):
    source = write_lines(
        tmp_path / "in.jsonl",
        {"id": "first", "prompt": "The capital"},
        "{broken\n",
        {"id": "long", "prompt": "a b " * MAX_POSITIONS},
        {"id": "talk", "messages": [{"role": "user", "content": "A cat"}]},
        {"id": "empty", "prompt": ""},
        {"id": "last", "prompt": "One two three"},
    )
    target = tmp_path / "out.jsonl"
    options = ["--tp", 2, "--device", "cpu", "--max-new-tokens", 8, "--temperature", 1, "--seed", 5]
    result = graphfuse(
        "generate",
        "--model",
        checkpoint,
        "--input",
        source,
        "--output",
        target,
        *options,
        "--no-chat-template",
        "--report",
    )
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["first", None, "long", "talk", "empty", "last"]
    assert ["error" in line for line in lines] == [False, True, True, False, True, False]
    assert "leaves no room" in lines[2]["error"] and "is empty" in lines[4]["error"]
    assert "3 of 6 lines could not be used" in result.stderr
    assert "tokens/s" in result.stderr
    assert "5 all-reduces: 5 fused" in result.stderr  # the embedding, two in each layer

    single = LLM(checkpoint, device="cpu", compile=False)
    prompts = ["The capital", [{"role": "user", "content": "A cat"}], "One two three"]
    params = [SamplingParams(max_tokens=8, temperature=1, seed=5 + place) for place in (0, 3, 5)]
    expected = single.generate(prompts, params)
    assert [lines[i]["token_ids"] for i in (0, 3, 5)] == [c.token_ids for c in expected]
    assert [lines[i]["text"] for i in (0, 3, 5)] == [c.text for c in expected]
    assert [lines[i]["finish_reason"] for i in (0, 3, 5)] == [c.finish_reason for c in expected]


def test_ctrl_c_leaves_no_process(checkpoint, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *({"id": i, "prompt": "The"} for i in range(2000)))
    target = tmp_path / "out.jsonl"
    command = [*COMMAND, "generate", "--model", checkpoint, "--tp", "2", "--device", "cpu", "--max-batch-size", "1"]
    command += ["--input", source, "--output", target, "--max-new-tokens", "60"]
    # A session of its own stands for the terminal: Ctrl-C reaches the process in front, not the ranks.
    with subprocess.Popen(
        list(map(str, command)), env=clean_environment(), start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as process:
        partial = tmp_path / "out.jsonl.partial"
        parent = psutil.Process(process.pid)
        while process.poll() is None and not partial.exists():  # made when the model is loaded
            psutil.wait_procs([parent], timeout=0.05)
        assert process.poll() is None, process.stderr.read()
        family = parent.children(recursive=True)
        assert len(family) >= 2
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert not target.exists() and partial.exists()


def test_an_error_of_the_ranks_is_one_clear_line(graphfuse, tmp_path):
    result = graphfuse("generate", "--model", tmp_path / "nowhere", "--prompt", "a", "--tp", 2, "--device", "cpu")
    assert result.returncode == 1
    assert "nowhere" in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("graphfuse: ") == 1
