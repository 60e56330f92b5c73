"""Attention whose softmax has one more term: each head's sink, a learned logit that takes weight and has no value.

    weight of key j  =  exp(s_j) / (exp(sink) + sum_i exp(s_i))

Softmax is in float32 (float64 for float64). Queries are taken in chunks, so that the scores of a long prompt are never
all there. Source: gpt-oss model card (arXiv 2508.10925); Xiao et al. 2023 (2309.17453).

Legend: B batch, S queries, L keys, Hq query heads, Hkv key-value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORES_PER_CHUNK = 1 << 26
"""256 MiB of float32 at a time."""


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """`[B, S, Hq, D]` for q `[B, S, Hq, D]`, k and v `[B, L, Hkv, D]`, sinks `[Hq]` and the mask `[B, S, L]`."""
    batch, length, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    keys = k.permute(0, 2, 3, 1)  # [B, Hkv, D, L]
    values = v.transpose(1, 2)  # [B, Hkv, L, D]
    precise = torch.promote_types(q.dtype, torch.float32)
    sink = sinks.to(precise).view(1, num_kv_heads, group, 1, 1)
    out = q.new_empty(q.shape)
    step = max(1, SCORES_PER_CHUNK // max(1, batch * num_heads * num_keys))
    for start in range(0, length, step):
        here = slice(start, start + step)
        queries = q[:, here].unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4)  # [B, Hkv, group, s, D]
        size = queries.shape[3]
        scores = torch.matmul(queries.reshape(batch, num_kv_heads, group * size, head_dim), keys).to(precise) * scale
        scores = scores.unflatten(2, (group, size)).masked_fill(~allowed[:, None, None, here], -torch.inf)
        largest = torch.maximum(scores.amax(-1, keepdim=True), sink)  # finite even where no key is allowed
        weights = (scores - largest).exp_()
        weights = weights / (weights.sum(-1, keepdim=True) + (sink - largest).exp())
        part = torch.matmul(weights.to(q.dtype).flatten(2, 3), values)  # [B, Hkv, group * s, D]
        part = part.unflatten(2, (group, size)).permute(0, 3, 1, 2, 4)
        out[:, here] = part.reshape(batch, size, num_heads, head_dim)
    return out
