"""Placements: how a value of a graph relates to the values of the same name on the other ranks of the group.

    Replicated      equal on every rank
    Shard(dim)      each rank has another part along a dimension
    Partial(op)     the true value is the sum (average, maximum, minimum) of all ranks' values
    Lookup          rows looked up in this rank's part of a table: a partial sum once those of other ranks are zeroed
    Unknown(why)    nothing is known, which is never taken for right or wrong

Rules answer with one of these for each result of an op, or raise `Violation`: no placement makes the op right.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node


@dataclass(frozen=True)
class Replicated:
    uniform: frozenset[int] = frozenset()
    """Dimensions along which all elements are equal (expanded ones): such a value is also a shard of a longer one."""
    zero: bool = False
    """Zero throughout: also a partial sum."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True)
class Shard:
    dim: int
    outer: Any = 1
    """Where a dimension was merged of several, the number of elements in front of the sharded one of them."""
    beside: int | None = field(default=None, compare=False)
    """Another dimension that may be the sharded one, at its end: a rank's only head was merged with one of the two."""

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True)
class Partial:
    op: str = "sum"

    def __str__(self) -> str:
        return f"partial({self.op})"


@dataclass(frozen=True)
class Lookup:
    def __str__(self) -> str:
        return "rows of a sharded table"


@dataclass(frozen=True)
class Unknown:
    reason: str
    inherited: bool = False
    """The reason lies in a value that this one was computed from, and is listed there."""

    def __str__(self) -> str:
        return "unknown"


Placement = Replicated | Shard | Partial | Lookup | Unknown
Outcome = Placement | tuple["Outcome", ...]

REPLICATED = Replicated()
PARTIAL = Partial()
ZERO = Replicated(zero=True)
INHERITED = Unknown("it is computed from values of which nothing is known", inherited=True)


class Kind(enum.Enum):
    """What can be wrong with a reduction."""

    NON_LINEAR = "non-linear op on a partial sum"
    RESIDUAL = "residual added to a partial sum"
    BIAS = "bias added on every rank"
    OUTPUT = "partial sum returned"
    TWICE = "reduced twice"
    WRONG_OP = "wrong reduction"
    WRONG_GROUP = "wrong group"
    GATE = "gate not replicated"
    MIXED = "partial sum joined with a whole value"
    LOOKUP = "rows of other ranks not masked"


class Violation(Exception):
    """An op for which no placement of its result is right. `operand` is the value that should be another one."""

    def __init__(self, kind: Kind, operand: Node | None, text: str) -> None:
        super().__init__(text)
        self.kind, self.operand, self.text = kind, operand, text


def expression(size: Any) -> Any:
    """A size as something to calculate with: symbols are sympy's."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def equal_sizes(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b or (a - b).expand() == 0)


def quotient(a: Any, b: Any) -> Any:
    """a / b if it is whole, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if a % b == 0 else None
    found = (a / b).cancel()
    return found if found.as_numer_denom()[1] == 1 else None
