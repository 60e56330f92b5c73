"""Layers that are alike are one line of the page, however the model repeats them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphfuse.page.folding import MAX_PERIOD, Fold, fold


@pytest.mark.parametrize(
    ("layers", "folds"),
    [
        ("", []),
        ("a", [Fold(0, 1, 1)]),
        ("ab", [Fold(0, 1, 1), Fold(1, 1, 1)]),
        ("aaaa", [Fold(0, 1, 4)]),
        ("eabbbbc", [Fold(0, 1, 1), Fold(1, 1, 1), Fold(2, 1, 4), Fold(6, 1, 1)]),
        ("xxxyxxxyxxxy", [Fold(0, 4, 3)]),  # three of linear attention, one of full attention
        ("exyxyxyn", [Fold(0, 1, 1), Fold(1, 2, 3), Fold(7, 1, 1)]),
        ("aaxyxyxyxy", [Fold(0, 1, 2), Fold(2, 2, 4)]),
    ],
)
def test_runs_and_periods_are_folded(layers, folds):
    assert fold(list(layers)) == folds


@given(st.lists(st.sampled_from("ab"), max_size=40))
def test_folds_cover_every_layer_once_in_order_and_hold_like_ones(layers):
    at = 0
    for f in fold(layers):
        assert f.start == at and 1 <= f.period <= MAX_PERIOD
        block = layers[f.start : f.start + f.period]
        assert layers[f.start : f.start + f.period * f.repeats] == block * f.repeats
        at += f.period * f.repeats
    assert at == len(layers)
