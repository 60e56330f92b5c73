"""Fixtures of all tests, and small models to compile. Tests that are not marked `gpu` describe the CPU, and see no GPU
even where there are some."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed._functional_collectives as fc
from torch import Tensor, nn

from tests.distributed.pool import RankPool

H, VOCAB = 16, 32


def pytest_configure(config: pytest.Config) -> None:
    selected = config.getoption("markexpr")
    if "gpu" not in selected or "not gpu" in selected:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks, and for the processes that tests start


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four gloo ranks for the whole run: `ranks.run(tp, function, *args)`; see tests/distributed/pool.py."""
    pool = RankPool()
    yield pool
    pool.close()


class Layer(nn.Module):
    """A residual layer with an all-reduce if there is a group."""

    def __init__(self, group=None) -> None:
        super().__init__()
        self.norm, self.proj, self.group = nn.RMSNorm(H), nn.Linear(H, H, bias=False), group

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(self.norm(x))
        return x + (y if self.group is None else fc.all_reduce(y, "sum", self.group))


class Model(nn.Module):
    def __init__(self, num_layers: int = 3, group=None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, H)
        self.layers = nn.ModuleList(Layer(group) for _ in range(num_layers))
        self.norm = nn.RMSNorm(H)
        self.config = {"hidden_size": H}
        self.requires_grad_(False)

    def forward(self, ids: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x) * scale
        return x if bias is None else x + bias


class Calls(nn.Module):
    """forward is any function of the module and its arguments."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(H, H), requires_grad=False)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def ids(batch: int, length: int) -> Tensor:
    return torch.arange(batch * length).reshape(batch, length) % VOCAB


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()
