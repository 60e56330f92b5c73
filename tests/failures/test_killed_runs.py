"""`graphfuse generate --tp 2` on a file, killed (SIGKILL) and started again: every record is answered exactly once."""

from __future__ import annotations

import json
import random
import subprocess
import time

import psutil
import pytest

from tests.cli.conftest import COMMAND, clean_environment

NUM_RECORDS = 80


def write_input(folder):
    lines = [
        json.dumps({"id": i, "prompt": "The capital" if i % 3 else "A cat sat"}) + "\n" for i in range(NUM_RECORDS)
    ]
    lines[7], lines[50] = '{"id": 7, "prompt": ""}\n', "{broken\n"
    (folder / "in.jsonl").write_text("".join(lines))


def command(checkpoint, folder):
    options = ["--tp", "2", "--device", "cpu", "--executor", "eager", "--max-batch-size", "4", "--max-new-tokens", "40"]
    files = ["--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    return [*COMMAND, "generate", "--model", str(checkpoint), *files, *options]


def num_lines(folder):
    output = folder / "out.jsonl"
    return output.read_bytes().count(b"\n") if output.exists() else 0


def is_rank(process):
    try:
        return "graphfuse.cli.main" in process.cmdline()
    except psutil.Error:
        return False


def run_and_kill(checkpoint, folder, victim, until):
    """Start the command, kill the launcher or a rank once `until(seconds)` holds, and see all of it end. False: it came
    to its end before."""
    with subprocess.Popen(
        command(checkpoint, folder), env=clean_environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        launcher, start, family = psutil.Process(process.pid), time.monotonic(), []
        try:
            while process.poll() is None and not until(time.monotonic() - start):
                psutil.wait_procs([launcher], timeout=0.02)
                family = launcher.children(recursive=True) if process.poll() is None else []
            ended_before = process.poll() is not None
            ranks = sorted((child for child in family if is_rank(child)), key=lambda child: child.pid)
            killed = launcher if victim == "launcher" or len(ranks) < 2 else ranks[victim]
            if not ended_before:
                killed.kill()
            _, errors = process.communicate(timeout=60)
            _, alive = psutil.wait_procs(family, timeout=60)
            assert not alive
        finally:
            for child in (*family, launcher):
                if child.is_running():
                    child.kill()
    if ended_before:
        assert process.returncode == 0, errors
    return not ended_before


def finish(checkpoint, folder):
    done = subprocess.run(
        command(checkpoint, folder), env=clean_environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    names = [(line["id"], line.get("line")) for line in lines]
    expected = {(i, None) for i in range(NUM_RECORDS) if i != 50} | {(None, 51)}
    assert len(names) == NUM_RECORDS and set(names) == expected
    assert {name for name, line in zip(names, lines, strict=True) if "error" in line} == {(7, None), (None, 51)}
    return done.stderr


@pytest.mark.slow
def test_a_run_goes_on_after_a_rank_and_after_the_launcher_was_killed(checkpoint, tmp_path):
    write_input(tmp_path)
    for victim in (1, "launcher"):
        enough = num_lines(tmp_path) + 6
        killed = run_and_kill(checkpoint, tmp_path, victim, lambda _, enough=enough: num_lines(tmp_path) >= enough)
        assert killed and enough <= num_lines(tmp_path) < NUM_RECORDS
    assert "records are done in" in finish(checkpoint, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_after_kills_at_any_moment(checkpoint, tmp_path):
    write_input(tmp_path)
    choices = random.Random()
    for _ in range(8):
        moment = choices.uniform(0, 25)
        run_and_kill(checkpoint, tmp_path, choices.choice([0, 1, "launcher"]), lambda seconds, at=moment: seconds > at)
    finish(checkpoint, tmp_path)
