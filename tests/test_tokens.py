"""Which dimensions count tokens, which of them are one quantity, and marks that come and go."""

from __future__ import annotations

import pytest
import torch

from graphfuse.tokens import Marking, TokenDims, token_dims


@pytest.mark.parametrize(
    ("tensor", "dims"),
    [
        (torch.zeros(2, 3, dtype=torch.long), [0, 1]),
        (torch.zeros(5, dtype=torch.int32), [0]),
        (torch.zeros(2, 3, dtype=torch.bool), [0, 1]),
        (torch.zeros(1, 1, 3, 3, dtype=torch.bool), []),
        (torch.zeros(2, 3, 16), [0, 1]),
        (torch.zeros(6, 16, dtype=torch.bfloat16), [0]),
        (torch.zeros(16), []),
        (torch.zeros(2, 3, 4, 16), []),
        (torch.tensor(3), []),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "",
)
def test_token_dimensions_are_read_from_dtype_and_rank(tensor, dims):
    assert list(token_dims(tensor)) == dims


def quantities(dims: TokenDims, **sizes: tuple[int, ...]) -> dict[str, list[str]]:
    """The name of the quantity that each dimension of integer tensors of these sizes is marked with."""
    tensors = {name: torch.zeros(size, dtype=torch.long) for name, size in sizes.items()}
    with dims.marked(tensors, Marking.UNBACKED):
        return {name: [t._dynamo_shape_ids[dim] for dim in range(t.dim())] for name, t in tensors.items()}


def test_equal_sizes_at_equal_places_are_one_quantity():
    first = quantities(TokenDims(), ids=(2, 7), positions=(2, 7), lengths=(2,))
    assert first["ids"] == first["positions"]
    assert first["lengths"] == first["ids"][:1]
    assert len(set(first["ids"])) == 2


def test_batch_and_length_are_two_quantities_also_when_equal():
    assert len(set(quantities(TokenDims(), ids=(3, 3))["ids"])) == 2


def test_a_later_call_keeps_the_quantities_of_the_first():
    dims = TokenDims()
    first = quantities(dims, ids=(2, 7), positions=(1, 7))
    assert first["ids"][0] != first["positions"][0]
    assert quantities(dims, ids=(1, 1), positions=(1, 1)) == first
    assert quantities(dims, positions=(1, 4), ids=(3, 4)) == first


def test_quantities_that_turn_out_to_differ_are_told_apart_for_good():
    dims = TokenDims()
    first = quantities(dims, ids=(1, 7), positions=(1, 7))
    second = quantities(dims, ids=(4, 7), positions=(1, 7))
    assert first["ids"][0] == first["positions"][0]
    assert second["ids"][0] != second["positions"][0]
    assert second["ids"][1] == second["positions"][1]
    assert quantities(dims, ids=(2, 2), positions=(2, 2)) == second


def test_dimensions_that_their_owner_marked_static_stay_so():
    ids = torch.zeros(2, 8, dtype=torch.long)
    torch._dynamo.mark_static(ids, 1)
    with TokenDims().marked({"ids": ids}, Marking.UNBACKED):
        assert ids._dynamo_unbacked_indices == {0}
        assert ids._dynamo_static_indices == {1}


@pytest.mark.parametrize("marking", Marking)
def test_marks_are_there_inside_and_the_owners_own_behind_also_on_exceptions(marking):
    ids, marked = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    torch._dynamo.mark_dynamic(marked, 1)
    before = [dict(ids.__dict__), dict(marked.__dict__)]
    with pytest.raises(ZeroDivisionError), TokenDims().marked({"a": ids, "b": marked, "c": ids}, marking):
        assert not hasattr(marked, "_dynamo_dynamic_indices")
        name = "_dynamo_unbacked_indices" if marking is Marking.UNBACKED else "_dynamo_weak_dynamic_indices"
        assert getattr(ids, name) == getattr(marked, name) == {0, 1}
        1 / 0  # noqa: B018
    assert [ids.__dict__, marked.__dict__] == before


def test_parameters_containers_and_constants_are_not_marked():
    weight, cache = torch.nn.Parameter(torch.zeros(4, 4)), torch.zeros(4, 4)
    with TokenDims().marked({"w": weight, "caches": [cache], "n": 3, "none": None}, Marking.UNBACKED):
        assert not any(name.startswith("_dynamo") for t in (weight, cache) for name in t.__dict__)
