"""What a process group runs on: the facts that the gate turns into a decision.

Each rank looks at its own process (`graphfuse.probe`), the ranks exchange what they saw, and `combine` makes one
`Facts` of it: a pure function of the same list on every rank, so every rank decides alike. What the ranks disagree on,
or could not find out, is kept as a sentence in `notes` and stands as its most careful value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphfuse.errors import GroupError, brief
from graphfuse.jsonfile import JsonObject

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

SCHEMA = 1
MOST_RANKS = 1 << 16

# KiB that a block of threads may have, by compute capability (CUDA C++ Programming Guide, technical specifications).
SHARED_MEMORY_KIB = {
    (7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99,
    (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227, (12, 0): 99, (12, 1): 99,
}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """One group and the hardware and software under it. None means that it could not be found out, or is absent."""

    device_type: str
    """"cuda" or "cpu"."""

    world_size: int
    """Ranks of the tensor-parallel group."""

    gpu: str | None = None
    """Torch's name of the GPUs, all alike; None on the CPU, or where the ranks have different ones."""

    compute_capability: tuple[int, int] | None = None
    """The lowest of the ranks."""

    one_host: bool = True
    """All ranks run on one host."""

    nvlink_mesh: bool | None = None
    """Each GPU reaches each other one over NVLink."""

    peer_access: bool | None = None
    """Each GPU can read and write each other's memory."""

    torch: str | None = None
    triton: str | None = None
    nccl: str | None = None
    flashinfer: str | None = None
    """Versions; None when not installed or not the same on every rank."""

    multicast_forbidden_by: str | None = None
    """The environment variable that forbids NVLink multicast, with its value, if any rank has one."""

    deterministic: bool = False
    """`torch.use_deterministic_algorithms` is on."""

    notes: tuple[str, ...] = ()
    """Sentences on what the ranks disagree about or could not find out."""

    @property
    def shared_memory(self) -> int | None:
        """Bytes that a block of threads may have; None on the CPU and for GPUs that are not known."""
        kib = SHARED_MEMORY_KIB.get(self.compute_capability) if self.compute_capability else None
        return kib and kib * 1024

    def for_world_size(self, world_size: int) -> Facts:
        """The same kind of host for another number of ranks, as `explain` asks. More ranks than described: several."""
        if world_size <= self.world_size:
            return dataclasses.replace(self, world_size=world_size)
        note = f"{world_size} ranks do not fit the {self.world_size} GPUs of the described host."
        return dataclasses.replace(self, world_size=world_size, one_host=False, notes=(*self.notes, note))

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads."""
        data = {"schema": SCHEMA, **dataclasses.asdict(self)}
        data["compute_capability"] = list(self.compute_capability) if self.compute_capability else None
        data["notes"] = list(self.notes)
        return data

    @classmethod
    def from_json(cls, source: dict[str, Any] | str | Path) -> Facts:
        """Facts from `to_json`'s data or from a facts file. Raises `SchemaError` naming the file and the key."""
        obj = JsonObject(source, "facts") if isinstance(source, dict) else JsonObject.read(source)
        obj.only("schema", *(field.name for field in dataclasses.fields(cls)))
        if obj.get("schema", int) != SCHEMA:
            raise obj.error("schema", f"is {obj.data['schema']}; this version of graphfuse reads {SCHEMA}")
        text, flag = str | None, bool | None
        values: dict[str, Any] = {
            "device_type": obj.get("device_type", str),
            "world_size": obj.get("world_size", int),
            "one_host": obj.get("one_host", bool),
            "deterministic": obj.get("deterministic", bool),
            **{key: obj.get(key, text) for key in ("gpu", "torch", "triton", "nccl", "flashinfer")},
            **{key: obj.get(key, flag) for key in ("nvlink_mesh", "peer_access")},
            "multicast_forbidden_by": obj.get("multicast_forbidden_by", text),
        }
        if values["device_type"] not in ("cpu", "cuda"):
            raise obj.error("device_type", f'is {brief(values["device_type"])}, which is neither "cpu" nor "cuda"')
        if not 1 <= values["world_size"] <= MOST_RANKS:
            raise obj.error("world_size", f"is {values['world_size']}, which is not a number of ranks")
        capability = obj.get("compute_capability", list | None)
        if capability is not None and not (
            len(capability) == 2 and all(type(v) is int and 0 <= v < 1000 for v in capability)
        ):
            raise obj.error("compute_capability", f"is {brief(capability)}, which is not [major, minor]")
        notes = obj.get("notes", list)
        if not all(isinstance(note, str) and note.isprintable() for note in notes):
            raise obj.error("notes", "holds something that is not a string of printable characters")
        return cls(compute_capability=tuple(capability) if capability else None, notes=tuple(notes), **values)


@dataclass(frozen=True)
class RankFacts:
    """What one rank sees of its own process. `reachable` are ids of GPUs, None when it could not be found out."""

    device_type: str
    host: str
    gpu: str | None
    gpu_id: str | None
    compute_capability: tuple[int, int] | None
    nvlink_peers: tuple[str, ...] | None
    access_peers: tuple[str, ...] | None
    torch: str | None
    triton: str | None
    nccl: str | None
    flashinfer: str | None
    multicast_forbidden_by: str | None
    deterministic: bool
    notes: tuple[str, ...] = ()


def combine(ranks: Sequence[RankFacts]) -> Facts:
    """One `Facts` for the group from each rank's, in rank order. Pure: the same list gives the same facts."""
    notes = [f"rank {rank}: {note}" for rank, facts in enumerate(ranks) for note in facts.notes]

    def agreed(name: str, label: str) -> Any:
        values = [getattr(facts, name) for facts in ranks]
        if all(value == values[0] for value in values):
            return values[0]
        seen = ", ".join(f"{value or 'none'} on rank {rank}" for rank, value in enumerate(values))
        notes.append(f"The ranks have different {label}: {seen}.")
        return None

    device_type = "cuda" if all(facts.device_type == "cuda" for facts in ranks) else "cpu"
    agreed("device_type", "devices")
    capabilities = [facts.compute_capability for facts in ranks if facts.compute_capability]
    if len(set(capabilities)) > 1:
        agreed("compute_capability", "compute capabilities")
    forbidden = [facts.multicast_forbidden_by for facts in ranks if facts.multicast_forbidden_by]
    deterministic = [facts.deterministic for facts in ranks]
    if any(deterministic) and not all(deterministic):
        notes.append("Deterministic algorithms are on for some ranks only; they count as on for all.")
    gpu_ids = [facts.gpu_id for facts in ranks]
    if device_type == "cuda" and None not in gpu_ids and len(set(gpu_ids)) < len(gpu_ids):
        notes.append("Several ranks share one GPU.")
    return Facts(
        device_type=device_type,
        world_size=len(ranks),
        gpu=agreed("gpu", "GPUs"),
        compute_capability=min(capabilities) if len(capabilities) == len(ranks) else None,
        one_host=len({facts.host for facts in ranks}) == 1,
        nvlink_mesh=_full_mesh(gpu_ids, [facts.nvlink_peers for facts in ranks]),
        peer_access=_full_mesh(gpu_ids, [facts.access_peers for facts in ranks]),
        torch=agreed("torch", "torch versions"),
        triton=agreed("triton", "Triton versions"),
        nccl=agreed("nccl", "NCCL versions"),
        flashinfer=agreed("flashinfer", "FlashInfer versions"),
        multicast_forbidden_by=forbidden[0] if forbidden else None,
        deterministic=any(deterministic),
        notes=tuple(dict.fromkeys(notes)),
    )


def _full_mesh(gpu_ids: Sequence[str | None], peers: Sequence[tuple[str, ...] | None]) -> bool | None:
    """Whether each GPU lists each other one; None when one of them could not look. Two ranks on one GPU are no mesh."""
    if any(gpu_id is None for gpu_id in gpu_ids) or any(seen is None for seen in peers):
        return None
    return all(
        other in (seen or ())
        for rank, seen in enumerate(peers)
        for other_rank, other in enumerate(gpu_ids)
        if other_rank != rank
    )


def gather_facts(group: ProcessGroup | None, device: torch.device | str) -> Facts:
    """The facts of a tensor-parallel group: collective, and equal on every rank.

    Args:
        group: the group, of any backend; None stands for one rank. Only its members call. A fake group (tests and
            `explain`) exchanges nothing: its ranks are taken to be copies of this one.
        device: the device this rank computes on.

    Raises:
        GroupError: this process is no member of the group, or a rank does not answer.
    """
    import torch
    import torch.distributed as dist

    from graphfuse.comm.control import control_channel
    from graphfuse.probe import probe

    mine = probe(torch.device(device))
    if group is None:
        return combine([mine])
    if dist.get_rank(group) < 0:
        raise GroupError("This process is not a member of the tensor-parallel group. Call only on the group's ranks.")
    world_size = dist.get_world_size(group)
    if dist.get_backend(group) == "fake":
        return dataclasses.replace(combine([mine]), world_size=world_size)
    if world_size == 1:
        return combine([mine])
    return combine(control_channel(group).exchange(mine, subject="facts of the hosts"))
