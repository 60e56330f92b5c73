"""Tuned MoE kernel configs as something to feed bytes to: as a file for both products, and as one for down alone."""

from __future__ import annotations

import json
from pathlib import Path

from graphfuse.tuning.moe_files import find_table, write_table
from graphfuse.tuning.moe_schema import Contents
from graphfuse.tuning.moe_shared_memory import Limits, shared_memory_bytes
from graphfuse.tuning.moe_table import MoeTable
from graphfuse.tuning.moe_tiles import MoeShape
from tests.tuning.moe import FIXTURES, SMALL_MEMORY

_FILES = sorted(FIXTURES.glob("vllm/*.json")) + sorted(FIXTURES.glob("sglang/*/*.json"))
PROVENANCE = {
    "hidden_size": 2048,
    "top_k": 8,
    "device": "NVIDIA H200",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "date": "2026-11-30",
    "method": "CUDA graphs",
    "effort": "quick",
    "command": "graphfuse tune moe",
}
_TILES = [tile for file in _FILES for tile in json.loads(file.read_text()).values() if isinstance(tile, dict)]
CONFIGS = [
    {"triton_version": "3.4.0", "1": _TILES[0], "4": _TILES[1], "64": _TILES[-1]},
    {"provenance": PROVENANCE, "1": _TILES[0] | {"SWAP_AB": True, "us": 27.1}, "2": _TILES[-1] | {"us": 30}},
    *({str(1 << n): tile for n, tile in enumerate(_TILES[i : i + 3])} for i in range(3, len(_TILES), 5)),
]
CONFIG_WORDS = [
    *_TILES[0], *PROVENANCE, "provenance", "triton_version", "SWAP_AB", "us", "SPLIT_K", "1", "4", "064", "0", "4096",
    "1073741825", "9" * 5000, "٣", "3.4", "3.4.0+git", 16, 32, 64, 256, 512, 1024, 48, 4.0, 1e-320, _TILES[0],
]  # fmt: skip

SHAPE = MoeShape(8, 256, 2048, 8, "fp8_w8a8", (128, 96))
NAME = "E=8,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,96]"
LIMITS = Limits.of(SHAPE, SMALL_MEMORY)


def prepare_config(folder: Path) -> None:
    (folder / "down").mkdir()
    (folder / "down" / f"{NAME}.json").write_text(json.dumps(CONFIGS[1]))


def read_config(folder: Path, data: bytes) -> None:
    (folder / f"{NAME}.json").write_bytes(data)
    (folder / "down" / f"{NAME}_down.json").write_bytes(data)
    for place in (folder, folder / "down"):
        table = find_table(SHAPE, "NVIDIA H200", folder=place, shared_memory=SMALL_MEMORY).table
        assert table.source == f"{NAME}.json"
        assert all(note.isprintable() and len(note) < 500 for note in table.notes), table.notes
        assert MoeTable.from_text(table.to_text()) == table
        tuned = [num_tokens for num_tokens, _ in table.entries]
        assert tuned == sorted(set(tuned)) and tuned[0] > 0
        for num_tokens in (tuned[0], tuned[-1]):
            tiles = table.tiles(num_tokens)
            assert max(shared_memory_bytes(tile, LIMITS) for tile in (tiles.gate_up, tiles.down)) <= SMALL_MEMORY
        provenance = Contents.read_file(place / f"{NAME}.json").provenance
        if provenance is not None:
            written = write_table(folder / "written", table, provenance)
            assert written.parent == folder / "written"
            again = find_table(SHAPE, provenance.device, folder=written.parent, shared_memory=SMALL_MEMORY).table
            assert again.entries == table.entries
