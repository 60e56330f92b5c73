"""`graphfuse.load`: a checkpoint folder or hub id → a model on this rank of a tensor-parallel group."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PretrainedConfig

from graphfuse.errors import CheckpointError, ConfigError, GraphfuseError, UnsupportedModelError, brief
from graphfuse.integrations.transformers_tp import shard_if_whole
from graphfuse.weights import stream
from graphfuse.weights.config import read_config, text_config
from graphfuse.weights.files import DTYPES, StoredTensor, check_links, find_tensors
from graphfuse.weights.text_part import text_part

logger = logging.getLogger("graphfuse")

IMPLEMENTATIONS = ("auto", "graphfuse", "transformers")
ADAPTER = "adapter_config.json"
SAFE = {"use_safetensors": True, "trust_remote_code": False}
"""No pickled weights, and no code that a checkpoint brings: None would ask on the terminal."""

HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def load(
    path_or_hub_id: str | os.PathLike[str],
    tp_group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    implementation: str = "auto",
) -> nn.Module:
    """Load a causal language model, every rank of `tp_group` its own part.

    A rank's peak memory is its part plus a bounded buffer; where transformers' model is sharded over some of the
    processes only, it is the whole model. No collective runs, except inside transformers.

    Args:
        path_or_hub_id: a folder with config.json and safetensors weights (read without any network), or the id of a
            repository on the hub ("Qwen/Qwen3-8B"), downloaded as transformers does.
        tp_group: process group or one-dimensional device mesh; None for one rank.
        dtype: of the weights and activations; None takes the config's, else the checkpoint's.
        device: None takes the current CUDA device, or the CPU where there is none or the group is CPU-only.
        implementation: "graphfuse" (the definitions in graphfuse.models), "transformers" (its model, sharded by its
            own plan), or "auto": graphfuse's where it has one for the config, else transformers'.

    Returns:
        The model in eval mode.

    Raises:
        CheckpointError: the folder or a file is missing, damaged, pickled, or does not fit the config.
        UnsupportedModelError: implementation="graphfuse" and there is no definition for the config.
        ConfigError: an unknown implementation, a dtype that no weights have here, or a device that is not there.
        GroupError: a group that cannot be used.
    """
    from graphfuse.models import registry
    from graphfuse.models.sharding import TensorParallel

    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation is {implementation!r}. Use one of {', '.join(IMPLEMENTATIONS)}.")
    if dtype is not None and dtype not in DTYPES.values():
        raise ConfigError(
            f"dtype={dtype!r} is no dtype of weights. Pass one of {', '.join(map(str, DTYPES.values()))}, or None for "
            "the checkpoint's."
        )
    if device is not None:
        device = available_device(device)
    tp = TensorParallel.of(tp_group)
    folder = local_folder(path_or_hub_id)
    config = read_config(folder)
    stored = find_tensors(folder)
    if implementation == "transformers":
        return _load_transformers(folder, tp.group, dtype, device)
    text = text_config(config)
    if text is not config:
        stored = text_part(stored)
    if text.model_type in registry.FAMILIES:
        _check_counts(folder, text, stored)
    config_dtype = text.dtype if isinstance(text.dtype, torch.dtype) else None
    model_dtype = dtype or stream.default_dtype(config_dtype, stored)
    try:
        shapes = registry.build(config, tp.group, model_dtype, "meta")
    except UnsupportedModelError as reason:
        if implementation == "graphfuse":
            raise
        if tp.rank == 0:
            logger.warning("Loading transformers' model of %s. %s", folder, reason)
        return _load_transformers(folder, tp.group, dtype, device)
    if model_dtype not in DTYPES.values():
        raise CheckpointError(f"{folder} asks for {model_dtype}, which is not implemented. Pass another dtype.")
    # Before anything of the size that the config tells is allocated, the files confirm that size.
    stream.check(shapes, shapes.checkpoint_plan(frozenset(stored)), stored, shapes.ignores)
    model = registry.build(config, tp.group, model_dtype, device or default_device(tp.group))
    plans = model.checkpoint_plan(frozenset(stored))
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=tp.rank != 0 or not console.is_terminal) as progress:
        bar = progress.add_task(f"Loading {folder.name}", total=len(plans))
        stream.fill(model, plans, stored, model.ignores, lambda n: progress.advance(bar, n))
    return model


def local_folder(path_or_hub_id: str | os.PathLike[str], files: Sequence[str] = HUB_FILES) -> Path:
    """The folder itself, or the hub's snapshot of it, which has those of the repository's files that match `files`.

    Raises:
        CheckpointError: neither a folder nor a repository that can be downloaded or is cached, or a folder with links
            that lead out of it.
    """
    path = Path(path_or_hub_id)
    if os.path.isdir(path):  # unlike Path's, it takes names that no file can have
        check_links(path)
        return path
    name = os.fspath(path_or_hub_id)
    if os.path.exists(path):
        raise CheckpointError(f"{name} is a file. Pass the folder that holds it.")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise CheckpointError(f"There is no folder {name}. Check the path, or pass a hub id such as Qwen/Qwen3-8B.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{brief(name)} is no local folder, and the hub does not give it "
            f"({type(error).__name__}: {brief(error, 300)}). Check the name, the network and the access rights."
        ) from error


def _check_counts(folder: Path, config: PretrainedConfig, stored: dict[str, StoredTensor]) -> None:
    """Every layer has tensors, and every expert unless they are fused: no loop over more of them than there can be."""
    counts = {"num_hidden_layers": config.num_hidden_layers}
    if not any(".experts.gate_up_proj" in name for name in stored):
        counts |= {field: getattr(config, field, 0) for field in ("num_experts", "n_routed_experts")}
    for field, count in counts.items():
        if isinstance(count, int) and count > len(stored):
            raise CheckpointError(
                f"{folder / 'config.json'} has {field}={count}, but the checkpoint has {len(stored)} tensors. Check "
                "that it is complete and belongs to its config.json."
            )


def available_device(device: torch.device | str) -> torch.device:
    """The device, if this process has it. Raises `ConfigError` otherwise."""
    try:
        wanted = torch.device(device)
        if wanted.type in ("cpu", "meta"):
            return wanted
        module = torch.get_device_module(wanted)
        count = module.device_count() if module.is_available() else 0
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(f"device={device!r} is no device of this PyTorch. Pass 'cpu', 'cuda' or 'cuda:0'.") from error
    if count == 0:
        raise ConfigError(f"device={device!r}, but there is no {wanted.type} device here. Pass 'cpu', or None.")
    if (wanted.index or 0) >= count:
        raise ConfigError(
            f"device={device!r}, but the {wanted.type} devices here are 0 to {count - 1}. Pass one of them, or None."
        )
    return wanted


def default_device(group: dist.ProcessGroup | None) -> torch.device:
    """The current CUDA device (which the launcher chose; a rank in a group says nothing of it), else the CPU."""
    on_gpu = torch.cuda.is_available() and (group is None or "nccl" in str(dist.get_backend(group)))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _load_transformers(
    folder: Path, group: dist.ProcessGroup | None, dtype: torch.dtype | None, device: torch.device | str | None
) -> nn.Module:
    """Its from_pretrained, sharded by its own plan. Over all processes each rank reads its part; transformers cannot do
    that over some of them, nor on another device than it would choose, so there the model is whole at first."""
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{folder} holds an adapter ({ADAPTER}), whose weights transformers would load too, pickled or from "
            "elsewhere. Merge it into the model and save that."
        )
    size = 1 if group is None else dist.get_world_size(group)
    wanted = torch.device(device) if device is not None else default_device(group)
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    by_parts = size > 1 and size == dist.get_world_size() and current is not None and wanted.type == current.type
    try:
        options: dict[str, Any] = {"dtype": dtype or "auto", **SAFE}
        if by_parts:
            from transformers.distributed.configuration_utils import DistributedConfig

            options["distributed_config"] = DistributedConfig(tp_size=size)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **options).eval().requires_grad_(False)
        if by_parts:
            return model
        model = model.to(wanted)
        if group is not None:
            shard_if_whole(model, group)
        return model
    except (GraphfuseError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # every model checks its config in its own way
        raise CheckpointError(
            f"transformers cannot load {folder} ({type(error).__name__}: {brief(error, 400)}). See its message."
        ) from error
