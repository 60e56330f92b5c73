"""Stand-ins for what MoE tables fall back to."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphfuse.tuning import moe_files
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles


@pytest.fixture
def known_heuristic(monkeypatch) -> None:
    """Tiles with the number of tokens as their group_size_m, and too much shared memory for a small device."""

    def tiles(shape: MoeShape, num_tokens: int) -> Tiles:
        tile = Tile(16, 32, 256, num_tokens, 4, 10)
        return Tiles(tile, tile)

    monkeypatch.setitem(sys.modules, "graphfuse.tuning.moe_heuristic", SimpleNamespace(heuristic=tiles))


@pytest.fixture
def shipped_configs(monkeypatch, tmp_path) -> Path:
    """A folder of the test's own in place of the shipped configs; it is not there yet."""
    monkeypatch.setattr(moe_files, "FOLDER", tmp_path / "shipped")
    return tmp_path / "shipped"
