"""How many tokens the caches of a model can hold here: measured, and the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfuse.agreement import is_shared
from graphfuse.comm.control import control_channel
from graphfuse.errors import ConfigError

GPU_SHARE = 0.9
"""Of a GPU's memory. The rest is for CUDA graphs, workspaces of fused ops, and what fragments."""

CPU_SHARE = 0.25
"""Of the memory that is available, for all ranks of this host together."""

CPU_MOST = 1 << 30
"""Bytes a rank, since on a CPU more is seldom of use; ask for more by the number of tokens."""


def tokens_that_fit(
    model: Any,
    group: dist.ProcessGroup | None,
    *,
    num_states: int,
    max_step_tokens: int,
    max_length: int,
    device: torch.device,
) -> int:
    """Tokens for which there is memory on every rank, when weights, states of `num_states` sequences and the largest
    step, of texts of `max_length`, have theirs. Collective: the step runs the model."""
    one = cache_bytes(model, 1, 0)
    on_gpu = device.type == "cuda"
    free = _free_on_gpu(model, num_states, max_step_tokens, max_length, device) if on_gpu else _free_on_cpu(group)
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
def _free_on_gpu(model: Any, num_states: int, num_tokens: int, max_length: int, device: torch.device) -> int:
    """What the largest step leaves. It runs as the model is written: the compiled one needs no more."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    inputs = largest_step(model, num_states, num_tokens, max_length, device)
    caches = inputs["kv_caches"]
    try:
        logits = model(**inputs)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"There is no memory for a step of {num_tokens} tokens beside the weights. Give a smaller max_step_tokens "
            "or max_length, or use more ranks."
        ) from error
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held - sum(_bytes(t) for pair in caches for t in pair)
    del inputs, logits, caches
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - GPU_SHARE) * total - peak)


def largest_step(model: Any, num_states: int, num_tokens: int, max_length: int, device: torch.device) -> dict[str, Any]:
    """A step of as many tokens, in as few texts as possible, which end at their longest: they attend to as much as the
    chunks of a step can. All their pages are one: what is computed is of no use. With logits for each of `num_states`.
    """
    page_size = 16
    num_texts = -(-num_tokens // max_length)
    lengths = [num_tokens - (num_texts - 1) * max_length, *[max_length] * (num_texts - 1)]
    at = torch.cat([torch.arange(max_length - length, max_length, device=device) for length in lengths])
    return {
        "input_ids": torch.zeros_like(at),
        "positions": at,
        "kv_caches": model.new_paged_caches(2, page_size, num_texts + 1),
        "last_token": torch.arange(num_states, device=device) % num_tokens,
        "entries": page_size + at % page_size,
        "pages": torch.ones(num_texts, -(-max_length // page_size), dtype=torch.int64, device=device),
        "states": torch.arange(1, num_texts + 1, device=device),
        "spans": torch.tensor([(length, max_length - length) for length in lengths]),
    }
