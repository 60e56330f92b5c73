"""The gate: facts about a group's hardware and software → whether fused reductions run, on which backends, and why.

    Facts ──► decide(dtype, hidden size, the user's wish) ──► Decision: allowed?, size ranges, reasons

It never looks at a model's name. Every refusal is a sentence (`graphfuse.comm.refusals`). `decide` is a pure function
of the facts, which `gather_facts` makes equal on every rank, and of the size tables: the ranks cannot part ways here.

    "auto"       the table measured on this kind of GPU, or on one that it may stand in for; what it gives to a backend
                 that cannot run goes to the other one. No table: FlashInfer, else symm_mem, for small messages only
    "symm_mem"   graphfuse's own kernels at every size
    "flashinfer" FlashInfer up to 32 MiB, the reference above
    "reference"  the reference at every size
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphfuse.comm.refusals import dtype_name, flashinfer_refusals, symm_mem_refusals
from graphfuse.comm.table import FOLDER, REFERENCE_ONLY, SizeRange, SizeTable, find_table, table_folders
from graphfuse.errors import BackendUnavailableError, ConfigError
from graphfuse.facts import Facts, gather_facts

__all__ = ["Decision", "Facts", "SizeRange", "decide", "flashinfer_refusals", "gather_facts", "symm_mem_refusals"]

ALLREDUCE_CHOICES = ("auto", "flashinfer", "symm_mem", "reference")

# Where nothing was measured: a one-shot reduction pushes (world size - 1) times the message over each GPU's links. The
# smallest limit measured to pay (H200, 2 ranks) pushes 4 MiB, in 10 microseconds; PCIe moves 1/16 of that meanwhile.
UNMEASURED_PUSHED_BYTES = 4 << 20
UNMEASURED_PUSHED_BYTES_WITHOUT_NVLINK = 256 << 10
# FlashInfer keeps 8 x ranks x this on each GPU; beyond, its one-shot kernel was slower than NCCL wherever measured.
FORCED_FLASHINFER_BYTES = 32 << 20


@dataclass(frozen=True)
class Decision:
    """What the gate says for one group, dtype and hidden size.

    `allowed` False leaves reductions as plain ops. `ranges` tell the backend by message bytes (tokens * hidden *
    itemsize), in rising order, the last unlimited. `reasons` are sentences: why not, or what to know. `table` is the
    size table's file name, None when none is in force. `workspace_bytes`, by backend, is what the workspaces take on
    each GPU once they are made (`graphfuse.comm.pool.prepare`).
    """

    allowed: bool
    ranges: tuple[SizeRange, ...]
    reasons: tuple[str, ...] = ()
    table: str | None = None
    workspace_bytes: dict[str, int] = field(default_factory=dict, compare=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "allowed": self.allowed,
            "ranges": [r.to_json() for r in self.ranges],
            "reasons": list(self.reasons),
            "table": self.table,
            "workspace_bytes": self.workspace_bytes,
        }


def decide(
    facts: Facts,
    *,
    dtype: torch.dtype,
    hidden_size: int,
    allreduce: str = "auto",
    tables: Sequence[Path] | None = None,
) -> Decision:
    """How fused reductions of [..., hidden_size] tensors run on a group with these facts.

    Args:
        facts: from `gather_facts`, a facts file, or made up.
        dtype: of the reduced tensors.
        hidden_size: their last dimension.
        allreduce: "auto" follows the table of this kind of host; a backend's name forces it.
        tables: folders of size tables, the first one first; None takes the user's, if the environment names a folder,
            and the shipped one.

    Raises:
        BackendUnavailableError: the backend asked for by name cannot run here; the message says why and what to do.
        ConfigError: `allreduce` is not a known name, or the environment names no folder of tables.
        SchemaError: the table of this kind of host is damaged.
    """
    if allreduce not in ALLREDUCE_CHOICES:
        known = ", ".join(map(repr, ALLREDUCE_CHOICES))
        raise ConfigError(f"allreduce={allreduce!r} is not known. Use one of {known}.")
    if facts.world_size < 2:
        return Decision(False, (), ("The group has one rank: there is nothing to reduce.",))
    if allreduce == "reference":
        return Decision(True, REFERENCE_ONLY, ('allreduce="reference" was asked for.',))
    refusals = {
        "flashinfer": flashinfer_refusals(facts, dtype=dtype, hidden_size=hidden_size),
        "symm_mem": symm_mem_refusals(facts, dtype=dtype, hidden_size=hidden_size),
    }
    row_bytes = hidden_size * dtype.itemsize
    if allreduce != "auto":
        if refusals[allreduce]:
            raise BackendUnavailableError(
                f"The comm backend {allreduce} cannot run here: {' '.join(refusals[allreduce])} "
                'Use allreduce="auto" to take what can, or change what the reasons name.'
            )
        return _forced(allreduce, facts, row_bytes)
    if facts.device_type == "cpu":
        return Decision(True, REFERENCE_ONLY, ("The group computes on the CPU: the reference backend serves it.",))
    if all(refusals.values()):
        every = dict.fromkeys(refusal for backend in refusals for refusal in refusals[backend])
        return Decision(False, (), ("No fused comm backend can run for this group.", *every))
    folders = table_folders() if tables is None else tables
    table = find_table(facts.gpu, facts.world_size, dtype_name(dtype), folders)
    # A table that stands in holds for alike links; GPUs known to lack NVLink have others.
    if table is not None and (table.device_name == facts.gpu or facts.nvlink_mesh is not False):
        return _measured(table, facts, hidden_size, row_bytes, refusals)
    return _careful(facts, dtype, row_bytes, refusals)


def _forced(backend: str, facts: Facts, row_bytes: int) -> Decision:
    """The backend asked for by name, which can run."""
    if backend == "symm_mem":
        asked = 'allreduce="symm_mem" was asked for.'
        return Decision(True, _symm_mem_ranges(facts, row_bytes), (*_policies(facts), asked))
    tokens = FORCED_FLASHINFER_BYTES // row_bytes
    asked = f'allreduce="flashinfer" was asked for: it serves up to {tokens} tokens, and the reference backend more.'
    ranges = (SizeRange(tokens * row_bytes, "flashinfer", "oneshot"), *REFERENCE_ONLY)
    return Decision(True, ranges, (*_policies(facts), asked))


def _measured(
    table: SizeTable, facts: Facts, hidden_size: int, row_bytes: int, refusals: dict[str, tuple[str, ...]]
) -> Decision:
    """The table's ranges, those of a backend that cannot run given to the other one."""
    reasons = _policies(facts)
    if table.device_name != facts.gpu:
        reasons.append(
            f"No size table was measured on {facts.gpu}: the one of {table.device_name} stands in, "
            "whose links are alike."
        )
    if table.path is not None and table.path.parent != FOLDER:
        reasons.append(f"The size table is not one that comes with graphfuse: {table.path}.")
    ranges = table.ranges(hidden_size)
    refused = next((r.backend for r in ranges if refusals.get(r.backend)), None)
    if refused is not None:
        others = _symm_mem_ranges(facts, row_bytes) if refused == "flashinfer" else _careful_ranges(facts, row_bytes)
        ranges = _give(ranges, refused, others)
        names = " and ".join(dict.fromkeys(r.backend for r in others))
        reasons.append(f"The sizes that the table gives to {refused} go to {names}. {' '.join(refusals[refused])}")
    return Decision(True, ranges, tuple(reasons), table.file)


def _careful(facts: Facts, dtype: torch.dtype, row_bytes: int, refusals: dict[str, tuple[str, ...]]) -> Decision:
    """Nothing was measured on this kind of host: small messages only, by FlashInfer, or by symm_mem where it cannot."""
    backend = "symm_mem" if refusals["flashinfer"] else "flashinfer"
    ranges = _careful_ranges(facts, row_bytes, backend)
    limit = ranges[0].max_bytes or 0
    gpus = f"{facts.world_size} x {facts.gpu}" if facts.gpu else f"{facts.world_size} different GPUs"
    sentence = (
        f"No size table was measured for {gpus} in {dtype_name(dtype)}: {backend} serves up to {limit // row_bytes} "
        "tokens, a careful limit, and the reference backend more."
    )
    return Decision(True, ranges, (*_policies(facts), " ".join([sentence, *refusals["flashinfer"]])))


def _policies(facts: Facts) -> list[str]:
    """What was asked of the process as a whole, and what it means here."""
    reasons = []
    if facts.multicast_forbidden_by:
        reasons.append(
            f"NVLink multicast is forbidden by {facts.multicast_forbidden_by}: no backend that needs it is considered, "
            "and the fused all-reduce in use needs none."
        )
    if facts.deterministic:
        reasons.append("Deterministic algorithms are on: the fused all-reduce sums the ranks in rank order, always.")
    return reasons


def _symm_mem_ranges(facts: Facts, row_bytes: int) -> tuple[SizeRange, ...]:
    """All sizes by symm_mem. Two ranks push the same bytes in both variants, and one-shot does it in one crossing."""
    if facts.world_size == 2:
        return (SizeRange(None, "symm_mem", "one_shot"),)
    limit = _careful_bytes(facts, row_bytes)
    return SizeRange(limit, "symm_mem", "one_shot"), SizeRange(None, "symm_mem", "two_shot")


def _careful_ranges(facts: Facts, row_bytes: int, backend: str = "flashinfer") -> tuple[SizeRange, ...]:
    """Small messages by a one-shot kernel, the others by the reference."""
    variant = {"flashinfer": "oneshot", "symm_mem": "one_shot"}[backend]
    return SizeRange(_careful_bytes(facts, row_bytes), backend, variant), *REFERENCE_ONLY


def _careful_bytes(facts: Facts, row_bytes: int) -> int:
    """Up to where one-shot kernels pay without a measurement: at least one row."""
    pushed = UNMEASURED_PUSHED_BYTES if facts.nvlink_mesh else UNMEASURED_PUSHED_BYTES_WITHOUT_NVLINK
    return max(pushed // (facts.world_size - 1), row_bytes)


def _give(ranges: tuple[SizeRange, ...], backend: str, others: tuple[SizeRange, ...]) -> tuple[SizeRange, ...]:
    """The ranges with every stretch of `backend` served as `others` say, whose last is unlimited. Neighbours merge."""
    given: list[SizeRange] = []
    for size_range in ranges:
        for piece in others if size_range.backend == backend else (size_range,):
            below = given[-1].max_bytes or 0 if given else 0
            if piece.max_bytes is not None and piece.max_bytes <= below:
                continue
            limits = [r.max_bytes for r in (piece, size_range) if r.max_bytes is not None]
            if given and given[-1].label == piece.label:
                given.pop()
            given.append(dataclasses.replace(piece, max_bytes=min(limits, default=None)))
            if given[-1].max_bytes == size_range.max_bytes:
                break
    return tuple(given)
