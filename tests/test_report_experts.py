"""The report's lines on layers of experts: each in JSON, like ones together in the text."""

from __future__ import annotations

from graphfuse.report import DeclineReport, Report
from graphfuse.report_experts import DECLINED, LOWERED, ExpertsReport, summary

SIZES = {"experts": 128, "intermediate": 384, "hidden": 2048, "top_k": 8}
FILE = "E=128,N=384,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
REASON = DeclineReport("lower_moe", "the group computes on the CPU")


def layer(index: int, **more) -> ExpertsReport:
    values = {"status": LOWERED, "config": FILE, "dtype": "fp8_w8a8", "block_shape": (128, 128), **SIZES, **more}
    return ExpertsReport(f"layers.{index}.mlp.experts", **values)


def test_like_layers_are_one_line_of_text():
    layers = [layer(0), layer(1), layer(2, experts=256), layer(3, notes=("it is for Triton 3.4.0",))]
    sizes = "intermediate 384, hidden 2048, top 8, fp8_w8a8 in blocks of 128x128"
    assert summary(layers) == [
        f"experts: 2 layers of 128 experts, {sizes}: Triton kernels, {FILE}",
        f"experts: 1 layer of 256 experts, {sizes}: Triton kernels, {FILE}",
        f"experts: 1 layer of 128 experts, {sizes}: Triton kernels, {FILE}; it is for Triton 3.4.0",
    ]


def test_text_shows_file_names_with_brackets():
    report = Report()
    report.add_graph([], [layer(0)])
    assert FILE in "".join(str(report).split("\n")).replace(" ", "")


def test_json_has_every_layer():
    report = Report()
    report.add_graph([], [layer(0, files=(f"/configs/{FILE}",), notes=("a note",)), layer(1)])
    document = report.to_json()
    assert document["schema"] == 2
    assert [line["module"] for line in document["moe"]] == ["layers.0.mlp.experts", "layers.1.mlp.experts"]
    assert document["moe"][0] == {
        "module": "layers.0.mlp.experts", "status": "lowered", **SIZES, "dtype": "fp8_w8a8", "block_shape": [128, 128],
        "config": FILE, "files": [f"/configs/{FILE}"], "notes": ["a note"], "declines": [],
    }  # fmt: skip


def test_a_declined_layer_tells_each_reason_once():
    declined = layer(0, status=DECLINED, config=None, declines=(REASON, REASON))
    assert declined.outcome() == "not lowered: the group computes on the CPU"
    assert declined.to_json()["declines"] == [{"rule": "lower_moe", "reason": REASON.reason}] * 2
    assert ExpertsReport("x", DECLINED, declines=(REASON,)).sizes() == "of another form"


def test_a_layer_of_several_graphs_is_one_line_and_the_declined_one_shows():
    report = Report()
    declined = layer(1, status=DECLINED, config=None, declines=(REASON,))
    report.add_graph([], [layer(0), layer(1)])
    report.add_graph([], [layer(0), declined])
    report.add_graph([], [layer(0), layer(1), layer(2)])
    assert report.moe == [layer(0), declined, layer(2)]
