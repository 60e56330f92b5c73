"""What a GPU does while it decodes: from a trace, from NVML."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from graphfuse.tuning.generate_meters import Busy, busy_of, energy_meter
from tests.profiling.traces import Trace


def test_busy_is_the_union_of_all_streams_from_the_first_kernel_to_the_end_of_the_last():
    trace = Trace().kernel("before", launched=1, start=2, end=90).phase("decode", 10, 400)
    trace.kernel("a", launched=20, start=100, end=140)
    trace.kernel("b", launched=25, start=120, end=150, stream=21)
    trace.kernel("c", launched=30, start=170, end=200)
    assert busy_of(trace.json, steps=2) == Busy(share=0.8, kernel_ms=0.04, step_ms=0.05, kernels=1.5)


def test_a_trace_without_kernels_says_nothing():
    assert busy_of(Trace().phase("decode", 0, 100).json, steps=2) is None


class FakeNvml(SimpleNamespace):
    class NVMLError(Exception):
        pass

    def __init__(self, millijoules: list[int] | None) -> None:
        super().__init__(asked=[])
        self._millijoules = millijoules

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if self._millijoules is None:
            raise self.NVMLError("Not Supported")
        return self._millijoules.pop(0)


def test_joules_are_read_of_the_gpu_by_its_uuid():
    nvml = FakeNvml([0, 2500, 4000])
    joules = energy_meter("GPU-1", nvml)
    assert joules is not None and nvml.asked == ["GPU-1"]
    assert (joules(), joules()) == (2.5, 4.0)


@pytest.mark.parametrize(("gpu_id", "nvml"), [(None, FakeNvml([0])), ("GPU-1", None), ("GPU-1", FakeNvml(None))])
def test_where_nvml_does_not_tell_there_is_no_meter(gpu_id, nvml):
    assert energy_meter(gpu_id, nvml) is None
