"""Ranks that were started differently are told so, on every rank, before they do anything together."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn

import graphfuse
from graphfuse import FuseConfig, agreement
from graphfuse.agreement import differences
from graphfuse.errors import GroupError
from graphfuse.generation import LLM, SamplingParams
from tests.conftest import Model, ids


def refused(action):
    """The message of the GroupError that the action must raise, and its seconds."""
    start = time.monotonic()
    try:
        action()
    except GroupError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def compiled(group, model=None, config=None, inputs=None):
    model = Model(group=group) if model is None else model
    return graphfuse.compile(model, group, example_inputs=ids(1, 4) if inputs is None else inputs, config=config)


def is_odd(group):
    return dist.get_rank(group) == 1


def another_graphfuse(group):
    with mock.patch.object(agreement, "version_of", lambda _: "0.9.9" if is_odd(group) else "0.1.0"):
        return refused(lambda: compiled(group))


def another_torch(group):
    with mock.patch.object(torch, "__version__", "2.0.0" if is_odd(group) else "2.11.0"):
        return refused(lambda: compiled(group))


def another_config(group):
    return refused(lambda: compiled(group, config=FuseConfig(fusion="off" if is_odd(group) else "auto")))


def other_rules(group):
    disabled = frozenset({"all_reduce_rms_norm"} if is_odd(group) else ())
    return refused(lambda: compiled(group, config=FuseConfig(disabled_rules=disabled)))


def another_depth(group):
    return refused(lambda: compiled(group, Model(num_layers=2 if is_odd(group) else 3, group=group)))


def another_dtype(group):
    dtype = torch.bfloat16 if is_odd(group) else torch.float32
    return refused(lambda: compiled(group, Model(group=group).to(dtype)))


def another_width(group):
    model = nn.Linear(8, 8) if is_odd(group) else nn.Linear(4, 4)
    return refused(
        lambda: compiled(group, model.requires_grad_(False), inputs=torch.ones(2, 8 if is_odd(group) else 4))
    )


def another_length(group):
    return refused(lambda: compiled(group, inputs=ids(1, 6 if is_odd(group) else 4)))


class SometimesTwice(nn.Module):
    def __init__(self, group, twice):
        super().__init__()
        self.group, self.twice = group, twice

    def forward(self, x):
        x = fc.all_reduce(x, "sum", self.group)
        return fc.all_reduce(x * 2, "sum", self.group) if self.twice else x


def another_graph(group):
    return refused(lambda: compiled(group, SometimesTwice(group, is_odd(group)), inputs=torch.ones(3, 8)))


STARTED = "The ranks differ in how they were started: "
CASES = {
    another_graphfuse: STARTED
    + r"the graphfuse version is 0\.1\.0, sources \w+ on rank 0 and 0\.9\.9, sources \w+ on r",
    another_torch: STARTED + r"the torch version is 2\.11\.0 on rank 0 and 2\.0\.0 on rank 1",
    another_config: STARTED + "FuseConfig.fusion is auto on rank 0 and off on rank 1",
    other_rules: STARTED + r'FuseConfig.disabled_rules is \[\] on rank 0 and \["all_reduce_rms_norm"\] on rank 1',
    another_depth: STARTED + r"the dtype of layers\.2\.norm\.weight is float32 on rank 0 and absent on rank 1.* more\.",
    another_dtype: STARTED + r"the dtype of embed\.weight is float32 on rank 0 and bfloat16 on rank 1",
    another_width: STARTED + r"local shape of weight is \[4, 4\] on rank 0 and \[8, 8\] on rank 1",
    another_length: STARTED + r"argument 0 is \[1, 4\] int64 on rank 0 and \[1, 6\] int64 on rank 1",
    another_graph: "The ranks differ in the graphs that they traced: the number of collectives is 1 on rank 0 and 2",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_differs_is_named_on_every_rank(ranks, case, record_property):
    answers = ranks.run(2, case)
    messages, seconds = zip(*answers, strict=True)
    assert messages[0] == messages[1]
    with pytest.raises(GroupError, match=CASES[case]):
        raise GroupError(messages[0])
    record_property("seconds", max(seconds))
    assert max(seconds) < 10


def alike(group):
    uneven = nn.Linear(8, 3 if is_odd(group) else 5).requires_grad_(False)
    config = FuseConfig(dump=None if is_odd(group) else "/nowhere")
    return refused(lambda: compiled(group)), refused(lambda: agreement.require_alike(group, config, uneven, {}))


def test_uneven_shards_and_dump_folders_of_their_own_are_no_difference(ranks):
    for answers in ranks.run(3, alike):
        assert [message for message, _ in answers] == ["", ""]


def prompts(group, folder):
    llm = LLM(folder, group, device="cpu", compile=False)
    given = ["The capital", "A cat"] if is_odd(group) else ["The capital"]
    first = refused(lambda: llm.generate(given, SamplingParams(max_tokens=4)))
    params = SamplingParams(max_tokens=4, temperature=0.5 if is_odd(group) else 0.0)
    second = refused(lambda: llm.generate(["The capital"], params))
    [completion] = llm.generate(["The capital"], SamplingParams(max_tokens=4))
    return first, second, completion.token_ids


def test_other_prompts_are_refused_and_the_llm_still_works(ranks, checkpoint, record_property):
    answers = ranks.run(2, prompts, checkpoint)
    assert answers[0][2] == answers[1][2]
    for (first, seconds), (second, _), _ in answers:
        assert "what they were given to generate: the number of prompts is 1 on rank 0 and 2 on rank 1" in first
        assert "the sampling parameters" in second and "temperature=0.5" in second
        record_property("seconds", seconds)


def sizes(group, folder):
    return refused(lambda: LLM(folder, group, device="cpu", max_batch_size=2 + is_odd(group)))


def test_an_llm_of_another_size_is_refused(ranks, checkpoint):
    for message, _ in ranks.run(2, sizes, checkpoint):
        assert message.startswith(STARTED + "max_batch_size is 2 on rank 0 and 3 on rank 1")


def test_long_values_and_many_differences_stay_readable():
    found = differences([{"a": "x" * 500, "b": 1}, {"a": "y", "b": 1}, {"a": "y", "b": 1}])
    assert len(found) == 1 and len(found[0]) < 150
    assert found[0].startswith("a is xxx") and found[0].endswith("… on rank 0 and y on ranks 1, 2")
