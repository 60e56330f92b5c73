"""One op of a graph as the transfer rules see it: its arguments by name, with their placements and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from graphfuse.passes.graph_reading import argument, parameters, value
from graphfuse.passes.groups import Groups
from graphfuse.passes.placement.lattice import (
    INHERITED,
    REPLICATED,
    ZERO,
    Lookup,
    Outcome,
    Partial,
    Placement,
    Replicated,
    Unknown,
)


@dataclass(frozen=True)
class Operand:
    """A tensor argument: the node (None for a number), its placement, its shape."""

    node: Node | None
    placement: Placement
    shape: tuple[Any, ...]

    @property
    def dim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Call:
    node: Node
    found: dict[Node, Outcome]
    groups: Groups

    def argument(self, name: str) -> Any:
        return argument(self.node, name)

    def has(self, name: str) -> bool:
        return name in parameters(self.node.target)[0]

    def first(self) -> Operand:
        return self.as_operand(self.node.args[0])

    def operand(self, name: str) -> Operand:
        return self.as_operand(self.argument(name))

    def optional(self, name: str) -> Operand | None:
        argument = self.argument(name)
        return None if argument is None else self.as_operand(argument)

    def as_operand(self, argument: Any) -> Operand:
        if not isinstance(argument, Node):
            return Operand(None, ZERO if argument == 0 else REPLICATED, ())
        tensor = value(argument)
        found = self.found.get(argument, REPLICATED)  # sizes and other plain values
        placement = found if not isinstance(found, tuple) else Unknown("a tuple stands where a tensor is expected")
        return Operand(argument, placement, () if tensor is None else tuple(tensor.shape))

    def operands(self, names: tuple[str, ...]) -> list[Operand]:
        return [o for name in names if self.has(name) and (o := self.optional(name)) is not None]

    def tensors(self) -> list[Operand]:
        """Every tensor among the arguments, in order."""
        return [self.as_operand(node) for node in self.node.all_input_nodes if value(node) is not None]

    @property
    def shape(self) -> tuple[Any, ...]:
        tensor = value(self.node)
        return () if tensor is None else tuple(tensor.shape)

    @property
    def name(self) -> str:
        return op_name(self.node)


def op_name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", None) or getattr(node.target, "__name__", node.target))


def partials(operands: list[Operand]) -> Iterator[Operand]:
    return (o for o in operands if isinstance(o.placement, Partial))


def ignorance(operands: list[Operand]) -> Placement | None:
    """Unknown, if an operand is, or rows of a table stand where an op cannot use them."""
    for o in operands:
        if isinstance(o.placement, Unknown):
            return INHERITED
    for o in operands:
        if isinstance(o.placement, Lookup):
            return Unknown("rows looked up in a sharded table are used before those of other ranks are zeroed")
    return None


def all_replicated(operands: list[Operand]) -> bool:
    return all(isinstance(o.placement, Replicated) for o in operands)


def is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
