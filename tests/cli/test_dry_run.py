"""`graphfuse generate --dry-run`: what there is to do, without weights."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.cli.test_generate import write_lines
from tests.generation.conftest import MAX_POSITIONS


@pytest.fixture
def no_weights(checkpoint, tmp_path):
    """The checkpoint without its weights."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def test_the_input_is_counted_and_checked(graphfuse, no_weights, tmp_path):
    source = write_lines(
        tmp_path / "in.jsonl",
        {"id": 1, "prompt": "A"},
        {"id": 2, "prompt": "A cat", "max_tokens": MAX_POSITIONS},
        "{broken\n",
        {"id": 4, "prompt": "a b " * MAX_POSITIONS},
        {"id": 1, "prompt": "again"},
        {"id": 6, "prompt": "a", "temperature": -1},
    )
    output = tmp_path / "out.jsonl"
    options = ["generate", "--model", no_weights, "--tp", 2, "--dry-run", "--input", source, "--no-chat-template"]
    done = graphfuse(*options, "--max-new-tokens", 8)
    assert done.returncode == 0, done.stderr
    first, second, *errors = done.stdout.splitlines()
    assert first == "6 records: 2 to complete, 0 done already, 4 that cannot be used"
    assert second.startswith("4 prompt tokens to read; the longest prompt has 3 of a context of 128")
    assert second.endswith("which may cut 1 answer short")
    assert [error.partition(" (")[0] for error in errors] == [
        "Line 3 is not JSON",
        errors[1],
        'The "id" 1 of line 5 is that of an earlier line. Give each its own.',
        "Line 6: temperature=-1 is not a finite number ≥ 0. Use 0 for greedy decoding, or e.g. 0.7.",
    ]
    assert errors[1].startswith("Line 4: The prompt has") and "leaves no room" in errors[1]

    answer = {"id": 2, "text": "x", "finish_reason": "stop", "num_prompt_tokens": 3, "num_tokens": 1}
    torn = '{"id": 4, "err'
    write_lines(output, answer, torn)
    done = graphfuse(*options, "--output", output)
    assert done.stdout.startswith("6 records: 1 to complete, 1 done already, 4 that cannot be used\n"), done.stderr
    assert output.read_text() == json.dumps(answer) + "\n" + torn  # nothing is repaired

    write_lines(output, {**answer, "id": 9})
    done = graphfuse(*options, "--output", output)
    assert done.returncode == 1 and "holds 1 answer to ids that" in done.stderr


@pytest.mark.slow
def test_a_shorter_context_and_a_smaller_cache_are_counted_with(graphfuse, no_weights, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", {"id": 1, "prompt": "One two three four"})
    options = ["generate", "--model", no_weights, "--dry-run", "--input", source, "--no-chat-template"]
    for limit in (["--max-length", 4], ["--cache-tokens", 7, "--page-size", 4]):
        done = graphfuse(*options, *limit)
        assert done.returncode == 1
        assert "1 that cannot be used" in done.stdout and "of a context of 4" in done.stdout


@pytest.mark.parametrize("missing", ["model", "input"])
def test_what_is_not_there_is_said(graphfuse, no_weights, tmp_path, missing):
    source = write_lines(tmp_path / "in.jsonl", {"id": 1, "prompt": "A"})
    paths = {"model": no_weights, "input": source} | {missing: tmp_path / "nowhere"}
    done = graphfuse("generate", "--model", paths["model"], "--input", paths["input"], "--dry-run")
    assert done.returncode == 1
    assert "nowhere" in done.stderr and "Traceback" not in done.stderr


def test_what_was_done_in_a_longer_context_is_done(graphfuse, no_weights, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", {"id": 1, "prompt": "One two three four"}, {"id": 2, "prompt": "A"})
    answer = {"id": 1, "text": "x", "finish_reason": "stop", "num_prompt_tokens": 12, "num_tokens": 1}
    output = write_lines(tmp_path / "out.jsonl", answer)
    options = ["--input", source, "--output", output, "--no-chat-template", "--max-length", 4]
    done = graphfuse("generate", "--model", no_weights, "--dry-run", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 records: 1 to complete, 1 done already, 0 that cannot be used")
