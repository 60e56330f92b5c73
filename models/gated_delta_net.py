"""Gated DeltaNet: a mixer with a recurrent state instead of a cache of keys and values.

    x ─┬► q, k, v ─► short convolution, SiLU ─► gated delta rule ─► norm · silu(z) ─► out_proj ─► all-reduce
       ├► b ─► sigmoid: how much of an error is corrected ──┘ │
       ├► a ─► -exp(A_log) softplus(a + dt_bias): forgetting ─┘
       └► z

A key head serves a group of value heads. Both are divided over the ranks as query heads and key-value heads are, groups
together; convolution and state are a channel's and a head's own, so that only the output projection needs a sum.

Source: Yang et al. 2024, Gated Delta Networks (arXiv 2412.06464), section 3.
Legend: B batch, S sequence, T tokens, H hidden, Hk and Hv this rank's key and value heads, Dk and Dv their sizes.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from graphfuse.models.layers import CacheDims, RMSNorm
from graphfuse.models.parallel import ColumnParallelLinear, RowParallelLinear, parameter, span_copies
from graphfuse.models.sharding import Shard, Span, TensorParallel, attention_heads
from graphfuse.ops.causal_conv import causal_conv
from graphfuse.ops.gated_delta import gated_delta
from graphfuse.ops.layout import Layout
from graphfuse.weights.plan import TensorPlan


class GatedRMSNorm(RMSNorm):
    """Each head normalised, then multiplied by the SiLU of its gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return (super().forward(x) * F.silu(gate.float())).to(x.dtype)


class ShortConvolution(nn.Module):
    """The filters of this rank's channels."""

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, channels: Shard, num_taps: int, *, dtype, device) -> None:
        super().__init__()
        self.channels = channels
        self.weight = parameter(channels.local, num_taps, dtype=dtype, device=device)

    def forward(self, x: Tensor, positions: Tensor, layout: Layout, conv_cache: Tensor | None) -> Tensor:
        return causal_conv(x, self.weight, positions, layout.lengths, conv_cache, layout.states, layout.spans)

    def tensor_plans(self, path: str, _names: frozenset[str]) -> Iterator[TensorPlan]:
        shape = (self.channels.full, 1, self.weight.shape[1])
        copies = span_copies(self.weight[:, None], self.channels, 0)
        yield TensorPlan(f"{path}.weight", shape, copies, self.weight)


class GatedDeltaNet(nn.Module, abc.ABC):
    """Families differ in how their checkpoints lay the input projections out."""

    shard_dims: ClassVar[dict[str, int]] = {"A_log": 0, "dt_bias": 0}
    cache_dims: ClassVar[CacheDims] = (1, 1)
    has_state: ClassVar[bool] = True

    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        super().__init__()
        kwargs = {"dtype": dtype, "device": device}
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        values, keys = attention_heads(config.linear_num_value_heads, config.linear_num_key_heads, tp)
        self.heads, self.num_heads, self.num_key_heads = values, values.local, keys.local
        key_rows, value_rows = keys.times(self.key_dim), values.times(self.value_dim)
        qkvz, ba = self.projections(keys, values)
        self.in_proj_qkvz = ColumnParallelLinear(config.hidden_size, qkvz, bias=False, **kwargs)
        self.in_proj_ba = ColumnParallelLinear(config.hidden_size, ba, bias=False, **kwargs)
        channels = one_behind_another(key_rows, key_rows, value_rows)
        self.conv1d = ShortConvolution(channels, config.linear_conv_kernel_dim, **kwargs)
        # float32 whatever the model's dtype: forgetting is an exponential of an exponential of them.
        self.A_log = parameter(values.local, dtype=torch.float32, device=device)
        self.dt_bias = parameter(values.local, dtype=torch.float32, device=device)
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps, **kwargs)
        self.out_proj = RowParallelLinear(value_rows, config.hidden_size, tp, bias=False, **kwargs)

    @abc.abstractmethod
    def projections(self, keys: Shard, values: Shard) -> tuple[dict[str, Shard], dict[str, Shard]]:
        """Of which checkpoint tensors q, k, v, z (in this order) and b, a are made; `keys` and `values` are heads."""

    def forward(
        self,
        x: Tensor,
        _cos: Tensor,
        _sin: Tensor,
        positions: Tensor,
        layout: Layout,
        conv_cache: Tensor | None,
        state_cache: Tensor | None,
    ) -> Tensor:
        batch, length = positions.shape
        key_size, value_size = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        qkvz = self.in_proj_qkvz(x).view(batch, length, 2 * (key_size + value_size))
        qkv, z = qkvz.split([2 * key_size + value_size, value_size], dim=2)
        b, a = self.in_proj_ba(x).view(batch, length, 2 * self.num_heads).chunk(2, dim=2)  # [B, S, Hv] each
        q, k, v = self.conv1d(qkv, positions, layout, conv_cache).split([key_size, key_size, value_size], dim=2)
        q, k = (t.view(batch, length, self.num_key_heads, self.key_dim) for t in (q, k))
        v, z = (t.view(batch, length, self.num_heads, self.value_dim) for t in (v, z))
        g = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        y = gated_delta(
            q, k, v, g, b.sigmoid(), positions, layout.lengths, state_cache, layout.states, layout.spans
        )  # [B, S, Hv, Dv]
        return self.out_proj(self.norm(y, z).view(batch * length, value_size))

    def new_cache(self, max_batch: int, _max_len: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The convolution's last inputs `[max_batch, channels, taps - 1]` and the states `[max_batch, Hv, Dk, Dv]`,
        float32, however long the texts are."""
        channels, num_taps = self.conv1d.weight.shape
        state = like.new_zeros(max_batch, self.num_heads, self.key_dim, self.value_dim, dtype=torch.float32)
        return like.new_zeros(max_batch, channels, num_taps - 1), state

    def tensor_plans(self, path: str, _names: frozenset[str]) -> Iterator[TensorPlan]:
        for name, tensor in (("A_log", self.A_log), ("dt_bias", self.dt_bias)):
            yield TensorPlan(f"{path}.{name}", (self.heads.full,), span_copies(tensor, self.heads, 0), tensor)


def one_behind_another(*shards: Shard) -> Shard:
    """Dimensions that a checkpoint has as one, each divided on its own: all of q, then all of k, ..."""
    spans, full, local = [], 0, 0
    for shard in shards:
        spans += [Span(full + s.source, local + s.target, s.length) for s in shard.spans]
        full, local = full + shard.full, local + shard.local
    return Shard(full, local, tuple(spans), math.gcd(*(n for s in shards for n in (s.unit, s.full, s.local))))


def group_by_group(num_groups: int, *parts: tuple[Shard, int]) -> Shard:
    """Parts of a dimension that a checkpoint stores by groups, each with a few heads of every part: the q, k, v and z
    of one key head, then those of the next. Here all of q comes first, then all of k, ...

    A part is (heads, rows of one head)."""
    width = sum(heads.full // num_groups * rows for heads, rows in parts)
    spans, in_group, local = [], 0, 0
    for heads, rows in parts:
        per_group = heads.full // num_groups
        for s in heads.spans:
            for i in range(s.length):
                group, member = divmod(s.source + i, per_group)
                there = group * width + in_group + member * rows
                spans.append(Span(there, local + (s.target + i) * rows, rows))
        in_group, local = in_group + per_group * rows, local + heads.local * rows
    return Shard(num_groups * width, local, tuple(spans), math.gcd(*(rows for _, rows in parts)))
