"""The scripts under examples/ run as their docstrings say, on two CPU ranks with tiny models."""

from __future__ import annotations

import sys

from tests.documents import ROOT, run
from tests.generation.conftest import checkpoint  # noqa: F401  (the tiny Llama)

EXAMPLES = ROOT / "examples"


def on_two_ranks(script: str, *arguments: object) -> str:
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, EXAMPLES / script, *arguments)
    return run(*command, folder=ROOT)


def test_a_transformers_model_is_compiled_and_gives_the_same_logits():
    output = on_two_ranks("compile_transformers.py")
    assert "7 all-reduces: 7 fused" in output
    assert float(output.split("largest difference of a logit:")[1]) < 1e-5


def test_prompts_are_completed_on_two_ranks_as_on_one(checkpoint):  # noqa: F811
    two = on_two_ranks("generate_offline.py", checkpoint)
    one = run(sys.executable, EXAMPLES / "generate_offline.py", checkpoint, folder=ROOT)
    completions = [line for line in two.splitlines() if " -> " in line]
    assert len(completions) == 3
    assert completions == [line for line in one.splitlines() if " -> " in line]


def test_every_example_is_short():
    for script in EXAMPLES.glob("*.py"):
        assert len(script.read_text().splitlines()) < 60, script
