"""The loop: schedule a step, launch it, and while it runs read the one before and end what is finished.

    schedule n+1 ─► launch n+1 ─► read n ─► end, let in ─► schedule n+2 ─► …

A sequence that turns out to have ended was launched once too often; that token is dropped. Sequences that a grammar
guides cannot be launched before their last token is known: while there are any, steps are read at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from graphfuse.agreement import is_shared, require
from graphfuse.comm import call_check
from graphfuse.comm.control import control_channel
from graphfuse.comm.watch import Watch
from graphfuse.errors import ConfigError
from graphfuse.generation.completion import GenerationStats
from graphfuse.generation.runner import Launched, Runner
from graphfuse.generation.sampler import NOT_FINITE
from graphfuse.generation.scheduler import MustRead, Part, Scheduler
from graphfuse.generation.sequence import Sequence


class Engine:
    """Runs sequences to their end. Deterministic: ranks that add the same sequences at the same steps stay in step."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, group: dist.ProcessGroup | None = None, watch: Watch | None = None
    ) -> None:
        self.scheduler = scheduler
        self._group, self._watch = group, watch
        self.stats = GenerationStats()
        self._runner = runner
        self._launched: Launched | None = None
        self._is_ready = self._is_busy = self._is_closed = False

    @property
    def num_unfinished(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.running)

    def begin(self) -> None:
        """Count from zero. The first time the model is traced, so that compiling does not count as prefill."""
        self.stats = GenerationStats()
        self.scheduler.num_preempted = self.scheduler.num_shared_tokens = 0
        if not self._is_ready:
            start = time.perf_counter()
            with self._waiting("preparation"):
                self._runner.warm_up()
            self.stats.start_up_seconds = time.perf_counter() - start
            self._is_ready = True

    def abandon(self) -> None:
        """Drop whatever is not finished."""
        self._launched = None
        for sequence in list(self.scheduler.running):
            self.scheduler.end(sequence, forget=True)
        self.scheduler.waiting.clear()

    def close(self) -> None:
        """Free the caches. Nothing can be run afterwards."""
        self._is_closed = True
        self._runner.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        """`begin`; while open, sequences can be added and run; `abandon` if it ends early. One at a time."""
        if self._is_closed:
            raise ConfigError("This LLM is closed. Make a new one.")
        if self._is_busy:
            raise ConfigError(
                "Other prompts are being completed. Take what complete() yields to its end, or close that generator."
            )
        self._is_busy = True
        try:
            self.begin()
            yield
        except BaseException:  # of a generator that is closed, GeneratorExit
            self.abandon()
            raise
        finally:
            self._is_busy = False

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def step(self) -> list[Sequence]:
        """Launch a step, and return the sequences that the one before has ended."""
        start = time.perf_counter()
        finished: list[Sequence] = []
        if any(sequence.guide for sequence in self.scheduler.running):
            finished += self._read()
        try:
            parts = self.scheduler.step()
        except MustRead:
            finished += self._read()
            parts = self.scheduler.step()
        before = self._launched
        with self._waiting("step", f"[{sum(part.length for part in parts)}]"):
            self._launched = self._runner.launch(parts, before) if parts else None
            if before is not None:
                finished += self._accept(before)
        self._count(parts, time.perf_counter() - start)
        return finished

    def _read(self) -> list[Sequence]:
        launched, self._launched = self._launched, None
        with self._waiting("reading"):
            return [] if launched is None else self._accept(launched)

    def _waiting(self, what: str, shape: str = "") -> AbstractContextManager[Any]:
        return nullcontext() if self._watch is None else self._watch.call(what, shape)

    def _accept(self, launched: Launched) -> list[Sequence]:
        finished, sampled = [], list(launched.read())
        if call_check.is_on() and is_shared(self._group):
            fields = {f"the token of text {s.request.index}, {s.request.sample}": each for s, each, _ in sampled}
            require(control_channel(self._group), "what they have sampled", fields)
        for sequence, token_id, logprob in sampled:
            had_ended = sequence.finish_reason is not None
            self.stats.decode_tokens -= had_ended
            if token_id == NOT_FINITE:
                sequence.fail(
                    f"The logits hold NaN or infinity after {sequence.num_generated} tokens. Try dtype=float32; if it "
                    "stays, the checkpoint is damaged or the model overflows."
                )
            else:
                sequence.accept(token_id, logprob)
            if sequence.finish_reason is not None and not had_ended:
                finished.append(sequence)
        for sequence in finished:
            self.scheduler.end(sequence, forget=sequence.error is not None)
        return finished

    def _count(self, parts: list[Part], seconds: float) -> None:
        """A step's time is shared out by tokens. What is recomputed after a preemption is prefill again."""
        prefill = sum(part.length for part in parts if part.before < part.sequence.num_prompt or part.length > 1)
        decode = sum(part.length for part in parts) - prefill
        share = prefill / (prefill + decode) if parts else 0.0
        self.stats.num_preempted = self.scheduler.num_preempted
        self.stats.shared_tokens = self.scheduler.num_shared_tokens
        self.stats.prefill_tokens += prefill
        self.stats.decode_tokens += decode
        self.stats.prefill_seconds += share * seconds
        self.stats.decode_seconds += (1 - share) * seconds
