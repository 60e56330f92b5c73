"""A profile as data, table and picture."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from graphfuse.profiling import plot, text
from graphfuse.profiling.attribution import Spent
from graphfuse.profiling.labels import CATEGORIES, Label
from graphfuse.profiling.result import FUSED, UNFUSED, Phase, Profile


def down(layer: int, category: str = "reduction", op: str = "aten.x") -> Label:
    return Label(f"layers.{layer}.mlp.down_proj", category, op)


def phase(reduction: float, norm: float) -> Phase:
    labels = {down(0): reduction / 2, down(1): reduction / 2, Label("norm", "norm", "aten.mul"): norm}
    window = reduction + norm + 10.0
    return Phase.of(Spent(window, 6.0, {k: v for k, v in labels.items() if v}, 4.0, 12), calls=2)


@pytest.fixture
def profile() -> Profile:
    variants = {UNFUSED: phase(60.0, 30.0), FUSED: phase(40.0, 0.0)}
    totals = {"all_reduce": 2, "fused": 0, "merged": 0, "declined": 2}
    return Profile(
        model="Tiny",
        device="GPU",
        ranks=2,
        batch=3,
        input_len=5,
        steps=2,
        dtype="bfloat16",
        executor="inductor",
        timed="steps as CUDA graphs",
        date="2026-01-01",
        versions={"torch": "2.13"},
        all_reduces={UNFUSED: totals, FUSED: totals | {"fused": 2, "declined": 0}},
        phases={"prefill": variants, "step": variants},
        notes=["fused: a note"],
    )


def test_layers_that_are_alike_are_one_line():
    found = phase(60.0, 30.0)
    assert [(m.module, m.layers, m.us) for m in found.modules] == [
        ("layers.*.mlp.down_proj", 2, 30.0),
        ("norm", 1, 15.0),
    ]
    assert set(found.categories) == set(CATEGORIES)
    assert (found.us, found.idle, found.unattributed, found.kernels) == (50.0, 3.0, 2.0, 6.0)
    assert found.reductions_and_norms == 45.0


def test_as_json(profile):
    document = json.loads(profile.dumps())
    assert document["kind"] == "graphfuse profile"
    assert document["phases"]["step"]["fused"]["categories"]["reduction"] == 20.0
    assert document["phases"]["step"]["unfused"]["modules"][0]["module"] == "layers.*.mlp.down_proj"


def test_as_a_table(profile):
    console = Console(file=io.StringIO(), width=120)
    for table in text.tables(profile):
        console.print(table)
    printed = console.file.getvalue()
    assert "prefill of [3, 5], µs a call" in printed and "step of [3, 1], µs a call" in printed
    (line,) = {line for line in printed.splitlines() if "reduction + norm" in line}
    assert line.split() == [
        "│",
        "reduction",
        "+",
        "norm",
        "│",
        "45.0",
        "│",
        "90.0",
        "│",
        "20.0",
        "│",
        "80.0",
        "│",
        "25.0",
        "│",
    ]
    lines = list(text.footnotes(profile))
    assert lines[0] == "Tiny in bfloat16 on 2 x GPU, inductor; means of 2 steps, steps as CUDA graphs"
    assert lines[-1] == "fused: a note"


def test_as_a_picture(profile):
    figure = plot.draw(profile)
    assert [axes.get_title() for axes in figure.axes] == ["prefill of [3, 5]", "step of [3, 1]"]
    tops: dict[str, float] = {}
    for bar in figure.axes[1].patches:
        name = str(round(bar.get_x()))
        tops[name] = max(tops.get(name, 0.0), bar.get_y() + bar.get_height())
    assert sorted(tops.values()) == [pytest.approx(25.0), pytest.approx(50.0)]
    assert set(plot.COLOURS) == {*CATEGORIES, "not attributed", "idle gaps"}
