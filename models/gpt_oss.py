"""gpt-oss: attention with sinks, in a sliding window every other layer; experts with biases and a clamped gate.

    router: a linear with bias, softmax over the K largest logits
    expert: gate, up = interleaved columns of gate_up(x), clamped; down(gate * sigmoid(1.702 gate) * (up + 1))

Its checkpoints hold the experts in MXFP4, which is decoded while it is read, or in 16 bits, transposed:

    gate_up_proj_blocks, ..._scales   of [E, 2I, H]        gate_up_proj [E, H, 2I]
    down_proj_blocks, ..._scales      of [E, H, I]         down_proj    [E, I, H]

In memory they are [E, 2I, H] and [E, H, I], rows of inputs, as the kernels read them fastest.
Source: OpenAI 2025, gpt-oss model card (arXiv 2508.10925).

Legend: T tokens, H hidden, E experts, I intermediate (i: this rank's part), K choices per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from graphfuse.errors import UnsupportedModelError, brief
from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.family import Family
from graphfuse.models.layers import Attention, DecoderLayer, RMSNorm
from graphfuse.models.parallel import parameter, reduce_sum, replicated, span_copies
from graphfuse.models.routers import TopKRouter
from graphfuse.models.sharding import TensorParallel, attention_heads, even
from graphfuse.ops.moe import moe_experts
from graphfuse.weights.plan import TensorPlan

SWIGLU_ALPHA = 1.702


class Float32RMSNorm(RMSNorm):
    """The product with the weight is in float32, too."""

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * f).to(x.dtype)


class SinkAttention(Attention):
    """Each query head has a sink, which lies on its rank."""

    shard_dims: ClassVar[dict[str, int]] = {"sinks": 0}

    def __init__(self, config: PretrainedConfig, tp: TensorParallel, sliding: bool, dtype, device) -> None:
        window = config.sliding_window if sliding else None
        super().__init__(
            config, tp, bias=config.attention_bias, qk_norm=False, sliding_window=window, dtype=dtype, device=device
        )
        self.heads = attention_heads(config.num_attention_heads, config.num_key_value_heads, tp)[0]
        self.sinks = parameter(self.num_heads, dtype=dtype, device=device)

    def tensor_plans(self, path: str, _names: frozenset[str]) -> Iterator[TensorPlan]:
        copies = span_copies(self.sinks, self.heads, 0)
        yield TensorPlan(f"{path}.sinks", (self.heads.full,), copies, self.sinks)


class GptOssExperts(nn.Module):
    """The chosen experts' weighted sum, reduced over the ranks. The down projections' biases are on the first."""

    shard_dims: ClassVar[dict[str, int | str]] = {
        "gate_up_proj": 1,
        "gate_up_proj_bias": 1,
        "down_proj": 2,
        "down_proj_bias": "sum",
    }

    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        super().__init__()
        if config.swiglu_alpha != SWIGLU_ALPHA:
            raise UnsupportedModelError(
                f"swiglu_alpha={brief(config.swiglu_alpha)} is not implemented, only {SWIGLU_ALPHA}. "
                'Load the model with implementation="transformers".'
            )
        self.num_experts, self.limit, self.tp = config.num_local_experts, config.swiglu_limit, tp
        self.shard = even(config.intermediate_size, tp)
        experts, hidden, inner = self.num_experts, config.hidden_size, self.shard.local
        self.gate_up_proj = parameter(experts, 2 * inner, hidden, dtype=dtype, device=device)
        self.gate_up_proj_bias = parameter(experts, 2 * inner, dtype=dtype, device=device)
        self.down_proj = parameter(experts, hidden, inner, dtype=dtype, device=device)
        self.down_proj_bias = parameter(experts, hidden, dtype=dtype, device=device)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        partial = moe_experts(
            x,
            self.gate_up_proj,
            self.down_proj,
            ids,
            weights,
            self.num_experts,
            gate_up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias,
            gate_up_layout="interleaved",
            activation="swiglu_oai",
            activation_limit=self.limit,
        )
        return reduce_sum(partial, self.tp)

    def tensor_plans(self, path: str, names: frozenset[str]) -> Iterator[TensorPlan]:
        experts, hidden, inner = self.num_experts, self.down_proj.shape[1], self.shard.full
        pairs = self.shard.times(2)  # a gate and its up lie side by side
        for name, weight, shape, shard, dim in (
            (f"{path}.gate_up_proj", self.gate_up_proj, (experts, 2 * inner, hidden), pairs, 1),
            (f"{path}.down_proj", self.down_proj, (experts, hidden, inner), self.shard, 2),
        ):
            if f"{name}_blocks" in names:
                copies = span_copies(weight, shard, dim)
                yield TensorPlan(f"{name}_blocks", shape, copies, weight, scales=f"{name}_scales")
            else:
                copies = span_copies(weight.transpose(1, 2), shard, 3 - dim)
                yield TensorPlan(name, (experts, shape[2], shape[1]), copies, weight)
        bias = self.gate_up_proj_bias
        yield TensorPlan(f"{path}.gate_up_proj_bias", (experts, 2 * inner), span_copies(bias, pairs, 1), bias)
        whole = replicated(f"{path}.down_proj_bias", self.down_proj_bias)
        yield whole if self.tp.rank == 0 else TensorPlan(whole.name, whole.shape, (), whole.target)


class GptOssBlock(nn.Module):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        super().__init__()
        size, top_k = config.num_local_experts, config.num_experts_per_tok
        # Softmax over the chosen logits is softmax over all, made to sum to one.
        self.router = TopKRouter(config.hidden_size, size, top_k, normalise=True, bias=True, dtype=dtype, device=device)
        self.experts = GptOssExperts(config, tp, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.router(x)
        return self.experts(x, ids, weights)


class GptOssDecoderLayer(DecoderLayer):
    norm_type = Float32RMSNorm
    sliding = False

    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        attention = SinkAttention(config, tp, self.sliding, dtype, device)
        super().__init__(config, attention, GptOssBlock(config, tp, dtype, device), dtype, device)


class GptOssSlidingDecoderLayer(GptOssDecoderLayer):
    """A class of its own, since layers of one class are traced once and must not differ in a constant."""

    sliding = True


class GptOssForCausalLM(CausalLM):
    about = Family(
        "gpt-oss",
        ("GptOssForCausalLM",),
        "GQA, sinks, sliding window every other layer",
        "top-k softmax, biases, clamped SwiGLU",
        ("bf16", "MXFP4 (decoded while loading)"),
    )
    norm_type = Float32RMSNorm

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        sliding = config.layer_types[index] == "sliding_attention"
        return (GptOssSlidingDecoderLayer if sliding else GptOssDecoderLayer)(config, tp, dtype, device)
