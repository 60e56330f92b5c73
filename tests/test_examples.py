"""The scripts under examples/ run as their docstrings say, on two CPU ranks with tiny models."""

from __future__ import annotations

import sys

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


def test_a_transformers_model_is_compiled_and_gives_the_same_logits():
    output = on_two_ranks("compile_transformers.py")
    assert "7 all-reduces: 7 fused" in output
    assert float(output.split("largest difference of a logit:")[1]) < 1e-5


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


def test_every_example_is_short():
    for script in EXAMPLES.glob("*.py"):
        assert len(script.read_text().splitlines()) < 60, script
