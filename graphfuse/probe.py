"""What one process can find out about its GPU, its links, its host and its software, without any other rank.

GPUs are named by their NVML uuid, which is the same for every process whatever CUDA_VISIBLE_DEVICES says: a rank is
never used as a device index. Links come from nvidia-ml-py (`pynvml`), which FlashInfer brings along; without it, or
where the driver does not tell, NVLink is "unknown" with the reason, and CUDA is asked which GPUs reach each other's
memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphfuse.facts import RankFacts

# Each of these, at this value, says that NVLink multicast must not be used in this process.
MULTICAST_SWITCHES = (
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
)


def probe(device: torch.device) -> RankFacts:
    """This rank's facts. Never raises: what fails becomes None and a note."""
    notes: list[str] = []
    gpu = gpu_id = capability = nvlink_peers = access_peers = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu, capability = properties.name, (properties.major, properties.minor)
        gpu_id = uuid_of(properties)
        links = nvml_links(gpu_id, load_nvml())
        if links.access_peers is None:
            links = with_peers_from_cuda(links, device.index, torch.cuda)
        nvlink_peers, access_peers = links.nvlink_peers, links.access_peers
        notes += links.notes
    return RankFacts(
        device_type="cuda" if device.type == "cuda" else "cpu",
        host=host_id(),
        gpu=gpu,
        gpu_id=gpu_id,
        compute_capability=capability,
        nvlink_peers=nvlink_peers,
        access_peers=access_peers,
        torch=torch.__version__,
        triton=version_of("triton"),
        nccl=nccl_version() if device.type == "cuda" else None,
        flashinfer=version_of("flashinfer-python"),
        multicast_forbidden_by=multicast_forbidden_by(os.environ),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        notes=tuple(notes),
    )


def multicast_forbidden_by(environment: Any) -> str | None:
    """The first of the variables that forbid NVLink multicast, as NAME=value, or None."""
    for name, value in MULTICAST_SWITCHES:
        if environment.get(name) == value:
            return f"{name}={value}"
    return None


def host_id() -> str:
    """Equal for processes of one host and container: the host name alone is often the same on cloned machines."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def nccl_version() -> str | None:
    """The version of the NCCL that torch uses, such as 2.28.3."""
    try:
        version: Any = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError):
        return None
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def uuid_of(properties: Any) -> str | None:
    """A GPU's uuid as NVML writes it, from torch's device properties."""
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return None
    text = str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


@dataclass(frozen=True)
class Links:
    """The GPUs of this host that one GPU reaches, by uuid: over NVLink, and for direct reads and writes."""

    nvlink_peers: tuple[str, ...] | None = None
    access_peers: tuple[str, ...] | None = None
    num_nvlinks: int | None = None
    notes: tuple[str, ...] = ()


def load_nvml() -> Any:
    """The module `pynvml`, or None where nvidia-ml-py is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def nvml_links(gpu_id: str | None, nvml: Any) -> Links:
    """What NVML knows about the links of one GPU. `nvml` is from `load_nvml`, or a stand-in in tests."""
    if nvml is None:
        return Links(notes=("GPU links are unknown because nvidia-ml-py is not installed.",))
    if gpu_id is None:
        return Links(notes=("GPU links are unknown because torch does not tell the GPU's uuid.",))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Links(notes=(f"GPU links are unknown because NVML does not start: {error}.",))
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        by_id = {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        if gpu_id not in by_id:
            return Links(notes=(f"GPU links are unknown because NVML does not list {gpu_id} (a MIG slice has none).",))
        mine = by_id.pop(gpu_id)
        return Links(
            nvlink_peers=_nvlink_peers(nvml, mine, by_id),
            access_peers=_reached(nvml, mine, by_id, nvml.NVML_P2P_CAPS_INDEX_READ, nvml.NVML_P2P_CAPS_INDEX_WRITE),
            num_nvlinks=len(_active_links(nvml, mine)),
        )
    except (nvml.NVMLError, AttributeError, TypeError, ctypes.ArgumentError) as error:  # the binding differs
        return Links(notes=(f"GPU links are unknown because NVML does not tell them: {error}.",))
    finally:
        nvml.nvmlShutdown()


def with_peers_from_cuda(links: Links, index: int | None, cuda: Any) -> Links:
    """The links with what CUDA knows: which of the GPUs that this process sees one of them reads and writes directly.

    Args:
        links: from `nvml_links`, without `access_peers`.
        index: of the GPU among those that this process sees; None: the current one.
        cuda: `torch.cuda`, or a stand-in in tests.
    """
    try:
        index = cuda.current_device() if index is None else index
        others = [other for other in range(cuda.device_count()) if other != index]
        reached = [other for other in others if cuda.can_device_access_peer(index, other)]
        peers = [uuid_of(cuda.get_device_properties(other)) for other in reached]
    except (RuntimeError, AssertionError) as error:  # CUDA's own errors, and torch's checks of the index
        return _with_note(links, f"Peer access is unknown because CUDA does not tell it: {error}.")
    if not others:
        return _with_note(links, "Peer access is unknown because this process sees one GPU only.")
    if None in peers:
        return _with_note(links, "Peer access is unknown because torch does not tell the GPUs' uuids.")
    told = tuple(peer for peer in peers if peer is not None)
    return dataclasses.replace(_with_note(links, "Peer access is known from CUDA."), access_peers=told)


def _with_note(links: Links, note: str) -> Links:
    return dataclasses.replace(links, notes=(*links.notes, note))


def _nvlink_peers(nvml: Any, mine: Any, others: dict[str, Any]) -> tuple[str, ...]:
    """Peers over NVLink. Drivers in some containers do not answer the direct question; then a GPU whose active links
    lead to an NVSwitch reaches every other GPU with such links."""
    try:
        return _reached(nvml, mine, others, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        if not _on_switch(nvml, mine):
            raise
        return tuple(gpu_id for gpu_id, handle in others.items() if _on_switch(nvml, handle))


def _reached(nvml: Any, mine: Any, others: dict[str, Any], *capabilities: int | tuple[int]) -> tuple[str, ...]:
    """The GPUs for which NVML reports every one of the peer-to-peer capabilities. Some releases of nvidia-ml-py define
    these constants with a comma behind, as tuples of one."""
    capabilities = tuple(c[0] if isinstance(c, tuple) else c for c in capabilities)
    return tuple(
        gpu_id
        for gpu_id, handle in others.items()
        if all(nvml.nvmlDeviceGetP2PStatus(mine, handle, c) == nvml.NVML_P2P_STATUS_OK for c in capabilities)
    )


def _active_links(nvml: Any, handle: Any) -> list[int]:
    """The numbers of a GPU's NVLinks that are up."""
    active = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                active.append(link)
        except nvml.NVMLError:  # link numbers end before the maximum, and PCIe cards have none
            break
    return active


def _on_switch(nvml: Any, handle: Any) -> bool:
    """Whether all active NVLinks of a GPU lead to an NVSwitch."""
    links = _active_links(nvml, handle)
    switch = nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    return bool(links) and all(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == switch for link in links)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
