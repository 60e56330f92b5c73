"""Tensor-parallel layers: Linear by columns and by rows, embedding and head by vocabulary.

Each holds this rank's part, zero where the division leaves padding (see `sharding`). It says through `tensor_plans`
which checkpoint tensors it is made of, and through `shard_dims`, for the proof of placements, along which dimension a
parameter is divided (one that it does not name is whole). Reductions are plain functional collectives, for the passes
to find.

Legend: T tokens, H hidden, V vocabulary (v: this rank's part).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from graphfuse.models.fp8 import Fp8Weight
from graphfuse.models.quantisation import Fp8Scheme
from graphfuse.models.sharding import Shard, TensorParallel, even, whole
from graphfuse.weights.plan import Copy, TensorPlan


class ColumnParallelLinear(nn.Module):
    """Several projections of one input as one matrix product, the output divided over the ranks.

    `parts` maps the checkpoint's names ("q_proj") to how each output dimension is divided. They stand in the
    checkpoint next to this module: `self_attn.qkv_proj` is made of `self_attn.q_proj`, ...
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0, "weight_scale": 0}

    def __init__(self, in_features: int, parts: dict[str, Shard], *, bias: bool, dtype, device) -> None:
        super().__init__()
        self.in_features, self.parts = in_features, parts
        rows = sum(shard.local for shard in parts.values())
        self.weight = parameter(rows, in_features, dtype=dtype, device=device)
        self.bias = parameter(rows, dtype=dtype, device=device) if bias else None
        self.fp8: Fp8Weight | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8 is not None:
            return self.fp8.linear(self, x, self.bias)
        return F.linear(x, self.weight, self.bias)

    def quantise(self, scheme: Fp8Scheme) -> None:
        self.fp8 = Fp8Weight.of(scheme, tuple(self.parts.values()), whole(self.in_features))
        self.fp8.convert(self)

    def checkpoint_names(self, path: str) -> list[str]:
        parent = path.rpartition(".")[0]
        return [f"{parent}.{part}" for part in self.parts]

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight that is meant, for modules that multiply it themselves."""
        return self.weight if self.fp8 is None else self.fp8.dequantised(self, dtype)

    def tensor_plans(self, path: str, names: frozenset[str]) -> Iterator[TensorPlan]:
        parent = path.rpartition(".")[0]
        offset = 0
        for part, shard in self.parts.items():
            for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
                if tensor is not None:
                    copies = span_copies(tensor.narrow(0, offset, shard.local), shard, 0)
                    shape = (shard.full, *tensor.shape[1:])
                    yield TensorPlan(f"{parent}.{part}.{kind}", shape, copies, tensor)
            offset += shard.local
        if self.fp8 is not None:
            yield from self.fp8.scale_plans(self, self.checkpoint_names(path), names)


class ReplicatedLinear(ColumnParallelLinear):
    """Projections that every rank has whole."""

    shard_dims: ClassVar[dict[str, int]] = {}


class RowParallelLinear(nn.Module):
    """A projection whose input is divided over the ranks: a partial product each, then their sum, then the bias."""

    def __init__(self, in_shard: Shard, out_features: int, tp: TensorParallel, *, bias: bool, dtype, device) -> None:
        super().__init__()
        self.in_shard, self.tp = in_shard, tp
        self.shard_dims = {"weight": 1}
        self.weight = parameter(out_features, in_shard.local, dtype=dtype, device=device)
        self.bias = parameter(out_features, dtype=dtype, device=device) if bias else None
        self.fp8: Fp8Weight | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = reduce_sum(self.partial(x), self.tp)
        return y if self.bias is None else y + self.bias

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum, without the bias, for callers that have more to add before it is reduced."""
        if self.fp8 is not None:
            return self.fp8.linear(self, x, None)
        return F.linear(x, self.weight)

    def quantise(self, scheme: Fp8Scheme) -> None:
        self.fp8 = Fp8Weight.of(scheme, (whole(self.weight.shape[0]),), self.in_shard)
        self.fp8.convert(self)
        if scheme.weights == "block":
            self.shard_dims = {"weight": 1, "weight_scale": 1}

    def checkpoint_names(self, path: str) -> list[str]:
        return [path]

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight that is meant, for modules that multiply it themselves."""
        return self.weight if self.fp8 is None else self.fp8.dequantised(self, dtype)

    def tensor_plans(self, path: str, names: frozenset[str]) -> Iterator[TensorPlan]:
        shape = (self.weight.shape[0], self.in_shard.full)
        yield TensorPlan(f"{path}.weight", shape, span_copies(self.weight, self.in_shard, 1), self.weight)
        if self.fp8 is not None:
            yield from self.fp8.scale_plans(self, [path], names)
        if self.bias is not None:
            yield replicated(f"{path}.bias", self.bias)


class VocabParallelEmbedding(nn.Module):
    """Rows of the embedding divided over the ranks; ids of other ranks' rows give zero before the sum."""

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel, *, dtype, device) -> None:
        super().__init__()
        self.shard, self.tp = even(vocab_size, tp), tp
        self.weight = parameter(self.shard.local, hidden_size, dtype=dtype, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        ids = ids - self.tp.rank * self.shard.local
        here = (ids >= 0) & (ids < self.shard.local)  # [T]
        x = F.embedding(torch.where(here, ids, 0), self.weight)  # [T, H]
        return reduce_sum(torch.where(here[:, None], x, 0.0), self.tp)

    def tensor_plans(self, path: str, _names: frozenset[str]) -> Iterator[TensorPlan]:
        shape = (self.shard.full, self.weight.shape[1])
        yield TensorPlan(f"{path}.weight", shape, span_copies(self.weight, self.shard, 0), self.weight)


class ParallelLMHead(nn.Module):
    """Logits of the whole vocabulary on every rank, each rank computing its rows. May share the embedding's weight."""

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(
        self, hidden_size: int, vocab_size: int, tp: TensorParallel, *, tied_to: nn.Parameter | None, dtype, device
    ) -> None:
        super().__init__()
        self.shard, self.tp, self.tied = even(vocab_size, tp), tp, tied_to is not None
        if tied_to is None:
            tied_to = parameter(self.shard.local, hidden_size, dtype=dtype, device=device)
        self.weight = tied_to

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.weight)  # [T, v]
        if self.tp.group is None or self.tp.size == 1:
            return logits
        num_tokens, part = logits.shape
        logits = funcol.all_gather_tensor(logits, 0, self.tp.group)  # [tp * T, v]
        logits = logits.view(self.tp.size, num_tokens, part).transpose(0, 1).reshape(num_tokens, self.tp.size * part)
        return logits[:, : self.shard.full]  # [T, V], without the padding

    def tensor_plans(self, path: str, _names: frozenset[str]) -> Iterator[TensorPlan]:
        if not self.tied:
            shape = (self.shard.full, self.weight.shape[1])
            yield TensorPlan(f"{path}.weight", shape, span_copies(self.weight, self.shard, 0), self.weight)


def reduce_sum(x: Tensor, tp: TensorParallel) -> Tensor:
    """The sum over the ranks of the group."""
    return x if tp.group is None or tp.size == 1 else funcol.all_reduce(x, "sum", tp.group)


def parameter(*shape: int, dtype, device) -> nn.Parameter:
    """Zero, because what the checkpoint does not fill is padding and must be zero."""
    return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device), requires_grad=False)


def span_copies(tensor: Tensor, shard: Shard, dim: int) -> tuple[Copy, ...]:
    """Copies of the shard's spans along `dim` of a tensor that is whole in its other dimensions."""
    copies = []
    for span in shard.spans:
        source = [slice(None)] * tensor.dim()
        source[dim] = slice(span.source, span.source + span.length)
        copies.append(Copy(tuple(source), tensor.narrow(dim, span.target, span.length)))
    return tuple(copies)


def replicated(name: str, tensor: nn.Parameter) -> TensorPlan:
    """Every rank takes the whole tensor."""
    return TensorPlan(name, tuple(tensor.shape), (Copy((slice(None),) * tensor.dim(), tensor),), tensor)
