"""How many tokens the caches of a model can hold here: measured, and the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfuse.agreement import is_shared
from graphfuse.comm.control import control_channel

GPU_SHARE = 0.9
"""Of a GPU's memory. The rest is for CUDA graphs, workspaces of fused ops, and what fragments."""

CPU_SHARE = 0.25
"""Of the memory that is available, for all ranks of this host together."""

CPU_MOST = 1 << 30
"""Bytes a rank, since on a CPU more is seldom of use; ask for more by the number of tokens."""


def tokens_that_fit(
    model: Any, group: dist.ProcessGroup | None, *, num_states: int, max_step_tokens: int, device: torch.device
) -> int:
    """Tokens for which there is memory on every rank, when weights, states of `num_states` sequences and the largest
    step have theirs. Collective: the step runs the model."""
    one = cache_bytes(model, 1, 0)
    free = _free_on_gpu(model, max_step_tokens, device) if device.type == "cuda" else _free_on_cpu(group)
    fit = max(0, free - cache_bytes(model, 0, num_states)) // max(1, one)
    if is_shared(group):
        fit = min(int(other) for other in control_channel(group).exchange(str(fit), subject="the size of the cache"))
    return fit


def cache_bytes(model: Any, num_tokens: int, num_states: int) -> int:
    """Bytes of a rank's caches for so many tokens and states."""
    with torch.device("meta"):
        like = model.norm.weight.to("meta")
        return sum(
            _bytes(t)
            for mixer in model.mixers
            for t in mixer.new_cache(num_states if mixer.has_state else num_tokens, 1, like)
        )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _free_on_cpu(group: dist.ProcessGroup | None) -> int:
    num_ranks = dist.get_world_size(group) if is_shared(group) else 1
    try:
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(meminfo["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # no Linux
        return CPU_MOST
    return min(CPU_MOST, int(available * CPU_SHARE / num_ranks))


@torch.no_grad()
def _free_on_gpu(model: Any, max_step_tokens: int, device: torch.device) -> int:
    """What a step of one text of the most tokens leaves. It runs as the model is written: the compiled one needs no
    more."""
    page_size = 16
    num_pages = -(-max_step_tokens // page_size) + 1
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    caches = model.new_paged_caches(num_pages, page_size, 2)
    at = torch.arange(max_step_tokens, device=device)
    logits = model(
        torch.zeros_like(at),
        at,
        caches,
        at[-1:],
        entries=at + page_size,
        pages=torch.arange(1, num_pages, device=device)[None],
        states=torch.ones_like(at[:1]),
        spans=torch.tensor([[max_step_tokens, 0]]),
    )
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held - sum(_bytes(t) for pair in caches for t in pair)
    del logits, caches
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - GPU_SHARE) * total - peak)
