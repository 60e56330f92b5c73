"""What is measured of generation, and the room that it needs."""

from __future__ import annotations

from dataclasses import dataclass

from graphfuse.errors import ConfigError

FUSED, UNFUSED = "fused", "unfused"
"""The variants: as usual, and without the rules that fuse or merge reductions."""

PAGE_SIZE = 16
MOST_AT_ONCE = 256
"""Prompts of an offline load that run together, unless a batch is larger."""


LEFT_OUT = 4
"""The most steps of a batch that are run and not timed."""

PROFILED = 16
"""Steps under the profiler."""

SPARE = 8
"""Tokens by which texts may become longer than what is timed."""


@dataclass(frozen=True)
class Workload:
    """`batch` prompts of `input_len` tokens that get `output_len` tokens each. `max_step_tokens` is the engine's."""

    batch: int
    input_len: int
    output_len: int
    max_step_tokens: int

    @property
    def num_left_out(self) -> int:
        return min(LEFT_OUT, (self.output_len - 1) // 2)

    @property
    def num_timed(self) -> int:
        """Steps; the prefill gives the first token."""
        return self.output_len - 1 - self.num_left_out

    @property
    def max_tokens(self) -> int:
        """The most tokens that a prompt gets: those that are in first decode while the others are read."""
        prompt_tokens = self.max_step_tokens - self.batch  # of a step, at least
        lead = -(-self.batch * self.input_len // prompt_tokens)
        return self.output_len + lead + PROFILED + SPARE

    @property
    def length(self) -> int:
        return self.input_len + self.max_tokens


@dataclass(frozen=True)
class OfflineLoad:
    """Prompts that come at once, and their tokens."""

    prompts: int
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    batches: tuple[int, ...]
    input_len: int
    output_len: int
    variants: tuple[str, ...]

    offline: OfflineLoad | None
    repeats: int
    max_step_tokens: int
    bandwidth: float
    """TB/s of the roofline."""

    time_limit: float | None
    """Seconds, the load included, after which nothing more is begun."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for what cannot be measured."""
        if self.max_step_tokens < 2 * self.max_batch_size:
            raise ConfigError(
                f"Steps of {self.max_step_tokens} tokens leave too little room for prompts beside the tokens of "
                f"{self.max_batch_size} sequences. Use at least {2 * self.max_batch_size}."
            )
        if self.output_len < 2:
            raise ConfigError(f"{self.output_len} output token leaves no step to time. Use 2 or more.")

    @property
    def max_batch_size(self) -> int:
        offline = 0 if self.offline is None else min(self.offline.prompts, MOST_AT_ONCE)
        return max(*self.batches, offline)

    @property
    def workloads(self) -> list[Workload]:
        return [Workload(b, self.input_len, self.output_len, self.max_step_tokens) for b in self.batches]

    @property
    def max_length(self) -> int:
        lengths = [workload.length for workload in self.workloads]
        if self.offline is not None:
            lengths.append(self.offline.input_len + self.offline.output_len)
        return max(lengths)

    def cache_tokens(self, fit: int) -> int:
        """Of an engine, when `fit` tokens have room: a batch must fit, an offline load may wait."""
        batch = max(self.workloads, key=lambda each: each.batch)
        need = batch.batch * _whole_pages(batch.length)
        if fit < need:
            raise ConfigError(
                f"A batch of {batch.batch} needs a cache of {need} tokens for each engine, and {fit} fit. Lower "
                "--batch or --input-len, use more ranks, or leave --compare out."
            )
        if self.offline is None:
            return need
        wanted = self.max_batch_size * _whole_pages(self.offline.input_len + self.offline.output_len)
        return max(need, min(fit, wanted))


def _whole_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE) * PAGE_SIZE
