"""One file of tuned MoE kernel configs, read and written.

    {
      "triton_version": "3.4.0",                what vLLM's tuner says of itself
      "provenance": {"hidden_size": 2048, ...}, what ours says: `Provenance`
      "1": {                                    number of tokens
        "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1,
        "num_warps": 4, "num_stages": 3,        4 and 3 where they are missing, as in Triton
        "SWAP_AB": true, "us": 27.1             ours, optional: `Tile.swap_ab`, microseconds of a layer's call
      }, ...
    }

Other keys of an entry belong to kernels or GPUs of others (USE_TMA, SPLIT_K, waves_per_eu, ...): they are ignored, with
a note. Any other key of the file is an error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphfuse.errors import SchemaError, brief
from graphfuse.jsonfile import JsonObject
from graphfuse.tuning.moe_tiles import Tile

MAX_TOKENS = 1 << 30
BLOCKS = {"BLOCK_SIZE_M": (16, 256), "BLOCK_SIZE_N": (16, 512), "BLOCK_SIZE_K": (16, 1024)}
WARPS = (1, 2, 4, 8, 16)
STAGES = range(1, 11)
GROUPS = range(1, 1025)
MAX_NOTES = 8
OURS = ("SWAP_AB", "us")


@dataclass(frozen=True)
class Provenance:
    """Where the numbers of a file come from: what its name does not say, but a tile may depend on."""

    hidden_size: int
    top_k: int
    device: str
    versions: Mapping[str, str]
    """Of torch and triton, at least."""

    date: str
    method: str
    effort: str
    """ "quick" or "full"."""

    command: str

    @classmethod
    def read(cls, obj: JsonObject) -> Provenance:
        """Raises `SchemaError`."""
        texts = ("device", "date", "method", "effort", "command")
        obj.only("hidden_size", "top_k", "versions", *texts)
        versions = obj.object("versions")
        return cls(
            hidden_size=obj.positive("hidden_size"),
            top_k=obj.positive("top_k"),
            versions={name: versions.get(name, str) for name in versions.data},
            **{key: obj.get(key, str) for key in texts},
        )


@dataclass(frozen=True)
class Entry:
    tile: Tile
    us: float | None = None


@dataclass(frozen=True)
class Contents:
    """What one file holds."""

    entries: Mapping[int, Entry]
    """By number of tokens, rising; at least one."""

    provenance: Provenance | None = None
    triton_version: str | None = None
    ignored: tuple[str, ...] = ()
    """Notes on what was left out of account, or assumed."""

    @classmethod
    def read_file(cls, file: str | Path) -> Contents:
        """Raises `SchemaError` naming the file and the key."""
        return cls.read(JsonObject.read(file))

    @classmethod
    def read(cls, obj: JsonObject) -> Contents:
        entries: dict[int, Entry] = {}
        seen: Counter[str] = Counter()
        for key in obj.data:
            if key not in ("triton_version", "provenance"):
                entries[_num_tokens(obj, key)] = _entry(obj.object(key), seen)
        if not entries:
            raise SchemaError(
                f"{obj.file} has no entry for any number of tokens. Give it keys such as 1, 64 and 4096, or remove it."
            )
        return cls(
            dict(sorted(entries.items())),
            Provenance.read(obj.object("provenance")) if "provenance" in obj.data else None,
            obj.get("triton_version", str) if "triton_version" in obj.data else None,
            _notes(seen, len(entries)),
        )

    def to_text(self) -> str:
        """JSON with one line for each entry, so that a changed tile is a changed line."""
        head: dict[str, Any] = {"provenance": asdict(self.provenance)} if self.provenance else {}
        head |= {"triton_version": self.triton_version} if self.triton_version else {}
        lines = [json.dumps({key: value}, indent=2, ensure_ascii=False)[4:-2] for key, value in head.items()]
        lines += [f'"{num_tokens}": {json.dumps(_to_json(entry))}' for num_tokens, entry in self.entries.items()]
        return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def _notes(seen: Counter[str], num_entries: int) -> tuple[str, ...]:
    notes = [f"{what} in {count} of {num_entries} entries" for what, count in seen.items()]
    return (
        *notes[:MAX_NOTES],
        *([f"{len(notes) - MAX_NOTES} more keys are ignored"] if len(notes) > MAX_NOTES else []),
    )


def _num_tokens(obj: JsonObject, key: str) -> int:
    """Digits only, with no zero before them: else one number could stand twice."""
    if not (key.isascii() and key.isdigit() and len(key) <= len(str(MAX_TOKENS)) and 0 < int(key) <= MAX_TOKENS):
        raise obj.error(key, f"is no number of tokens from 1 to {MAX_TOKENS}, nor triton_version or provenance")
    if key[0] == "0":
        raise obj.error(key, f"begins with a zero; a number of tokens is written {int(key)}")
    return int(key)


def _entry(obj: JsonObject, seen: Counter[str]) -> Entry:
    sizes = {key: _power_of_two(obj, key, *limits) for key, limits in BLOCKS.items()}
    known = (*BLOCKS, "GROUP_SIZE_M", "num_warps", "num_stages", *OURS)
    for key, default in (("num_warps", 4), ("num_stages", 3)):
        if key not in obj.data:
            seen[f"{key} is missing and taken to be {default}, as in Triton,"] += 1
    for key in obj.data:
        if key not in known:
            seen[f"{key if key.isidentifier() and len(key) < 40 else brief(key, 40)} is ignored"] += 1
    tile = Tile(
        sizes["BLOCK_SIZE_M"],
        sizes["BLOCK_SIZE_N"],
        sizes["BLOCK_SIZE_K"],
        _one_of(obj, "GROUP_SIZE_M", GROUPS),
        _one_of(obj, "num_warps", WARPS) if "num_warps" in obj.data else 4,
        _one_of(obj, "num_stages", STAGES) if "num_stages" in obj.data else 3,
        obj.get("SWAP_AB", bool) if "SWAP_AB" in obj.data else False,
    )
    return Entry(tile, float(obj.positive("us", int | float)) if "us" in obj.data else None)


def _power_of_two(obj: JsonObject, key: str, least: int, most: int) -> int:
    value: int = obj.get(key, int)
    if not least <= value <= most or value & (value - 1):
        raise obj.error(key, f"is {value}, which is not a power of two from {least} to {most}")
    return value


def _one_of(obj: JsonObject, key: str, values: range | tuple[int, ...]) -> int:
    value: int = obj.get(key, int)
    if value not in values:
        allowed = f"{values[0]} to {values[-1]}" if isinstance(values, range) else ", ".join(map(str, values))
        raise obj.error(key, f"is {value}, which is not one of {allowed}")
    return value


def _to_json(entry: Entry) -> dict[str, Any]:
    tile = entry.tile
    data: dict[str, Any] = {
        "BLOCK_SIZE_M": tile.block_size_m,
        "BLOCK_SIZE_N": tile.block_size_n,
        "BLOCK_SIZE_K": tile.block_size_k,
        "GROUP_SIZE_M": tile.group_size_m,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    if tile.swap_ab:
        data["SWAP_AB"] = True
    if entry.us is not None:
        data["us"] = float(f"{entry.us:.5g}")
    return data
