"""The chain of grouped products that transformers' experts become, and chains that look like it.

Each takes tokens [T, H], ids [T, K] and weights [T, K]. With `held`, ids of E and more are of experts on other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers the grouped product)
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

E, H, I, K = 4, 16, 8, 2  # noqa: E741


def product(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, matrices, offsets)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return gate, up


def every_other(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2], x[..., 1::2]


def gated(act: Callable[[Tensor], Tensor], split=halves) -> Callable[[Tensor], Tensor]:
    def activation(x: Tensor) -> Tensor:
        gate, up = split(x)
        return act(gate) * up

    return activation


def clamped(x: Tensor) -> Tensor:
    gate, up = every_other(x)
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


SILU = gated(F.silu)


@dataclass(frozen=True)
class Case:
    name: str
    activation: Callable[[Tensor], Tensor] = SILU
    transposed: bool = False
    biased: bool = False
    held: bool = False
    down_transposed: bool | None = None
    """Other than `transposed`: the second matrix is stored in another order than the first."""

    last_bin: int = E - 1
    descending: bool = False
    divisor: int = K
    weights: Callable[[Tensor, Tensor], Tensor] = lambda flat, order: flat[order]
    back: Callable[[Tensor], Tensor] = lambda order: torch.empty_like(order).index_put(
        (order,), torch.arange(order.shape[0])
    )
    between: Callable[[Tensor], Tensor] = lambda rows: rows
    """What is done with the activated rows."""

    more: Callable[[dict[str, Tensor]], tuple[Tensor, ...]] = lambda _: ()
    """Further results, made of intermediate values."""

    dtype: torch.dtype = torch.float32
    weights_dtype: torch.dtype | None = None
    reason: str = ""


class Chain(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        down_transposed = case.transposed if case.down_transposed is None else case.down_transposed
        gate_up, down = torch.rand(E, 2 * I, H) - 0.5, torch.rand(E, H, I) - 0.5
        self.gate_up = nn.Parameter((gate_up.mT if case.transposed else gate_up).contiguous().to(case.dtype))
        self.down = nn.Parameter((down.mT if down_transposed else down).contiguous().to(case.dtype))
        self.down_transposed = down_transposed
        self.gate_up_bias = nn.Parameter(torch.rand(E, 2 * I).to(case.dtype))
        self.down_bias = nn.Parameter(torch.rand(E, H).to(case.dtype))

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        case = self.case
        ids, order = torch.sort(ids.reshape(-1), descending=case.descending)
        rows = tokens[order // case.divisor]
        offsets = torch.cumsum(torch.histc(ids.float(), E, 0, case.last_bin), 0, dtype=torch.int32)
        expert = ids.clamp(max=E - 1) if case.held else ids
        zeroed = (lambda x: x.masked_fill((ids >= E).unsqueeze(-1), 0.0)) if case.held else (lambda x: x)
        x = product(zeroed(rows), self.gate_up if case.transposed else self.gate_up.mT, offsets)
        first = x = zeroed(x + self.gate_up_bias[expert] if case.biased else x)
        x = case.between(case.activation(x))
        x = product(x, self.down if self.down_transposed else self.down.mT, offsets)
        x = zeroed(x + self.down_bias[expert] if case.biased else x)
        x = x * case.weights(weights.reshape(-1), order).unsqueeze(-1)
        x = x[case.back(order)].view(tokens.shape[0], K, H).sum(1)
        more = case.more({"first": first, "tokens": tokens, "ids": ids})
        return (x if case.weights_dtype is None else x.to(tokens.dtype), *more)


def graph(case: Case, num_tokens: int = 7, seed: int = 0) -> tuple[GraphModule, list[Tensor]]:
    """The chain as an ATen graph, and what to call it with."""
    torch.manual_seed(seed)
    model = Chain(case).requires_grad_(False)
    parameters, args = dict(model.named_parameters()), inputs(case, num_tokens, seed)

    def flat(*values: Tensor) -> tuple[Tensor, ...]:
        return torch.func.functional_call(model, dict(zip(parameters, values, strict=False)), values[len(parameters) :])

    values = [*parameters.values(), *args]
    with torch.no_grad():
        module = make_fx(flat, select_decomp_table(), "fake")(*values)
    module.graph.eliminate_dead_code()
    return module, values


def inputs(case: Case, num_tokens: int = 7, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    tokens = torch.randn(num_tokens, H).to(case.dtype)
    ids = torch.stack([torch.randperm(E + 2 if case.held else E)[:K].clamp(max=E) for _ in range(num_tokens)])
    return tokens, ids, torch.rand(num_tokens, K).to(case.weights_dtype or case.dtype).masked_fill(ids >= E, 0.0)


MATCHED = [
    Case("silu"),
    Case("gelu", gated(F.gelu)),
    Case("gelu_tanh", gated(lambda x: F.gelu(x, approximate="tanh"))),
    Case("silu_spelled_out", lambda x: halves(x)[1] * (halves(x)[0] * torch.sigmoid(halves(x)[0]))),
    Case("interleaved", gated(F.silu, every_other)),
    Case("slices", lambda x: F.silu(x[:, :I]) * x[:, I:]),
    Case("gpt_oss", clamped, transposed=True, biased=True),
    Case("gpt_oss_held", clamped, transposed=True, biased=True, held=True),
    Case("clamped_silu", lambda x: F.silu(halves(x)[0].clamp(max=2.5)) * halves(x)[1].clamp(-2.5, 2.5)),
    Case("held", held=True),
    Case("transposed", transposed=True),
    Case("biased", biased=True),
    Case("bfloat16", dtype=torch.bfloat16),
    Case("float64", dtype=torch.float64),
    Case("weights_in_float32", dtype=torch.bfloat16, weights_dtype=torch.float32),
    Case("ids_read_elsewhere", more=lambda v: (v["ids"] + 1,)),
]

GLU = gated(F.relu)
LEFT_ALONE = [
    Case("other_activation", GLU, reason="its activation is none of silu, gelu, gelu_tanh, swiglu_oai"),
    Case("gate_is_second", lambda x: (h := halves(x))[0] * F.silu(h[1]), reason="the first half of its columns is not"),
    Case("no_gate", lambda x: F.silu(x[:, :I]), reason="is not computed from the two halves"),
    Case("three_parts", lambda x: F.silu(x[:, :I]) * x[:, 1 : I + 1], reason="its activation holds slice"),
    Case("other_alpha", lambda x: (h := halves(x))[0] * torch.sigmoid(1.7021 * h[0]) * (h[1] + 1), reason="is none of"),
    Case("clamped_on_one_side", lambda x: F.silu((h := halves(x))[0].clamp(max=2.0)) * h[1], reason="is none of"),
    Case("normalised", between=lambda x: x / x.sum(-1, keepdim=True), reason="its activation"),
    Case("rounded_between", between=lambda x: x.half().float(), reason="its activation is rounded to float16"),
    Case("other_reader", more=lambda v: (v["first"] * 2,), reason="an intermediate value has another reader: mul"),
    Case("stored_unlike", down_transposed=True, reason="gate_up and down are stored in different orders"),
    Case("counted_otherwise", last_bin=E, reason=f"rows are counted into {E} bins from 0 to {E}, for {E} experts"),
    Case("descending", descending=True, reason="sorted from the last expert to the first"),
    Case("other_tokens", divisor=K + 1, reason="are not the tokens of the sorted choices"),
    Case("other_weights", weights=lambda flat, order: flat, reason="the weights of the rows: view"),
    Case("weights_of_others", weights=lambda flat, order: flat[order.flip(0)], reason="with the weights of their"),
    Case("not_brought_back", back=lambda order: order, reason="not brought back into the order of the choices"),
    Case(
        "wide_result", dtype=torch.bfloat16, weights_dtype=torch.float32, more=lambda v: (v["tokens"],),
        weights=lambda flat, order: flat[order].half(), reason="the weights of the rows",
    ),
]  # fmt: skip
