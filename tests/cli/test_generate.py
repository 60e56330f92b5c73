"""`graphfuse generate` on two CPU ranks that it starts itself."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from graphfuse.cli.generate import generate
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
        "--token-ids",
        "--report",
    )
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in target.read_text().splitlines()]
    lines = {line["id"]: line for line in found}
    assert len(found) == 6 and lines.keys() == {"first", None, "long", "talk", "empty", "last"}
    assert {name for name, line in lines.items() if "error" in line} == {None, "long", "empty"}
    assert "leaves no room" in lines["long"]["error"] and "is empty" in lines["empty"]["error"]
    assert "3 records completed, 3 could not be used, 0 were done before" in result.stderr
    assert "latency of a record: p50" in result.stderr
    assert "tokens/s" in result.stderr
    assert "5 all-reduces: 5 fused" in result.stderr  # the embedding, two in each layer

    single = LLM(checkpoint, device="cpu", compile=False)
    prompts = ["The capital", [{"role": "user", "content": "A cat"}], "One two three"]
    params = [SamplingParams(max_tokens=8, temperature=1, seed=5 + place) for place in (0, 3, 5)]
    expected = single.generate(prompts, params)
    for name, completion in zip(("first", "talk", "last"), expected, strict=True):
        assert lines[name] == {
            "id": name,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "num_prompt_tokens": len(completion.prompt_token_ids),
            "num_tokens": len(completion.token_ids),
            "token_ids": completion.token_ids,
        }


def test_lines_of_openai_are_answered_and_a_second_run_has_nothing_to_do(graphfuse, checkpoint, tmp_path):
    body = {"messages": [{"role": "user", "content": "A cat"}], "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    source = write_lines(
        tmp_path / "in.jsonl",
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"prompt": "A cat", "max_tokens": 3}},
        {"id": "ours", "prompt": "A cat", "temperature": 1, "n": 2, "max_tokens": 3},
    )
    target = tmp_path / "out.jsonl"
    command = ["generate", "--model", checkpoint, "--device", "cpu", "--executor", "eager", "--seed", 1]
    command += ["--input", source, "--output", target]
    result = graphfuse(*command)
    assert result.returncode == 0, result.stderr
    lines = {line.get("custom_id", line["id"]): line for line in map(json.loads, target.read_text().splitlines())}
    [choice] = lines["chat"]["response"]["body"]["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] in ("length", "stop")
    assert all(len(token["top_logprobs"]) == 2 for token in choice["logprobs"]["content"])
    assert lines["text"]["response"]["body"]["usage"]["prompt_tokens"] == 3  # no template, though there is one
    assert len(lines["ours"]["completions"]) == 2

    before = target.read_bytes()
    result = graphfuse(*command)
    assert result.returncode == 0, result.stderr
    assert "Nothing is left to do" in result.stderr
    assert target.read_bytes() == before


def test_a_schema_that_is_no_json_is_said(graphfuse, tmp_path):
    (tmp_path / "schema.json").write_text("{")
    result = graphfuse("generate", "--model", "nowhere", "--prompt", "a", "--json-schema", tmp_path / "schema.json")
    assert result.returncode == 1
    assert "schema.json cannot be read as JSON" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_file_of_which_nothing_can_be_used_is_an_error(graphfuse, checkpoint, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", "{broken\n", {"id": 1, "prompt": ""})
    options = ["--tp", 2, "--device", "cpu", "--executor", "eager"]
    result = graphfuse("generate", "--model", checkpoint, "--input", source, "--output", tmp_path / "out", *options)
    assert result.returncode == 1
    assert "0 records completed, 2 could not be used" in result.stderr
    assert "graphfuse: No record of" in result.stderr and "could be used" in result.stderr
    assert len((tmp_path / "out").read_text().splitlines()) == 2


def test_torchrun_starts_replicas_that_share_the_input(checkpoint, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *({"id": i, "prompt": "The"} for i in range(7)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", *COMMAND[1:], "generate", "--model", str(checkpoint), "--tp", "1"]
    command += ["--device", "cpu", "--executor", "eager", "--max-new-tokens", "3"]
    command += ["--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    parts = [(tmp_path / f"out-0000{replica}-of-00002.jsonl").read_text().splitlines() for replica in range(2)]
    assert [sorted(json.loads(line)["id"] for line in part) for part in parts] == [[0, 2, 4, 6], [1, 3, 5]]


def test_the_options_say_what_the_llm_does_without_them():
    options = inspect.signature(generate).parameters
    for name, parameter in inspect.signature(LLM).parameters.items():
        if name in options and name not in ("dtype", "device"):
            assert options[name].default == parameter.default, name


def test_ctrl_c_leaves_no_process(checkpoint, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *({"id": i, "prompt": "The"} for i in range(2000)))
    target = tmp_path / "out.jsonl"
    command = [*COMMAND, "generate", "--model", checkpoint, "--tp", "2", "--device", "cpu", "--max-batch-size", "1"]
    command += ["--input", source, "--output", target, "--max-new-tokens", "60"]
    # A session of its own stands for the terminal: Ctrl-C reaches the process in front, not the ranks.
    with subprocess.Popen(
        list(map(str, command)), env=clean_environment(), start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as process:
        parent = psutil.Process(process.pid)
        while process.poll() is None and not (target.exists() and target.stat().st_size):
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
    assert all(json.loads(line)["num_tokens"] for line in target.read_text().splitlines())


def test_an_error_of_the_ranks_is_one_clear_line(graphfuse, tmp_path):
    result = graphfuse("generate", "--model", tmp_path / "nowhere", "--prompt", "a", "--tp", 2, "--device", "cpu")
    assert result.returncode == 1
    assert "nowhere" in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("graphfuse: ") == 1
