"""A rule is data: where it starts, what it matches, whether it may, and what it puts there instead.

`match` reads the graph and answers with a `Site` (what it found) or a `Decline` (why this is not one). `applies` is the
only gate, `rewrite` the only function that touches the graph. No rule has side effects, and none lists epsilons,
layouts or operand orders: it reads them from the graph.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from graphfuse.gate import Decision, Facts
from graphfuse.passes.groups import Groups


class Tier(enum.Enum):
    """How exact a rule is. FAITHFUL: its error against float64 is no larger than that of the model's own formula."""

    FAITHFUL = "faithful"
    RELAXED = "relaxed"


@dataclass(frozen=True)
class Decline:
    """A rule leaves an anchor alone. The reason is a sentence that a user of the model understands."""

    reason: str

    residual: bool = False
    """The reduced value does meet the residual stream (an add or a norm); `fusion="require"` asks about these."""

    remote: bool = False
    """Nothing of the pattern is there: the report names the reason of any other rule first."""


@dataclass(frozen=True)
class Site:
    """What a rule matched: enough to rewrite it and to report it."""

    anchor: Node
    """Where it starts: the all_reduce, for rules about reductions."""

    op: str
    """Name of the op that will stand there, for the report."""

    norm: Node | None
    """The node whose module path names the norm in the report."""

    dtype: torch.dtype
    hidden_size: int
    parts: Any
    """The rule's own findings; only its `rewrite` reads them."""

    merged_into: Node | None = None
    """Another reduction that takes this one in, for rules that merge. `rewrite` returns what stands for both then."""


@dataclass(frozen=True)
class Context:
    """What rules may know besides the graph."""

    groups: Groups
    """The compiled group, and how to compare another one with it."""

    decide: Callable[[torch.dtype, int], Decision]
    """The gate's decision for (dtype, hidden size)."""

    placements: dict[str, Any] = field(default_factory=dict)
    """Filled by the first rule that asks: the placement of every value over the ranks, by name."""

    facts: Callable[[], Facts] = lambda: Facts("cpu", 1)
    """What the group runs on. Collective at the first call."""

    moe_config_dir: str | None = None
    """A folder of tuned MoE kernel configs that is searched before the shipped ones."""

    moe_tables: dict[Any, Any] = field(default_factory=dict)
    """Filled by the rule that lowers experts: what was found for a shape, so that its files are read once."""


@dataclass(frozen=True)
class Rule:
    """One rewrite. See `CONTRIBUTING.md` for a worked example."""

    name: str
    anchor: Callable[[Node], bool]
    match: Callable[[Node, Context], Site | Decline]
    applies: Callable[[Site, Context], Decline | None]
    rewrite: Callable[[Graph, Site, Context], Node | None]
    tier: Tier = Tier.FAITHFUL

    reduces: frozenset[object] = frozenset()
    """Ops this rule emits that sum their first argument over the compiled group, for the verifier."""

    needs_group: bool = True
    """Rules about reductions have nothing to do where there is one rank; where this is False, a rule runs there too."""

    dispatched: bool = False
    """The op picks a comm backend by size at run time: workspaces are made for it, and the report names its ranges."""
