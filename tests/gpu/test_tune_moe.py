"""A quick tuning run on a real GPU: a tiny shape of each form, two token counts."""

from __future__ import annotations

import csv

import pytest
import torch

from graphfuse.tuning.moe_files import find_table
from graphfuse.tuning.moe_inputs import FORMS
from graphfuse.tuning.moe_journal import OK
from graphfuse.tuning.moe_search import EFFORTS
from graphfuse.tuning.moe_shapes import Workload
from graphfuse.tuning.moe_tiles import MoeShape
from graphfuse.tuning.moe_tune import Host, Plan, tune

pytestmark = pytest.mark.gpu


def workload_of(form):
    dtype = "fp8_w8a8" if form.startswith("fp8") else None
    return Workload(MoeShape(8, 256, 512, 2, dtype, (128, 128) if form == "fp8_block" else None), form)


@pytest.mark.parametrize("form", FORMS)
def test_a_quick_run_finds_tiles_that_serve(form, tmp_path):
    workload = workload_of(form)
    plan = Plan(workload, (4, 512), EFFORTS["quick"], tmp_path, "graphfuse tune moe")
    outcome = tune(plan, Host.here())
    assert list(outcome.done) == [4, 512] and outcome.missing == ()
    assert all(0 < best.us < 10_000 for best in outcome.done.values())
    with open(outcome.journal, encoding="utf-8", newline="") as stream:
        next(stream)
        trials = list(csv.DictReader(stream))
    statuses = [trial["status"] for trial in trials]
    assert statuses.count(OK) > len(statuses) / 2, set(statuses)
    assert not [status for status in statuses if "result is wrong" in status]
    found = find_table(workload.shape, torch.cuda.get_device_name(), folder=tmp_path)
    assert [num_tokens for num_tokens, _ in found.table.entries] == [4, 512]
