"""The gate: facts about a group's hardware and software → whether fused reductions run, on which backends, and why.

    Facts ──► decide(dtype, hidden size, the user's wish) ──► Decision: allowed?, size ranges, reasons

It never looks at a model's name. Every refusal is a sentence. `decide` is a pure function of the facts, which
`gather_facts` makes equal on every rank, so the ranks cannot part ways here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from graphfuse.comm.table import FLASHINFER_BUFFER_BYTES, FOLDER, REFERENCE_ONLY, SizeRange, find_table
from graphfuse.errors import BackendUnavailableError, ConfigError
from graphfuse.facts import Facts, gather_facts

__all__ = ["Decision", "Facts", "SizeRange", "decide", "flashinfer_refusals", "gather_facts"]

ALLREDUCE_CHOICES = ("auto", "flashinfer", "symm_mem", "reference")

FLASHINFER_MIN_VERSION = "0.7.2"
FLASHINFER_CAPABILITIES = ((9, 0), (10, 0))
FLASHINFER_WORLD_SIZES = (2, 4, 8)
FLASHINFER_MIN_HIDDEN_SIZE = 256
# Where no table was measured: a one-shot reduction pushes (world size - 1) times the message over each GPU's links, and
# the smallest limit measured to pay (H200, 2 ranks) pushes 4 MiB.
UNMEASURED_PUSHED_BYTES = 4 << 20


@dataclass(frozen=True)
class Decision:
    """What the gate says for one group, dtype and hidden size.

    `allowed` False leaves reductions as plain ops. `ranges` tell the backend by message bytes (tokens * hidden *
    itemsize), in rising order, the last unlimited. `reasons` are sentences: why not, or what to know. `table` is the
    size table's file name, None when none was measured for this kind of host.
    """

    allowed: bool
    ranges: tuple[SizeRange, ...]
    reasons: tuple[str, ...] = ()
    table: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "allowed": self.allowed,
            "ranges": [r.to_json() for r in self.ranges],
            "reasons": list(self.reasons),
            "table": self.table,
        }


def decide(
    facts: Facts, *, dtype: torch.dtype, hidden_size: int, allreduce: str = "auto", tables: Path = FOLDER
) -> Decision:
    """How fused reductions of [..., hidden_size] tensors run on a group with these facts.

    Args:
        facts: from `gather_facts`, a facts file, or made up.
        dtype: of the reduced tensors.
        hidden_size: their last dimension.
        allreduce: "auto" follows the table of this kind of host; a backend's name forces it.
        tables: the folder of size tables.

    Raises:
        BackendUnavailableError: the backend asked for by name cannot run here; the message says why and what to do.
        ConfigError: `allreduce` is not a known name.
        SchemaError: the table of this kind of host is damaged.
    """
    if allreduce not in ALLREDUCE_CHOICES:
        known = ", ".join(map(repr, ALLREDUCE_CHOICES))
        raise ConfigError(f"allreduce={allreduce!r} is not known. Use one of {known}.")
    if allreduce == "symm_mem":
        raise BackendUnavailableError(
            "The comm backend symm_mem does not exist yet in this version of graphfuse. "
            'Use allreduce="auto", which takes the fastest backend that can run here.'
        )
    if facts.world_size < 2:
        return Decision(False, (), ("The group has one rank: there is nothing to reduce.",))
    if allreduce == "reference":
        return Decision(True, REFERENCE_ONLY, ('allreduce="reference" was asked for.',))
    refusals = flashinfer_refusals(facts, dtype=dtype, hidden_size=hidden_size)
    if allreduce == "flashinfer" and refusals:
        raise BackendUnavailableError(
            f"The comm backend flashinfer cannot run here: {' '.join(refusals)} "
            'Use allreduce="auto" to take what can, or change what the reasons name.'
        )
    if facts.device_type == "cpu":
        return Decision(True, REFERENCE_ONLY, ("The group computes on the CPU: the reference backend serves it.",))
    if refusals:
        return Decision(False, (), ("No fused comm backend can run for this group.", *refusals))
    return _measured_or_careful(facts, dtype, hidden_size, tables)


def flashinfer_refusals(facts: Facts, *, dtype: torch.dtype, hidden_size: int) -> tuple[str, ...]:
    """Why FlashInfer's fused all-reduce cannot serve these tensors on this group; empty when it can.

    Multicast policy and deterministic mode are no reasons: the trtllm kernels, the only ones used, need no multicast,
    and sum the ranks in rank order without atomics, so a run repeats bit by bit.
    """
    if facts.device_type != "cuda":
        return ("FlashInfer runs on NVIDIA GPUs only, and the group computes on the CPU.",)
    return (*_hardware_refusals(facts), *_version_refusals(facts), *_tensor_refusals(facts, dtype, hidden_size))


def _hardware_refusals(facts: Facts) -> list[str]:
    refusals = []
    if facts.compute_capability is None:
        refusals.append(f"The compute capability of the ranks is unknown.{_why(facts, 'capabilit')}")
    elif facts.compute_capability not in FLASHINFER_CAPABILITIES:
        have = "SM{}{}".format(*facts.compute_capability)
        refusals.append(f"FlashInfer's fused all-reduce is for SM90 and SM100 GPUs, and these are {have}.")
    if facts.gpu is None:
        refusals.append(f"The ranks do not share one kind of GPU.{_why(facts, 'different GPUs')}")
    if facts.world_size not in FLASHINFER_WORLD_SIZES:
        refusals.append(f"FlashInfer's fused all-reduce is for 2, 4 or 8 ranks, and the group has {facts.world_size}.")
    if not facts.one_host:
        refusals.append("The ranks run on several hosts, and the fused all-reduce reaches GPUs of one host only.")
        return refusals  # links between hosts are no further news
    if facts.nvlink_mesh is None:
        refusals.append(f"It is unknown whether NVLink connects every pair of the GPUs.{_why(facts, 'links')}")
    elif not facts.nvlink_mesh:
        refusals.append("NVLink does not connect every pair of the GPUs, and over PCIe the fused all-reduce is slower.")
    if facts.peer_access is None:
        refusals.append(f"It is unknown whether the GPUs reach each other's memory.{_why(facts, 'links')}")
    elif not facts.peer_access:
        refusals.append("The GPUs cannot access each other's memory.")
    return refusals


def _version_refusals(facts: Facts) -> list[str]:
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


def _tensor_refusals(facts: Facts, dtype: torch.dtype, hidden_size: int) -> list[str]:
    refusals = []
    name = _dtype_name(dtype)
    if name not in ("float16", "bfloat16"):
        refusals.append(f"The reduced tensors are {name}, and the fused all-reduce is for float16 and bfloat16.")
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


def _measured_or_careful(facts: Facts, dtype: torch.dtype, hidden_size: int, tables: Path) -> Decision:
    """FlashInfer's gate is open: the measured table of this kind of host, or a careful limit without one."""
    reasons = []
    if facts.multicast_forbidden_by:
        reasons.append(
            f"NVLink multicast is forbidden by {facts.multicast_forbidden_by}: no backend that needs it is considered, "
            "and the fused all-reduce in use needs none."
        )
    if facts.deterministic:
        reasons.append("Deterministic algorithms are on: the fused all-reduce sums the ranks in rank order, always.")
    table = find_table(facts.gpu, facts.world_size, _dtype_name(dtype), tables)
    if table is not None:
        return Decision(True, table.ranges(hidden_size), tuple(reasons), table.file)
    row_bytes = hidden_size * dtype.itemsize
    limit = max(UNMEASURED_PUSHED_BYTES // (facts.world_size - 1), row_bytes)
    reasons.append(
        f"No size table was measured for {facts.world_size} x {facts.gpu} in {_dtype_name(dtype)}: FlashInfer serves "
        f"up to {limit // row_bytes} tokens, a careful limit, and the reference backend more."
    )
    return Decision(True, (SizeRange(limit, "flashinfer", "oneshot"), *REFERENCE_ONLY), tuple(reasons))


def _why(facts: Facts, word: str) -> str:
    """The notes of the facts that hold a word, to follow a sentence."""
    return "".join(f" {note}" for note in facts.notes if word in note)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
