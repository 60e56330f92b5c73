"""What a node and a kernel are called."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.fx import Graph

from graphfuse.profiling.labels import CATEGORIES, TOP, Label, category_of, label_graph, label_of_kernel
from graphfuse.testing import fake_tp, trace

MM = Label("layers.1.mlp.down_proj", "dense GEMM", "aten.mm")
WAIT = Label("layers.1.mlp.down_proj", "reduction", "_c10d_functional.wait_tensor")
ADD = Label("layers.1", "other", "aten.add")
SCALE = Label("layers.2.input_layernorm", "norm", "aten.mul")


@pytest.mark.parametrize(
    ("op", "path", "category"),
    [
        ("aten.mm", "layers.0.self_attn.q_proj", "dense GEMM"),
        ("aten.addmm", "lm_head", "dense GEMM"),
        ("aten.mm", "layers.0.mlp.gate", "dense GEMM"),
        ("graphfuse.fp8_linear", "layers.0.mlp.gate_up_proj", "dense GEMM"),
        ("_c10d_functional.all_reduce", "layers.0.mlp", "reduction"),
        ("_c10d_functional.wait_tensor", "", "reduction"),
        ("graphfuse.all_reduce_add_rms_norm", "norm", "reduction"),
        ("mine.all_reduce_scale", "layers.0", "reduction"),
        ("graphfuse.attention", "layers.0.self_attn", "attention"),
        ("aten._softmax", "layers.0.self_attn", "attention"),
        ("aten._softmax", "layers.0.mlp.router", "attention"),
        ("aten.bmm", "layers.0.self_attn", "attention"),
        ("aten.bmm", "layers.0.mlp", "dense GEMM"),
        ("aten.topk", "layers.0.mlp.gate", "experts"),
        ("aten.mul", "layers.0.mlp.experts.act_fn", "experts"),
        ("graphfuse.moe_experts", "layers.0.mlp.experts", "experts"),
        ("aten.sigmoid", "layers.0.mlp.shared_expert_gate", "experts"),
        ("aten.silu", "layers.0.mlp.shared_experts.act_fn", "other"),
        ("aten.mul", "layers.0.self_attn.q_norm", "norm"),
        ("aten.rsqrt", "model.layers.0.post_attention_layernorm", "norm"),
        ("aten.mul", "transformer.h.0.ln_1", "norm"),
        ("aten.cos", "rotary", "attention"),
        ("aten.embedding", "embed_tokens", "other"),
        ("aten.mul", "layers.0.mlp", "other"),
        ("aten.argmax", "", "sampling"),
    ],
)
def test_the_kind_of_work(op, path, category):
    assert category in CATEGORIES
    assert category_of(op, path) == category


def test_a_range_is_read_as_it_was_written():
    for label in (MM, WAIT, Label(TOP, "other", "aten.add")):
        assert Label.read(label.text) == label
    assert Label.read("aten::mm") is None
    assert Label.read("layers.0 [of another kind: aten.mm]") is None


class Layer(nn.Module):
    def __init__(self, group) -> None:
        super().__init__()
        self.proj, self.norm, self.group = nn.Linear(16, 64, bias=False), nn.RMSNorm(64), group

    def forward(self, x, residual):
        return self.norm(residual + fc.all_reduce(self.proj(x), "sum", self.group))


def test_a_fused_reduction_goes_by_the_module_whose_sum_it_is():
    inputs = torch.ones(6, 16), torch.ones(6, 64)
    with fake_tp(4) as group:
        traced = trace(lambda: Layer(group), inputs, group)
    before, after = (list(label_graph(graph.graph).values()) for graph in (traced.before, traced.after))
    assert {label.category for label in before} >= {"dense GEMM", "reduction", "norm"}
    assert [label for label in after if label.category == "reduction"] == [
        Label("proj", "reduction", "graphfuse.all_reduce_add_rms_norm")
    ]


def test_a_node_without_module_stands_at_the_top():
    graph = Graph()
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("x"), 1)))
    assert [label.path for label in label_graph(graph).values()] == [TOP]


@pytest.mark.parametrize(
    ("kernel", "labels", "expected"),
    [
        ("extern_kernels.mm", [ADD, MM], MM),
        ("extern_kernels.addmm", [ADD, MM], MM),
        ("torch.ops._c10d_functional.wait_tensor.default", [MM, WAIT], WAIT),
        ("torch.ops._c10d_functional.all_reduce_.default", [ADD, WAIT], WAIT),
        ("triton_red_fused_add_mul_0", [WAIT, ADD, ADD, SCALE], SCALE),
        ("cpp_fused_add_0", [WAIT, MM, ADD], ADD),
        ("triton_poi_fused_copy_0", [WAIT], WAIT),
        ("triton_mm", [ADD, MM], MM),
        ("triton_tem_fused_mm_3", [SCALE, MM], MM),
        ("extern_kernels.mm", [WAIT], MM),
        ("extern_kernels.mm", [], None),
    ],
)
def test_one_label_for_a_kernel_of_several_nodes(kernel, labels, expected):
    assert label_of_kernel(kernel, labels) == expected
    assert label_of_kernel(kernel, labels[::-1]) == expected
