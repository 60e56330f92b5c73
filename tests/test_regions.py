"""Repeated layers are traced once, and nothing about a layer is lost by it: values, writes to caches and buffers, their
order, several layers of a kind, layers that differ. Where layers cannot be regions, the report says why."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor, nn
from torch.fx import GraphModule

import graphfuse
from graphfuse import backend
from graphfuse.region_marks import marked_regions, repeated_layer_classes
from graphfuse.testing import fake_tp, trace

H = 16


def linear() -> nn.Linear:
    return nn.Linear(H, H, bias=False)


class Stack(nn.Module):
    """Calls its layers in a row; `forward` of subclasses may do other things in between."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, *rest: Any) -> Any:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.proj(x))


class Scaled(Plain):
    """A constant of its own, which is no tensor."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.proj(x)


class Counting(Plain):
    """Writes to a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.proj(x) * self.calls


class Caching(Plain):
    """Writes to a cache [4, H] that is handed in, at a place given by a tensor, and reads it back."""

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, self.proj(x).sum(0, keepdim=True))
        return x + cache.mean(0)


class CachingInPart(Plain):
    """Writes to a part of a cache."""

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        cache[1:].index_copy_(0, at, self.proj(x).sum(0, keepdim=True))
        return x + cache.mean(0)


class Pair(Plain):
    def forward(self, x: Tensor, extra: Tensor) -> tuple[Tensor, None, Tensor]:
        return x + self.proj(extra), None, extra * 2


class PairStack(Stack):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        extra = x * 2
        for layer in self.layers:
            x, nothing, extra = layer(x, extra)
            assert nothing is None
        return x, extra


class Numbered(Plain):
    def forward(self, x: Tensor, index: int) -> Tensor:
        return x + self.proj(x) * index


class NumberedStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, index)
        return x


class ReadsCacheBetween(Stack):
    """Reads after each layer what this layer has written to the cache."""

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.zeros(H)
        for layer in self.layers:
            x = layer(x, cache, at)
            seen = seen * 3 + cache.sum(0)
        return x, seen


class ReadsViewAfterwards(Stack):
    """Takes a view of the cache before the layers, and reads it behind them."""

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        view = cache.view(2, -1)
        for layer in self.layers:
            x = layer(x, cache, at)
        return x, view.sum(1)


class HandsOutViews(Stack):
    """Layers write to views of one big cache, [layers, 4, H]."""

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, cache[index], at)
        return x


class WritesBetween(Stack):
    """Writes to the cache itself, between its layers."""

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cache, at)
            cache.mul_(2)
        return x


class ReturnsTheCache(Stack):
    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x, cache, at)
        return x, cache


class TwoCaches(Plain):
    def forward(self, x: Tensor, written: Tensor, read: Tensor, at: Tensor) -> Tensor:
        written.index_copy_(0, at, self.proj(x).sum(0, keepdim=True))
        return x + read.mean(0)


class SwapsCaches(Stack):
    def forward(self, x: Tensor, caches: list[Tensor], at: Tensor) -> Tensor:
        written, read = caches
        for layer in self.layers:
            x = layer(x, written, read, at)
            written, read = read, written
        return x


class ReadsAnother(Stack):
    """Its layers write to the first cache; it reads the second itself."""

    def forward(self, x: Tensor, caches: list[Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
        written, read = caches
        for layer in self.layers:
            x = layer(x, written, at)
        return x, read.sum(0)


def tokens(n: int = 5) -> Tensor:
    torch.manual_seed(n)
    return torch.randn(n, H) / 4


def cache(rows: int = 4) -> Tensor:
    return torch.zeros(rows, H)


AT = torch.tensor([1])
CASES = {
    "plain": (lambda: Stack(Plain(), Plain(), Plain()), lambda: ()),
    "one layer": (lambda: Stack(Plain()), lambda: ()),
    "differing constants": (lambda: Stack(Scaled(1.0), Scaled(0.5), Scaled(0.5), Scaled(0.25)), lambda: ()),
    "differing kinds": (lambda: Stack(Plain(), Scaled(0.5), Plain(), Scaled(0.5), Plain()), lambda: ()),
    "one layer called twice": (lambda: Stack(*[Plain()] * 2, Plain()), lambda: ()),
    "tuples with None": (lambda: PairStack(Pair(), Pair()), lambda: ()),
    "python ints": (lambda: NumberedStack(Numbered(), Numbered(), Numbered()), lambda: ()),
    "buffers": (lambda: Stack(Counting(), Counting()), lambda: ()),
    "one buffer written twice": (lambda: Stack(*[Counting()] * 2, Counting()), lambda: ()),
    "caches": (lambda: Stack(Caching(), Caching(), Caching()), lambda: (cache(), AT)),
    "parts of caches": (lambda: Stack(CachingInPart(), CachingInPart()), lambda: (cache(), AT)),
    "cache read between": (lambda: ReadsCacheBetween(Caching(), Caching()), lambda: (cache(), AT)),
    "view read afterwards": (lambda: ReadsViewAfterwards(Caching(), Caching()), lambda: (cache(), AT)),
    "views handed out": (lambda: HandsOutViews(Caching(), Caching()), lambda: (torch.zeros(2, 4, H), AT)),
    "cache written between": (lambda: WritesBetween(Caching(), Caching()), lambda: (cache(), AT)),
    "cache returned": (lambda: ReturnsTheCache(Caching(), Caching()), lambda: (cache(), AT)),
    "caches swapped": (lambda: SwapsCaches(TwoCaches(), TwoCaches(), TwoCaches()), lambda: ([cache(), cache()], AT)),
    "one cache given twice": (lambda: SwapsCaches(TwoCaches(), TwoCaches()), lambda: ([cache()] * 2, AT)),
    "caches that share memory": (
        lambda: ReadsAnother(Caching(), Caching()),
        lambda: ([(both := torch.zeros(6, H))[:4], both[2:]], AT),
    ),
}  # fmt: skip


FLAT = {
    "view read afterwards": "a view of a tensor that a layer writes to is read behind the layer",
    "views handed out": "a layer writes to a tensor that is no input of the model",
    "cache written between": "a layer writes to a tensor that is no input of the model",
    "caches that share memory": "a layer writes to a tensor that shares memory with another input",
}
"""Which cases cannot be regions, and what the report says then."""


@pytest.mark.parametrize("case", CASES)
def test_values_and_writes_are_those_of_the_eager_model(case):
    """Three calls in a row, of different lengths, in one graph: what one wrote, the next reads."""
    build, make_arguments = CASES[case]
    torch.manual_seed(0)
    eager = build().requires_grad_(False)
    model = copy.deepcopy(eager)
    compiled = graphfuse.compile(model)
    wanted, own = make_arguments(), make_arguments()
    for length in (5, 1, 3):
        want, got = eager(tokens(length), *wanted), compiled(tokens(length), *own)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(own, wanted)
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    assert compiled.report.num_graphs == 1
    expected = [f"layers were traced flat: {FLAT[case]}."] if case in FLAT else []
    assert compiled.report.notes == expected


class Reducing(Plain):
    """A layer of a tensor-parallel model."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.norm, self.group = nn.RMSNorm(H), group

    def forward(self, x: Tensor) -> Tensor:
        return x + fc.all_reduce(self.proj(self.norm(x)), "sum", self.group)


class ReducingStack(Stack):
    def __init__(self, num_layers: int, group: dist.ProcessGroup) -> None:
        super().__init__(*[Reducing(group) for _ in range(num_layers)])
        self.norm = nn.RMSNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def test_a_body_is_traced_once_and_sites_between_layers_are_fused(monkeypatch):
    """Regions do not hide the layer boundary: each site's norm is the next layer's, the last one's the final norm."""
    bodies: list[GraphModule] = []
    capture = backend._capture_body
    monkeypatch.setattr(
        backend, "_capture_body", lambda module, inputs: bodies.append(module) or capture(module, inputs)
    )
    with fake_tp(2) as group:
        report = trace(lambda: ReducingStack(12, group), tokens(), group).report
    assert len(bodies) == 1
    norms = [f"layers.{i}.norm" for i in range(1, 12)] + ["norm"]
    assert [(s.module, s.norm, s.status) for s in report.sites] == [
        (f"layers.{i}", norm, "fused") for i, norm in enumerate(norms)
    ]
    assert report.notes == []


def test_the_marks_are_taken_off_whatever_happens():
    model = Stack(Plain(), Plain())
    forward = Plain.__dict__["forward"]
    with pytest.raises(ZeroDivisionError), marked_regions(model):
        assert Plain.__dict__["forward"] is not forward
        1 / 0  # noqa: B018
    assert Plain.__dict__["forward"] is forward


def test_an_inherited_forward_is_marked_on_the_class_that_inherits_it_only():
    class Heir(Plain):
        pass

    with marked_regions(Stack(Heir(), Heir())):
        assert "forward" in Heir.__dict__
        assert Plain.forward is not Heir.forward
    assert "forward" not in Heir.__dict__


def test_marks_that_overlap_in_time_go_with_the_last():
    """Two threads trace models of one class, and the first one ends before the second."""
    forward = Plain.__dict__["forward"]
    first, second = marked_regions(Stack(Plain(), Plain())), marked_regions(Stack(Plain(), Plain()))
    first.__enter__()
    second.__enter__()
    marked = Plain.__dict__["forward"]
    first.__exit__(None, None, None)
    assert Plain.__dict__["forward"] is marked
    second.__exit__(None, None, None)
    assert Plain.__dict__["forward"] is forward


def test_layers_are_the_repeated_classes_of_module_lists_and_not_what_they_contain():
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Plain() for _ in range(2))

    assert repeated_layer_classes(Stack(Plain(), Plain())) == [Plain]
    assert repeated_layer_classes(Stack(Plain())) == []
    assert repeated_layer_classes(Stack(Plain(), Scaled(1.0), Scaled(2.0), Plain())) == [Plain, Scaled]
    assert repeated_layer_classes(Stack(Nested(), Nested())) == [Nested]


def test_a_sequential_of_layers_counts_like_a_list_and_its_single_ops_do_not():
    assert repeated_layer_classes(nn.Sequential(Plain(), Plain())) == [Plain]
    assert repeated_layer_classes(nn.Sequential(Plain())) == []
    assert repeated_layer_classes(nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU())) == []


@pytest.mark.parametrize(
    "container",
    [
        nn.ModuleList([nn.ModuleList([Plain(), Plain()]), nn.ModuleList([Plain(), Plain()])]),
        nn.ModuleList([nn.ModuleList([Plain()]), nn.ModuleList([Plain()])]),
        nn.ModuleList([nn.Sequential(Plain(), nn.ReLU()), nn.Sequential(Plain(), nn.ReLU())]),
        nn.ModuleList([nn.ModuleDict({"a": Plain()}), nn.ModuleDict({"a": Plain()})]),
    ],
    ids=["lists of two", "lists of one", "sequentials", "dicts"],
)
def test_containers_are_no_layers_but_what_they_hold_is(container):
    assert repeated_layer_classes(container) == [Plain]


def test_regions_of_a_sequential_keep_their_values():
    torch.manual_seed(0)
    model, x = nn.Sequential(Plain(), Plain(), Plain()), torch.randn(3, H)
    with torch.no_grad():
        want = model(x)
        torch.testing.assert_close(graphfuse.compile(model)(x), want)


class Configured(nn.Module):
    """A layer that reads an object which the model has too."""

    def __init__(self, settings) -> None:
        super().__init__()
        self.proj, self.settings = nn.Linear(H, H, bias=False), settings

    def forward(self, x):
        return x + self.proj(x) * self.settings.scale


class WithSettings(nn.Module):
    def __init__(self, *settings) -> None:
        super().__init__()
        self.settings = settings[0]
        self.layers = nn.ModuleList(Configured(s) for s in settings)
        self.requires_grad_(False)

    def forward(self, x):
        x = x * self.settings.scale
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_hold_different_objects_or_forwards_are_no_regions():
    """Dynamo met the shared object elsewhere first, and would take every layer for the first one."""
    one, two = SimpleNamespace(scale=1.0), SimpleNamespace(scale=2.0)
    assert repeated_layer_classes(WithSettings(one, one, one)) == [Configured]
    unlike = WithSettings(one, one, two)
    assert repeated_layer_classes(unlike) == []
    patched = WithSettings(one, one, one)
    patched.layers[1].proj.forward = lambda x: 2 * x
    assert repeated_layer_classes(patched) == []
    for model in (unlike, patched):
        x = torch.randn(2, 3, H)
        torch.testing.assert_close(graphfuse.compile(model)(x), model(x))


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise NotImplementedError


@pytest.mark.parametrize(
    "make",
    [lambda: np.ones(1), lambda: np.ones(3), lambda: {torch.ones(3): 1}, Incomparable],
    ids=["array of one", "array", "keys that are tensors", "error"],
)
def test_layers_whose_objects_cannot_be_compared_are_no_regions(make):
    shared = make()
    assert repeated_layer_classes(WithSettings(shared, shared)) == [Configured]
    assert repeated_layer_classes(WithSettings(make(), make())) == []
