"""Results of generation, in little."""

from __future__ import annotations

from graphfuse.tuning.generate_load import BatchRun
from graphfuse.tuning.generate_plan import FUSED, UNFUSED, Workload
from graphfuse.tuning.generate_result import ColdStart, Offline, Result, Row
from graphfuse.tuning.generate_roofline import Roofline

ROOFLINE = Roofline(weight_bytes=4.0e9, cache_bytes=0.3e9, bandwidth=4.3, reductions=97, reduction_us=None)
TTFT = [0.1, 0.2, 0.3, 0.4]


def row(variant: str, *rounds: list[float], batch: int = 4, joules: tuple[float | None, ...] = ()) -> Row:
    """A row of rounds of steps of so many milliseconds."""
    workload = Workload(batch, input_len=100, output_len=8, max_step_tokens=2048)  # 4 steps are timed
    runs = [BatchRun(TTFT, [ms / 1e3 for ms in steps], context=105.0, joules=None) for steps in rounds]
    return Row.of(variant, workload, runs, joules or (None,) * len(rounds), ROOFLINE, first_step=0.5)


def result() -> Result:
    found = Result(
        device_name="CPU",
        ranks=2,
        model="tiny",
        dtype="float32",
        executor="eager",
        weights="random",
        input_len=100,
        output_len=8,
        max_step_tokens=2048,
        bandwidth_tb_s=4.3,
        attention={"prefill": "torch", "decode": "torch"},
        versions={"torch": "2"},
    )
    found.all_reduces = {
        FUSED: {"all_reduce": 97, "fused": 97, "merged": 0, "declined": 0},
        UNFUSED: {"all_reduce": 97, "fused": 0, "merged": 0, "declined": 97},
    }
    for variant in (FUSED, UNFUSED):
        found.cold_start[variant] = ColdStart(3.0, 1.0, 0.5, 0.25, 4.0, 6.0, 2.0, 0.5)
    found.rows = [row(FUSED, [2.0] * 4, [2.5] * 4, [2.0] * 4), row(UNFUSED, [3.0] * 4, [3.0] * 4, [4.0] * 4)]
    found.offline = [Offline(FUSED, 10, 5, 3, [1.0, 2.0]), Offline(UNFUSED, 10, 5, 3, [2.0, 3.0])]
    return found
