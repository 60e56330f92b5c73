"""What a GPU does while it decodes: for how much of the time it is busy, what energy it uses, what serves attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from graphfuse.ops.varlen import why_plain
from graphfuse.profiling.attribution import PHASE, spent, work_of
from graphfuse.profiling.trace_file import trace_of
from graphfuse.tuning.generate_plan import PROFILED

_NOT_LOOKED_AT = 2
"""Steps behind the profiler's start, which takes time of its own."""
_DECODE = "decode"


@dataclass(frozen=True)
class Busy:
    """Some steps of decoding, under the profiler, which makes them slower."""

    share: float
    """Of the time from the first kernel to the end of the last one, that in which some kernel or copy runs, 0 ... 1."""

    kernel_ms: float
    """A step: the time in which some kernel or copy runs."""

    step_ms: float
    kernels: float
    """A step."""


def profiled(step: Callable[[], object], device: torch.device) -> Busy | None:
    """Run `PROFILED` steps and look at most of them. None on the CPU, or where the profiler sees no kernels."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_NOT_LOOKED_AT):
            step()
        torch.cuda.synchronize(device)
        with record_function(PHASE + _DECODE):
            for _ in range(PROFILED - _NOT_LOOKED_AT):
                step()
            torch.cuda.synchronize(device)
    return busy_of(trace_of(profiler), PROFILED - _NOT_LOOKED_AT)


def busy_of(trace: Mapping[str, Any], steps: int) -> Busy | None:
    """Of a trace in which the phase "decode" is that many steps. None without kernels."""
    found = spent(work_of(trace), _DECODE)
    if found.window <= 0:
        return None
    return Busy(found.busy / found.window, found.busy / steps / 1e3, found.window / steps / 1e3, found.kernels / steps)


def energy_meter(gpu_id: str | None, nvml: Any) -> Callable[[], float] | None:
    """What reads the joules that a GPU has used so far; None where NVML does not tell.

    Args:
        gpu_id: the GPU's uuid, as `graphfuse.probe.uuid_of` gives it.
        nvml: from `graphfuse.probe.load_nvml`, or a stand-in.
    """
    if nvml is None or gpu_id is None:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu_id)
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (nvml.NVMLError, AttributeError, TypeError):  # an old driver or binding, a MIG slice
        return None
    return lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3


def attention_names(model: Any, device: torch.device) -> dict[str, str]:
    """What serves attention of prompts, and of a token a sequence."""
    mixers = [mixer for mixer in model.mixers if not mixer.has_state]
    if not mixers:
        return {"prefill": "none", "decode": "none"}
    if device.type != "cuda":
        return {"prefill": "torch", "decode": "torch"}
    latent = hasattr(mixers[0], "latent_sizes")
    size, value_size = (
        (sum(mixers[0].q_sizes), mixers[0].value_size) if latent else (mixers[0].head_dim, mixers[0].head_dim)
    )
    q, v = (torch.empty(0, 1, each, dtype=model.dtype, device=device) for each in (size, value_size))
    plain = why_plain(q, v)
    return {
        "prefill": "FlashAttention, by torch" if plain is None else f"torch ({plain})",
        "decode": f"graphfuse's Triton kernel for paged {'latents' if latent else 'caches'}",
    }
