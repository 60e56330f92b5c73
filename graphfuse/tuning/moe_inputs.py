"""What MoE layers are measured on: weights in each number format, tokens, and routings like those of a model.

| form | weights | activations |
|---|---|---|
| bf16 | | |
| bf16_bias_interleaved | with biases, gates and ups in turn, inputs before outputs, clamped: gpt-oss | |
| fp8_tensor | a scale for each expert | static scales |
| fp8_channel | a scale for each output channel | a scale for each token, found on the fly |
| fp8_block | a scale for each block of (output, input) | a scale for each token and group of inputs, found on the fly |

Weights are normal with deviation 1 / sqrt(inputs) and tokens with deviation 1, so that values stay near 1 throughout.
Each set of tokens and routings stands for another layer: what one call leaves in the L2 cache helps the next one no
more than in a model.

Legend: T tokens, H hidden, E experts, I intermediate, K choices per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.errors import ConfigError
from graphfuse.ops.moe_reference import ExpertWeights
from graphfuse.tuning.moe_tiles import MoeShape

FORMS = ("bf16", "bf16_bias_interleaved", "fp8_tensor", "fp8_channel", "fp8_block")
ROUTINGS = ("uniform", "skewed")
FP8 = torch.float8_e4m3fn
LIMIT = 7.0
"""gpt-oss clamps gates and ups here."""

# The largest |value| that static scales leave room for. Of 10^8 normal values one is beyond 6; SiLU(gate) * up has
# longer tails.
TOKENS_TOP, INTERMEDIATE_TOP = 6.0, 24.0
# Weights are made this many at a time: the float32 values of a whole layer would not fit beside it.
CHUNK_ELEMENTS = 1 << 26
MIN_SETS, MAX_SETS, FEW_TOKENS = 2, 16, 64


@dataclass(frozen=True)
class Layer:
    """Weights of a layer, and how its activations are treated: the arguments of `moe_experts` that no token changes."""

    weights: ExpertWeights
    activation: str = "silu"
    activation_limit: float | None = None
    tokens_scale: Tensor | None = None
    intermediate_scale: Tensor | None = None
    dynamic: bool = False
    dtype: torch.dtype = torch.bfloat16
    """Of tokens and results."""


def form_of(shape: MoeShape) -> str:
    """The usual form of a shape."""
    if shape.dtype is None:
        return "bf16"
    return "fp8_tensor" if shape.block_shape is None else "fp8_block"


@torch.no_grad()
def make_weights(shape: MoeShape, *, device: torch.device | str, seed: int = 0, form: str | None = None) -> Layer:
    """A layer of a shape with random weights, `form_of(shape)` unless another form is given.

    Raises:
        ConfigError: the form is not known, or is not one of the shape's dtype.
    """
    form = form or form_of(shape)
    _check_form(form, shape)
    generator = torch.Generator(device).manual_seed(seed)
    inputs, intermediate, experts = shape.hidden_size, shape.intermediate_size, shape.num_experts
    gate_up, gate_up_scale = _matrices(experts, 2 * intermediate, inputs, form, shape.block_shape, generator)
    down, down_scale = _matrices(experts, inputs, intermediate, form, shape.block_shape, generator)
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    has_biases = form == "bf16_bias_interleaved"
    if has_biases:
        gate_up_bias, down_bias = (
            torch.randn(experts, size, generator=generator, device=device).mul_(0.1).bfloat16()
            for size in (2 * intermediate, inputs)
        )
        biases = gate_up_bias, down_bias
    weights = ExpertWeights(
        gate_up, down, *biases, gate_up_scale, down_scale,
        shape.block_shape if form == "fp8_block" else None, interleaved=has_biases, transposed=has_biases,
    )  # fmt: skip
    if has_biases:
        return Layer(weights, "swiglu_oai", LIMIT)
    if form == "fp8_tensor":
        tokens_scale, intermediate_scale = (
            torch.tensor([top / _fp8_max()], device=device) for top in (TOKENS_TOP, INTERMEDIATE_TOP)
        )
        return Layer(weights, tokens_scale=tokens_scale, intermediate_scale=intermediate_scale)
    return Layer(weights, dynamic=form in ("fp8_channel", "fp8_block"))


@torch.no_grad()
def make_tokens(
    num_tokens: int, shape: MoeShape, *, sets: int, seed: int = 0, device: torch.device | str
) -> list[Tensor]:
    """`sets` times `[T, H]` bfloat16."""
    generator = torch.Generator(device).manual_seed(seed + 1)
    size = (num_tokens, shape.hidden_size)
    return [torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(sets)]


@torch.no_grad()
def make_routing(
    num_tokens: int,
    shape: MoeShape,
    *,
    routing: str = "uniform",
    sets: int,
    seed: int = 0,
    device: torch.device | str,
) -> list[tuple[Tensor, Tensor]]:
    """`sets` times (ids int32 `[T, K]`, distinct in a row; weights float32 `[T, K]`, which sum to 1).

    uniform: a random router. skewed: the r-th most popular expert is drawn as if with weight 1 / r (Zipf's law), in an
    order of its own in each set.

    Raises:
        ConfigError: `routing` is not known.
    """
    check_routing(routing)
    generator = torch.Generator(device).manual_seed(seed + 2)
    experts = shape.num_experts
    made = []
    for _ in range(sets):
        # The k largest of log p + Gumbel noise are k draws without replacement from p (Gumbel-max trick).
        score = -torch.empty(num_tokens, experts, device=device).exponential_(generator=generator).log_()
        if routing == "skewed":
            rank = torch.randperm(experts, generator=generator, device=device) + 1
            score -= rank.log()
        top, ids = score.topk(shape.top_k, dim=-1)
        made.append((ids.int(), top.softmax(-1)))
    return made


def num_sets(num_tokens: int) -> int:
    """Sets for `make_tokens` and `make_routing`: many of few tokens, of which each call touches other experts; of many
    tokens, each of which call reads more weights than the L2 cache holds, enough for an average."""
    return max(MIN_SETS, MAX_SETS * FEW_TOKENS // max(num_tokens, FEW_TOKENS))


def experts_touched(routing: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Distinct experts of a set, on average."""
    return sum(ids.unique().numel() for ids, _ in routing) / len(routing)


def check_routing(routing: str) -> None:
    """Raises `ConfigError` where `make_routing` does not know it."""
    if routing not in ROUTINGS:
        raise ConfigError(f"The routing {routing!r} is not known. Use {' or '.join(ROUTINGS)}.")


def _check_form(form: str, shape: MoeShape) -> None:
    if form not in FORMS:
        raise ConfigError(f"The form {form!r} is not known. Use {', '.join(FORMS)}.")
    wanted = "fp8_w8a8" if form.startswith("fp8") else None
    if shape.dtype != wanted or (shape.block_shape is not None) != (form == "fp8_block"):
        raise ConfigError(
            f"The form {form} does not fit a shape of dtype {shape.dtype} and block_shape {shape.block_shape}. "
            f"Use {form_of(shape)}, or change the shape."
        )


def _matrices(
    experts: int, outputs: int, inputs: int, form: str, block_shape: tuple[int, int] | None, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """(weights, scales or None) of all experts: `[E, outputs, inputs]`, or `[E, inputs, outputs]` for gpt-oss."""
    device = generator.device
    size = (inputs, outputs) if form == "bf16_bias_interleaved" else (outputs, inputs)
    is_fp8 = form.startswith("fp8")
    weights = torch.empty(experts, *size, dtype=FP8 if is_fp8 else torch.bfloat16, device=device)
    scales = []
    at_once = max(1, CHUNK_ELEMENTS // (outputs * inputs))
    for chunk in weights.split(at_once):
        values = torch.randn(chunk.shape, generator=generator, device=device, dtype=torch.bfloat16)
        values.mul_(1 / math.sqrt(inputs))
        if not is_fp8:
            chunk.copy_(values)
            continue
        scale, spread = _scales(values, form, block_shape)
        chunk.copy_(values.float().div_(spread).clamp_(-_fp8_max(), _fp8_max()).to(FP8))
        scales.append(scale)
    return weights, torch.cat(scales) if scales else None


def _scales(values: Tensor, form: str, block_shape: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Scales as they are stored (see `moe_experts`), and the same spread over the values they belong to."""
    top = values.abs().float()
    if form == "fp8_tensor":
        scale = top.amax((1, 2)) / _fp8_max()  # [E]
        return scale, scale[:, None, None]
    if form == "fp8_channel":
        scale = top.amax(2) / _fp8_max()  # [E, outputs]
        return scale, scale[:, :, None]
    assert block_shape is not None  # checked with the form
    (n, k), (_, outputs, inputs) = block_shape, values.shape
    top = F.pad(top, (0, -inputs % k, 0, -outputs % n))
    scale = top.unflatten(2, (-1, k)).unflatten(1, (-1, n)).amax((2, 4)) / _fp8_max()  # [E, blocks, blocks]
    spread = scale.repeat_interleave(n, 1).repeat_interleave(k, 2)
    return scale, spread[:, :outputs, :inputs]


def _fp8_max() -> float:
    return torch.finfo(FP8).max
