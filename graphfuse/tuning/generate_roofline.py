"""How long a step of decoding takes at least: the bytes that it must read at the memory's rate, then its reductions.

    weights     once each, of experts those that some token of the batch has chosen; of the embedding the tokens' rows
    caches      keys and values of each sequence's tokens, or of those in the window; states are read and written
    reductions  as many as the graph has, at what the size table says that one of this size takes

Arithmetic is left out: a batch that decodes is bound by memory. All bytes are of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphfuse.comm.table import SizeTable
from graphfuse.models.experts import RoutedExperts
from graphfuse.models.gpt_oss import GptOssExperts

EXPERTS = (RoutedExperts, GptOssExperts)
BANDWIDTH = 4.3
"""TB/s of an H200: 90 % of the data sheet."""


@dataclass(frozen=True)
class Mixer:
    """What a layer keeps between calls."""

    token_bytes: int
    """Of each token."""

    state_bytes: int
    """Of each sequence, however long it is."""

    window: int | None = None


@dataclass(frozen=True)
class Footprint:
    """What a step of a model touches, on one rank."""

    dense_bytes: int
    expert_bytes: int
    """Of all experts of all layers."""

    embedding_row_bytes: int
    num_experts: int
    top_k: int
    mixers: tuple[Mixer, ...]

    @classmethod
    def of(cls, model: Any) -> Footprint:
        """Of one of graphfuse's own models."""
        dense = experts = 0
        num_experts = 0
        inside: set[int] = set()
        for module in model.modules():
            if isinstance(module, EXPERTS):
                num_experts = int(module.num_experts)
                for tensor in module.parameters():
                    experts += _bytes(tensor)
                    inside.add(id(tensor))
        for name, tensor in model.named_parameters():
            is_table = name == "embed_tokens.weight" and not model.lm_head.tied
            if id(tensor) not in inside and not is_table:
                dense += _bytes(tensor)
        row = model.embed_tokens.weight[0]
        top_k = int(getattr(model.config, "num_experts_per_tok", None) or 0) if num_experts else 0
        return cls(dense, experts, _bytes(row), num_experts, top_k, tuple(_mixer(m, model) for m in model.mixers))

    def weight_bytes(self, batch: int) -> float:
        touched = expected_experts(self.num_experts, self.top_k, batch) / max(1, self.num_experts)
        return self.dense_bytes + batch * self.embedding_row_bytes + touched * self.expert_bytes

    def cache_bytes(self, batch: int, context: float) -> float:
        """Of a batch of sequences of `context` tokens each."""
        total = 0.0
        for mixer in self.mixers:
            seen = context if mixer.window is None else min(context, mixer.window)
            total += batch * (seen * mixer.token_bytes + 2 * mixer.state_bytes)
        return total


@dataclass(frozen=True)
class Roofline:
    """The floor of one step."""

    weight_bytes: float
    cache_bytes: float
    bandwidth: float
    """TB/s."""

    reductions: int
    reduction_us: float | None
    """Of one; None where no table says."""

    @property
    def ms(self) -> float:
        """A bound from below also where reductions are unknown."""
        memory = (self.weight_bytes + self.cache_bytes) / (self.bandwidth * 1e9)
        return memory + self.reductions * (self.reduction_us or 0.0) / 1e3


def expected_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """How many distinct experts tokens choose that each choose `top_k`, all equally likely."""
    if num_experts == 0:
        return 0.0
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def reduction_us(table: SizeTable | None, hidden_size: int, num_tokens: int, itemsize: int = 2) -> float | None:
    """What one fused reduction of `[num_tokens, hidden_size]` takes by the table: the backend that serves the size, at
    the nearest number of tokens that was measured, of this hidden size or the nearest."""
    if table is None:
        return None
    num_bytes = num_tokens * hidden_size * itemsize
    served = next(r.label for r in table.ranges(hidden_size) if r.max_bytes is None or num_bytes <= r.max_bytes)
    rows = [row for row in table.measured if served in row.us]
    if not rows:
        return None
    nearest = min(rows, key=lambda row: (abs(row.hidden_size - hidden_size), abs(row.tokens - num_tokens)))
    return nearest.us[served]


def _mixer(mixer: Any, model: Any) -> Mixer:
    with torch.device("meta"):
        like = model.norm.weight.to("meta")
        num_bytes = sum(_bytes(tensor) for tensor in mixer.new_cache(1, 1, like))
    if mixer.has_state:
        return Mixer(0, num_bytes)
    return Mixer(num_bytes, 0, getattr(mixer, "sliding_window", None))


def _bytes(tensor: Tensor | nn.Parameter) -> int:
    return tensor.numel() * tensor.element_size()
