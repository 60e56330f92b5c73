"""A file of tuned MoE kernel configs, with its `_down` file, as the table of a layer; and what is to be said of it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from graphfuse.errors import brief
from graphfuse.tuning.moe_file_names import FileName
from graphfuse.tuning.moe_schema import Contents
from graphfuse.tuning.moe_shared_memory import Limits, fit
from graphfuse.tuning.moe_table import MAX_GAP, MoeTable
from graphfuse.tuning.moe_tiles import MoeShape, Tiles

Version = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """The table for a layer, and the files it came from: none, where the heuristic serves everything."""

    table: MoeTable
    files: tuple[Path, ...] = ()

    @property
    def source(self) -> str:
        """For the report: the file's name, or "heuristic"."""
        return self.table.source

    @property
    def notes(self) -> list[str]:
        return list(self.table.notes)


def read_file(file: Path, shape: MoeShape, limits: Limits | None, running: Version, notes: Sequence[str] = ()) -> Found:
    """The table of one file for a shape, its tiles made to fit.

    Args:
        running: the version of Triton that will compile the kernels; () if it is not known.
        notes: how the file was chosen.

    Raises:
        SchemaError: the file, or the `_down` file beside it, does not follow the schema.
    """
    contents = Contents.read_file(file)
    entries = [(num_tokens, Tiles(entry.tile, entry.tile)) for num_tokens, entry in contents.entries.items()]
    files, said = [file], [*notes, *_origin_notes(file, contents, shape, running)]
    down_file = file.with_name(file.name.removesuffix(".json") + "_down.json")
    if os.path.isfile(down_file):
        files.append(down_file)
        down = Contents.read_file(down_file)
        entries, down_notes = _with_down(entries, down, shape)
        said += [f"{down_file.name}: {note}" for note in (*down.ignored, *down_notes)]
    said += _span_notes([num_tokens for num_tokens, _ in entries])
    if limits:
        fitted = [(n, fit(tiles, limits)) for n, tiles in entries]
        said += _fit_notes(
            [n for (n, before), (_, after) in zip(entries, fitted, strict=True) if before != after], limits
        )
        entries = fitted
    measured = tuple((n, entry.us) for n, entry in contents.entries.items() if entry.us is not None)
    return Found(MoeTable(shape, tuple(entries), file.name, tuple(said), limits, measured), tuple(files))


def _with_down(
    entries: list[tuple[int, Tiles]], down: Contents, shape: MoeShape
) -> tuple[list[tuple[int, Tiles]], list[str]]:
    """The entries with the down projection's own tiles, looked up as at run time; their block_size_m is gate_up's."""
    table = MoeTable(shape, tuple((n, Tiles(entry.tile, entry.tile)) for n, entry in down.entries.items()))
    result, differing = [], []
    for num_tokens, tiles in entries:
        own = (table.tuned(num_tokens) or tiles).down
        if own.block_size_m != tiles.gate_up.block_size_m:
            differing.append(num_tokens)
            own = replace(own, block_size_m=tiles.gate_up.block_size_m)
        result.append((num_tokens, Tiles(tiles.gate_up, own)))
    note = f"BLOCK_SIZE_M is that of the file without _down {_at(differing)}, as both products share one sort"
    return result, [note] if differing else []


def _origin_notes(file: Path, contents: Contents, shape: MoeShape, running: Version) -> list[str]:
    name = FileName.parse(file.name)
    notes = ["it was tuned for a scale of each channel"] if name and name.per_channel else []
    notes += contents.ignored
    tuned_with = contents.triton_version
    if provenance := contents.provenance:
        tuned_with = tuned_with or provenance.versions.get("triton")
        for what, tuned, here in (
            ("hidden size", provenance.hidden_size, shape.hidden_size),
            ("top-k", provenance.top_k, shape.top_k),
        ):
            if tuned != here:
                notes.append(f"it was tuned for {what} {tuned}, and serves {here}")
    if tuned_with and running and to_version(tuned_with)[:2] != running[:2]:
        notes.append(f"it was tuned with Triton {brief(tuned_with, 40)[1:-1]}; {version_text(running)} runs")
    return notes


def _span_notes(tuned: Sequence[int]) -> list[str]:
    holes = ", ".join(f"{a} … {b}" for a, b in pairwise(tuned) if b > MAX_GAP * a)
    notes = [f"it has a hole at {holes} tokens: the heuristic serves it"] if holes else []
    if tuned[0] > 1:
        notes.append(f"it begins at {tuned[0]} tokens: the heuristic serves fewer")
    return notes


def _fit_notes(changed: Sequence[int], limits: Limits) -> list[str]:
    memory = f"{limits.shared_memory:,} bytes of shared memory" if limits.shared_memory is not None else ""
    blocks = f"blocks of {limits.block_shape[1]} inputs that share a scale" if limits.block_shape else ""
    to = " and ".join(filter(None, (memory, blocks)))
    return [f"stages or blocks are made to fit {to} {_at(changed)}"] if changed else []


def _at(tuned: Sequence[int]) -> str:
    return f"for {', '.join(map(str, tuned[:6]))}{', …' if len(tuned) > 6 else ''} tokens"


def to_version(text: str) -> Version:
    """The leading numbers: "3.4.0+git1234" is (3, 4, 0)."""
    match = re.match(r"\d{1,4}(\.\d{1,4}){0,2}", text, re.ASCII)
    return tuple(map(int, match[0].split("."))) if match else ()


def version_text(version: Version) -> str:
    return ".".join(map(str, version))


def installed_triton() -> Version:
    from graphfuse.probe import version_of

    return to_version(version_of("triton") or "")
