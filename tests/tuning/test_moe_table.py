"""A tuned table answers inside its span, the heuristic elsewhere; a graph's text of it launches alike."""

from __future__ import annotations

import random

import pytest

from graphfuse.errors import ArgumentError
from graphfuse.tuning.moe_shared_memory import Limits
from graphfuse.tuning.moe_table import MoeTable
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles
from tests.tuning.moe import SMALL_MEMORY, both

pytestmark = pytest.mark.usefixtures("known_heuristic")

SHAPE = MoeShape(128, 384, 2048, 8)


def table(*tuned: int, **kwargs) -> MoeTable:
    """Each entry has its number of tokens, and 10,000 more, as group_size_m."""
    return MoeTable(SHAPE, tuple((n, both(16, 64, 64, 10_000 + n)) for n in tuned), "file.json", **kwargs)


def chosen(table: MoeTable, num_tokens: int) -> str:
    number = table.tiles(num_tokens).gate_up.group_size_m
    return f"tuned {number - 10_000}" if number > 10_000 else f"heuristic {number}"


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (8, "tuned 8"),
        (16, "tuned 16"),
        (11, "tuned 8"),
        (12, "tuned 16"),  # √(8 · 16) = 11.3
        (31, "tuned 16"),
        (32, "tuned 16"),  # halfway on a log scale
        (33, "tuned 64"),
        (64, "tuned 64"),
        (65, "heuristic 65"),  # 64 … 1024 is a hole
        (1000, "heuristic 1000"),
        (1024, "tuned 1024"),
        (1025, "heuristic 1025"),
        (7, "heuristic 7"),
        (1, "heuristic 1"),
        (0, "heuristic 1"),
    ],
)
def test_the_nearest_entry_serves_within_the_span_and_the_heuristic_elsewhere(num_tokens, expected):
    assert chosen(table(8, 16, 64, 1024), num_tokens) == expected


def test_neighbours_four_times_apart_have_no_hole_between_them():
    assert chosen(table(8, 32), 20) == "tuned 32" and chosen(table(8, 33), 20) == "heuristic 20"


def test_a_table_that_begins_at_96_tokens_leaves_decoding_to_the_heuristic():
    assert [chosen(table(96, 128, 256, 512, 1024), n) for n in (1, 95, 96, 100, 2048)] == [
        "heuristic 1", "heuristic 95", "tuned 96", "tuned 96", "heuristic 2048",
    ]  # fmt: skip


def test_a_table_without_entries_is_the_heuristic():
    empty = MoeTable(SHAPE)
    assert empty.source == "heuristic" and chosen(empty, 64) == "heuristic 64"


def test_what_the_heuristic_says_is_made_to_fit_too():
    assert table(8).tiles(4).gate_up.num_stages == 10
    fitted = table(8, limits=Limits.of(SHAPE, SMALL_MEMORY)).tiles(4).gate_up
    assert (fitted.num_stages, fitted.block_size_k) == (4, 256)


def any_table(choices: random.Random) -> MoeTable:
    def tile(m: int) -> Tile:
        return Tile(m, choices.choice((32, 64)), choices.choice((64, 128)), 1, 8, 4, choices.random() < 0.5)

    counts = sorted(choices.sample(range(1, 5000), choices.randrange(20)))
    ms = [choices.choice((16, 256)) for _ in counts]
    block_shape = choices.choice((None, (128, 64)))
    shape = MoeShape(choices.randrange(1, 300), 256, 7168, 8, choices.choice((None, "fp8_w8a8")), block_shape)
    limits = choices.choice((None, Limits.of(shape), Limits.of(shape, SMALL_MEMORY)))
    entries = tuple((n, Tiles(tile(m), tile(m))) for n, m in zip(counts, ms, strict=True))
    return MoeTable(shape, entries, choices.choice(("a.json", "heuristic")), limits=limits)


def test_its_text_holds_all_that_launching_needs():
    choices = random.Random(0)
    for _ in range(200):
        before = any_table(choices)
        after = MoeTable.from_text(before.to_text())
        assert after == before and after.to_text() == before.to_text()
        assert [after.tiles(n) for n in (0, 1, 77, 4096)] == [before.tiles(n) for n in (0, 1, 77, 4096)]


def test_equal_tables_have_equal_texts_whatever_is_said_about_them():
    plain, annotated = table(1, 2), table(1, 2, notes=("found elsewhere",), measured_us=((1, 27.5),))
    assert plain == annotated and plain.to_text() == annotated.to_text()
    assert table(1, 3).to_text() != plain.to_text()


def test_a_text_is_parsed_once():
    text = table(1, 2, 4).to_text()
    assert MoeTable.from_text(text) is MoeTable.from_text(text[:-1] + "}")


@pytest.mark.parametrize("text", ["", "tuned", "[]", "{}", "[" * 10**5, '{"shape": [1], "entries": [], "source": ""}'])
def test_a_text_of_anything_else_is_an_error(text):
    with pytest.raises(ArgumentError, match=r"describes no launch parameters. Pass what MoeTable.to_text\(\) returned"):
        MoeTable.from_text(text)
