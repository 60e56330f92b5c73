"""Recorded figures of another project's MoE kernels, measured apart from ours on the same kind of GPU.

{
  "schema": 1, "peer", "what", "host", "versions", "date", "method", "notes",
  "rows": [{"experts", "intermediate_size", "hidden_size", "top_k", "form", "tokens", "us", "experts_touched",
            "tuned"}]
}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphfuse.jsonfile import JsonObject
from graphfuse.tuning.moe_result import read_us

SCHEMA = 1
NUMBERS = ("experts", "intermediate_size", "hidden_size", "top_k")
Key = tuple[int, int, int, int, str]
"""As `BenchedShape.key`."""


@dataclass(frozen=True)
class Peers:
    """Microseconds a call, by shape and number of tokens."""

    peer: str
    us: dict[tuple[Key, int], float]

    @classmethod
    def read(cls, file: str | Path) -> Peers:
        """The figures of a file. Raises `SchemaError` naming the file and the key."""
        obj = JsonObject.read(file)
        obj.only("schema", "peer", "what", "host", "versions", "date", "method", "notes", "rows")
        if obj.get("schema", int) != SCHEMA:
            raise obj.error("schema", f"is {obj.data['schema']}; this version of graphfuse reads {SCHEMA}")
        us = {}
        for row in obj.objects("rows"):
            row.only(*NUMBERS, "form", "tokens", "us", "experts_touched", "tuned")
            key = (*(row.positive(name) for name in NUMBERS), row.get("form", str))
            us[key, row.positive("tokens")] = float(read_us(row, "us"))
        return cls(obj.get("peer", str), us)
