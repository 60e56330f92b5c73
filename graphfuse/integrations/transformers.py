"""Experts of transformers models as `graphfuse::moe_experts`, chosen like transformers' own implementations.

    import graphfuse.integrations.transformers as integration

    integration.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="graphfuse")

In eager mode the op gets its tuned launch parameters here, looked up once for each shape on CUDA; under torch.compile
graphfuse's backend gives it those, with a line in the report. Sharded experts run as they are: with their intermediate
dimension divided, or some of the experts on each rank; FP8 experts with their block or per-tensor scales. Experts that
the op does not know (without a gate, with a norm, with another activation) run on transformers' "grouped_mm", which is
announced once.

Legend: T tokens, H hidden, E experts, I intermediate, K choices per token.
"""

from __future__ import annotations

import functools
import logging
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from graphfuse.config import FuseConfig
from graphfuse.kernels.sizes import ceil_div
from graphfuse.ops.moe import moe_experts
from graphfuse.ops.moe_formulas import Formula, identify

log = logging.getLogger(__name__)

NAME = "graphfuse"

_ACTIVATIONS = {type(ACT2FN[name]): name for name in ("gelu_pytorch_tanh", "gelu", "silu")}
_NUMBERS = ("alpha", "limit", "swiglu_alpha", "swiglu_limit", "gate_softcap", "up_softcap")
"""What expert modules call the numbers in their gated activation."""


def register(moe_config_dir: str | os.PathLike[str] | None = None) -> None:
    """Make `experts_implementation="graphfuse"` known to transformers. Calling it again changes the folder.

    Args:
        moe_config_dir: a folder of tuned configs that is searched before the shipped ones, for experts in eager mode.
            Compiled models take `FuseConfig.moe_config_dir`.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = FuseConfig(moe_config_dir=None if moe_config_dir is None else os.fspath(moe_config_dir)).moe_config_dir
    for functions in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        functions.register(NAME, functools.partial(experts_forward, moe_config_dir=folder))


def is_known(module: Any) -> bool:
    """Whether the op can do what an expert module of transformers does."""
    if hasattr(module, "activation_scheme") and _fp8_arguments(module) is None:
        return False
    return _formula(module) is not None


def experts_forward(
    module: nn.Module, tokens: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, moe_config_dir: str | None = None
) -> Tensor:
    """What an expert module of transformers runs: tokens `[T, H]`, ids and weights `[T, K]`, to `[T, H]`."""
    m: Any = module
    is_fp8 = hasattr(m, "activation_scheme")
    formula, quantised = _formula(m), _fp8_arguments(m) if is_fp8 else {}
    if formula is None or quantised is None:
        _announce(type(m))
        functions = ALL_FP8_EXPERTS_FUNCTIONS if is_fp8 else ALL_EXPERTS_FUNCTIONS
        return functions["grouped_mm"](m, tokens, topk_ids, topk_weights)
    gate_up, down = m.gate_up_proj, m.down_proj
    x = tokens if is_fp8 else tokens.to(gate_up.dtype)
    launch = ""
    if tokens.is_cuda and not torch.compiler.is_compiling():
        scale = quantised.get("tokens_scale")
        launch = _kernel(
            tuple(down.shape), bool(m.is_transposed), topk_ids.shape[1], x.dtype, down.dtype,
            quantised.get("block_shape"), scale is not None and scale.numel() > 1, tokens.device, moe_config_dir,
        )  # fmt: skip
    out = moe_experts(
        x, gate_up, down, topk_ids, topk_weights, gate_up.shape[0],
        gate_up_bias=m.gate_up_proj_bias if m.has_bias else None,
        down_bias=m.down_proj_bias if m.has_bias else None,
        gate_up_layout="concatenated" if m.is_concatenated else "interleaved",
        transposed=m.is_transposed, activation=formula[0], activation_limit=formula[1], launch=launch, **quantised,
    )  # fmt: skip
    return out.to(tokens.dtype)


def _fp8_arguments(m: Any) -> dict[str, Any] | None:
    """The op's arguments for the scales of transformers' `FP8Experts`; None for another form, such as FP4."""
    if not m.has_gate or m.gate_up_proj.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return None
    experts, two_i, hidden = m.gate_up_proj.shape
    gate_up, down = m.gate_up_proj_scale_inv.float(), m.down_proj_scale_inv.float()
    if m.block_size is None:  # one for all gates of an expert, one for all ups, one for the down projection
        if gate_up.shape != (experts, 2, 1) or down.shape != (experts, 1, 1):
            return None
        scales = {"gate_up_scale": gate_up[..., 0].repeat_interleave(two_i // 2, 1), "down_scale": down[:, 0, 0]}
    else:
        n, k = m.block_size
        if gate_up.shape != (experts, ceil_div(two_i, n), ceil_div(hidden, k)):
            return None
        scales = {"gate_up_scale": gate_up, "down_scale": down, "block_shape": (n, k)}
    if m.activation_scheme == "static":
        return {
            **scales,
            "tokens_scale": m.gate_up_proj_activation_scale,
            "intermediate_scale": m.down_proj_activation_scale,
        }
    return {**scales, "dynamic": True}


def _formula(m: Any) -> tuple[str, float | None] | None:
    """The name and limit of a module's gated activation; None if the op cannot do what the module does."""
    if not m.has_gate or m.has_post_expert_norm:
        return None
    numbers = tuple(getattr(m, name, None) for name in _NUMBERS)
    return _known_formula(type(m), _ACTIVATIONS.get(type(getattr(m, "act_fn", None))), numbers, m.is_concatenated)


@torch._dynamo.assume_constant_result  # of constants alone, so that a trace takes the answer and not what finds it
def _known_formula(
    cls: type, activation: str | None, numbers: tuple[Any, ...], concatenated: bool
) -> tuple[str, float | None] | None:
    return _identify(cls, activation, numbers, concatenated)


@functools.lru_cache(maxsize=256)
def _identify(
    cls: Any, activation: str | None, numbers: tuple[Any, ...], concatenated: bool
) -> tuple[str, float | None] | None:
    """What a class's `_apply_gate` computes, asked of a stand-in for the module with the same numbers."""
    stand_in = SimpleNamespace(**dict(zip(_NUMBERS, numbers, strict=True)))
    if activation is not None:
        stand_in.act_fn = ACT2FN[activation]

    def compute(gate: Tensor, up: Tensor) -> Tensor:
        both = torch.stack((gate, up), -1).flatten(-2) if not concatenated else torch.cat((gate, up), -1)
        return cls._apply_gate(stand_in, both)

    formula: Formula | None = identify(compute, [n for n in numbers if isinstance(n, int | float)])
    return None if formula is None or formula.swapped else (formula.name, formula.limit)


@functools.lru_cache(maxsize=1024)
def _kernel(
    down: tuple[int, ...],
    transposed: bool,
    top_k: int,
    tokens: torch.dtype,
    weights: torch.dtype,
    block_shape: tuple[int, int] | None,
    rounds_tokens: bool,
    device: torch.device,
    folder: str | None,
) -> str:
    """Launch parameters for experts on a GPU, as the op takes them."""
    from graphfuse.tuning.moe_files import device_shared_memory, find_table
    from graphfuse.tuning.moe_shared_memory import Limits
    from graphfuse.tuning.moe_tiles import MoeShape

    experts, hidden, intermediate = (down[0], down[2], down[1]) if transposed else down
    is_fp8 = weights.itemsize == 1
    shape = MoeShape(experts, intermediate, hidden, top_k, "fp8_w8a8" if is_fp8 else None, block_shape)
    limits = Limits.of(shape, device_shared_memory(), tokens.itemsize, rounds_tokens=rounds_tokens)
    found = find_table(shape, torch.cuda.get_device_name(device), folder=folder, limits=limits)
    log.info("experts of %s: %s%s", shape, found.source, "".join(f"; {note}" for note in found.notes))
    return found.table.to_text()


@functools.lru_cache(maxsize=64)
def _warn(name: str) -> None:
    log.warning(
        "%s computes something that graphfuse's experts do not know: it runs on transformers' \"grouped_mm\".", name
    )


@torch._dynamo.assume_constant_result
def _announce(cls: type) -> None:
    _warn(cls.__name__)
