"""Models without a checkpoint: published configs at full size, by name, with weights drawn where they are needed.

For measurements, whose times do not depend on what is computed. Experts are chosen at random then, nearly evenly.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from graphfuse.errors import ConfigError
from graphfuse.weights.config import read_config, text_config
from graphfuse.weights.load import local_folder

if TYPE_CHECKING:
    from graphfuse.models.causal_lm import CausalLM

FOLDER = Path(__file__).parent.parent / "configs" / "models"
_CHUNK = 1 << 24
"""Elements that are drawn at once where torch draws none of the dtype itself."""


def published() -> list[str]:
    """The names of the configs that come with graphfuse."""
    return sorted(file.parent.name for file in FOLDER.glob("*/config.json"))


def config_folder(model: str) -> Path:
    """The folder of a model's config.json: one of `published`, a folder, or a hub id, of which only it is fetched.

    Raises `CheckpointError`."""
    if model.lower() in published() and not Path(model).is_dir():
        return FOLDER / model.lower()
    return local_folder(model, ["config.json"])


def random_model(
    model: str,
    group: ProcessGroup | None,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    num_layers: int | None = None,
) -> CausalLM:
    """graphfuse's own definition of a model, of which only the config is read, with random weights.

    Args:
        model: as of `config_folder`.
        dtype: None takes the config's, else bfloat16.
        num_layers: take only the first layers.

    Raises:
        CheckpointError, UnsupportedModelError: as `load`.
        ConfigError: the model does not have so many layers.
    """
    from graphfuse.models import registry

    config = read_config(config_folder(model))
    if num_layers is not None:
        keep_layers(config.get_text_config(), num_layers)
    named = text_config(config).dtype
    made = registry.build(config, group, dtype or (named if isinstance(named, torch.dtype) else torch.bfloat16), device)
    made.requires_grad_(False)
    randomise(made)
    return made


@torch.no_grad()
def randomise(model: CausalLM, seed: int = 0) -> None:
    """Random weights in place, small enough that activations stay in range: variance 1 / inputs, norms and scales 1.

    What is whole on every rank gets the same values on each, what is divided different ones. Nothing but the parameter
    itself is held in memory."""
    divided, rank = model.placements(), model.tp.rank
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or name.endswith("scale"):
            parameter.fill_(1.0)
            continue
        part = rank if divided.get(name) is not None else 0
        digest = hashlib.sha256(f"{seed}/{name}/{part}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7], "big"))
        _draw(parameter.data, parameter.shape[-1] ** -0.5, generator)


def _draw(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    if tensor.itemsize > 1:
        tensor.normal_(0.0, std, generator=generator)
        return
    for chunk in tensor.view(-1).split(_CHUNK):  # FP8
        noise = torch.empty(chunk.shape, dtype=torch.float32, device=tensor.device)
        chunk.copy_(noise.normal_(0.0, std, generator=generator))


def keep_layers(config: Any, num_layers: int) -> None:
    """Leave out all but the first layers. Raises `ConfigError` where there are not so many."""
    if not 1 <= num_layers <= config.num_hidden_layers:
        raise ConfigError(
            f"The model has {config.num_hidden_layers} layers, not {num_layers}. Take a number from 1 to that."
        )
    config.num_hidden_layers = num_layers
    for field in ("layer_types", "mlp_layer_types"):  # one entry a layer
        if isinstance(getattr(config, field, None), list):
            setattr(config, field, getattr(config, field)[:num_layers])
