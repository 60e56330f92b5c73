"""Mark the token dimensions of a model's inputs, so that one graph serves every batch and length.

Which dimensions these are is read from the arguments: all of an integer or boolean tensor of at most two dimensions
(ids, positions, masks), all but the last of a floating-point tensor of two or three (hidden states). Tensors inside
lists, tuples and objects (caches) keep their shapes, and so do dimensions that the caller has marked with
`torch._dynamo.mark_static`. Equal sizes at equal places of the first call are taken to be one quantity, and checked at
run time from then on; a call that shows them to be two is traced again, once.

`UNBACKED` marks them with `mark_unbacked`: nothing may depend on the size, not even whether it is 1, and there is one
graph. A model that cannot be traced so gets `DYNAMIC`: up to four graphs, since sizes of 1 specialise, but what may be
decided either way does not look at sizes (DTensor asks whether a batch is even). With `GUARDED` it does, which models
need that broadcast an argument of one row over others; such a model asks whatever it asks.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch.nn import Parameter

_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_hint_overrides",
    "_dynamo_propagated_dynamic_indices",
    "_dynamo_shape_ids",
    "_dynamo_strict_unbacked_indices",
    "_dynamo_unbacked_bounds",
    "_dynamo_unbacked_indices",
    "_dynamo_weak_dynamic_indices",
    "_has_dynamo_dim_marking",
    "_specialize_on",
)
"""Attributes in which torch keeps what a tensor's dimensions are marked as. Static ones are not ours to change."""

# Where torch can be told (from 2.13 on): otherwise Inductor, and torch's own shape rules, ask whether a size is 0.
_AT_LEAST_ONE: dict = {"min": 1} if "min" in inspect.signature(mark_unbacked).parameters else {}


def is_empty(arguments: Iterable[object]) -> bool:
    """Whether some argument counts no tokens at all, which no graph is traced for."""
    return any(a.shape[dim] == 0 for a in arguments if isinstance(a, Tensor) for dim in token_dims(a))


class Marking(enum.Enum):
    UNBACKED = "unbacked"
    DYNAMIC = "dynamic"
    GUARDED = "guarded"


def token_dims(tensor: Tensor) -> range:
    """The dimensions of an argument that count tokens, sequences or positions."""
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return range(tensor.dim()) if tensor.dim() <= 2 else range(0)
    return range(tensor.dim() - 1) if tensor.dim() in (2, 3) else range(0)


class TokenDims:
    """Marks the arguments of one model's calls, each argument the same way in every call.

    With `masks` also tensors of four dimensions: masks [sequences or 1, heads or 1, queries, keys], whose queries are
    the tokens of the call, while there are as many keys in each."""

    def __init__(self, *, masks: bool = False) -> None:
        self._masks = masks
        self._quantities: dict[tuple[str, int], str] = {}
        self._fresh = itertools.count()

    @contextlib.contextmanager
    def marked(self, arguments: Mapping[str, object], marking: Marking) -> Iterator[None]:
        """While open, a call's arguments, given by name, carry marks instead of those that their owner gave them."""
        tensors = {name: a for name, a in arguments.items() if isinstance(a, Tensor) and not isinstance(a, Parameter)}
        owners = [(t.__dict__, {k: t.__dict__.pop(k) for k in _MARKS if k in t.__dict__}) for t in tensors.values()]
        try:
            for attributes, _ in owners:
                if "_dynamo_static_indices" in attributes:
                    attributes["_has_dynamo_dim_marking"] = True
            for (name, dim), quantity in self._read(tensors).items():
                if marking is Marking.UNBACKED:
                    mark_unbacked(tensors[name], dim, shape_id=quantity, **_AT_LEAST_ONE)
                else:
                    torch._dynamo.maybe_mark_dynamic(tensors[name], dim)
            shape_config = torch.fx.experimental._config
            with shape_config.patch(backed_size_oblivious=marking is Marking.DYNAMIC):  # type: ignore[attr-defined]
                yield
        finally:
            for attributes, _ in owners:  # first all, then all: one tensor may be several arguments
                for mark in _MARKS:
                    attributes.pop(mark, None)
            for attributes, owned in owners:
                attributes.update(owned)

    def _read(self, tensors: Mapping[str, Tensor]) -> dict[tuple[str, int], str]:
        """The quantity that each token dimension counts. Two dimensions of one quantity have one size."""
        sizes: dict[str, int] = {}
        found: dict[tuple[str, int], str] = {}
        for name, tensor in tensors.items():
            static = getattr(tensor, "_dynamo_static_indices", ())
            is_mask = self._masks and tensor.dim() == 4
            for dim in (2,) if is_mask else token_dims(tensor):
                if dim in static:
                    continue
                size = tensor.shape[dim]
                quantity = self._quantities.get((name, dim))
                if quantity is None:
                    like = 1 if is_mask else dim
                    alike = [q for (_, d), q in found.items() if d == like and sizes[q] == size]
                    quantity = alike[0] if alike else f"tokens{next(self._fresh)}"
                elif sizes.get(quantity, size) != size:
                    quantity = f"tokens{next(self._fresh)}"
                sizes[quantity] = size
                found[name, dim] = self._quantities[name, dim] = quantity
        return found
