"""Experts get the launch parameters of a tuned file, or of the heuristic, on made-up GPUs; the report says which."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import graphfuse
from graphfuse import FuseConfig
from graphfuse.errors import RuleError, SchemaError
from graphfuse.facts import Facts
from graphfuse.ops import moe_triton
from graphfuse.ops.moe import moe_experts
from graphfuse.passes.expert_layers import is_expert_layer
from graphfuse.passes.graph_reading import argument
from graphfuse.passes.lower_moe import LOWER_MOE
from graphfuse.testing import Trace, assert_golden, fake_tp, trace
from graphfuse.tuning.moe_table import MoeTable
from graphfuse.tuning.moe_tiles import MoeShape

GOLDEN = Path(__file__).parents[1] / "golden" / "experts"
FACTS = Path(__file__).parents[2] / "configs" / "facts"
H200, CPU = Facts.from_json(FACTS / "h200_x2.json"), Facts("cpu", 2)
E, H, I, K = 4, 32, 24, 2  # noqa: E741
FILE = f"E={E},N={I},device_name=NVIDIA_H200.json"
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
FP8 = torch.float8_e4m3fn


class Experts(nn.Module):
    """One layer's experts; `settings` are further arguments of the op."""

    def __init__(self, dtype: torch.dtype, experts: int = E, **settings) -> None:
        super().__init__()
        self.experts, self.settings = experts, settings
        self.gate_up = nn.Parameter(torch.rand(experts, 2 * I, H).to(dtype), requires_grad=False)
        self.down = nn.Parameter(torch.rand(experts, H, I).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(experts), requires_grad=False)

    def forward(self, x, ids, weights):
        quantised = self.gate_up.dtype.itemsize == 1
        scales = {"gate_up_scale": self.scale, "down_scale": self.scale} if quantised else {}
        return moe_experts(x, self.gate_up, self.down, ids, weights, self.experts, **scales, **self.settings)


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, ids, weights):
        for layer in self.layers:
            x = layer(x, ids, weights)
        return x


def lowered(*layers: nn.Module, facts: Facts = H200, dtype: torch.dtype = torch.bfloat16, **settings) -> Trace:
    inputs = torch.rand(6, H).to(dtype), torch.zeros(6, K, dtype=torch.int64), torch.rand(6, K).to(dtype)
    return trace(Layers(*layers), inputs, None, config=FuseConfig(**settings), facts=facts)


def tables(traced: Trace) -> list[MoeTable]:
    nodes = filter(is_expert_layer, traced.after.graph.nodes)
    return [MoeTable.from_text(argument(node, "launch")) for node in nodes]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"1": TILE, "64": TILE}))
    return tmp_path


def test_without_a_file_the_heuristic_serves_and_the_report_says_so():
    traced = lowered(Experts(torch.bfloat16))
    assert_golden(traced.after, GOLDEN / "lowered.after.txt")
    (table,) = tables(traced)
    assert (table.shape, table.source) == (MoeShape(E, I, H, K), "heuristic")
    (layer,) = traced.report.moe
    assert (layer.module, layer.status, layer.config, layer.files) == ("layers.0", "lowered", "heuristic", ())
    assert any(f"there is no {FILE} in the shipped configs" in note for note in layer.notes)


def test_tiles_are_made_to_fit_the_described_gpu():
    for facts, kib in ((H200, 227), (dataclasses.replace(H200, gpu="NVIDIA L40S", compute_capability=(8, 9)), 99)):
        (table,) = tables(lowered(Experts(torch.bfloat16), facts=facts))
        assert table.limits is not None
        assert (table.limits.shared_memory, table.limits.token_bytes, table.limits.weight_bytes) == (kib * 1024, 2, 2)


def test_a_file_of_the_user_serves_each_layer_of_its_shape(folder):
    traced = lowered(*(Experts(torch.bfloat16) for _ in range(3)), Experts(torch.bfloat16, 8), moe_config_dir=folder)
    assert [len(table.entries) for table in tables(traced)] == [2, 2, 2, 0]
    assert [layer.config for layer in traced.report.moe] == [FILE, FILE, FILE, "heuristic"]
    assert traced.report.moe[0].files == (str(folder / FILE),)
    text = " ".join(str(traced.report).split())
    assert (
        f"experts: 3 layers of 4 experts, intermediate 24, hidden 32, top 2, bfloat16: Triton kernels, {FILE}" in text
    )
    assert "experts: 1 layer of 8 experts" in text
    lines = traced.report.to_json()["moe"]
    assert [(line["module"], line["experts"], line["status"]) for line in lines] == [
        *((f"layers.{index}", 4, "lowered") for index in range(3)),
        ("layers.3", 8, "lowered"),
    ]


def test_a_file_is_read_once(folder, monkeypatch):
    looked = []
    from graphfuse.passes import lower_moe

    find = lower_moe.find_table
    monkeypatch.setattr(lower_moe, "find_table", lambda *args, **kw: looked.append(args) or find(*args, **kw))
    lowered(*(Experts(torch.bfloat16) for _ in range(3)), moe_config_dir=folder)
    assert looked == [(MoeShape(E, I, H, K), "NVIDIA H200")]


def test_a_damaged_file_is_an_error_that_names_it(folder):
    (folder / FILE).write_text(json.dumps({"1": {**TILE, "BLOCK_SIZE_M": "many"}}))
    with pytest.raises(SchemaError, match=r"E=4,N=24,device_name=NVIDIA_H200.*BLOCK_SIZE_M"):
        lowered(Experts(torch.bfloat16), moe_config_dir=folder)


def test_ranks_with_different_gpus_take_the_heuristic(folder):
    traced = lowered(Experts(torch.bfloat16), facts=dataclasses.replace(H200, gpu=None), moe_config_dir=folder)
    (layer,) = traced.report.moe
    assert layer.config == "heuristic"
    assert "the ranks have different GPUs" in layer.outcome()


FORMS = [
    (Experts(FP8, tokens_scale=torch.ones(1), intermediate_scale=torch.ones(1)), "fp8_w8a8", (1, 1)),
    (Experts(FP8, tokens_scale=torch.ones(E), intermediate_scale=torch.ones(1)), "fp8_w8a8", (2, 1)),
    (Experts(FP8, dynamic=True), "fp8_w8a8", (1, 1)),
    (Experts(FP8), "fp8_w8a16", (2, 2)),
]
"""Layers, the name of their format, and bytes of a token's number and a weight as they are multiplied or stored."""


@pytest.mark.parametrize(
    ("layer", "dtype", "num_bytes"), FORMS, ids=["static", "static for each expert", "dynamic", "weights alone"]
)
def test_quantised_experts_are_named_as_tuning_files_name_them(layer, dtype, num_bytes):
    traced = lowered(layer)
    (table,) = tables(traced)
    assert table.shape.dtype == traced.report.moe[0].dtype == dtype
    assert table.limits is not None
    assert (table.limits.token_bytes, table.limits.weight_bytes) == num_bytes


# --- left alone, and why ----------------------------------------------------------------------------------------------

INT8 = Experts(torch.int8)
LEFT_ALONE = {
    "cpu": (Experts(torch.bfloat16), {"facts": CPU}, "the group computes on the CPU"),
    "float64": (Experts(torch.float64), {"dtype": torch.float64}, "float64"),
    "int8": (INT8, {}, "the weights are int8"),
    "disabled": (Experts(torch.bfloat16), {"disabled_rules": {"lower_moe"}}, "the rule lower_moe is switched off"),
    "fusion_off": (Experts(torch.bfloat16), {"fusion": "off"}, "fusion is switched off"),
    "own_rules": (Experts(torch.bfloat16), {"rules": ()}, "no rule starts there"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_experts_are_left_alone_with_a_reason(name):
    layer, settings, reason = LEFT_ALONE[name]
    traced = lowered(layer, **settings)
    (node,) = filter(is_expert_layer, traced.after.graph.nodes)
    assert not argument(node, "launch")
    (entry,) = traced.report.moe
    assert (entry.status, entry.config, entry.experts) == ("declined", None, E)
    assert reason in entry.outcome()


def test_what_the_kernels_say_is_the_reason(monkeypatch):
    monkeypatch.setattr(moe_triton, "can_run", lambda *args: "they are out of order")
    assert lowered(Experts(torch.bfloat16)).report.moe[0].outcome() == "not lowered: they are out of order"


def test_launch_parameters_that_the_model_gives_stay(folder):
    own = MoeTable(MoeShape(E, I, H, K), source="mine.json").to_text()
    traced = lowered(Experts(torch.bfloat16, launch=own), moe_config_dir=folder)
    assert [table.source for table in tables(traced)] == ["mine.json"]
    assert traced.report.rules["lower_moe"]["matches"] == traced.report.rules["lower_moe"]["declines"] == 0
    assert traced.report.moe[0].outcome() == "Triton kernels, mine.json; the model itself gives launch parameters"


def test_fuel_stops_after_so_many_layers(monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_FUEL", "2")
    report = lowered(*(Experts(torch.bfloat16) for _ in range(3))).report
    assert [layer.status for layer in report.moe] == ["lowered", "lowered", "declined"]
    assert report.moe[2].outcome() == "not lowered: stopped by GRAPHFUSE_FUEL"


def test_a_switched_off_lowering_is_no_reason_of_a_reduction():
    class Summed(Experts):
        def forward(self, x, ids, weights):
            return torch.distributed._functional_collectives.all_reduce(super().forward(x, ids, weights), "sum", group)

    with fake_tp(2) as group:
        inputs = torch.rand(6, H), torch.zeros(6, K, dtype=torch.int64), torch.rand(6, K)
        config = FuseConfig(disabled_rules={"lower_moe"}, verify_placements=False)
        report = trace(Summed(torch.float32), inputs, group, config=config, facts=H200).report
    assert not any(decline.rule == "lower_moe" for site in report.sites for decline in site.declines)
    assert "lower_moe is switched off" in report.moe[0].outcome()


def test_a_rule_that_fails_is_named_with_the_layer():
    def fail(*_args):
        raise KeyError("nothing")

    broken = dataclasses.replace(LOWER_MOE, rewrite=fail)
    with pytest.raises(RuleError, match=r"The rule 'lower_moe' fails where it rewrites layers\.0: KeyError"):
        lowered(Experts(torch.bfloat16), rules=(broken,))


def test_inductor_takes_the_op_with_all_of_its_arguments():
    """It hands arguments on by name, beside its own `kernel`."""
    model = Layers(Experts(torch.float32, launch=""), Experts(torch.float32))
    compiled = graphfuse.compile(model, None, config=FuseConfig(executor="inductor", watch=False))
    x, ids, weights = torch.rand(5, H), torch.randint(E, (5, 2)), torch.rand(5, 2)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, ids, weights), model(x, ids, weights))
