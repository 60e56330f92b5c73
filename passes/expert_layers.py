"""Layers of routed experts in a graph: what a `graphfuse::moe_experts` node holds, and the report's line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphfuse.ops import moe as _moe  # noqa: F401  (registers the op)
from graphfuse.ops.moe_reference import ExpertWeights
from graphfuse.passes.graph_reading import argument, is_call, module_path, value
from graphfuse.passes.grouped_experts import last_grouped_product
from graphfuse.report import DeclineReport
from graphfuse.report_experts import DECLINED, LOWERED, ExpertsReport
from graphfuse.tuning.moe_table import MoeTable
from graphfuse.tuning.moe_tiles import MoeShape

FOUND = "graphfuse_moe_config"
"""Metadata of a lowered node: the files that its launch parameters come from, and notes on them."""

RULES = ("match_grouped_experts", "lower_moe")
"""The rules that decide what becomes of a layer of experts."""

ROUTE = "route_experts"
"""The rule about how experts are chosen: no reason for what becomes of a layer of them, or of a reduction."""

_WEIGHTS = ("gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale")


def is_expert_layer(node: Node) -> bool:
    return is_call(node, torch.ops.graphfuse.moe_experts.default)


@dataclass(frozen=True)
class ExpertLayer:
    """What a moe_experts node computes, told by its arguments; tensors are fake."""

    tokens: Tensor
    weights: ExpertWeights
    dtype: torch.dtype
    activation: str
    shape: MoeShape
    rounds_tokens: bool = False
    """Whether tokens are rounded in the product, since each expert has a static scale for them."""

    @classmethod
    def of(cls, node: Node) -> ExpertLayer:
        tokens, ids = value(argument(node, "tokens")), value(argument(node, "topk_ids"))
        gate_up, down, *optional = [value(argument(node, name)) for name in _WEIGHTS]
        gate_up_bias, down_bias, gate_up_scale, down_scale = optional
        assert tokens is not None and ids is not None and gate_up is not None and down is not None
        block_shape = argument(node, "block_shape")
        blocks = (int(block_shape[0]), int(block_shape[1])) if block_shape else None
        weights = ExpertWeights(
            gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale, blocks,
            argument(node, "gate_up_layout") == "interleaved", bool(argument(node, "transposed")),
        )  # fmt: skip
        tokens_scale = value(argument(node, "tokens_scale"))
        rounds = argument(node, "dynamic") or tokens_scale is not None
        rounds_tokens = tokens_scale is not None and tokens.dtype.itemsize > 1 and tokens_scale.numel() > 1
        experts, hidden, intermediate = weights.down_shape
        shape = MoeShape(
            int(experts), int(intermediate), int(hidden), int(ids.shape[1]), _name(gate_up.dtype, bool(rounds)), blocks
        )
        dtype, activation = argument(node, "out_dtype") or tokens.dtype, argument(node, "activation")
        return cls(tokens, weights, dtype, activation, shape, rounds_tokens)

    def report(self, module: str, status: str, **more: Any) -> ExpertsReport:
        shape = self.shape
        return ExpertsReport(
            module, status, shape.num_experts, shape.intermediate_size, shape.hidden_size, shape.top_k,
            shape.dtype or str(self.dtype).removeprefix("torch."), shape.block_shape, **more,
        )  # fmt: skip


def _name(weights: torch.dtype, rounds_activations: bool) -> str | None:
    """What tuning files call a number format: nothing for floats of 16 bits or more."""
    if weights.itemsize > 1:
        return None
    return f"{'fp8' if weights.is_floating_point else 'int8'}_w8a{8 if rounds_activations else 16}"


def expert_layers(
    graph: Graph, declines: Mapping[Node, Sequence[DeclineReport]], switches: Sequence[DeclineReport]
) -> list[ExpertsReport]:
    """A line for each layer of experts of a rewritten graph, in order.

    Args:
        declines: by node, why rules left it alone.
        switches: what holds for every node: rules that are switched off.
    """
    switched_off = tuple(switch for switch in switches if switch.rule in ("fusion", *RULES))
    layers = []
    for node in graph.nodes:
        if is_expert_layer(node):
            layer, launch = ExpertLayer.of(node), argument(node, "launch")
            if launch:
                files, notes = node.meta.get(FOUND, ((), ("the model itself gives launch parameters",)))
                config = MoeTable.from_text(launch).source
                layers.append(layer.report(module_path(node), LOWERED, config=config, files=files, notes=notes))
                continue
        elif last_grouped_product(node):
            layer = None
        else:
            continue
        reasons = tuple(declines.get(node, ())) or switched_off or (DeclineReport("rules", "no rule starts there"),)
        make = ExpertsReport if layer is None else layer.report
        layers.append(make(module_path(node), DECLINED, declines=reasons))
    return layers
