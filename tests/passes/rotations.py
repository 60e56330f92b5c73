"""Queries and keys on their way to attention: forms of norm and rotation that become one op, and others that only look
like it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from graphfuse.models.layers import rotate
from graphfuse.ops.attention import attention

B, S, HEADS, KV_HEADS, D, R, EPS = 2, 3, 4, 2, 16, 8, 1e-5

Heads = tuple[Tensor, Tensor]
Form = Callable[["Layer", Tensor, Tensor, Tensor, Tensor], Heads | tuple[Tensor, Tensor, Tensor]]


class Layer(nn.Module):
    """Attention whose queries and keys `form` makes of (layer, q, k, cos, sin); a third result is the model's, too."""

    def __init__(self, form: Form, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.form = form
        self.q_weight, self.k_weight = (
            nn.Parameter(torch.rand(D, generator=generator).to(dtype), requires_grad=False) for _ in range(2)
        )
        self.wide_weight = nn.Parameter(torch.rand(D, generator=generator), requires_grad=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.view(*x.shape[:2], HEADS + 2 * KV_HEADS, D).split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        q, k, *rest = self.form(self, q, k, cos, sin)
        return attention(q, k, v, positions, None, None, D**-0.5, None), *rest


def inputs(rotated: int = D, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, (HEADS + 2 * KV_HEADS) * D, generator=generator).to(dtype)
    angles = torch.randn(B, S, 1, rotated, generator=generator)
    return x, angles.cos().to(dtype), angles.sin().to(dtype), torch.arange(S).expand(B, S).contiguous()


# --- forms of the rotation, and of the norm ---------------------------------------------------------------------------


def both(function: Callable[..., Tensor]) -> Form:
    return lambda _m, q, k, cos, sin: (function(q, cos, sin), function(k, cos, sin))


def normalised(norm: Callable[[Tensor, Tensor], Tensor]) -> Form:
    def form(m, q, k, cos, sin):
        return rotate(norm(q, m.q_weight), cos, sin), rotate(norm(k, m.k_weight), cos, sin)

    return form


def operands_the_other_way(x, cos, sin):
    first, second = x[..., : D // 2], x[..., D // 2 :]
    return sin * torch.cat((-second, first), dim=3) + cos * x


def pieces_and_copies(x, cos, sin):
    x = x.contiguous()
    first, second = x.split([D // 2, D // 2], dim=3)
    y = x.view(x.shape) * cos + torch.cat((second.neg(), first), dim=-1) * sin
    return y.contiguous()


def halves_of_the_whole_head(x, cos, sin):
    part, kept = x.split([R, D - R], dim=-1)
    turned = torch.cat((-x[..., R // 2 : R], x[..., : R // 2]), dim=-1)
    return torch.cat((part * cos + turned * sin, kept), dim=-1)


def rstd(f: Tensor, eps: float = EPS) -> Tensor:
    return torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)


def llama(x, weight, eps=EPS):
    f = x.float()
    return weight * (f * rstd(f, eps)).to(x.dtype)


def zero_centred(x, weight):
    f = x.float()
    return (f * rstd(f) * (1.0 + weight.float())).to(x.dtype)


def float32(x, weight):
    f = x.float()
    return (weight * (f * rstd(f))).to(x.dtype)


def out_of_a_wider_head(m, q, k, cos, sin):
    """Queries are every other head's worth of columns, as those with an output gate are."""
    q = q.view(B, S, HEADS // 2, 2 * D).chunk(2, dim=-1)[0]
    return rotate(llama(q, m.q_weight), cos, sin), rotate(llama(k, m.k_weight), cos, sin)


FUSED: dict[str, tuple[Form, int, tuple]] = {
    "llama": (both(rotate), D, ()),
    "operands_the_other_way": (both(operands_the_other_way), D, ()),
    "pieces_and_copies": (both(pieces_and_copies), D, ()),
    "partial": (both(rotate), R, ()),
    "halves_of_the_whole_head": (both(halves_of_the_whole_head), R, ()),
    "qwen3": (normalised(llama), D, (EPS, 0.0, True)),
    "qwen3_next": (normalised(zero_centred), R, (EPS, 1.0, False)),
    "weight_in_float32": (normalised(float32), D, (EPS, 0.0, False)),
    "out_of_a_wider_head": (out_of_a_wider_head, D, (EPS, 0.0, True)),
}
"""A form, how many dimensions it rotates, and what the op is told of the norm."""


# --- left alone, and why ----------------------------------------------------------------------------------------------


def interleaved(x, cos, sin):
    pairs = x.unflatten(-1, (-1, 2))
    turned = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def the_other_way_round(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, -first), dim=-1) * sin


def halves_in_place(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-first, second), dim=-1) * sin


def half_of_another(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second * 1.5, first), dim=-1) * sin


def rectified(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second.relu(), first), dim=-1) * sin


def the_first_twice(x, cos, sin):
    first, _ = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-first, first), dim=-1) * sin


def the_second_twice(x, cos, sin):
    _, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, second), dim=-1) * sin


def every_other_as_a_half(x, cos, sin):
    return x * cos + torch.cat((-x[..., D // 2 :], x[..., ::2]), dim=-1) * sin


def the_rest_straight(x, cos, sin):
    turned = torch.cat((-x[..., R // 2 : R], x[..., : R // 2]), dim=-1)
    return torch.cat((x[..., R:] * cos + turned * sin, x[..., R:]), dim=-1)


def subtracted(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos - torch.cat((-second, first), dim=-1) * sin


def weighted_sum(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.add(x * cos, torch.cat((-second, first), dim=-1) * sin, alpha=2)


def unequal_halves(x, cos, sin):
    first, second = x.split([D // 4, 3 * D // 4], dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def strided_halves(x, cos, sin):
    return x * cos + torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1) * sin


def in_float32(x, cos, sin):
    return rotate(x.float(), cos.float(), sin.float()).to(x.dtype)


def keeps_what_it_rotates(x, cos, sin):
    return torch.cat((rotate(x[..., :R], cos, sin), x[..., : D - R]), dim=-1)


def keeps_the_first(x, cos, sin):
    return torch.cat((x[..., : D - R], rotate(x[..., D - R :], cos, sin)), dim=-1)


def rotates_the_last(x, cos, sin):
    return torch.cat((rotate(x[..., D - R :], cos, sin), x[..., D - R :]), dim=-1)


def other_angles(_m, q, k, cos, sin):
    return rotate(q, cos, sin), rotate(k, cos * 2, sin)


def norm_of_queries_alone(m, q, k, cos, sin):
    return rotate(llama(q, m.q_weight), cos, sin), rotate(k, cos, sin)


def two_epsilons(m, q, k, cos, sin):
    return rotate(llama(q, m.q_weight), cos, sin), rotate(llama(k, m.k_weight, 2 * EPS), cos, sin)


def wide_weight(m, q, k, cos, sin):
    return rotate(float32(q, m.wide_weight), cos, sin), rotate(float32(k, m.wide_weight), cos, sin)


def normalised_queries_are_read(m, q, k, cos, sin):
    q, k = llama(q, m.q_weight), llama(k, m.k_weight)
    return rotate(q, cos, sin), rotate(k, cos, sin), q * 2


def rotated_keys_are_read(_m, q, k, cos, sin):
    k = rotate(k, cos, sin)
    return rotate(q, cos, sin), k, k * 2


NO_ROTATION = "no rotation of two halves gives the queries and keys of attention"
LEFT_ALONE: dict[str, tuple[Form, int, str]] = {
    "nothing": (lambda _m, q, k, _cos, _sin: (q, k), D, NO_ROTATION),
    **{
        f.__name__: (both(f), D, NO_ROTATION)
        for f in (
            interleaved, the_other_way_round, halves_in_place, half_of_another, subtracted, weighted_sum,
            unequal_halves, strided_halves, in_float32, rectified, the_first_twice, the_second_twice,
            every_other_as_a_half,
        )
    },
    **{
        f.__name__: (both(f), R, NO_ROTATION)
        for f in (keeps_what_it_rotates, keeps_the_first, rotates_the_last, the_rest_straight)
    },
    "scaled": (both(lambda x, cos, sin: rotate(x, cos, sin) * 0.5), D, NO_ROTATION),
    "angles_without_rows": (both(lambda x, cos, sin: rotate(x, cos[:, :1], sin[:, :1])), D, NO_ROTATION),
    "queries_alone": (lambda _m, q, k, cos, sin: (rotate(q, cos, sin), k), D, "gives the keys of attention"),
    "keys_alone": (lambda _m, q, k, cos, sin: (q, rotate(k, cos, sin)), D, "gives the queries of attention"),
    "other_angles": (other_angles, D, "rotated by different angles"),
    "norm_of_queries_alone": (norm_of_queries_alone, D, "only the queries are normalised"),
    "two_epsilons": (two_epsilons, D, "normalised by different formulas"),
    "weightless": (normalised(lambda x, _weight: (x.float() * rstd(x.float())).to(x.dtype)), D, "has no weight"),
    "wide_weight": (wide_weight, D, "no vector of the activations' dtype, but torch.float32"),
    "normalised_queries_are_read": (normalised_queries_are_read, D, "reads a part of it"),
    "rotated_keys_are_read": (rotated_keys_are_read, D, "reads a part of it"),
}  # fmt: skip
