"""Which layers of a model are regions, and their marking while the model is traced (see `graphfuse/regions.py`).

The mark is on the class, from outside: `torch.compiler.nested_compile_region` around its forward. It is there while a
model is traced and taken off again, whatever happens; threads that trace at once share it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_MIN_LAYERS = 2


def repeated_layer_classes(model: nn.Module, *, alike: bool = True) -> list[type[nn.Module]]:
    """Classes of which some `nn.ModuleList` or `nn.Sequential` of the model holds at least two instances, itself or in
    containers within it. Containers are never layers, nor are torch's modules of a single op (`nn.Linear`, `nn.ReLU`)
    in an `nn.Sequential`, where they are the steps of one layer. With `alike`, only classes whose instances hold equal
    objects, and so may be one region."""
    classes: list[type[nn.Module]] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            counts = Counter(type(layer) for layer in _layers_in(module))
            classes += [c for c, n in counts.items() if n >= _MIN_LAYERS and c not in classes]
    nested = {type(m) for c in classes for layer in _instances(model, c) for m in layer.modules() if m is not layer}
    return [c for c in classes if c not in nested and (not alike or _all_alike(list(_instances(model, c))))]


def _all_alike(layers: list[nn.Module]) -> bool:
    return all(_alike(layers[0], layer) for layer in layers[1:])


def _alike(a: Any, b: Any) -> bool:
    """Whether two layers, or what they hold, may be one region. Dynamo compares tensors and plain values of a region's
    calls itself, but not objects that it met elsewhere first, nor a forward that one instance was given."""
    if a is b:
        return True
    if type(a) is not type(b):
        return isinstance(a, _PLAIN) and isinstance(b, _PLAIN)
    if isinstance(a, nn.Module):
        return _alike(vars(a), vars(b))
    if isinstance(a, dict):
        return _equal(list(a), list(b)) and all(map(_alike, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    return isinstance(a, (*_PLAIN, torch.Tensor)) or _equal(a, b)


def _equal(a: Any, b: Any) -> bool:
    """What `==` says, if it says True or False: of arrays it gives an array, and any object may raise."""
    try:
        return (a == b) is True
    except Exception:
        return False


_PLAIN = (int, float, complex, str, bytes, type(None))


def _layers_in(container: nn.Module) -> Iterator[nn.Module]:
    for child in container.children():
        if _is_container(child):
            yield from _layers_in(child)
        elif not (isinstance(container, nn.Sequential) and _is_single_op(child)):
            yield child


def _is_container(module: nn.Module) -> bool:
    """A plain `nn.Sequential`, or a list or dict of modules that nobody gave a forward."""
    holds_only = isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward
    return holds_only or type(module) is nn.Sequential


def _is_single_op(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


def _instances(model: nn.Module, cls: type[nn.Module]) -> Iterator[nn.Module]:
    return (m for m in model.modules() if type(m) is cls)


@dataclass
class _Mark:
    """What the namespace of a marked class held, and how many traces want the mark."""

    own: Any
    users: int = 0


_MARKED: dict[type[nn.Module], _Mark] = {}
_LOCK = threading.Lock()


@contextlib.contextmanager
def marked_regions(model: nn.Module) -> Iterator[None]:
    """While open, calls of the model's repeated layers trace as regions. The classes are left as they were."""
    classes = repeated_layer_classes(model)
    with _LOCK:
        for cls in classes:
            if cls not in _MARKED:
                _MARKED[cls] = _Mark(cls.__dict__.get("forward"))
                cls.forward = torch.compiler.nested_compile_region(cls.forward)
            _MARKED[cls].users += 1
    try:
        yield
    finally:
        with _LOCK:
            for cls in classes:
                mark = _MARKED[cls]
                mark.users -= 1
                if mark.users:
                    continue
                del _MARKED[cls]
                if mark.own is None:
                    del cls.forward
                else:
                    cls.forward = mark.own


def forget_forward_guards() -> None:
    """Called while Dynamo compiles a graph: take back its guards on the layer classes' forward. They would fail at the
    second call, when the marks are gone, and the model would be traced again, flat. (Dynamo's own way to leave out
    guards, `guard_filter_fn`, builds all of them twice.)"""
    context = torch._guards.TracingContext.try_get()
    if context is not None and _MARKED:
        guards = context.guards_context.dynamo_guards
        guards.inner = type(guards.inner)(g for g in guards.inner if not _is_on_forward(g))


def _is_on_forward(guard: Any) -> bool:
    name = guard.name() if callable(guard.name) else guard.name
    return "__dict__['forward']" in name or "__dict__)['forward']" in name
