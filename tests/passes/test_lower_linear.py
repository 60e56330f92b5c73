"""Products with a weight's transpose become `graphfuse::linear` on GPUs, and nothing else does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphfuse import FuseConfig
from graphfuse.errors import ArgumentError
from graphfuse.facts import Facts
from graphfuse.ops.linear import MOST_BYTES_OF_ONE_ROW, MOST_SKINNY_BYTES, OP, is_skinny, why_not_skinny
from graphfuse.testing import Trace, assert_golden, fake_tp, trace

GOLDEN = Path(__file__).parents[1] / "golden" / "linear"
FACTS = Path(__file__).parents[2] / "configs" / "facts"
H200, CPU = Facts.from_json(FACTS / "h200_x2.json"), Facts("cpu", 2)
BF16 = torch.bfloat16


class Two(nn.Module):
    """A linear layer with and one without a bias."""

    def __init__(self, dtype: torch.dtype = BF16, size: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(size, 48, dtype=dtype).requires_grad_(False)
        self.second = nn.Linear(48, size, bias=False, dtype=dtype).requires_grad_(False)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


class Of(nn.Module):
    def __init__(self, function, dtype=BF16, shape=(48, 32)) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.rand(shape, dtype=dtype), requires_grad=False)

    def forward(self, x):
        return self.function(x, self.weight)


def traced(model: nn.Module, dtype=BF16, facts=H200, group=None, size=32, **settings) -> Trace:
    return trace(model, torch.rand(6, size, dtype=dtype), group, config=FuseConfig(**settings), facts=facts)


def linears(found: Trace) -> int:
    return sum(node.target is OP for node in found.after.graph.nodes)


def test_both_forms_of_a_linear_layer():
    found = traced(Two())
    assert linears(found) == 2
    assert_golden(found.after, GOLDEN / "two.after.txt")


def test_on_the_cpu_nothing_changes():
    assert linears(traced(Two(), facts=CPU)) == 0


def test_on_gpus_before_hopper_nothing_changes():
    assert linears(traced(Two(), facts=dataclasses.replace(H200, compute_capability=(8, 9)))) == 0


def test_wrong_shapes_are_refused():
    for x, weight, bias in [((5, 31), (48, 32), None), ((5, 32), (48, 32), (47,)), ((5, 32), (48, 32, 1), None)]:
        with pytest.raises(ArgumentError, match=r"^(linear|bias)"):
            OP(torch.rand(x), torch.rand(weight), None if bias is None else torch.rand(bias))


def test_the_rule_can_be_left_out():
    assert linears(traced(Two(), disabled_rules={"lower_linear"})) == 0


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x, w: x @ w, (32, 48)),  # not transposed
        (lambda x, w: x @ (w * 2).t(), (48, 32)),  # made anew in each call
        (lambda x, w: torch.addmm(x[:, :1].expand(6, 48), x, w.t()), (48, 32)),  # what is added differs by row
        (lambda x, w: torch.addmm(w[:, 0], x, w.t(), alpha=2), (48, 32)),
        (lambda x, w: torch.addmm(w[:, 0], x, w.t(), beta=0.5), (48, 32)),
        (lambda x, w: x @ x.t(), (48, 32)),  # an input, which may have been written just before
    ],
)
def test_other_products_are_left_alone(function, shape):
    assert linears(traced(Of(function, shape=shape))) == 0


def test_weights_that_the_kernel_does_not_serve_are_left_alone():
    assert linears(traced(Two(torch.float32), dtype=torch.float32)) == 0
    assert linears(traced(Two(size=24), size=24)) == 1, "24 inputs are not, 48 are"
    meta = {"dtype": BF16, "device": "meta"}
    assert why_not_skinny(torch.empty(48, 32, **meta)) is None
    assert "contiguous" in why_not_skinny(torch.empty(32, 48, **meta).t())
    assert "large" in why_not_skinny(torch.empty(MOST_BYTES_OF_ONE_ROW // 64 + 1, 32, **meta))
    assert "large" in why_not_skinny(torch.empty(2048, 16384, **meta)), "of so many inputs"
    for outputs, most_rows in ((MOST_BYTES_OF_ONE_ROW // 64, 1), (MOST_SKINNY_BYTES // 64, 16)):
        weight = torch.empty(outputs, 32, **meta)
        assert why_not_skinny(weight) is None
        assert is_skinny(most_rows, weight) and not is_skinny(most_rows + 1, weight)


def test_a_weight_that_the_model_writes_to_is_left_alone():
    class Learns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(48, 32, dtype=BF16), requires_grad=False)

        def forward(self, x):
            y = x @ self.weight.t()
            self.weight.copy_(self.weight * 0.5)
            return y

    assert linears(traced(Learns())) == 0


def test_the_op_is_a_linear_layer():
    x, weight, bias = torch.rand(5, 32), torch.rand(48, 32), torch.rand(48)
    assert torch.equal(OP(x, weight), F.linear(x, weight)) and torch.equal(
        OP(x, weight, bias), F.linear(x, weight, bias)
    )
    torch.library.opcheck(
        OP, (x, weight, bias), test_utils=["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    )


def test_a_sharded_model_is_verified_with_the_op_and_its_reductions_are_fused():
    from transformers import LlamaConfig

    from graphfuse.models import registry

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    with fake_tp(2) as group:
        model = registry.build(config, group, BF16, "cpu").requires_grad_(False)
        found = trace(model, torch.zeros(1, 8, dtype=torch.long), group, config=FuseConfig(verify=True), facts=H200)
    assert found.report.totals["fused"] == 5
    assert linears(found) == 4 * 2 + 1
    assert not any("unknown" in note for note in found.report.notes), found.report.notes
