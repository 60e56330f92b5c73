"""`Scheduler`: every token is computed once and in order, within the budget; the oldest gets on; nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphfuse.generation.job import Request
from graphfuse.generation.pages import PagePool
from graphfuse.generation.sampling import SamplingParams
from graphfuse.generation.scheduler import MustRead, Scheduler
from graphfuse.generation.sequence import Sequence


def make_sequence(index, prompt, max_tokens, *, max_length=1000):
    request = Request(index, list(prompt), SamplingParams(max_tokens=max_tokens), seed=0)
    return Sequence(request, decode=str, eos=frozenset(), max_length=max_length)


def make_scheduler(num_pages=100, page_size=4, batch=4, step=16, share=True):
    pool = PagePool(num_pages + 1, page_size, share=share)
    return Scheduler(pool, max_batch_size=batch, max_step_tokens=step, max_length=num_pages * page_size)


def lengths(parts):
    return [(part.sequence.request.index, part.before, part.length, part.samples) for part in parts]


def read(scheduler, parts, token=7):
    """The tokens of a step become known; what has finished ends."""
    for part in parts:
        if part.samples:
            part.sequence.accept(token)
            if part.sequence.finish_reason is not None and part.sequence in scheduler.running:
                scheduler.end(part.sequence)


def test_a_long_prompt_is_computed_in_chunks_among_the_tokens_of_others():
    scheduler = make_scheduler(step=6)
    scheduler.add(make_sequence(0, [1, 2, 3], 10))
    scheduler.add(make_sequence(1, range(100, 112), 10))
    step = scheduler.step()
    assert lengths(step) == [(0, 0, 3, True), (1, 0, 3, False)]
    read(scheduler, step)
    step = scheduler.step()
    assert lengths(step) == [(0, 3, 1, True), (1, 3, 5, False)]
    read(scheduler, step)
    step = scheduler.step()
    assert lengths(step) == [(0, 4, 1, True), (1, 8, 4, True)]
    read(scheduler, step)
    assert lengths(scheduler.step()) == [(0, 5, 1, True), (1, 12, 1, True)]


def test_steps_are_scheduled_before_the_token_of_the_last_one_is_known_but_never_past_the_end():
    scheduler = make_scheduler()
    scheduler.add(sequence := make_sequence(0, [1, 2], 3))
    steps = [scheduler.step()]
    steps.append(scheduler.step())
    assert lengths(steps[1]) == [(0, 2, 1, True)]
    read(scheduler, steps[0])
    steps.append(scheduler.step())
    assert lengths(steps[2]) == [(0, 3, 1, True)]
    read(scheduler, steps[1])
    assert scheduler.step() == [], "its last token is under way"
    read(scheduler, steps[2])
    assert sequence.finish_reason == "length" and sequence.num_generated == 3
    assert scheduler.running == [] and scheduler.pool.used == 0.0


def test_who_waits_is_let_in_in_turn_when_all_its_pages_are_free():
    scheduler = make_scheduler(num_pages=4, batch=2, share=False)
    for index, length in enumerate((8, 12, 2)):
        scheduler.add(make_sequence(index, range(length), 1))
    step = scheduler.step()
    assert lengths(step) == [(0, 0, 8, True)], "two pages are left, and the next one needs three; nobody overtakes it"
    read(scheduler, step)
    assert lengths(scheduler.step()) == [(1, 0, 12, True), (2, 0, 2, True)]


def test_without_a_page_the_last_one_let_in_starts_again():
    scheduler = make_scheduler(num_pages=3, share=False)
    scheduler.add(first := make_sequence(0, range(4), 4))
    scheduler.add(last := make_sequence(1, range(10, 14), 4))
    step = scheduler.step()
    assert lengths(step) == [(0, 0, 4, True), (1, 0, 4, True)]
    with pytest.raises(MustRead):
        scheduler.step()
    assert (first.num_computed, last.num_computed) == (4, 4), "nothing has changed"
    read(scheduler, step)
    step = scheduler.step()
    assert lengths(step) == [(0, 4, 1, True)]
    assert scheduler.num_preempted == 1 and list(scheduler.waiting) == [last] and last.pages == []
    while scheduler.running:
        read(scheduler, step)
        step = scheduler.step()
        if step and step[0].sequence is last:
            break
    assert lengths(step) == [(1, 0, 5, True)], "its prompt and the token it had"


def test_equal_beginnings_are_computed_once_also_in_one_step():
    scheduler = make_scheduler()
    for index in range(3):
        scheduler.add(make_sequence(index, [*range(9), index], 2))
    assert lengths(scheduler.step()) == [(0, 0, 10, True), (1, 8, 2, True), (2, 8, 2, True)]
    shared = [sequence.pages[:2] for sequence in scheduler.running]
    assert shared[0] == shared[1] == shared[2]
    assert scheduler.num_shared_tokens == 16


def test_what_the_chunks_of_a_step_attend_to_is_no_more_than_one_text_can_have():
    scheduler = Scheduler(PagePool(200, 4), max_batch_size=8, max_step_tokens=50, max_length=100)
    scheduler.add(make_sequence(0, range(90), 3))
    read(scheduler, scheduler.step())
    step = scheduler.step()
    assert lengths(step) == [(0, 50, 40, True)]
    read(scheduler, step)
    for index in range(1, 4):  # 88 tokens are shared
        scheduler.add(make_sequence(index, [*range(90), index], 2))
    scheduler.add(make_sequence(4, [*range(88), 4], 1))
    step = scheduler.step()
    assert lengths(step) == [(0, 90, 1, True), (1, 88, 3, True)]
    read(scheduler, step)
    step = scheduler.step()
    assert lengths(step) == [(0, 91, 1, True), (1, 91, 1, True), (2, 88, 3, True)]
    read(scheduler, step)
    step = scheduler.step()
    assert lengths(step) == [(2, 91, 1, True), (4, 88, 1, True), (3, 88, 3, True)]


def test_what_was_generated_is_shared_too():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, [1, 2, 3], 6))
    while parts := scheduler.step():
        read(scheduler, parts)
    scheduler.add(make_sequence(1, [1, 2, 3, 7, 7, 7, 7, 7, 5], 1))
    assert lengths(scheduler.step()) == [(1, 8, 1, True)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_sequence_gets_its_tokens_in_order_whatever_the_sizes(data):
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    num_pages = data.draw(st.integers(2, 12))
    batch, step = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    scheduler = make_scheduler(num_pages, page_size, batch, step, share=data.draw(st.booleans()))
    capacity = num_pages * page_size
    expected, sequences = {}, []
    for index in range(data.draw(st.integers(1, 7))):
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=capacity - 1))
        max_tokens = data.draw(st.integers(1, 6))
        sequences.append(make_sequence(index, prompt, max_tokens, max_length=capacity))
        expected[index] = min(max_tokens, capacity - len(prompt))
    arrivals = list(sequences)
    under_way: list = []
    have: dict[int, int] = {}  # how many tokens each sequence's pages hold
    at = sorted(data.draw(st.lists(st.integers(0, 20), min_size=len(arrivals), max_size=len(arrivals))))
    for now in range(2000):
        while arrivals and at[0] <= now:
            at.pop(0)
            scheduler.add(arrivals.pop(0))
        try:
            parts = scheduler.step()
        except MustRead:
            read(scheduler, under_way.pop(0))
            assert not under_way
            parts = scheduler.step()
        assert sum(part.length for part in parts) <= max(step, batch) and len(scheduler.running) <= batch
        assert sum(p.before + p.length for p in parts if p.length > 1) <= max(capacity, step, batch)
        assert [part.length > 1 for part in parts] == sorted(part.length > 1 for part in parts)
        for part in parts:
            sequence = part.sequence
            if part.before != have.get(id(sequence), 0):  # starts anew, with what it shares
                assert part.before % page_size == 0 and part.before <= len(sequence.token_ids)
            have[id(sequence)] = part.before + part.length
            assert len(sequence.pages) * page_size >= part.before + part.length and sequence.slot > 0
        assert len({part.sequence.slot for part in parts}) == len(parts)
        under_way.append(parts)
        if len(under_way) > 1 or not parts:
            read(scheduler, under_way.pop(0))
        if not arrivals and not scheduler.running and not scheduler.waiting:
            break
    assert {s.request.index: s.num_generated for s in sequences} == expected
    assert scheduler.pool.used == 0.0
