"""Multi-head latent attention: keys and values of all heads from one low-rank latent, which is all that is cached.

    x ─► q_a ─► norm ─► q_b ─► q [nope, rope]                       (or x ─► q, without a latent of its own)
    x ─► kv_a ─┬► latent ─► norm ─┐
               └► k_rope, of all heads ─► mla_attention(q, latent, k_rope, kv_b) ─► o ─► all-reduce

Heads are divided over the ranks: q_b, kv_b and o. The projections to latents are whole on every rank, as the cache is,
and are one matrix product.

Source: DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434), section 2.1; Peng et al. 2023, YaRN (2309.00071), for the
scale; the growth of queries with their position is Llama 4's (Meta 2025).

Legend: B batch, S sequence, T tokens, H hidden.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from graphfuse.models.layers import CacheDims, RMSNorm, rotate
from graphfuse.models.parallel import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from graphfuse.models.sharding import TensorParallel, even, whole
from graphfuse.ops.layout import Layout
from graphfuse.ops.mla import mla_attention

LATENT_NORM_EPS = 1e-6
"""Of the norms of latents: published models set it apart from the config's rms_norm_eps."""


class LatentAttention(nn.Module):
    cache_dims: ClassVar[CacheDims] = (None, None)
    has_state: ClassVar[bool] = False

    def __init__(self, config: PretrainedConfig, tp: TensorParallel, *, dtype, device) -> None:
        super().__init__()
        heads = even(config.num_attention_heads, tp)
        hidden, bias, kwargs = config.hidden_size, config.attention_bias, {"dtype": dtype, "device": device}
        self.num_heads, self.value_size = heads.local, config.v_head_dim
        self.q_sizes = [config.qk_nope_head_dim, config.qk_rope_head_dim]
        self.latent_sizes = [config.kv_lora_rank, config.qk_rope_head_dim]
        self.scale, self.position_scaling = softmax_scale(config), position_scaling(config)
        self.rotate = rotate_interleaved if getattr(config, "rope_interleave", True) else rotate

        latents = {"kv_a_proj_with_mqa": whole(sum(self.latent_sizes))}
        queries = heads.times(sum(self.q_sizes))
        self.q_rank: int | None = config.q_lora_rank
        if self.q_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, {"q_proj": queries}, bias=False, **kwargs)
        else:
            latents = {"q_a_proj": whole(self.q_rank), **latents}
            self.q_a_layernorm = RMSNorm(self.q_rank, LATENT_NORM_EPS, **kwargs)
            self.q_b_proj = ColumnParallelLinear(self.q_rank, {"q_b_proj": queries}, bias=False, **kwargs)
        self.qkv_a_proj = ReplicatedLinear(hidden, latents, bias=bias, **kwargs)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS, **kwargs)
        keys_values = {"kv_b_proj": heads.times(config.qk_nope_head_dim + config.v_head_dim)}
        self.kv_b_proj = ColumnParallelLinear(config.kv_lora_rank, keys_values, bias=False, **kwargs)
        self.o_proj = RowParallelLinear(heads.times(config.v_head_dim), hidden, tp, bias=bias, **kwargs)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        layout: Layout,
        latent_cache: Tensor | None,
        k_rope_cache: Tensor | None,
    ) -> Tensor:
        q, latents = self.latents(x)
        return self.attend(q, latents, cos, sin, positions, layout, latent_cache, k_rope_cache, None)

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of x `[T, H]`: what queries are made of, their latent or x itself, and the latent with the rotary key."""
        latents = self.qkv_a_proj(x)
        if self.q_rank is None:
            return x, latents
        q, latents = latents.split([self.q_rank, sum(self.latent_sizes)], dim=-1)
        return self.q_a_layernorm(q), latents

    def attend(
        self,
        q: Tensor,
        latents: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        layout: Layout,
        latent_cache: Tensor | None,
        k_rope_cache: Tensor | None,
        selected: Tensor | None,
    ) -> Tensor:
        """`[T, H]` of what `latents` gives. `selected`: the only tokens that are attended to, or None."""
        batch, length = positions.shape
        q = self.q_proj(q) if self.q_rank is None else self.q_b_proj(q)
        q = q.view(batch, length, self.num_heads, sum(self.q_sizes))
        if self.position_scaling is not None:
            q = q * self._growth(positions).to(q.dtype)
        q_nope, q_rope = q.split(self.q_sizes, dim=-1)
        latent, k_rope = latents.view(batch, length, 1, sum(self.latent_sizes)).split(self.latent_sizes, dim=-1)
        latent = self.kv_a_layernorm(latent)
        q_rope, k_rope = self.rotate(q_rope, cos, sin), self.rotate(k_rope, cos, sin)
        kv_up = self.kv_b_proj.dense_weight(latents.dtype)
        y = mla_attention(
            q_nope, q_rope, latent.squeeze(2), k_rope.squeeze(2), kv_up, positions, latent_cache, k_rope_cache,
            self.scale, layout.entries, layout.pages, layout.spans, selected,
        )  # fmt: skip
        return self.o_proj(y.view(batch * length, self.num_heads * self.value_size))

    def new_cache(self, max_batch: int, max_len: int, like: Tensor) -> tuple[Tensor, ...]:
        """Latents and rotated keys, `[max_batch, max_len, kv_lora_rank]` and `[..., qk_rope_head_dim]`. Zero, not
        empty: attention weighs unused slots with zero, and zero times a stray NaN is NaN."""
        return tuple(like.new_zeros(max_batch, max_len, size) for size in self.latent_sizes)

    def _growth(self, positions: Tensor) -> Tensor:
        """By how much the queries grow with their position, `[B, S, 1, 1]`: by the logarithm of how many of the
        contexts that the model was first trained on lie in front of them."""
        assert self.position_scaling is not None
        beta, context = self.position_scaling
        return (1 + beta * torch.log(1 + torch.floor(positions / context)))[:, :, None, None]


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of neighbours, x `[B, S, heads, D]`, or of its first dimensions, as many as cos has. The result
    has the pairs' first elements first: queries and keys alike, so that their products are the same."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate_interleaved(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def softmax_scale(config: PretrainedConfig) -> float:
    """1 / sqrt(size of a key), times the square of YaRN's temperature where the config asks for it."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    factor, mscale = rope.get("factor"), rope.get("mscale_all_dim")
    if rope["rope_type"] == "default" or not mscale or factor <= 1:
        return scale
    return scale * (0.1 * mscale * math.log(factor) + 1.0) ** 2


def position_scaling(config: PretrainedConfig) -> tuple[float, int] | None:
    """beta and the first training context of Llama 4's scaling, where one of its two spellings is in the config."""
    apart = getattr(config, "llama_4_scaling", None)
    if apart:
        return apart["beta"], apart["original_max_position_embeddings"]
    beta = config.rope_parameters.get("llama_4_scaling_beta")
    return None if beta is None else (beta, config.rope_parameters["original_max_position_embeddings"])
