"""What became of every reduction of a model: a table for people, JSON for programs.

One `SiteReport` per all-reduce of the traced model, also those of other groups and other reduce ops, each once however
many graphs the model was traced into. A site is fused, merged into another one, or declined with the reasons. Layers of
routed experts have lines of their own (`graphfuse/report_experts.py`).
"""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from graphfuse.report_experts import LOWERED, ExpertsReport, summary
from graphfuse.report_graph import Surroundings

SCHEMA = 2
FUSED, MERGED, DECLINED = "fused", "merged", "declined"


@dataclass(frozen=True)
class DeclineReport:
    """Why one rule left a site alone."""

    rule: str
    reason: str
    closeness: int = 0
    """How far the rule got: -1 another rule's reason says more, 0 it found nothing of its pattern, 1 a part of it, 2 it
    found all of it, but may not rewrite it."""


@dataclass(frozen=True)
class SiteReport:
    """One all-reduce of the model. `module` and `norm` are module paths; `backends` the size ranges that serve it."""

    id: int
    module: str
    norm: str | None
    status: str
    op: str | None = None
    backends: tuple[dict[str, Any], ...] = ()
    declines: tuple[DeclineReport, ...] = ()
    residual: bool = False
    """Whether the reduced value meets the residual stream: an add, or a norm."""
    served_as: tuple[Any, int] | None = None
    """(dtype, hidden size) under which the gate decided."""
    merged_into: str | None = None
    """Module path of the reduction that took this one in."""

    surroundings: Surroundings | None = field(default=None, compare=False, repr=False)
    """What stands around it, for the page (`Report.to_html`)."""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "module": self.module,
            "norm": self.norm,
            "status": self.status,
            "op": self.op,
            "backends": list(self.backends),
            "declines": [{"rule": d.rule, "reason": d.reason} for d in self.declines],
            "merged_into": self.merged_into,
        }

    def outcome(self) -> str:
        """What happened, in one line."""
        if self.status == DECLINED:
            closest = max(d.closeness for d in self.declines)
            return "; ".join(dict.fromkeys(d.reason for d in self.declines if d.closeness == closest))
        return f"into {self.merged_into}" if self.merged_into is not None else self.op or ""


@dataclass
class Report:
    """The report of one compiled model. Filled when the model is traced; `print(report)` before that says so."""

    sites: list[SiteReport] = field(default_factory=list)
    model: str = ""
    """Whose definition of the model was compiled, if it is graphfuse's or transformers'."""

    gate: dict[str, Any] = field(default_factory=dict)
    moe: list[ExpertsReport] = field(default_factory=list)
    """Every layer of routed experts, and the config that serves it or the reason that it was left alone."""

    notes: list[str] = field(default_factory=list)
    """Facts a user should know: why layers were not traced as regions, more than one graph, an ignored setting."""

    placements: dict[str, Any] = field(default_factory=dict)
    """What the proof of placements knows of the rewritten graph's values; empty where it did not run."""

    num_graphs: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the start-up went: trace, passes, compile."""

    rules: dict[str, dict[str, float]] = field(default_factory=dict)
    """Per rule: matches, declines, seconds."""

    @property
    def traced(self) -> bool:
        return self.num_graphs > 0

    @property
    def totals(self) -> dict[str, int]:
        status = Counter(site.status for site in self.sites)
        return {
            "all_reduce": len(self.sites),
            "fused": status[FUSED],
            "merged": status[MERGED],
            "declined": status[DECLINED],
        }

    def add_graph(self, sites: list[SiteReport], experts: list[ExpertsReport] | None = None) -> None:
        """Merge the sites of one more graph of the same model: a site seen before stays one line, and if two graphs
        disagree about it, the declined one shows, since that is what a user must know. So it is with experts."""
        self.num_graphs += 1
        layers = _by_place(self.moe)
        for where, layer in _by_place(experts or []).items():
            if where not in layers or layer.status != LOWERED:
                layers[where] = layer
        self.moe = list(layers.values())
        places = _by_place(self.sites)
        for place, site in _by_place(sites).items():
            known = places.get(place)
            if known is None:
                self.sites.append(replace(site, id=len(self.sites)))
            elif known.status != DECLINED and site.status == DECLINED:
                self.sites[known.id] = replace(site, id=known.id)

    def joined(self, other: Report) -> Report:
        """A report of what this one and another of the same model are about."""
        both = replace(self, sites=list(self.sites), moe=list(self.moe), notes=list(self.notes))
        if other.traced:
            both.add_graph(other.sites, other.moe)
        both.num_graphs = self.num_graphs + other.num_graphs
        both.gate = self.gate or other.gate
        both.seconds = {
            stage: self.seconds.get(stage, 0.0) + other.seconds.get(stage, 0.0)
            for stage in dict.fromkeys((*self.seconds, *other.seconds))
        }
        for text in other.notes:
            both.note(text)
        return both

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "sites": [site.to_json() for site in self.sites],
            "totals": self.totals,
            "gate": self.gate,
            "moe": [layer.to_json() for layer in self.moe],
            "notes": self.notes,
            "placements": self.placements,
            "graphs": self.num_graphs,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "rules": self.rules,
        }

    def dumps(self) -> str:
        """The JSON document as text."""
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False)

    def to_html(self, title: str = "graphfuse report") -> str:
        """The report as one page that needs no network: write it to a file and open it in a browser."""
        from graphfuse.page import render

        return render(self, title)

    def headline(self) -> str:
        if not self.traced:
            return "not traced yet: call the model once, or give example_inputs to graphfuse.compile"
        t = self.totals
        return f"{t['all_reduce']} all-reduces: {t['fused']} fused, {t['merged']} merged, {t['declined']} declined"

    def __rich__(self) -> RenderableType:
        if not self.traced:
            return Text(f"graphfuse: {self.headline()}")
        table = Table(title=f"graphfuse: {self.headline()}", title_justify="left", caption_justify="left")
        table.caption = escape("\n".join(self._footnotes())) or None
        for column in ("#", "reduction in", "norm", "status", "became, or why not", "served by"):
            table.add_column(column, overflow="fold")
        for site in self.sites:
            served = ", ".join(_range_text(r) for r in site.backends)
            table.add_row(
                str(site.id), site.module or "(top)", site.norm or "", site.status, escape(site.outcome()), served
            )
        return table

    def _footnotes(self) -> list[str]:
        notes = [f"model: {self.model}"] if self.model else []
        notes += [f"gate: {reason}" for reason in self.gate.get("reasons", ())]
        held: dict[tuple[str, str], int] = {}  # one workspace serves all hidden sizes of a dtype
        for decision in self.gate.get("decisions", ()):
            for backend, num_bytes in decision["workspace_bytes"].items():
                key = (backend, decision["dtype"])
                held[key] = max(held.get(key, 0), num_bytes)
        notes += [
            f"{name}: {size >> 20} MiB of buffers for {dtype} on each GPU." for (name, dtype), size in held.items()
        ]
        if self.placements:
            found = self.placements
            notes.append(f"placements: proved {found['proved']} values, {found['unknown']} unknown")
        return notes + summary(self.moe) + self.notes

    def to_text(self) -> str:
        """The table as plain text."""
        console = Console(width=160, no_color=True, highlight=False, file=io.StringIO())
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    __str__ = to_text


Line = TypeVar("Line", SiteReport, ExpertsReport)


def _by_place(lines: list[Line]) -> dict[tuple[str, int], Line]:
    """Lines keyed by (module path, how many came before it in that module): stable from graph to graph."""
    seen: Counter[str] = Counter()
    places = {}
    for line in lines:
        places[line.module, seen[line.module]] = line
        seen[line.module] += 1
    return places


def _range_text(entry: dict[str, Any]) -> str:
    name = entry["backend"] + (f" {entry['variant']}" if entry.get("variant") else "")
    limit = entry.get("max_bytes")
    return name if limit is None else f"{name} ≤ {limit / 1024:g} KiB"
