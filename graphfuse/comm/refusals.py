"""What each fast comm backend asks of a group and its tensors: every requirement that is not met is a sentence.

    flashinfer   SM90 or SM100, 2, 4 or 8 ranks, NVLink between all, FlashInfer new enough, 16-bit floats
    symm_mem     SM80 or newer, 2 to 8 ranks, peer access between all, Triton, 16- or 32-bit floats

Requirements that both have are worded alike, so that a report says them once. Multicast policy and deterministic mode
are no reasons: the kernels in use need no multicast, and sum the ranks in rank order without atomics, so a run repeats
bit by bit.
"""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

from graphfuse.comm.table import FLASHINFER_BUFFER_BYTES
from graphfuse.facts import Facts

FLASHINFER_MIN_VERSION = "0.7.2"
FLASHINFER_CAPABILITIES = ((9, 0), (10, 0))
FLASHINFER_WORLD_SIZES = (2, 4, 8)
FLASHINFER_MIN_HIDDEN_SIZE = 256

SYMM_MEM_MIN_CAPABILITY = (8, 0)  # the first with bfloat16 arithmetic
SYMM_MEM_WORLD_SIZES = range(2, 9)
SYMM_MEM_MAX_HIDDEN_SIZE = 16384  # a row is held in one block's registers


def flashinfer_refusals(facts: Facts, *, dtype: torch.dtype, hidden_size: int) -> tuple[str, ...]:
    """Why FlashInfer's fused all-reduce cannot serve these tensors on this group; empty when it can."""
    if facts.device_type != "cuda":
        return ("FlashInfer runs on NVIDIA GPUs only, and the group computes on the CPU.",)
    refusals = []
    if facts.compute_capability is None:
        refusals.append(_capability_unknown(facts))
    elif facts.compute_capability not in FLASHINFER_CAPABILITIES:
        have = _architecture(facts.compute_capability)
        refusals.append(f"FlashInfer's fused all-reduce is for SM90 and SM100 GPUs, and these are {have}.")
    if facts.gpu is None:
        refusals.append(f"FlashInfer needs one kind of GPU on all ranks.{_why(facts, 'different GPUs')}")
    if facts.world_size not in FLASHINFER_WORLD_SIZES:
        refusals.append(f"FlashInfer's fused all-reduce is for 2, 4 or 8 ranks, and the group has {facts.world_size}.")
    if facts.one_host:  # links between hosts are no further news
        refusals += _nvlink_refusals(facts)
    refusals += _reach_refusals(facts)
    refusals += _flashinfer_version_refusals(facts)
    refusals += _flashinfer_tensor_refusals(facts, dtype, hidden_size)
    return tuple(refusals)


def symm_mem_refusals(facts: Facts, *, dtype: torch.dtype, hidden_size: int) -> tuple[str, ...]:
    """Why graphfuse's own kernels over symmetric memory cannot serve these tensors on this group; empty when they can.

    They need no NVLink: over PCIe they run where the GPUs reach each other's memory.
    """
    if facts.device_type != "cuda":
        return ("symm_mem runs on NVIDIA GPUs only, and the group computes on the CPU.",)
    refusals = []
    if facts.compute_capability is None:
        refusals.append(_capability_unknown(facts))
    elif facts.compute_capability < SYMM_MEM_MIN_CAPABILITY:
        have = _architecture(facts.compute_capability)
        refusals.append(f"The symm_mem kernels are for SM80 and newer GPUs, and these are {have}.")
    if facts.world_size not in SYMM_MEM_WORLD_SIZES:
        refusals.append(f"The symm_mem kernels are for 2 to 8 ranks, and the group has {facts.world_size}.")
    refusals += _reach_refusals(facts)
    if facts.triton is None:
        differing = _why(facts, "Triton versions")
        if differing:
            refusals.append(f"Triton must be one version on every rank.{differing}")
        else:
            refusals.append("Triton is not installed: pip install triton brings what the symm_mem kernels need.")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        name = dtype_name(dtype)
        refusals.append(f"The reduced tensors are {name}, and symm_mem is for float16, bfloat16 and float32.")
    if hidden_size > SYMM_MEM_MAX_HIDDEN_SIZE:
        refusals.append(f"The hidden size {hidden_size} is above the {SYMM_MEM_MAX_HIDDEN_SIZE} symm_mem is for.")
    return tuple(refusals)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reach_refusals(facts: Facts) -> list[str]:
    if not facts.one_host:
        return ["The ranks run on several hosts, and the fused all-reduce reaches GPUs of one host only."]
    if facts.peer_access is None:
        reasons = _why(facts, "links") + _why(facts, "Peer access")
        return [f"It is unknown whether the GPUs reach each other's memory.{reasons}"]
    if not facts.peer_access:
        return ["The GPUs cannot access each other's memory."]
    return []


def _nvlink_refusals(facts: Facts) -> list[str]:
    if facts.nvlink_mesh is None:
        return [f"It is unknown whether NVLink connects every pair of the GPUs.{_why(facts, 'links')}"]
    if not facts.nvlink_mesh:
        return ["NVLink does not connect every pair of the GPUs, and over PCIe FlashInfer's all-reduce is slower."]
    return []


def _flashinfer_version_refusals(facts: Facts) -> list[str]:
    wanted = FLASHINFER_MIN_VERSION
    if facts.flashinfer is None:
        differing = _why(facts, "FlashInfer versions")
        if differing:
            return [f"FlashInfer must be one version on every rank.{differing}"]
        return [f'FlashInfer is not installed: pip install "graphfuse[cuda]" brings version {wanted} or newer.']
    if TorchVersion(facts.flashinfer) < wanted:
        return [
            f"FlashInfer {facts.flashinfer} is too old: before {wanted} its fused all-reduce can read unfinished data. "
            f'Upgrade with pip install "flashinfer-python>={wanted}".'
        ]
    return []


def _flashinfer_tensor_refusals(facts: Facts, dtype: torch.dtype, hidden_size: int) -> list[str]:
    refusals = []
    name = dtype_name(dtype)
    if name not in ("float16", "bfloat16"):
        refusals.append(f"The reduced tensors are {name}, and FlashInfer's kernels are for float16 and bfloat16.")
    elif hidden_size * dtype.itemsize % 16:
        refusals.append(f"The hidden size {hidden_size} does not fill whole 16-byte words of {name}.")
    elif not _has_launch_shape(hidden_size):
        refusals.append(f"FlashInfer's kernels have no launch shape for the hidden size {hidden_size}.")
    if hidden_size < FLASHINFER_MIN_HIDDEN_SIZE:
        refusals.append(f"The hidden size {hidden_size} is below the {FLASHINFER_MIN_HIDDEN_SIZE} FlashInfer needs.")
    elif facts.world_size * hidden_size * dtype.itemsize >= FLASHINFER_BUFFER_BYTES:
        refusals.append(f"One row of hidden size {hidden_size} does not fit FlashInfer's 1 GiB of buffers.")
    return refusals


def _has_launch_shape(hidden_size: int) -> bool:
    """A row is spread over a cluster of 1, 2, 4 or 8 blocks of at most 1,024 threads, 8 elements a thread."""
    threads = hidden_size // 8
    cluster = 8
    while threads % cluster:
        cluster //= 2
    return threads // cluster <= 1024


def _capability_unknown(facts: Facts) -> str:
    return f"The compute capability of the ranks is unknown.{_why(facts, 'capabilit')}"


def _architecture(capability: tuple[int, int]) -> str:
    return "SM{}{}".format(*capability)


def _why(facts: Facts, word: str) -> str:
    """The notes of the facts that hold a word, to follow a sentence."""
    return "".join(f" {note}" for note in facts.notes if word in note)
