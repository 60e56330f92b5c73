"""How the inputs of a traced graph are divided over the ranks: what the proof of placements starts from.

    DTensors                      their own placements
    models with `placements()`    what it says: {name of a parameter, buffer or argument: sharded dimension, or None},
                                  of an argument that is a list also a list of that, "sum" of what is a summand
    other inputs of either        whole on every rank
    any other module              unknown

Dynamo knows where each input of its graph comes from (`L['model']._modules['norm']._parameters['weight']`), and
AOTAutograd which of them each input of the ATen graph is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.fx import Graph, GraphModule, Node

from graphfuse.module_paths import plain_path
from graphfuse.passes.graph_reading import PARAMETER
from graphfuse.passes.groups import Groups
from graphfuse.passes.placement.lattice import PARTIAL, REPLICATED, Partial, Placement, Shard, Unknown
from graphfuse.passes.verify_placements import PLACEMENT, SOURCE

_ARGUMENT = re.compile(r"^L\['args'\]\[(\d+)\]")
_KEYWORD = re.compile(r"^L\['kwargs'\]\['(\w+)'\]|^L\['(\w+)'\](?!\.)")
_INDICES = re.compile(r"^(?:\[\d+\])+")
_PARAMETER = re.compile(r"\._parameters\[['\"]\w+['\"]\]$")
_HELD = re.compile(r"\._(?:parameters|buffers)\[['\"](\w+)['\"]\]")


@dataclass(frozen=True)
class Source:
    """What one input of a graph is called, and its placement if anybody knows."""

    name: str
    placement: Placement | None
    is_parameter: bool = False


class InputPlacements:
    """What a model says of its parameters and arguments; of no model, when a graph comes through `torch.compile`."""

    def __init__(self, model: nn.Module | None) -> None:
        say = getattr(model, "placements", None)
        self._declared: Mapping[str, Any] | None = say() if callable(say) else None
        self._arguments = list(inspect.signature(model.forward).parameters) if model is not None else []

    def sources(self, module: GraphModule, groups: Groups) -> list[Source]:
        """One for each input of a Dynamo graph, in order."""
        nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
        is_told = self._declared is not None or any(isinstance(_example(node), DTensor) for node in nodes)
        return [self._source(node, groups, is_told) for node in nodes]

    def _source(self, node: Node, groups: Groups, is_told: bool) -> Source:
        text = _source_text(node)
        argument, indices, path = self._place(text)
        name = (argument or path) + "".join(f"[{i}]" for i in indices)
        return Source(
            name, self._placement(node, groups, is_told, argument, indices, path), bool(_PARAMETER.search(text))
        )

    def _placement(
        self, node: Node, groups: Groups, is_told: bool, argument: str | None, indices: tuple[int, ...], path: str
    ) -> Placement | None:
        example = _example(node)
        if isinstance(example, DTensor):
            return _of_dtensor(example, groups)
        if not is_told:
            return None
        declared = self._declared
        if declared is None or (argument is not None and argument not in declared):
            return REPLICATED
        if (argument or path) not in declared:
            return Unknown("the model's placements() does not name it")
        dim = declared[argument or path]
        for index in indices:
            dim = dim[index] if isinstance(dim, Sequence) else dim
        return REPLICATED if dim is None else PARTIAL if dim == "sum" else Shard(dim)

    def _place(self, source: str) -> tuple[str | None, tuple[int, ...], str]:
        """The argument a source is, or is a part of, if it is one, and which part; else its path in the model."""
        positional, keyword = _ARGUMENT.match(source), _KEYWORD.match(source)
        if positional:
            index = int(positional.group(1))
            name = self._arguments[index] if index < len(self._arguments) else f"argument {index}"
            return name, _indices(source[positional.end() :]), ""
        if keyword:
            return keyword.group(1) or keyword.group(2), _indices(source[keyword.end() :]), ""
        return None, (), plain_path(_HELD.sub(r".\1", source))


def _indices(source: str) -> tuple[int, ...]:
    """`[3][0]` → (3, 0)."""
    found = _INDICES.match(source)
    return tuple(int(i) for i in found.group()[1:-1].split("][")) if found else ()


def _source_text(node: Node) -> str:
    """Where Dynamo took an input from."""
    name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
    return str(name() if callable(name) else name)


def _example(node: Node) -> Any:
    return node.meta.get("example_value")


def _of_dtensor(tensor: DTensor, groups: Groups) -> Placement:
    for i, placement in enumerate(tensor.placements):
        to_be_found = not groups.ranks and len(tensor.placements) == 1  # the group is the one that reductions share
        if to_be_found or set(_ranks_along(tensor.device_mesh, i)) == set(groups.ranks):
            if isinstance(placement, Replicate):
                return REPLICATED
            if placement.is_partial():
                op = str(getattr(placement, "reduce_op", "sum"))
                return PARTIAL if op == "sum" else Partial(op)
            return Shard(getattr(placement, "dim", 0) % tensor.dim())
    return Unknown("a DTensor over other ranks than the compiled group's")


def _ranks_along(mesh: DeviceMesh, dim: int) -> list[int]:
    """The ranks that differ from this one in one coordinate of a mesh."""
    here: list[Any] = list(mesh.get_coordinate() or ())
    if not here:
        return []
    here[dim] = slice(None)
    return mesh.mesh[tuple(here)].tolist()


def name_inputs(graph: Graph, sources: list[Source]) -> None:
    """Note on each placeholder of an ATen graph what it is called and, if anybody knows, its placement."""
    for node in graph.nodes:
        index = _dynamo_index(node) if node.op == "placeholder" else None
        if index is not None and index < len(sources):
            node.meta[SOURCE] = sources[index].name
            node.meta[PARAMETER] = sources[index].is_parameter
            if sources[index].placement is not None:
                node.meta[PLACEMENT] = sources[index].placement


def _dynamo_index(node: Node) -> int | None:
    """Which input of the Dynamo graph this is, or is a part of."""
    described: Any = node.meta.get("desc")
    while hasattr(described, "base"):
        described = described.base
    return getattr(described, "idx", None)
