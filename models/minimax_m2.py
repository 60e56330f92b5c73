"""MiniMax-M2: Mixtral's layout, routed as DeepSeek-V3 without groups or shared experts; part of each head is rotated.

Queries and keys are normalised over all heads at once, which lie on several ranks: their sums of squares, two numbers a
token, are reduced beforehand. So a layer has a small third reduction, which no residual follows.

Source: MiniMax 2025 (https://huggingface.co/MiniMaxAI/MiniMax-M2).

Legend: B batch, S sequence, Hq and Hkv this rank's query and key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.family import Family
from graphfuse.models.layers import Attention, DecoderLayer, RMSNorm
from graphfuse.models.mixtral import MixtralBlock
from graphfuse.models.parallel import reduce_sum, replicated, span_copies
from graphfuse.models.routers import GroupLimitedRouter
from graphfuse.models.sharding import Shard, TensorParallel, attention_heads
from graphfuse.weights.plan import TensorPlan


class HeadsNorm(RMSNorm):
    """Over the dimensions of all heads, of which this rank has a part."""

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, heads: Shard, head_dim: int, eps: float, *, dtype, device) -> None:
        self.shard = heads.times(head_dim)
        super().__init__(self.shard.local, eps, dtype=dtype, device=device)

    def given(self, squares: Tensor, x: Tensor) -> Tensor:
        """x `[B, S, heads, D]`, where `squares` `[B, S]` are the sums of squares over all heads."""
        factor = torch.rsqrt(squares / self.shard.full + self.eps)[:, :, None, None]
        return self.weight.view(x.shape[2:]) * (x.float() * factor).to(x.dtype)

    def tensor_plans(self, path: str, _names: frozenset[str]) -> Iterator[TensorPlan]:
        copies = span_copies(self.weight, self.shard, 0)
        yield TensorPlan(f"{path}.weight", (self.shard.full,), copies, self.weight)


class MiniMaxM2Attention(Attention):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, *, dtype, device) -> None:
        kwargs = {"dtype": dtype, "device": device}
        super().__init__(config, tp, bias=False, qk_norm=False, sliding_window=None, **kwargs)
        q_heads, kv_heads = attention_heads(config.num_attention_heads, config.num_key_value_heads, tp)
        self.tp, self.key_copies = tp, max(1, tp.size // config.num_key_value_heads)
        self.q_norm: HeadsNorm = HeadsNorm(q_heads, self.head_dim, config.rms_norm_eps, **kwargs)
        self.k_norm: HeadsNorm = HeadsNorm(kv_heads, self.head_dim, config.rms_norm_eps, **kwargs)

    def normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        squares = [x.float().pow(2).sum((2, 3)) for x in (q, k)]  # [B, S] each
        squares[1] = squares[1] / self.key_copies  # a key-value head may lie on several ranks
        q_squares, k_squares = reduce_sum(torch.stack(squares, -1), self.tp).unbind(-1)
        return self.q_norm.given(q_squares, q), self.k_norm.given(k_squares, k)


class MiniMaxM2Router(GroupLimitedRouter):
    """Its correction bias stands beside it in checkpoints."""

    def tensor_plans(self, path: str, _names: frozenset[str]) -> Iterator[TensorPlan]:
        assert self.e_score_correction_bias is not None
        yield replicated(f"{path}.weight", self.weight)
        yield replicated(f"{path.rpartition('.')[0]}.e_score_correction_bias", self.e_score_correction_bias)


class MiniMaxM2Block(MixtralBlock):
    def make_router(self, config: PretrainedConfig, dtype, device) -> nn.Module:
        return MiniMaxM2Router(
            config.hidden_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            scoring="sigmoid",
            correction_bias=True,
            num_groups=1,
            top_groups=1,
            normalise=True,
            scale=1.0,
            device=device,
        )


class MiniMaxM2DecoderLayer(DecoderLayer):
    mlp_name = "block_sparse_moe"

    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        attention = MiniMaxM2Attention(config, tp, dtype=dtype, device=device)
        super().__init__(config, attention, MiniMaxM2Block(config, tp, dtype, device), dtype, device)


class MiniMaxM2ForCausalLM(CausalLM):
    about = Family(
        "MiniMax-M2",
        ("MiniMaxM2ForCausalLM",),
        "GQA, q/k norm over all heads, partial rotary",
        "sigmoid with bias",
    )

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        return MiniMaxM2DecoderLayer(config, tp, dtype, device)
