"""A rank's peak memory while loading is its part of the weights plus a bounded buffer, not the checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from graphfuse.models import registry

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from graphfuse.weights import stream
from graphfuse.weights.load import load

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key + ":"))
    return int(line.split()[1]) << 10

torch.set_num_threads(1)
stream.BUFFER_BYTES = int(sys.argv[2])
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
load(sys.argv[3], dist.group.WORLD)            # a small one: libraries are in, allocator is warm
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again here
before = status("VmRSS")
model = load(sys.argv[1], dist.group.WORLD)
held = sum(p.numel() * p.element_size() for p in model.parameters())
print(held, status("VmHWM") - before)
"""


def write(folder: Path, hidden_size: int) -> int:
    """A Llama checkpoint of one file; returns its bytes."""
    config = LlamaConfig(
        hidden_size=hidden_size, intermediate_size=4 * hidden_size, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=8000, dtype=torch.float32,
    )  # fmt: skip
    config.save_pretrained(folder)
    plans = registry.build(config, device="meta").checkpoint_plan(frozenset())
    save_file({plan.name: torch.ones(plan.shape) for plan in plans}, folder / "model.safetensors")
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark of memory")
def test_peak_memory_is_the_ranks_part_and_a_buffer(tmp_path):
    buffer, slack = 16 * MIB, 16 * MIB
    file_bytes = write(tmp_path / "large", 1024)
    write(tmp_path / "small", 64)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "large"), str(buffer), str(tmp_path / "small")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    held, peak = map(int, done.stdout.split()[-2:])
    assert held < 0.3 * file_bytes
    limit = held + buffer + slack
    assert limit < 0.5 * file_bytes, "the test could not fail otherwise"
    assert held * 0.9 < peak < limit, f"peak {peak / MIB:.0f} MiB, part {held / MIB:.0f} MiB"
