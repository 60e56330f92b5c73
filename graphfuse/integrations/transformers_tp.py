"""Models of transformers: what can be compiled, and sharding one that is whole, in place, by its own plan.

    model = AutoModelForCausalLM.from_pretrained(name)      # whole on every rank
    model = graphfuse.compile(model, tp_group)              # sharded now, each rank its part

The plan is the one in the model's config, applied by transformers' own `apply_tensor_parallelism`, over the group that
the model is compiled for, be it all processes or some of them. A model counts as sharded when it has a DTensor, when
transformers sharded it, or when modules that its plan names are neither torch's nor transformers': then it is left as
it is.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from graphfuse.errors import ConfigError, UnsupportedModelError, brief

log = logging.getLogger(__name__)

OLDEST = "5.24"
"""Older versions shard by hooks that cannot be traced, or have no `apply_tensor_parallelism`."""


def is_transformers_model(model: object) -> TypeGuard[Any]:
    """Whether this is a model of transformers. Does not import it: who has such a model has."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def describe(model: nn.Module) -> str:
    """Whose definition a model is, for the report; empty for a user's own."""
    name = type(model).__name__
    if type(model).__module__.startswith("graphfuse.models."):
        return f"graphfuse's {name}"
    if not is_transformers_model(model):
        return ""
    return f"transformers' {name}" + (", sharded by its plan" if _is_sharded(model) else "")


def require_traceable(model: nn.Module) -> None:
    """Raise `ConfigError` for a model of transformers that no graph can be made of, and say why."""
    if getattr(model, "use_kernels", False) or getattr(getattr(model, "config", None), "use_kernels", False):
        raise ConfigError("The model was loaded with use_kernels=True, whose norms cannot be traced. Load it without.")


def shard_if_whole(model: nn.Module, group: dist.ProcessGroup, mesh: DeviceMesh | None = None) -> bool:
    """Shard a model of transformers in place if it is whole on every rank of the group; whether that was done.

    Raises:
        UnsupportedModelError: it is whole and cannot be sharded: there is no plan for it, its heads do not divide, it
            is quantised, or this version of transformers is too old.
        ConfigError: its weights are on a device that the group does not reach.
    """
    if not is_transformers_model(model) or group.size() == 1 or _is_sharded(model):
        return False
    name, size = type(model).__name__, group.size()
    import transformers

    if TorchVersion(transformers.__version__) < OLDEST:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} shards models in a way that cannot be traced. Install "
            f"transformers {OLDEST} or newer."
        )
    if getattr(model, "hf_quantizer", None) is not None:  # a config alone may speak of it, and nothing be quantised
        raise UnsupportedModelError(
            f"{name} is quantised ({brief(_quantisation(model))}), and quantised weights are sharded when they are "
            "loaded, not afterwards. Load it by from_pretrained(..., distributed_config=DistributedConfig(tp_size="
            f"{size})), or load an unquantised one."
        )
    device = _device(model)
    if device.type not in ("meta", *_devices(group)):
        raise ConfigError(
            f"The model is on {device}, which its group ({dist.get_backend(group)}) does not reach. Move it to this "
            "rank's device before compiling it."
        )
    plan = _plan(model, size)
    if plan is None:
        return False
    if mesh is None:
        mesh = DeviceMesh.from_group(group, device.type if device.type != "meta" else "cpu", mesh_dim_names=("tp",))
    _apply(model, mesh, plan)
    model._tp_size, model._device_mesh = size, mesh
    log.info("sharded %s over %d ranks by its own plan", name, size)
    return True


def _is_sharded(model: Any) -> bool:
    if (getattr(model, "_tp_size", None) or 1) > 1 or any(isinstance(p, DTensor) for p in model.parameters()):
        return True
    return any(getattr(module, "_is_hooked", False) for module in model.modules())


def _quantisation(model: Any) -> str:
    config = model.config.quantization_config
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return str(getattr(method, "value", method))


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _devices(group: dist.ProcessGroup) -> tuple[str, ...]:
    """The kinds of device whose tensors a group reduces."""
    backends = str(dist.get_backend(group))
    return ("cuda",) if backends == "nccl" else ("cpu",) if backends == "gloo" else ("cpu", "cuda")


def _plan(model: Any, size: int) -> dict[str, str] | None:
    """The style of each module and parameter by name; None where the model was sharded by hand."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    name = type(model).__name__
    if not model.tp_plan:
        if not type(model).__module__.startswith("transformers."):
            return None  # a model of the user's own, which may reduce by itself
        raise UnsupportedModelError(
            f"transformers has no tensor-parallel plan for {name}: every rank would hold and compute all of it. "
            "Shard it with torch's parallelize_module, give its config a base_model_tp_plan before you make it, or "
            "compile it with tp_group=None."
        )
    try:
        plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=size))
    except Exception as error:
        raise UnsupportedModelError(
            f"The tensor-parallel plan of {name} does not fit it: {brief(error, 400)}"
        ) from error
    modules = dict(model.named_modules())
    if any(path in modules and _is_foreign(modules[path]) for path in plan):
        return None
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    if isinstance(heads, int) and get_kv_heads_per_rank(model.tp_plan, heads, size) is None:
        raise UnsupportedModelError(
            f"{name} has {heads} key-value heads, which transformers' plan cannot divide over {size} ranks. Use a "
            'number of ranks that divides them, or graphfuse.load(..., implementation="graphfuse"), which copies them.'
        )
    return plan


def _is_foreign(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in ("torch", "transformers")


def _apply(model: Any, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    ties = _untie(model)
    try:
        apply_tensor_parallelism(model, mesh, plan)
    except Exception as error:  # each style checks its module in its own way
        raise UnsupportedModelError(
            f"transformers cannot shard {type(model).__name__} over {mesh.size()} ranks: {brief(error, 400)}"
        ) from error
    for first, *others in ties:
        for module, name in others:
            _tie_again(first, module, name)


_Place = tuple[nn.Module, str]
"""A module and the name of a parameter of its own."""


def _untie(model: nn.Module) -> list[list[_Place]]:
    """Give each place of a shared parameter a parameter object of its own, on the same memory: shards are put into each
    place by itself, and transformers looks for each under its own name."""
    places: dict[nn.Parameter, list[_Place]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, name))
    shared = [found for found in places.values() if len(found) > 1]
    for module, name in (place for _, *others in shared for place in others):
        whole = module._parameters[name]
        assert whole is not None
        module._parameters[name] = nn.Parameter(whole.detach(), requires_grad=whole.requires_grad)
    return shared


def _tie_again(first: _Place, module: nn.Module, name: str) -> None:
    """Share a parameter with the first place, unless the two were sharded in different ways."""
    kept, other = first[0]._parameters[first[1]], module._parameters[name]
    if type(kept) is type(other) and getattr(kept, "placements", None) == getattr(other, "placements", None):
        module._parameters[name] = kept
