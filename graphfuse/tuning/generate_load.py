"""Loads that an engine is put under to be timed: a batch that decodes together, and many prompts at once.

    batch     all prompts come at once ─► prefill in chunks, until the last is launched ─► steps, timed
    offline   all prompts come at once ─► the engine lets them in as it can ─► the last one ends

The host launches a step before it has read the one before, so a step of the engine takes as long as the slower of the
host's work and the device's. The first steps of a batch are left out: a CUDA graph may be captured in one, and they
still wait for prompts. Nothing is decoded to text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphfuse.errors import GenerationError
from graphfuse.generation.engine import Engine
from graphfuse.generation.job import Request
from graphfuse.generation.sampling import SamplingParams
from graphfuse.generation.sequence import Sequence as Running
from graphfuse.tuning.generate_meters import Busy, profiled
from graphfuse.tuning.generate_plan import Workload

Prompts = list[list[int]]


@dataclass(frozen=True)
class BatchRun:
    """What one run of a batch took, on this rank."""

    ttft: list[float]
    """Seconds from when all came to each one's first token on the host, by prompt."""

    steps: list[float]
    """Seconds of each timed step."""

    context: float
    """Tokens a sequence had on average over the timed steps."""

    joules: float | None
    """What this rank's GPU used over the timed steps."""

    busy: Busy | None = None


def random_prompts(number: int, length: int, vocab_size: int, seed: int) -> Prompts:
    """Prompts of random tokens, the same on every rank; those of two seeds share no beginning worth a page."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (number, length), generator=generator).tolist()


def run_batch(
    engine: Engine,
    prompts: Prompts,
    workload: Workload,
    *,
    device: torch.device,
    joules: Callable[[], float] | None = None,
    profile: bool = False,
) -> BatchRun:
    """One run of a batch. Ends with nothing left in the engine.

    Args:
        joules: what this rank's GPU has used so far.
        profile: at the end, while all sequences run, look at what the GPU does.

    Raises `GenerationError` if logits are not finite.
    """
    engine.begin()
    settle(device)
    sequences = _sequences(prompts, workload.max_tokens, workload.length)
    first_tokens: dict[int, float] = {}
    start = time.perf_counter()

    def step() -> float:
        began = time.perf_counter()
        _refuse_failed(engine.step())
        ended = time.perf_counter()
        if len(first_tokens) < len(sequences):
            for index, sequence in enumerate(sequences):
                if sequence.num_generated and index not in first_tokens:
                    first_tokens[index] = ended - start
        return ended - began

    for sequence in sequences:
        engine.add(sequence)
    while any(sequence.num_computed < sequence.num_prompt for sequence in sequences):
        step()
    for _ in range(workload.num_left_out):
        step()
    lengths = [sequence.num_computed for sequence in sequences]
    used = 0.0 if joules is None else joules()
    steps = [step() for _ in range(workload.num_timed)]
    assert all(sequence.finish_reason is None for sequence in sequences), "the whole batch was timed"
    spent = None if joules is None else joules() - used
    busy = profiled(step, device) if profile else None
    engine.abandon()
    settle(device)
    context = sum(lengths) / len(lengths) + (len(steps) + 1) / 2
    ttft = [first_tokens[index] for index in range(len(sequences))]
    return BatchRun(ttft, steps, context, spent, busy)


def warm_up(engine: Engine, workload: Workload, vocab_size: int, device: torch.device) -> float:
    """Whatever a run of the workload meets for the first time, for less than a run: a step of as many tokens as any,
    then steps of the whole batch over as many pages. Most prompts have two tokens. Returns the seconds of the first of
    these steps, in which a CUDA graph is captured if there is none for the size."""
    engine.begin()
    num_long = min(workload.batch, -(-workload.max_step_tokens // workload.input_len))
    prompts = random_prompts(num_long, workload.input_len, vocab_size, seed=1)
    prompts += random_prompts(workload.batch - num_long, min(2, workload.input_len), vocab_size, seed=2)
    sequences = _sequences(prompts, workload.max_tokens, workload.length)
    for sequence in sequences:
        engine.add(sequence)
    while any(sequence.num_computed < sequence.num_prompt for sequence in sequences):
        _refuse_failed(engine.step())
    settle(device)
    start = time.perf_counter()
    _refuse_failed(engine.step())
    settle(device)
    seconds = time.perf_counter() - start
    for _ in range(2):
        _refuse_failed(engine.step())
    engine.abandon()
    settle(device)
    return seconds


def first_token(engine: Engine, prompt: Sequence[int], device: torch.device) -> tuple[float, float]:
    """Seconds until a prompt's first token is there, and of the step behind it, for which a CUDA graph is captured. The
    prompt must fit into a step."""
    start = time.perf_counter()
    engine.add(_sequences([list(prompt)], 3, len(prompt) + 3)[0])
    _refuse_failed(engine.step())
    settle(device)
    there = time.perf_counter()
    _refuse_failed(engine.step())
    settle(device)
    ended = time.perf_counter()
    engine.abandon()
    return there - start, ended - there


def run_offline(engine: Engine, prompts: Prompts, output_len: int, device: torch.device) -> float:
    """Seconds until every prompt has its `output_len` tokens. Raises `GenerationError` if logits are not finite."""
    engine.begin()
    settle(device)
    start = time.perf_counter()
    for sequence in _sequences(prompts, output_len, len(prompts[0]) + output_len):
        engine.add(sequence)
    while engine.num_unfinished:
        _refuse_failed(engine.step())
    return time.perf_counter() - start


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sequences(prompts: Prompts, max_tokens: int, max_length: int) -> list[Running]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    requests = [Request(index, prompt, params, seed=0) for index, prompt in enumerate(prompts)]
    return [Running(request, _no_text, frozenset(), max_length) for request in requests]


def _no_text(_token_ids: Any) -> str:
    return ""


def _refuse_failed(finished: list[Running]) -> None:
    for sequence in finished:
        if sequence.error is not None:
            raise GenerationError(sequence.error)
