"""What is recorded around a reduction for the report page: the ops that a person would draw."""

from __future__ import annotations

import pytest

from graphfuse import FuseConfig
from graphfuse.passes import default_rules
from graphfuse.passes.driver import run_passes
from graphfuse.passes.surroundings import MAX_BOXES
from graphfuse.testing import fake_tp
from tests.passes.graphs import HIDDEN, TOKENS, Builder, aten, context, flat_layers


@pytest.fixture(scope="module")
def group():
    with fake_tp(4) as group:
        yield group


def sites(module, group):
    return run_passes(module, default_rules(), context(group), FuseConfig()).sites


def drawn(graph):
    """A graph in words: each edge as "from > to"."""
    named = [box.label + (f" x{box.count}" if box.count > 1 else "") for box in graph.boxes]
    return [f"{named[a]} > {named[b]}" + (f" ({name})" if name else "") for a, b, name in graph.edges]


def test_before_and_after_of_a_fused_reduction(group):
    """The norm is one box however it is written, and the next layer's product is where the picture ends."""
    first, last = sites(flat_layers(2, group.group_name), group)
    assert drawn(first.surroundings.before) == [
        "mm > all_reduce", "all_reduce > add", "add > rms_norm", "rms_norm > mm", "add > add",
    ]  # fmt: skip
    assert drawn(first.surroundings.after) == [
        "mm > all_reduce_add_rms_norm",
        "all_reduce_add_rms_norm > mm (normed)",
        "all_reduce_add_rms_norm > all_reduce_add_rms_norm (residual)",
    ]
    assert (first.surroundings.dtype, first.surroundings.shape) == ("bfloat16", f"[{TOKENS}, {HIDDEN}]")
    assert drawn(last.surroundings.after)[-1] == "all_reduce_add_rms_norm > the model's output (normed)"


def test_a_declined_one_shows_who_reads_it_and_stays_as_it_was(group):
    b = Builder()
    x, residual, weight = b.input(TOKENS, HIDDEN), b.input(TOKENS, HIDDEN), b.input(HIDDEN)
    reduced = b.all_reduce(b(aten.relu.default, x), group.group_name)
    total = b(aten.add.Tensor, residual, reduced)
    (site,) = sites(b.output(b.rms_norm(total, weight), b(aten.sigmoid.default, reduced)), group)
    assert site.status == "declined"
    assert "all_reduce > sigmoid" in drawn(site.surroundings.before)
    assert site.surroundings.after is None


def test_readers_that_are_alike_are_one_box(group):
    b = Builder()
    x, residual, weight = b.input(TOKENS, HIDDEN), b.input(TOKENS, HIDDEN), b.input(HIDDEN)
    total = b(aten.add.Tensor, residual, b.all_reduce(b(aten.relu.default, x), group.group_name))
    normed = b.rms_norm(total, weight)
    (site,) = sites(b.output(*[b(aten.mm.default, normed, b.input(HIDDEN, HIDDEN)) for _ in range(40)]), group)
    assert drawn(site.surroundings.before)[-1] == "rms_norm > mm x40"


def test_a_picture_stays_small(group):
    ops = (aten.sin, aten.cos, aten.exp, aten.abs, aten.sqrt, aten.log, aten.tan, aten.neg, aten.relu, aten.sign,
           aten.floor, aten.ceil, aten.round, aten.erf, aten.sinh)  # fmt: skip
    b = Builder()
    reduced = b.all_reduce(b(aten.relu.default, b.input(TOKENS, HIDDEN)), group.group_name)
    (site,) = sites(b.output(*[b(op.default, reduced) for op in ops]), group)
    assert len(site.surroundings.before.boxes) == MAX_BOXES


def test_like_sites_share_one_picture(group):
    """A model of 94 layers keeps a handful of pictures."""
    pictures = {id(site.surroundings) for site in sites(flat_layers(94, group.group_name), group)}
    assert len(pictures) <= 4
