"""Measured microseconds of a reduction, fused and not, for the page's estimate: from the size table in force.

A table holds times at some token counts and hidden sizes (`graphfuse.comm.table`). A hidden size between two measured
ones is interpolated here; token counts are interpolated where the reader's slider stands.
"""

from __future__ import annotations

from typing import Any

from graphfuse.comm.table import SizeTable, find_table

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def times(gate: dict[str, Any]) -> list[dict[str, Any]]:
    """For each decision of the gate that a measured table stands behind: its ranges, and rows of (tokens, us)."""
    facts, found = gate.get("facts", {}), []
    for decision in gate.get("decisions", ()):
        table = None
        if decision["allowed"] and decision["table"] is not None:
            table = find_table(facts.get("gpu"), facts.get("world_size", 0), decision["dtype"])
        if table is None or table.file != decision["table"]:
            continue
        rows, widths = _rows(table, decision["hidden_size"])
        found.append(
            {
                "dtype": decision["dtype"],
                "hidden": decision["hidden_size"],
                "row_bytes": decision["hidden_size"] * BYTES[decision["dtype"]],
                "ranges": [{"max_bytes": r["max_bytes"], "label": _label(r)} for r in decision["ranges"]],
                "rows": rows,
                "from_widths": widths,
                "table": table.file,
                "measured_on": f"{table.world_size} × {table.device_name}",
                "date": table.provenance["date"],
            }
        )
    return found


def why_none(gate: dict[str, Any]) -> str:
    """Why there is no estimate, and what would bring one."""
    facts = gate.get("facts", {})
    if facts.get("device_type") != "cuda":
        return "There is no estimate: times were measured on GPUs only. Give the facts of a GPU host to see some."
    return (
        f"There is no estimate: no size table was measured on {facts.get('world_size')} × {facts.get('gpu')}. "
        "There, graphfuse tune allreduce makes one."
    )


def _rows(table: SizeTable, hidden: int) -> tuple[list[dict[str, Any]], list[int]]:
    """Times for a hidden size by rising token counts, and the measured hidden sizes they come from."""
    by_width: dict[int, dict[int, dict[str, float]]] = {}
    for row in table.measured:
        by_width.setdefault(row.hidden_size, {})[row.tokens] = dict(row.us)
    below = max((w for w in by_width if w <= hidden), default=min(by_width))
    above = min((w for w in by_width if w >= hidden), default=max(by_width))
    share = (hidden - below) / (above - below) if above > below else 0.0
    rows = []
    for tokens in sorted(by_width[below].keys() & by_width[above].keys()):
        low, high = by_width[below][tokens], by_width[above][tokens]
        us = {name: round(low[name] + share * (high[name] - low[name]), 3) for name in low if name in high}
        rows.append({"tokens": tokens, "us": us})
    return rows, sorted({below, above})


def _label(size_range: dict[str, Any]) -> str:
    return size_range["backend"] + (f"/{size_range['variant']}" if size_range["variant"] else "")
