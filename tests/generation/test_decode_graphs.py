"""CUDA graphs of decoding, with recorded operations in their place: what they compute is what the model computes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphfuse.generation import LLM, SamplingParams
from graphfuse.generation.decode_graphs import DecodeGraphs, ladder
from graphfuse.generation.inputs import HostInputs, StaticInputs

CPU = torch.device("cpu")


class Recorded(TorchDispatchMode):
    """What runs inside is run again by `replay`, on the same tensors and into the same results, as CUDA graphs do."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            if again.data_ptr() != result.data_ptr():
                result.copy_(again)

    def pool(self):
        return "pool"


@pytest.fixture
def recorded(monkeypatch):
    """Stands in for torch.cuda; the graphs that were captured."""
    graphs = []

    def new_graph():
        graphs.append(Recorded())
        return graphs[-1]

    class Stream:
        def wait_stream(self, other):
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", new_graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return graphs


def forward(inputs):
    """Looks at every input; a row depends on no other."""
    return (
        torch.stack((inputs.input_ids, inputs.positions, inputs.entries, inputs.states, inputs.pages.sum(1)), 1) * 2.0
    )


def make_step(rows, num_pages, seed):
    """Every third token is under way."""
    draw = np.random.default_rng(seed)
    ids, positions, entries, states = draw.integers(1, 1000, (4, rows))
    targets = np.arange(0, rows, 3)
    ids[targets] = 0
    ones = np.ones((rows, 2), dtype=np.int64)
    sources, pages = draw.permutation(rows)[: len(targets)], draw.integers(1, 1000, (rows, num_pages))
    return HostInputs(ids, positions, np.arange(rows), entries, pages, states, ones, targets, sources)


def test_every_input_starts_where_inductor_takes_it_as_it_is():
    for rows in (1, 2, 3, 7):
        for inputs in (make_step(rows, 3, 0).on(CPU, SAMPLED), StaticInputs(rows, 3, CPU).inputs):
            fields = {name: field for name, field in vars(inputs).items() if name != "spans"}
            assert all(field.data_ptr() % 16 == 0 for field in fields.values()), (rows, fields)


SAMPLED = torch.arange(-1, 30)  # a row has no token


def test_a_step_runs_the_graph_of_the_next_size_and_padding_does_not_show(recorded):
    graphs = DecodeGraphs(forward, 20, CPU)
    for seed, (rows, num_pages) in enumerate([(3, 5), (20, 1), (4, 8), (17, 1), (1, 3), (3, 5), (9, 2), (2, 3)]):
        step = make_step(rows, num_pages, seed)
        inputs = step.on(CPU, SAMPLED)
        assert inputs.input_ids[::3].tolist() == SAMPLED[step.sources].clamp_min(0).tolist()
        assert torch.equal(graphs(step, SAMPLED), forward(inputs))
    assert len(recorded) == 5, "3 and 4 rows of up to 8 pages are one graph, so are 17 and 20 of a page"


def test_graphs_share_the_place_of_their_logits(recorded):
    graphs = DecodeGraphs(forward, 8, CPU)
    places = {graphs(make_step(rows, 2, 0), SAMPLED).data_ptr() for rows in (8, 1, 3)}
    assert len(places) == 1 and len(recorded) == 3


def test_the_ladder_ends_with_the_largest_size():
    assert ladder(1) == [1] and ladder(6) == [1, 2, 4, 6] and ladder(8) == [1, 2, 4, 8]
    assert ladder(100) == [1, 2, 4, *range(8, 64, 8), 64, 80, 96, 100]


@pytest.mark.gpu
def test_on_a_gpu_tokens_are_those_without_graphs(checkpoint):
    prompts = ["The capital", "A", "One two three four five six seven. The cat sat on the mat.", "日本 🙂", "Paris"]
    params = [SamplingParams(max_tokens=8 + 5 * i, ignore_eos=True) for i in range(len(prompts))]
    sizes = {"device": "cuda", "dtype": torch.float32, "max_batch_size": 4}
    plain = LLM(checkpoint, compile=False, **sizes).generate(prompts, params)
    with LLM(checkpoint, **sizes) as llm:
        assert [c.token_ids for c in llm.generate(prompts, params)] == [c.token_ids for c in plain]
        assert llm._engine._runner._graphs._captured


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_gpu_that_is_not_the_current_one_serves_too(checkpoint):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    here, there = (LLM(checkpoint, device=f"cuda:{i}", dtype=torch.float32).generate(["A"], params) for i in (0, 1))
    assert there == here
