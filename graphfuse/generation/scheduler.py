"""Which tokens of which sequences the next step computes.

    waiting ─► running: prompt in chunks, then a token a step ─► finished
       ▲          │ no page left: the one that came last starts again
       └──────────┘

Each step has room for a number of tokens. Running sequences that are past their prompt take one each; what is left goes
to prompts, the oldest first, in chunks. What the chunks of a step attend to is copied together for them, and so is no
more than one text can have: short ends of long texts with a common beginning take several steps. A sequence is let in
when pages for all of its tokens are free. When a running one needs a page and there is none, the one that was let in
last gives its pages back and waits, at the front, to compute its tokens again; the oldest thus always gets on.

Nothing here looks at a clock, a tensor or a file: every rank that is given the same requests schedules the same steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from graphfuse.generation.pages import PagePool
from graphfuse.generation.sequence import Sequence


@dataclass(frozen=True)
class Part:
    """Tokens `before` … `before + length - 1` of a sequence."""

    sequence: Sequence
    before: int
    length: int
    samples: bool
    """Whether the next token follows: the part ends with the sequence's last token."""


class MustRead(Exception):
    """Sequences have to start again, and the tokens that are under way must be read first."""


class Scheduler:
    """Waiting and running sequences, of `max_length` tokens at most. `max_batch_size` run at most, and compute at most
    `max_step_tokens` in a step."""

    def __init__(self, pool: PagePool, *, max_batch_size: int, max_step_tokens: int, max_length: int) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order in which they were let in."""
        self.num_preempted = 0
        self.num_shared_tokens = 0
        """Tokens that were not computed because another text that begins with them had been."""
        self.max_batch_size = max_batch_size
        self._max_step_tokens = max(max_step_tokens, max_batch_size)
        self._max_step_keys = max(max_length, self._max_step_tokens)
        self._slots = list(range(max_batch_size, 0, -1))  # slot 0 is nobody's, as page 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def step(self) -> list[Part]:
        """The parts of the next step, those of one token first; none when there is nothing to launch.

        Sequences count what is launched from now on: call it only to run its result. Raises `MustRead`, with nothing
        changed, when sequences have to start again while tokens are under way."""
        lengths = self._lengths()
        while sum(self._missing(s, s.num_computed + n) for s, n in lengths) > self.pool.num_free:
            if any(sequence.num_pending for sequence in self.running):
                raise MustRead
            self._preempt(self.running[-1])
            lengths = self._lengths()
        budget = self._max_step_tokens - sum(n for _, n in lengths)
        parts = [self._launch(sequence, length) for sequence, length in lengths]
        while budget > 0 and (sequence := self._let_in(budget, self._keys_left(parts))):
            length = min(sequence.num_left, budget)
            parts.append(self._launch(sequence, length))
            budget -= length
        for part in parts:
            part.sequence.num_pending += part.samples
        return sorted(parts, key=lambda part: part.length > 1)

    def end(self, sequence: Sequence, *, forget: bool = False) -> None:
        """A running sequence has finished; `forget`: what its pages hold is not to be shared."""
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        self.pool.give_back(sequence.pages, forget=forget)

    def _lengths(self) -> list[tuple[Sequence, int]]:
        """How many tokens of each running sequence are next: one of those that generate, chunks of prompts."""
        left = {id(s): s.num_left for s in self.running}
        budget = self._max_step_tokens - sum(n == 1 for n in left.values())
        keys = self._max_step_keys
        found = []
        for sequence in self.running:
            length = left[id(sequence)]
            if length > 1:
                length = min(length, budget)
                num_keys = sequence.num_computed + length
                if length > 1 and num_keys > keys:
                    continue
                budget -= length
                keys -= num_keys if length > 1 else 0
            if length > 0:
                found.append((sequence, length))
        return found

    def _keys_left(self, parts: list[Part]) -> int:
        """How many tokens further chunks may attend to. A part of one token reads the caches where they are."""
        return self._max_step_keys - sum(part.before + part.length for part in parts if part.length > 1)

    def _missing(self, sequence: Sequence, length: int) -> int:
        """How many pages a sequence needs to have its first `length` tokens in them."""
        return max(0, -(-length // self.pool.page_size) - len(sequence.pages))

    def _let_in(self, budget: int, keys: int) -> Sequence | None:
        """The first that waits, if there is room for it, and for a chunk of it in a step with so many tokens left that
        may attend to so many."""
        if not self.waiting or not self._slots:
            return None
        sequence = self.waiting[0]
        sequence.pages = self.pool.shared(sequence.token_ids)
        missing = self._missing(sequence, sequence.length)
        num_shared = len(sequence.pages) * self.pool.page_size
        length = min(sequence.length - num_shared, budget)
        if missing > self.pool.num_free or (length > 1 and num_shared + length > keys):
            self.pool.give_back(sequence.pages)
            sequence.pages = []
            return None
        sequence.num_remembered = len(sequence.pages)
        sequence.num_computed = num_shared
        self.num_shared_tokens += num_shared
        self._take_pages(sequence, missing)
        sequence.slot = self._slots.pop()
        self.running.append(self.waiting.popleft())
        return sequence

    def _launch(self, sequence: Sequence, length: int) -> Part:
        before = sequence.num_computed
        sequence.num_computed += length
        self._take_pages(sequence, self._missing(sequence, sequence.num_computed))
        # What is under way is not known: pages are remembered up to the tokens before it.
        num_known = min(sequence.num_computed, len(sequence.token_ids))
        if num_known // self.pool.page_size > sequence.num_remembered:
            known = sequence.token_ids[:num_known]
            sequence.num_remembered = self.pool.remember(sequence.pages, known, sequence.num_remembered)
        return Part(sequence, before, length, samples=sequence.num_computed == sequence.length)

    def _take_pages(self, sequence: Sequence, number: int) -> None:
        for _ in range(number):
            page = self.pool.take()
            assert page is not None, "pages were counted before"
            sequence.pages.append(page)

    def _preempt(self, sequence: Sequence) -> None:
        self.end(sequence)
        sequence.start_again()
        self.waiting.appendleft(sequence)
        self.num_preempted += 1
