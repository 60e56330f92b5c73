"""Routers of models, ours and transformers', and what looks like one, in front of a layer of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from graphfuse.models.routers import GroupLimitedRouter, TopKRouter
from graphfuse.ops.moe import moe_experts

E, H, K = 8, 16, 2
DTYPE = torch.bfloat16


class Block(nn.Module):
    """Experts that a router chooses; it gives ids, weights and perhaps more results."""

    def __init__(self, router: nn.Module, dtype: torch.dtype = DTYPE) -> None:
        super().__init__()
        self.router = router
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        self.gate_up = nn.Parameter(torch.rand(E, 2 * H, H, generator=generator).to(dtype))
        self.down = nn.Parameter(torch.rand(E, H, H, generator=generator).to(dtype))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        ids, weights, *more = self.router(x)
        return (moe_experts(x, self.gate_up, self.down, ids, weights, E), *more)


class Theirs(nn.Module):
    """A router of transformers, whose results come in another order."""

    def __init__(self, kind: type, **settings) -> None:
        super().__init__()
        config = {
            "num_experts_per_tok": K,
            "num_experts": E,
            "num_local_experts": E,
            "norm_topk_prob": True,
            "hidden_size": H,
        }
        self.inner = kind(SimpleNamespace(**{**config, **settings})).to(DTYPE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, weights, ids = self.inner(x)
        return ids, weights


class Formula(nn.Module):
    """A router made of a function of logits `[T, E]` and a bias `[E]`."""

    def __init__(self, formula: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype = DTYPE) -> None:
        super().__init__()
        self.formula, self.dtype = formula, dtype
        self.weight, self.bias = nn.Parameter(torch.empty(E, H, dtype=dtype)), nn.Parameter(torch.empty(E))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.formula(x.to(self.dtype) @ self.weight.T, self.bias)


def ours(**settings) -> nn.Module:
    return TopKRouter(H, E, K, **{"normalise": True, "dtype": DTYPE, "device": "cpu", **settings})


def grouped(**settings) -> nn.Module:
    usual = {
        "scoring": "sigmoid",
        "correction_bias": True,
        "num_groups": 1,
        "top_groups": 1,
        "normalise": True,
        "scale": 2.5,
    }
    return GroupLimitedRouter(H, E, K, device="cpu", **{**usual, **settings})


def best(scores: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(scores, K, dim=-1)


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1, dtype=torch.float32)


def tokens(num_tokens: int = 6) -> Tensor:
    return torch.randn(num_tokens, H, generator=torch.Generator().manual_seed(1)).to(DTYPE)


def graph(router: nn.Module, num_tokens: int = 6) -> tuple[GraphModule, list[Tensor]]:
    """Experts with a router as an ATen graph, and what to call it with."""
    block = Block(router)
    parameters = dict(block.named_parameters())

    def flat(*values: Tensor) -> tuple[Tensor, ...]:
        return torch.func.functional_call(block, dict(zip(parameters, values, strict=False)), values[-1])

    values = [*parameters.values(), tokens(num_tokens)]
    with torch.no_grad():
        module = make_fx(torch.func.functionalize(flat), select_decomp_table(), "fake")(*values)
    module.graph.eliminate_dead_code()
    return module, values


@dataclass(frozen=True)
class Case:
    router: Callable[[], nn.Module]
    arguments: tuple
    """Scoring, bias, normalise, eps, scale, dtype."""


BF16, F32 = torch.bfloat16, torch.float32
MATCHED = {
    "ours": Case(ours, ("softmax", None, True, 0.0, 1.0, BF16)),
    "not_normalised": Case(lambda: ours(normalise=False), ("softmax", None, False, 0.0, 1.0, BF16)),
    "bias_of_the_linear": Case(lambda: ours(bias=True), ("softmax", None, True, 0.0, 1.0, BF16)),
    "deepseek_v3": Case(grouped, ("sigmoid", "bias", True, 1e-20, 2.5, F32)),
    "no_groups_fewer": Case(lambda: grouped(num_groups=4, top_groups=4), ("sigmoid", "bias", True, 1e-20, 2.5, F32)),
    "softmax_and_factor": Case(
        lambda: grouped(scoring="softmax", correction_bias=False, normalise=False, scale=16.0),
        ("softmax", None, False, 0.0, 16.0, F32),
    ),
    "qwen3_moe": Case(lambda: Theirs(Qwen3MoeTopKRouter), ("softmax", None, True, 0.0, 1.0, BF16)),
    "olmoe": Case(lambda: Theirs(OlmoeTopKRouter, norm_topk_prob=False), ("softmax", None, False, 0.0, 1.0, BF16)),
    "mixtral": Case(lambda: Theirs(MixtralTopKRouter), ("softmax", None, True, 0.0, 1.0, F32)),
    "gpt_oss": Case(lambda: Theirs(GptOssTopKRouter), ("chosen_softmax", None, False, 0.0, 1.0, BF16)),
}


def of_scores(scores: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def formula(logits, bias):
        weights, ids = best(scores(logits, bias))
        return ids, weights

    return formula


def smallest(logits, _bias):
    weights, ids = torch.topk(softmax(logits), K, largest=False)
    return ids, weights


def along_tokens(logits, _bias):
    weights, ids = torch.topk(softmax(logits), K, dim=0)
    return ids.T[:, :K], weights.T[:, :K]


def other_scores(logits, bias):
    scores = torch.sigmoid(logits.float())
    ids = best(scores + bias)[1]
    return ids, (scores * 2).gather(1, ids)


def logits_as_weights(logits, _bias):
    values, ids = best(logits.float())
    return ids, torch.sigmoid(values)


def part_of_the_softmax(logits, _bias):
    values, ids = best(logits)
    exp = (values - values.amax(-1, keepdim=True)).float().exp()
    return ids, exp


def unscaled(logits):
    return logits.float().exp() / logits.float().exp().sum(-1, keepdim=True)


LEFT_ALONE = {
    "groups": (grouped(num_groups=4, top_groups=2), "the scores are no softmax or sigmoid"),
    "other_scores": (Formula(of_scores(lambda x, _: x.float().tanh())), "the scores are no softmax or sigmoid"),
    "no_maximum": (Formula(of_scores(lambda x, _: unscaled(x))), "the scores are no softmax or sigmoid"),
    "over_tokens": (Formula(of_scores(lambda x, _: x.float().softmax(0))), "the scores are no softmax or sigmoid"),
    "rounded": (Formula(of_scores(lambda x, _: x.softmax(-1))), "the scores are rounded before the choice"),
    "float64": (Formula(of_scores(lambda x, _: x.double().softmax(-1))), "are not computed in float32"),
    "integers": (Formula(of_scores(lambda x, _: softmax(x.int()))), "the logits are torch.int32"),
    "smallest": (Formula(smallest), "not the largest scores of each token"),
    "along_tokens": (Formula(along_tokens), "no layer of experts reads what is chosen"),
    "weighed_with_the_bias": (Formula(of_scores(lambda x, b: x.float().sigmoid() + b)), "counts in the weights"),
    "half_the_bias": (Formula(of_scores(lambda x, b: x.float().sigmoid().add(b, alpha=0.5))), "no softmax or sigmoid"),
    "bias_for_tokens": (Formula(of_scores(lambda x, b: x.float().sigmoid() + x[:, :1])), "no softmax or sigmoid"),
    "weights_of_other_scores": (Formula(other_scores), "the chosen experts are read 0 times"),
    "sigmoid_of_the_chosen": (Formula(logits_as_weights), "nor are the weights a softmax of the chosen"),
    "part_of_the_softmax": (Formula(part_of_the_softmax), "nor are the weights a softmax of the chosen"),
}
