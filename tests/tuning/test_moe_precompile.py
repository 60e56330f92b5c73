"""Calls made in threads: each once, whatever the others raise."""

import threading

from graphfuse.tuning.moe_precompile import precompile


def test_each_call_is_made_once_and_what_it_raises_stands_in_its_place():
    made = []

    def fail():
        made.append("b")
        raise ValueError("b does not fit")

    outcomes = precompile([lambda: made.append("a"), fail, lambda: made.append("c")])
    assert sorted(made) == ["a", "b", "c"]
    assert [str(outcome) if outcome else None for outcome in outcomes] == [None, "b does not fit", None]


def test_calls_run_side_by_side_after_the_first_that_succeeds():
    order, meet = [], threading.Barrier(2, timeout=30)

    def fail():
        order.append("fails")
        raise RuntimeError

    def together():
        meet.wait()  # ends only if the other one has started too
        order.append("together")

    outcomes = precompile([fail, lambda: order.append("alone"), together, together], max_threads=2)
    assert order == ["fails", "alone", "together", "together"]
    assert [type(outcome) for outcome in outcomes] == [RuntimeError, *[type(None)] * 3]


def test_there_may_be_nothing_to_compile():
    assert precompile([]) == []
