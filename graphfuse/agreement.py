"""What the ranks of a group must have alike, compared once before they do anything together.

At the first trace, and when an `LLM` starts, every rank describes itself in named fields: versions, settings, the
model's class, its config, its parameters' names, dtypes and local shapes, the inputs of the call; and, once the model
is traced, the sequence of its collectives. A digest crosses the control channel; only where it differs the fields
themselves do, and every rank raises the same `GroupError`, which names the field, its values and their ranks.

Local shapes may differ in one dimension: a dimension that does not divide is split unevenly by some. What is compared
is how the ranks were started, not what the weights hold.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.fx import GraphModule

from graphfuse.comm.control import ControlChannel, control_channel
from graphfuse.comm.timeout import TIMEOUT_VARIABLE
from graphfuse.config import FuseConfig
from graphfuse.errors import GroupError
from graphfuse.probe import version_of

Fields = Mapping[str, Any]
"""Names and values that JSON can hold. A list of integers under "local shape …" is compared as a shape."""

MOST_NAMED = 3
LONGEST_VALUE = 80
_SHAPE = "local shape of "
_VARIABLES = (TIMEOUT_VARIABLE, "GRAPHFUSE_FUEL")
# What a config says of where it came from rather than of the model.
_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "distributed_config", "device_mesh"}


def require(channel: ControlChannel, subject: str, fields: Fields) -> None:
    """Compare fields over all ranks of the channel. Collective.

    Raises:
        GroupError: they differ (on every rank), or a rank does not answer.
    """
    text = json.dumps(fields, default=lambda value: type(value).__name__)
    digests = channel.exchange(hashlib.sha256(text.encode()).hexdigest(), subject=subject)
    if len(set(digests)) == 1:
        return
    found = differences([json.loads(theirs) for theirs in channel.exchange(text, subject=f"{subject} in full")])
    if not found:
        return
    more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    raise GroupError(
        f"The ranks differ in {subject}: {'; '.join(found[:MOST_NAMED])}{more}. Start every rank with the same "
        "versions, settings, model and inputs."
    )


def require_alike(
    group: ProcessGroup | None, config: FuseConfig, model: nn.Module, inputs: Mapping[str, object], **more: Any
) -> None:
    """Compare how the ranks of a group were started. Collective, but for one rank or a fake group.

    Raises:
        GroupError: as `require`.
    """
    if is_shared(group):
        fields = {**of_program(config), **of_model(model), **of_inputs(inputs), **more}
        require(control_channel(group), "how they were started", fields)


def require_same_graph(group: ProcessGroup | None, module: GraphModule) -> None:
    """Compare the collectives of a traced graph. Collective, but for one rank or a fake group.

    Raises:
        GroupError: as `require`.
    """
    if is_shared(group):
        require(control_channel(group), "the graphs that they traced", of_graph(module))


def is_shared(group: ProcessGroup | None) -> TypeGuard[ProcessGroup]:
    """Whether there are other ranks to agree with."""
    return group is not None and dist.get_backend(group) != "fake" and dist.get_world_size(group) > 1


def differences(ranks: Sequence[Fields]) -> list[str]:
    """One phrase for each field that is not alike: its name, its values, and the ranks that have each."""
    names = dict.fromkeys(name for fields in ranks for name in fields)
    return [
        f"{name} is {_sides([fields.get(name, 'absent') for fields in ranks])}"
        for name in names
        if not _alike(name, [fields.get(name) for fields in ranks])
    ]


def _alike(name: str, values: list[Any]) -> bool:
    if all(value == values[0] for value in values):
        return True
    if not name.startswith(_SHAPE) or None in values or len({len(shape) for shape in values}) > 1:
        return False
    return sum(len(set(sizes)) > 1 for sizes in zip(*values, strict=True)) <= 1


def _sides(values: list[Any]) -> str:
    ranks_with: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        text = value if isinstance(value, str) else json.dumps(value)
        text = text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"
        ranks_with.setdefault(text, []).append(str(rank))
    return " and ".join(
        f"{text} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" for text, ranks in ranks_with.items()
    )


# --- what a rank says of itself -------------------------------------------------------------------------------------


def of_program(config: FuseConfig) -> dict[str, Any]:
    """Versions and settings."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del settings["dump"]  # a folder of each rank's own, if it likes
    rules = settings.pop("rules")
    return {
        "the graphfuse version": f"{version_of('graphfuse') or 'not installed'}, sources {_sources()}",
        "the torch version": torch.__version__,
        **{f"FuseConfig.{name}": _plain(value) for name, value in settings.items()},
        "FuseConfig.rules": None if rules is None else [f"{rule.name} ({rule.tier})" for rule in rules],
        **{name: os.environ.get(name) or "unset" for name in _VARIABLES},
    }


def of_model(model: nn.Module) -> dict[str, Any]:
    """Class, config and parameters."""
    fields: dict[str, Any] = {"the model's class": f"{type(model).__module__}.{type(model).__qualname__}"}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        described = config.to_dict()
        fields |= {f"the model's config.{k}": v for k, v in described.items() if k not in _NOT_THE_MODEL}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        fields[f"the dtype of {name}"] = _dtype(tensor)
        fields[f"{_SHAPE}{name}"] = list(tensor.shape)  # of a DTensor: the whole's
    return fields


def of_inputs(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Shapes and dtypes of a call's tensors."""
    return {name: f"{list(a.shape)} {_dtype(a)}" for name, a in arguments.items() if isinstance(a, Tensor)}


def of_graph(module: GraphModule) -> dict[str, Any]:
    """The collectives of a traced graph in their order. What else ranks compute may differ: a bias on one of them."""
    collectives = [node for node in module.graph.nodes if _is_collective(node.target)]
    described = [f"{node.target} of {_described(node.meta.get('val'))}" for node in collectives]
    return {"the number of collectives": len(described)} | {f"collective {i}": d for i, d in enumerate(described)}


def has_collectives(module: GraphModule) -> bool:
    return any(_is_collective(node.target) for node in module.graph.nodes)


def _is_collective(target: object) -> bool:
    name = str(target)
    return name.startswith(("_c10d_functional.", "_dtensor.")) and "wait_tensor" not in name


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        sizes = ", ".join(str(size) if isinstance(size, int) else "tokens" for size in value.shape)
        return f"[{sizes}] {_dtype(value)}"
    return ", ".join(map(_described, value)) if isinstance(value, list | tuple) else type(value).__name__


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return sorted(map(str, value))
    return value if isinstance(value, bool | int | float | str | None) else str(value)


@functools.cache
def _sources() -> str:
    """A short digest of graphfuse's own files: two checkouts of one version may differ."""
    digest = hashlib.sha256()
    top = Path(__file__).parent
    for folder in (top, top / "passes", top / "models"):  # links in a checkout, which `rglob` does not follow
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:8]
