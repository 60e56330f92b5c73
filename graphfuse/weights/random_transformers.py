"""Models of transformers without a checkpoint: a config's, with weights drawn where they are needed.

    meta ─► sharded by its own plan ─► this rank's parts allocated on the device ─► filled in place

No host or device ever holds a whole model.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphfuse.integrations.transformers_tp import shard_if_whole
from graphfuse.weights.config import read_config, text_config
from graphfuse.weights.random_weights import config_folder, keep_layers


def random_transformers_model(
    name: str, num_layers: int | None, mesh: DeviceMesh | None, dtype: torch.dtype, device: torch.device
) -> Any:
    """transformers' model of a config, with random weights, in eval mode.

    Args:
        name: as of `config_folder`.
        num_layers: take only the first layers; None takes all.
        mesh: the ranks that it is sharded over by its own plan, on `device`'s kind; None leaves it whole.

    Raises:
        CheckpointError, ConfigError, UnsupportedModelError: as `random_model` and `graphfuse.compile`.
    """
    from transformers import AutoModelForCausalLM

    config = text_config(read_config(config_folder(name)))
    if num_layers is not None:
        keep_layers(config, num_layers)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.eval().requires_grad_(False)
    if mesh is not None:
        shard_if_whole(model, mesh.get_group(), mesh)
    model.to_empty(device=device)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            _draw(path, parameter)
        for module in model.modules():
            if module._buffers:  # rotary frequencies, which the config tells
                for buffer in module._buffers.values():
                    buffer.zero_()
                model._init_weights(module)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def _draw(path: str, parameter: Tensor) -> None:
    """Variance 1 / inputs. What is whole gets the same values on each rank, what is divided different ones."""
    local, part = parameter, 0
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        if not all(placement.is_replicate() for placement in parameter.placements):
            part = parameter.device_mesh.get_local_rank()
    if parameter.dim() < 2:
        local.fill_(1.0)
        return
    digest = hashlib.sha256(f"{path}/{part}".encode()).digest()
    generator = torch.Generator(local.device).manual_seed(int.from_bytes(digest[:7], "big"))
    local.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
