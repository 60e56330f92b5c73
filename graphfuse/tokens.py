"""Mark the token dimensions of a model's inputs, so that one graph serves every batch and length.

Which dimensions these are is read from the arguments: all of an integer or boolean tensor of at most two dimensions
(ids, positions, masks), all but the last of a floating-point tensor of two or three (hidden states). Tensors inside
lists, tuples and objects (caches) keep their shapes. Equal sizes at equal places of the first call are taken to be one
quantity, and checked at run time from then on.

`UNBACKED` marks them with `mark_unbacked`: nothing may depend on the size, not even whether it is 1, and there is one
graph. A model that cannot be traced so gets `DYNAMIC`: up to four graphs, since sizes of 1 specialise.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

_MARKS = ("_dynamo_unbacked_indices", "_dynamo_shape_ids", "_specialize_on", "_dynamo_hint_overrides")


class Marking(enum.Enum):
    UNBACKED = "unbacked"
    DYNAMIC = "dynamic"


def token_dims(tensor: Tensor) -> range:
    """The dimensions of an argument that count tokens, sequences or positions."""
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return range(tensor.dim()) if tensor.dim() <= 2 else range(0)
    return range(tensor.dim() - 1) if tensor.dim() in (2, 3) else range(0)


class TokenDims:
    """Marks the arguments of one model's calls, each argument the same way in every call."""

    def __init__(self) -> None:
        self._quantities: dict[tuple[str, int], str] = {}

    def mark(self, arguments: Mapping[str, object], marking: Marking) -> None:
        """Mark a call's arguments, by name. Marks live on the tensor objects and change nothing else."""
        tensors = [(name, a) for name, a in arguments.items() if isinstance(a, Tensor) and not isinstance(a, Parameter)]
        leaders: dict[int, int] = {}
        for name, tensor in tensors:
            for dim in token_dims(tensor):
                size = tensor.shape[dim]
                leader = leaders.setdefault(dim, size)
                quantity = f"dim{dim}" if size == leader else f"dim{dim} of {name}"
                quantity = self._quantities.setdefault((name, dim), quantity)
                if marking is Marking.DYNAMIC:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
                elif getattr(tensor, "_dynamo_shape_ids", {}).get(dim) != quantity:
                    torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=quantity)

    @staticmethod
    def unmark(arguments: Mapping[str, object]) -> None:
        """Take unbacked marks off again, before another attempt."""
        for tensor in arguments.values():
            for name in _MARKS:
                if hasattr(tensor, name):
                    delattr(tensor, name)
