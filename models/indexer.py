"""The indexer of sparse attention: a small attention without values that says which tokens a query attends to.

    q latent ─► wq_b ─────────────► rotary ─► q of its heads ─┐
    x ─┬► wk ─► LayerNorm ────────► rotary ─► one key ────────┼► select_tokens ─► K tokens of each query
       └► weights_proj, float32 ───────────► weights of heads ┘

It is whole on every rank, as in the published code and in transformers' plan, so that ranks select the same tokens and
nothing is reduced. Divided by heads it would need the sum of all scores, L numbers a query, where the layer's own
reductions are of H: more from a few thousand tokens on.

The published code multiplies queries and keys by an orthogonal matrix (Hadamard's), which changes no product, and then
rounds them to FP8; here, as in transformers, they are multiplied as they are.

Source: DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from graphfuse.models.parallel import ReplicatedLinear, parameter
from graphfuse.models.sharding import whole
from graphfuse.ops.layout import Layout
from graphfuse.ops.select_tokens import select_tokens

KEY_NORM_EPS = 1e-6
Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]


class LayerNorm(nn.Module):
    """With mean and bias."""

    def __init__(self, size: int, eps: float, *, dtype, device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, dtype=dtype, device=device)
        self.bias = parameter(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class HeadWeights(nn.Module):
    """A linear in float32 whatever the model's dtype, never in FP8: close scores decide what is selected."""

    def __init__(self, hidden_size: int, num_heads: int, *, device) -> None:
        super().__init__()
        self.weight = parameter(num_heads, hidden_size, dtype=torch.float32, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight)


class Indexer(nn.Module):
    def __init__(self, config: PretrainedConfig, rotate: Rotate, *, dtype, device) -> None:
        """`rotate`: of its queries' and keys' first dimensions; it need not be that of the attention."""
        super().__init__()
        self.rotate, self.top_k = rotate, config.index_topk
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        kwargs = {"dtype": dtype, "device": device}
        queries, key = whole(self.num_heads * self.head_dim), whole(self.head_dim)
        self.wq_b = ReplicatedLinear(config.q_lora_rank, {"wq_b": queries}, bias=False, **kwargs)
        self.wk = ReplicatedLinear(config.hidden_size, {"wk": key}, bias=False, **kwargs)
        self.k_norm = LayerNorm(self.head_dim, KEY_NORM_EPS, **kwargs)
        self.weights_proj = HeadWeights(config.hidden_size, self.num_heads, device=device)

    def forward(
        self,
        x: Tensor,
        q_latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        layout: Layout,
        k_cache: Tensor | None,
    ) -> Tensor:
        """`[B, S, K]` int32 (see `graphfuse.ops.select_tokens`), of x `[T, H]` and q_latent `[T, q_lora_rank]`."""
        batch, length = positions.shape
        q = self.wq_b(q_latent).view(batch, length, self.num_heads, self.head_dim)
        k = self.k_norm(self.wk(x)).view(batch, length, 1, self.head_dim)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        weights = self.weights_proj(x).view(batch, length, self.num_heads)
        return select_tokens(
            q, k.squeeze(2), weights, positions, k_cache, self.top_k, layout.entries, layout.pages, layout.spans
        )
