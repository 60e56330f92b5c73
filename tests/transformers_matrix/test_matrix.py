"""docs/transformers.md says what becomes of transformers' models now: a sample in each run, all of it when asked."""

from __future__ import annotations

import pytest

from tests.transformers_matrix import measure, table, tiny

SAMPLE = ("qwen2",)
ARCHITECTURES = sorted(table.rows() | table.failures())


def test_every_architecture_with_a_plan_is_in_the_page():
    assert tiny.architectures() == ARCHITECTURES
    assert not table.rows().keys() & table.failures().keys()


def test_at_least_thirty_are_compiled_whole_and_agree_with_eager_mode():
    cells = [row.split(" | ") for row in table.rows().values()]
    whole = [
        c for c in cells if c[0] in ("1", "2") and int(c[1]) > 0 and float(c[-1].removeprefix("<")) < measure.LIMIT
    ]
    assert len(whole) >= 30
    assert len(whole) == len(cells), "the page has no row beyond the limit"


@pytest.mark.parametrize(
    "name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES if name not in SAMPLE)]
)
def test_the_row_is_current(ranks, name):
    outcomes = ranks.run(measure.TP, measure.computed, name, timeout=280)
    if name in table.failures():
        assert all(outcome.error for outcome in outcomes), "write the page anew: it can be compiled now"
        return
    for outcome in outcomes:
        assert not outcome.error
        assert outcome.difference is not None and outcome.difference < measure.LIMIT
        assert table.cells(outcome) == table.rows()[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_in_bfloat16_the_same_becomes_of_it(name):
    """Weights and activations of several dtypes could keep norms from being fused: float32 does not show that."""
    outcome = measure.traced(name)
    if name in table.failures():
        assert outcome.error
        return
    _, all_reduces, fused, merged, *_ = table.rows()[name].split(" | ")
    assert (outcome.all_reduces, outcome.fused, outcome.merged) == (int(all_reduces), int(fused), int(merged))
