"""Path of `graphfuse::moe_experts` through the Triton kernels: sort, gate_up, down, combine.

    few choices      gate_up ─► down ─► combine                               each program finds its choices itself
    otherwise        sort ─► gate_up ─► down ─► combine
    FP8 activations  are rounded by kernels of their own, but for what can be done on the way: the intermediate in
                     gate_up, with a static scale, or where a program makes whole groups; tokens in its loop, where each
                     expert has a scale of its own

Nothing waits for the device or depends on values on the host, so all of it can be captured in a CUDA graph.

Legend: T tokens, H hidden, E experts held here, I intermediate size here, K choices per token, P = T * K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from graphfuse.kernels.moe_combine import combine
from graphfuse.kernels.moe_down import down
from graphfuse.kernels.moe_gate_up import GROUPS, gate_up
from graphfuse.kernels.moe_product import AS_IS, SCALED, STATIC
from graphfuse.kernels.moe_scales import BLOCKS, CHANNELS, NONE, ROWS, TENSOR
from graphfuse.kernels.moe_sort import sort_choices
from graphfuse.kernels.quantise import quantise, quantise_static
from graphfuse.kernels.sizes import ceil_div, power_of_two
from graphfuse.ops.moe_reference import ExpertWeights
from graphfuse.ops.moe_triton import FP8
from graphfuse.tuning.moe_tiles import Tile, Tiles

UNSORTED_CHOICES = 128
"""Up to so many choices programs find theirs by themselves, which costs less than a sort before."""

SHORT_PRODUCT = 512
"""Up to so many inputs, programs of the down product make several blocks of columns."""

PROGRAMS_TO_SPARE = 4096


@dataclass(frozen=True)
class _Operand:
    """What a product multiplies by the weights, and how its scales are to be read."""

    x: Tensor
    how: int
    scale: Tensor
    scale_kind: int
    stride_scale: int


def run(
    tokens: Tensor,
    weights: ExpertWeights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    activation_limit: float | None,
    tokens_scale: Tensor | None,
    intermediate_scale: Tensor | None,
    dynamic: bool,
    dtype: torch.dtype,
    tiles: Tiles,
    first_expert: int = 0,
) -> Tensor:
    """`[T, H]` in `dtype`, for arguments that the op has checked and `moe_triton.can_run` has no objection to."""
    num_tokens, hidden = tokens.shape
    out = torch.empty(num_tokens, hidden, dtype=dtype, device=tokens.device)
    if num_tokens == 0 or topk_ids.numel() == 0 or weights.num_experts == 0:
        return out.zero_()
    tokens, topk_ids, topk_weights = _rows_adjacent(tokens), topk_ids.contiguous(), topk_weights.contiguous()
    experts, two_i, _ = weights.gate_up_shape
    inner, choices, top_k = two_i // 2, topk_ids.numel(), topk_ids.shape[1]
    tile, launch = tiles.gate_up, _dependent_launch(tokens)
    is_sorted = choices > UNSORTED_CHOICES
    if is_sorted:
        order, blocks, num_blocks = sort_choices(topk_ids, first_expert, experts, tile.block_size_m, launch)
    else:
        order, blocks, num_blocks = topk_ids, topk_ids, choices
    routing = (topk_ids, order, blocks)
    counts = (first_expert, experts, choices, num_blocks)
    sizes = {"SORTED": is_sorted, "CHOICES": 1 if is_sorted else _few(choices)}
    quantised = weights.gate_up.dtype in FP8
    block_n, block_k = weights.block_shape if weights.block_shape and weights.gate_up_scale is not None else (1, 0)

    x = _operand(tokens, tokens_scale, weights.gate_up.dtype, dynamic, block_k, launch)
    half = tile.block_size_n // 2
    groups_whole = dynamic and block_k == half
    stored = weights.gate_up.dtype if intermediate_scale is not None or groups_whole else dtype
    middle = torch.empty(choices, inner, dtype=stored, device=tokens.device)
    middle_scales = middle
    if groups_whole:
        middle_scales = middle.new_empty(choices, ceil_div(inner, half), dtype=torch.float32)
    gate_up[(num_blocks * ceil_div(inner, half),)](
        x.x, weights.gate_up, _or(weights.gate_up_bias, x.x), middle, middle_scales, _or(intermediate_scale, x.x),
        *routing, x.scale, _or(weights.gate_up_scale, x.x), *counts, top_k, inner, hidden,
        0.0 if activation_limit is None else activation_limit, x.x.stride(0), *_strides(weights.gate_up, weights),
        x.stride_scale, _per_expert(intermediate_scale), _stride(weights.gate_up_scale), tile.group_size_m,
        block_n,
        X=x.how, X_SCALE=x.scale_kind, W_SCALE=_w_scale(weights, weights.gate_up_scale),
        OUT=STATIC if intermediate_scale is not None else GROUPS if groups_whole else AS_IS,
        BIAS=weights.gate_up_bias is not None, ACTIVATION=activation, LIMITED=activation_limit is not None,
        INTERLEAVED=weights.interleaved, ONE_SCALE=not weights.interleaved and _in_one_block(half, inner, block_n),
        **sizes, **launch, EVEN_N=inner % half == 0, **_tile(tile, hidden, block_k, weights.transposed),
    )  # fmt: skip

    if intermediate_scale is not None:
        scale = intermediate_scale
        x = _Operand(middle, AS_IS, scale, TENSOR, _per_expert(scale))
    elif groups_whole:
        x = _Operand(middle, SCALED, middle_scales, ROWS, middle_scales.stride(0))
    elif dynamic and quantised:
        x = _operand(middle, None, weights.down.dtype, dynamic, block_k, launch)
    else:
        x = _Operand(middle, AS_IS, middle, NONE, 0)
    tile = tiles.down
    by_choice = torch.empty(choices, hidden, dtype=dtype, device=tokens.device)
    column_blocks = ceil_div(hidden, tile.block_size_n)
    run = _run(column_blocks, num_blocks * column_blocks) if inner <= SHORT_PRODUCT else 1
    down[(num_blocks * ceil_div(column_blocks, run),)](
        x.x, weights.down, _or(weights.down_bias, x.x), by_choice, *routing, x.scale, _or(weights.down_scale, x.x),
        *counts, hidden, inner, *_strides(weights.down, weights), x.stride_scale, _stride(weights.down_scale),
        tile.group_size_m, block_n,
        X=x.how, X_SCALE=x.scale_kind, W_SCALE=_w_scale(weights, weights.down_scale),
        BIAS=weights.down_bias is not None, ONE_SCALE=_in_one_block(tile.block_size_n, 0, block_n),
        **sizes, **launch, RUN=run, EVEN_N=hidden % (run * tile.block_size_n) == 0,
        **_tile(tile, inner, block_k, weights.transposed),
    )  # fmt: skip
    combine(by_choice, topk_ids, topk_weights, first_expert, experts, out, launch)
    return out


def _operand(
    x: Tensor, scale: Tensor | None, stored: torch.dtype, dynamic: bool, block_k: int, launch: dict[str, bool]
) -> _Operand:
    """x as it is, or quantised before the product, or to be quantised in it."""
    if x.dtype in FP8:
        assert scale is not None  # checked by the op
        rows = scale.dim() == 2
        kind, stride = (ROWS, scale.stride(0)) if rows else (TENSOR, _per_expert(scale))
        grouped = rows and block_k > 0 and scale.shape[1] > 1
        if block_k and not grouped:  # one scale for all groups of a row
            scale = scale.expand(x.shape[0], ceil_div(x.shape[1], block_k)).contiguous() if rows else scale
            grouped, stride = rows, scale.stride(0) if rows else stride
        return _Operand(x, SCALED if grouped else AS_IS, scale, kind, stride)
    if scale is not None and scale.numel() > 1:
        return _Operand(x, STATIC, scale, TENSOR, _per_expert(scale))
    if scale is not None:
        return _Operand(quantise_static(x, scale, stored, launch), AS_IS, scale, TENSOR, 0)
    if not dynamic:
        return _Operand(x, AS_IS, x, NONE, 0)
    x, scale = quantise(x, block_k or x.shape[1], stored, launch)
    return _Operand(x, SCALED if block_k else AS_IS, scale, ROWS, scale.stride(0))


def _dependent_launch(tokens: Tensor) -> dict[str, bool]:
    """Let a kernel start while the one before it ends (Hopper and later): what it does first overlaps with that."""
    if tokens.is_cuda and _capability(tokens.device) >= (9, 0):
        return {"DEPENDENT_LAUNCH": True, "launch_pdl": True}
    return {"DEPENDENT_LAUNCH": False}


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    """What torch asks the driver for each time."""
    return torch.cuda.get_device_capability(device)


def _run(column_blocks: int, programs: int) -> int:
    """Column blocks for each program: a divisor of their number, so that there are none beyond the last."""
    run = 1
    while run < 8 and column_blocks % (2 * run) == 0 and programs > 2 * run * PROGRAMS_TO_SPARE:
        run *= 2
    return run


def _few(choices: int) -> int:
    """A power of two that they fit in: one of few, so that few kernels are compiled."""
    return 16 if choices <= 16 else max(128, power_of_two(choices))


def _rows_adjacent(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Kernels take a pointer even where they read nothing."""
    return other if tensor is None else tensor.contiguous()


def _stride(scale: Tensor | None) -> int:
    return 0 if scale is None else scale.numel() // scale.shape[0]


def _per_expert(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else 1


def _strides(weight: Tensor, weights: ExpertWeights) -> tuple[int, int, int]:
    """(expert, output, input)."""
    expert, a, b = weight.stride()
    return (expert, b, a) if weights.transposed else (expert, a, b)


def _w_scale(weights: ExpertWeights, scale: Tensor | None) -> int:
    if scale is None:
        return NONE
    return BLOCKS if weights.block_shape is not None else TENSOR if scale.dim() == 1 else CHANNELS


def _in_one_block(columns: int, second_half: int, block_n: int) -> bool:
    """Whether each program's columns share one block of scales, also those that start at second_half."""
    return block_n % columns == 0 and second_half % columns == 0


def _tile(tile: Tile, num_inputs: int, block_k: int, transposed: bool) -> dict[str, int | bool]:
    """A tile as the kernels' keyword arguments. Scales of blocks fix BLOCK_K. Small blocks have transposed weights as
    rows whatever a file says: as columns they cannot be copied ahead of their use, and take 10 to 60 times as long."""
    size = block_k or tile.block_size_k
    return {
        "EVEN_K": num_inputs % size == 0,
        "SWAP": tile.swap_ab or (transposed and tile.block_size_m < 64),
        "BLOCK_M": tile.block_size_m,
        "BLOCK_N": tile.block_size_n,
        "BLOCK_K": size,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
