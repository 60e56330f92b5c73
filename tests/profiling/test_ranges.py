"""A compiled model names its work: node by node in the eager executor, kernel by kernel behind Inductor."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from graphfuse.config import FuseConfig
from graphfuse.models import registry
from graphfuse.profiling import ranges
from graphfuse.profiling.attribution import PHASE, spent, work_of
from graphfuse.profiling.ranges import LabelledModel
from graphfuse.testing import fake_tp

LAYERS = 4
CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)
IDS = torch.zeros(1, 8, dtype=torch.long)


@dataclass
class Run:
    trace: dict
    plain: torch.Tensor
    """What a call without ranges gives."""

    labelled: torch.Tensor


def profiled(executor: str, fusion: str, folder: Path, *, ranges: bool = True) -> Run:
    torch.manual_seed(0)
    with fake_tp(2) as group:
        model = registry.build(CONFIG, group, torch.float32, "cpu").requires_grad_(False)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        with LabelledModel(model, group, FuseConfig(executor=executor, fusion=fusion, watch=False)) as compiled:
            plain = compiled(IDS)
            with (
                torch.profiler.profile() as profiler,
                torch.profiler.record_function(PHASE + "prefill"),
                compiled.ranges() if ranges else nullcontext(),
            ):
                labelled = compiled(IDS)
            profiler.export_chrome_trace(str(folder / "trace.json"))
    return Run(json.loads((folder / "trace.json").read_text()), plain, labelled)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each way to run it once: Inductor's C++ takes seconds to compile."""
    return functools.cache(lambda *way: profiled(*way, tmp_path_factory.mktemp("run")))


@pytest.mark.parametrize(
    ("fusion", "executor"),
    [
        ("auto", "eager"),
        ("off", "eager"),
        ("off", "inductor"),
        pytest.param("auto", "inductor", marks=pytest.mark.slow),
    ],
)
def test_every_layer_of_the_model_is_named(executor, fusion, runs):
    run = runs(executor, fusion)
    torch.testing.assert_close(run.plain, run.labelled, rtol=0, atol=0)
    found = spent(work_of(run.trace), "prefill")
    assert found.attributed > 0.9
    reductions = {label.path for label in found.by_label if label.category == "reduction"}
    sums = {f"layers.{i}.{part}" for i in range(LAYERS) for part in ("self_attn.o_proj", "mlp.down_proj")}
    assert sums <= reductions
    products = {label.path for label in found.by_label if label.category == "dense GEMM"}
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert {f"layers.{i}.{name}" for i in range(LAYERS) for name in names} | {"lm_head"} <= products
    attention = {label.path for label in found.by_label if label.op == "graphfuse.attention"}
    assert attention == {f"layers.{i}.self_attn" for i in range(LAYERS)}
    norms = {label.path for label in found.by_label if label.category == "norm"}
    assert bool(norms) == (fusion == "off")


def test_ranges_come_in_the_order_of_the_model(runs):
    """Layers are outlined: one function of the generated code, whose k-th call is the k-th layer."""
    events = [e for e in runs("inductor", "auto").trace["traceEvents"] if e.get("cat") == "user_annotation"]
    names = [event["name"] for event in sorted(events, key=lambda event: event["ts"])]
    sums = [found[1] for name in names if (found := re.match(r"layers\.(\d+)\.\S+ \[reduction", name))]
    assert sums == sorted(sums, key=int)
    assert Counter(sums) == {str(i): 2 for i in range(LAYERS)}


def test_without_ranges_nothing_is_named_and_nothing_is_traced(tmp_path):
    before = sys.gettrace()
    run = profiled("eager", "auto", tmp_path, ranges=False)
    assert sys.gettrace() is before
    assert not spent(work_of(run.trace), "prefill").by_label


def test_a_debuggers_tracer_is_back_afterwards():
    def debugger(*_):
        return None

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        with ranges.lines_traced([]):
            assert sys.gettrace() is not debugger
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
