"""What a measurement of generation found, as data, and the file that holds it.

    {
      "schema": 1, "kind": "generate", "what", "host", "device_name", "ranks", "model", "dtype", "executor", "weights",
      "input_len", "output_len", "max_step_tokens", "bandwidth_tb_s", "attention": {"prefill", "decode"}, "versions",
      "date", "method",
      "all_reduces": {variant: {"all_reduce", "fused", "merged", "declined"}},
      "cold_start": {variant: {"load_s", "build_s", "trace_s", "passes_s", "compile_s", "prepare_s", "first_token_s",
                               "graph_capture_s", "total_s"}},
      "offline": [{"variant", "prompts", "input_len", "output_len", "seconds": [by round], "total_tokens_per_s",
                   "output_tokens_per_s"}],
      "ratios": {"batch 1": {"median", "min", "max"}, ..., "offline": ...},
      "notes": [...],
      "rows": [{"batch", "variant", "tpot_ms", "tpot_ms_rounds", "tpot_ms_p99", "ttft_ms_p50", "ttft_ms_p99",
                "tokens_per_s", "prefill_tokens_per_s", "joules_per_token", "first_step_ms", "context", "roofline_ms",
                "roofline_share", "weight_bytes", "cache_bytes", "reductions", "reduction_us", "busy_share",
                "kernel_ms", "profiled_step_ms", "kernels"}]
    }

`tpot_ms` is a step of decoding: the median of the rounds' medians over their steady steps. Times are of rank 0, joules
of all ranks, bytes of one. What is unknown is null. A ratio is how many times as fast as unfused fused is, a round
against the one beside it.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from graphfuse.tuning.generate_load import BatchRun
from graphfuse.tuning.generate_meters import Busy
from graphfuse.tuning.generate_plan import FUSED, UNFUSED, Workload
from graphfuse.tuning.generate_roofline import Roofline
from graphfuse.tuning.measured import write_result

SCHEMA, KIND = 1, "generate"
METHOD = (
    "all prompts of a batch come at once; the steady steps behind the last prefill are timed on the host, one by one; "
    "median over steps, then over rounds; variants take turns, on the same weights and prompts, in one process"
)


@dataclass(frozen=True)
class Row:
    """A batch size of a variant. Milliseconds, tokens a second over all sequences, joules of all GPUs a token."""

    batch: int
    variant: str
    tpot_ms: float
    tpot_ms_rounds: list[float]
    tpot_ms_p99: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tokens_per_s: float
    prefill_tokens_per_s: float
    joules_per_token: float | None
    first_step_ms: float
    """The first one of the warm-up, with the capture of a CUDA graph if there was none for this size."""

    context: float
    roofline_ms: float
    roofline_share: float
    weight_bytes: float
    cache_bytes: float
    reductions: int
    reduction_us: float | None
    busy_share: float | None = None
    kernel_ms: float | None = None
    profiled_step_ms: float | None = None
    kernels: float | None = None
    """A step. The last four are unknown until the profiler has looked."""

    @classmethod
    def of(
        cls,
        variant: str,
        workload: Workload,
        runs: Sequence[BatchRun],
        joules: Sequence[float | None],
        roofline: Roofline,
        first_step: float,
    ) -> Row:
        """A row of its rounds. `joules`: of all ranks, by round."""
        rounds = [1e3 * median(run.steps) for run in runs]
        steps = [1e3 * seconds for run in runs for seconds in run.steps]
        ttft = [1e3 * seconds for run in runs for seconds in run.ttft]
        tpot = median(rounds)
        read = workload.batch * workload.input_len
        num_tokens = workload.batch * workload.num_timed
        known = [each / num_tokens for each in joules if each is not None]
        return cls(
            batch=workload.batch,
            variant=variant,
            tpot_ms=tpot,
            tpot_ms_rounds=rounds,
            tpot_ms_p99=percentile(steps, 99),
            ttft_ms_p50=percentile(ttft, 50),
            ttft_ms_p99=percentile(ttft, 99),
            tokens_per_s=1e3 * workload.batch / tpot,
            prefill_tokens_per_s=median(read / max(run.ttft) for run in runs),
            joules_per_token=median(known) if known and len(known) == len(joules) else None,
            first_step_ms=1e3 * first_step,
            context=sum(run.context for run in runs) / len(runs),
            roofline_ms=roofline.ms,
            roofline_share=roofline.ms / tpot,
            weight_bytes=roofline.weight_bytes,
            cache_bytes=roofline.cache_bytes,
            reductions=roofline.reductions,
            reduction_us=roofline.reduction_us,
        )

    def with_busy(self, busy: Busy | None) -> Row:
        if busy is None:
            return self
        return replace(
            self,
            busy_share=busy.share,
            kernel_ms=busy.kernel_ms,
            profiled_step_ms=busy.step_ms,
            kernels=busy.kernels,
        )


@dataclass(frozen=True)
class Offline:
    """Many prompts at once, of a variant."""

    variant: str
    prompts: int
    input_len: int
    output_len: int
    seconds: list[float]

    @property
    def total_tokens_per_s(self) -> float:
        return self.prompts * (self.input_len + self.output_len) / median(self.seconds)

    @property
    def output_tokens_per_s(self) -> float:
        return self.prompts * self.output_len / median(self.seconds)

    def to_json(self) -> dict[str, Any]:
        rates = {"total_tokens_per_s": self.total_tokens_per_s, "output_tokens_per_s": self.output_tokens_per_s}
        return {**asdict(self), **rates}


@dataclass(frozen=True)
class ColdStart:
    """Seconds until the first token of the first prompt, each part apart. `build` is measuring the memory and making
    the caches; `prepare` the first call, of which Dynamo has what is not trace, passes and compile."""

    load_s: float
    build_s: float
    trace_s: float
    passes_s: float
    compile_s: float
    prepare_s: float
    first_token_s: float
    graph_capture_s: float | None
    """The first step of one token; None where there are no CUDA graphs."""

    @property
    def total_s(self) -> float:
        """Without the load: the weights are on the device."""
        return self.build_s + self.prepare_s + self.first_token_s + (self.graph_capture_s or 0.0)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total_s": self.total_s}


@dataclass
class Result:
    """A result, which grows while it is measured."""

    device_name: str
    ranks: int
    model: str
    dtype: str
    executor: str
    weights: str
    """"random", or "checkpoint"."""

    input_len: int
    output_len: int
    max_step_tokens: int
    bandwidth_tb_s: float
    attention: dict[str, str]
    versions: dict[str, str | None]
    all_reduces: dict[str, dict[str, int]] = field(default_factory=dict)
    cold_start: dict[str, ColdStart] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    offline: list[Offline] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"{self.ranks}x {self.device_name}"

    def row(self, batch: int, variant: str) -> Row | None:
        return next((row for row in self.rows if (row.batch, row.variant) == (batch, variant)), None)

    def offline_of(self, variant: str) -> Offline | None:
        return next((each for each in self.offline if each.variant == variant), None)

    @property
    def ratios(self) -> dict[str, dict[str, float]]:
        """How many times as fast as unfused fused is, by round: of all that both were measured at."""
        found = {}
        for batch in dict.fromkeys(row.batch for row in self.rows):
            fused, unfused = self.row(batch, FUSED), self.row(batch, UNFUSED)
            if fused is not None and unfused is not None:
                found[f"batch {batch}"] = ratio(unfused.tpot_ms_rounds, fused.tpot_ms_rounds)
        before, after = self.offline_of(UNFUSED), self.offline_of(FUSED)
        if before is not None and after is not None:
            found["offline"] = ratio(before.seconds, after.seconds)
        return found

    def write(self, file: Path) -> None:
        """Write the file, one line a row. Raises `ConfigError` where that cannot be."""
        head = {
            "schema": SCHEMA,
            "kind": KIND,
            "what": f"generation at TP{self.ranks}: prompts of {self.input_len} tokens, then steps of a token each",
            "host": self.host,
            **{key: getattr(self, key) for key in _PLAIN},
            "date": datetime.date.today().isoformat(),
            "method": METHOD,
            "all_reduces": self.all_reduces,
            "cold_start": {variant: each.to_json() for variant, each in self.cold_start.items()},
            "offline": [each.to_json() for each in self.offline],
            "ratios": self.ratios,
            "notes": self.notes,
        }
        write_result(file, rounded(head), [rounded(asdict(row)) for row in self.rows])


_PLAIN = (
    "device_name", "ranks", "model", "dtype", "executor", "weights", "input_len", "output_len", "max_step_tokens",
    "bandwidth_tb_s", "attention", "versions",
)  # fmt: skip


def percentile(values: Sequence[float], percent: int) -> float:
    """Of the values in order the one that so many percent are at most as large as."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def ratio(before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """before / after of rounds that stood beside each other, and how far it spreads."""
    each = [a / b for a, b in zip(before, after, strict=False)]
    return {"median": median(each), "min": min(each), "max": max(each)}


def rounded(value: Any) -> Any:
    """Five significant digits: more is noise, and makes every digit a change."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
