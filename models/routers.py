"""Which experts a token goes to, and with which weights: a linear, scores, the K largest.

Legend: T tokens, H hidden, E experts, K choices per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphfuse.models.parallel import parameter


class TopKRouter(nn.Module):
    """Softmax over all experts in float32, the K largest, made to sum to one if `normalise`."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, normalise: bool, bias: bool = False, dtype, device
    ) -> None:
        super().__init__()
        self.top_k, self.normalise = top_k, normalise
        self.weight = parameter(num_experts, hidden_size, dtype=dtype, device=device)
        self.bias = parameter(num_experts, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and weights, `[T, K]` each."""
        logits = F.linear(x, self.weight, self.bias)  # [T, E]
        probabilities = F.softmax(logits, dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(probabilities, self.top_k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return ids, weights.to(x.dtype)


class GroupLimitedRouter(nn.Module):
    """DeepSeek-V3's router: scores in float32, the best groups of experts, then the K best experts within them.

    A group's score is the sum of its two best. With `correction_bias`, a learned bias is added to the scores to choose,
    and not to weigh: it balances the experts' load. The weights are the chosen scores, made to sum to one if
    `normalise`, times `scale`.

    Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.1.2, equations 13 to 16; groups in DeepSeek-V2 (2405.04434).
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: str,
        correction_bias: bool,
        num_groups: int,
        top_groups: int,
        normalise: bool,
        scale: float,
        device,
    ) -> None:
        """`scoring`: "sigmoid" of each logit, or "softmax" over all experts."""
        super().__init__()
        self.scores: Callable[[Tensor], Tensor] = torch.sigmoid if scoring == "sigmoid" else _softmax
        self.top_k, self.num_groups, self.top_groups = top_k, num_groups, top_groups
        self.normalise, self.scale = normalise, scale
        # float32 whatever the model's dtype, as some checkpoints store them: close scores decide which expert is taken.
        self.weight = parameter(num_experts, hidden_size, dtype=torch.float32, device=device)
        bias = parameter(num_experts, dtype=torch.float32, device=device) if correction_bias else None
        self.e_score_correction_bias = bias

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and float32 weights, `[T, K]` each."""
        scores = self.scores(F.linear(x.float(), self.weight))  # [T, E]
        bias = self.e_score_correction_bias
        wanted = scores if bias is None else scores + bias
        if self.top_groups < self.num_groups:
            wanted = self._within_best_groups(wanted)
        ids = torch.topk(wanted, self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return ids, weights * self.scale

    def _within_best_groups(self, wanted: Tensor) -> Tensor:
        """`[T, E]`, minus infinity outside the best groups."""
        groups = wanted.unflatten(1, (self.num_groups, -1))  # [T, G, E / G]
        best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(self.top_groups, dim=-1).indices  # [T, top_groups]
        number = torch.arange(self.num_groups, device=wanted.device)
        is_best = (best[:, :, None] == number).any(dim=1)  # [T, G]
        return groups.masked_fill(~is_best[:, :, None], -torch.inf).flatten(1)


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1)
