"""The scripts under examples/ run as their docstrings say, on two CPU ranks with tiny models."""

from __future__ import annotations

import json
import sys

import pytest

from tests.documents import ROOT, run
from tests.generation.conftest import checkpoint  # noqa: F401  (the tiny Llama)

EXAMPLES = ROOT / "examples"


def on_two_ranks(script: str, *arguments: object) -> str:
    command = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        2,
        EXAMPLES / script,
        *arguments,
    )
    return run(*command, folder=ROOT)


@pytest.mark.slow
def test_a_transformers_model_is_compiled_and_gives_the_same_logits():
    output = on_two_ranks("compile_transformers.py")
    assert "7 all-reduces: 7 fused" in output
    assert float(output.split("largest difference of a logit:")[1]) < 1e-5


@pytest.mark.slow
def test_a_module_sharded_by_torch_is_compiled_and_gives_the_same_result():
    output = on_two_ranks("tensor_parallel_module.py")
    assert "4 all-reduces: 4 fused" in output
    assert float(output.split("largest difference from the whole model:")[1]) < 1e-5


def test_a_rule_from_outside_is_used_and_changes_nothing():
    output = run(sys.executable, EXAMPLES / "custom_rule.py", folder=ROOT)
    assert "equal: True, rewritten: {'matches': 2, 'declines': 0" in output


def test_prompts_are_completed_on_two_ranks(checkpoint):  # noqa: F811
    output = on_two_ranks("generate_offline.py", checkpoint)
    assert output.count(" -> ") == 3, "one rank prints"
    assert "tokens/s" in output


def test_a_file_of_answers_is_gone_on_with(checkpoint, tmp_path):  # noqa: F811
    answers = tmp_path / "answers.jsonl"
    command = (sys.executable, EXAMPLES / "resumed_file.py", checkpoint, answers)
    assert run(*command, folder=ROOT).endswith("All are answered.\n")
    lines = answers.read_text().splitlines()
    answers.write_text("\n".join(lines[:5]) + "\n" + lines[5][:9])
    assert "5 of 12 are answered." in run(*command, folder=ROOT)
    ids = [json.loads(line)["id"] for line in answers.read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 12
    assert run(*command, folder=ROOT) == "12 of 12 are answered.\n"


@pytest.mark.slow
def test_a_data_set_is_completed_in_ray(checkpoint):  # noqa: F811
    pytest.importorskip("ray.data")
    output = run(sys.executable, EXAMPLES / "ray_data.py", checkpoint, 2, folder=ROOT)
    assert sorted(line.partition(":")[0] for line in output.splitlines() if ": '" in line) == [str(i) for i in range(8)]


def test_every_example_is_short():
    for script in EXAMPLES.glob("*.py"):
        assert len(script.read_text().splitlines()) < 60, script
