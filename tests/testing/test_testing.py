"""`graphfuse.testing`: fake groups come and go cleanly, traces run nothing, texts are the same everywhere, and an
assertion that fails says what to look at."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor, nn

from graphfuse.errors import GroupError, TraceMismatchError
from graphfuse.passes import default_rules
from graphfuse.testing import assert_fused, assert_golden, fake_tp, graph_text, trace

H = 64


class RowParallel(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.group = nn.Parameter(torch.ones(H, H)), group

    def forward(self, x: Tensor) -> Tensor:
        return fc.all_reduce(x @ self.weight, "sum", self.group)


class Model(nn.Module):
    """Three reductions; the later two are multiplied first and cannot be fused."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.first, self.second, self.norm = RowParallel(group), RowParallel(group), nn.RMSNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.first(x))
        return x * self.second(x) * self.second(x + 1)


INPUT = torch.ones(2, 3, H)


# --- fake_tp --------------------------------------------------------------------------------------------------------


def test_a_fake_group_is_there_inside_and_gone_behind(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with fake_tp(4, rank=1) as group:
        assert (dist.get_rank(group), dist.get_world_size(group)) == (1, 4)
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "4")
    assert not dist.is_initialized()
    assert os.environ["RANK"] == "7"
    assert "WORLD_SIZE" not in os.environ


def test_it_goes_also_when_the_body_raises():
    with pytest.raises(ZeroDivisionError), fake_tp(2):
        1 / 0  # noqa: B018
    assert not dist.is_initialized()
    with fake_tp(8) as group:
        assert group.size() == 8


def test_it_goes_also_when_the_body_has_taken_it_down():
    with fake_tp(2):
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_the_environment_is_restored_also_when_the_group_cannot_be_made(monkeypatch):
    monkeypatch.setenv("RANK", "7")

    def fail(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("no group today")

    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(RuntimeError, match="no group today"), fake_tp(2):
        pass
    assert os.environ["RANK"] == "7"


def test_one_inside_another_is_refused():
    message = r"A process group exists already\. Use fake_tp in a process that has not made one\."
    with fake_tp(2) as group:
        with pytest.raises(GroupError, match=message), fake_tp(2):
            pass
        assert dist.get_world_size(group) == 2


def test_numbers_that_are_no_rank_are_refused():
    with pytest.raises(GroupError, match=r"rank 2 of 2 is no rank\. Give 0 <= rank < world_size\."), fake_tp(2, rank=2):
        pass


def test_a_device_mesh_can_be_made_anew_each_time():
    from torch.distributed.device_mesh import init_device_mesh

    for size in (2, 4):
        with fake_tp(size):
            assert init_device_mesh("cpu", (size,)).size() == size


# --- trace ----------------------------------------------------------------------------------------------------------


def test_a_factory_is_built_on_meta_and_nothing_runs():
    devices = []

    def factory() -> nn.Module:
        model = Model(group)
        devices.extend(p.device.type for p in model.parameters())
        return model

    with fake_tp(4) as group:
        traced = trace(factory, INPUT, group)
    assert set(devices) == {"meta"}
    assert traced.report.totals == {"all_reduce": 3, "fused": 1, "merged": 0, "declined": 2}


def test_a_module_is_traced_as_it_is_and_left_so():
    with fake_tp(2) as group:
        model = Model(group).train()
        trace(model, {"x": INPUT}, group)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


def test_rules_can_be_chosen():
    with fake_tp(2) as group:
        report = trace(Model(group), INPUT, group, rules=[]).report
        assert report.totals["fused"] == 0
        assert report.sites[0].outcome() == "no rule starts at this reduction"
        rules = [rule for rule in default_rules() if rule.name == "all_reduce_add_rms_norm"]
        assert trace(Model(group), INPUT, group, rules=rules).report.totals["fused"] == 1


def test_a_model_without_a_graph_is_refused():
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> int:
            return 3

    with fake_tp(2) as group, pytest.raises(TraceMismatchError, match=r"traced into 0 graphs\. Give inputs that one"):
        trace(Constant(), INPUT, group)


# --- text and goldens -----------------------------------------------------------------------------------------------


def test_the_text_of_a_graph_is_the_same_each_time_and_names_nothing_of_this_process():
    texts = []
    for seed in range(2):
        torch.manual_seed(seed)
        with fake_tp(4) as group:
            texts.append(graph_text(trace(Model(group), INPUT, group).after))
    assert texts[0] == texts[1]
    assert not re.search(r"0x[0-9a-f]{6,}|\b[su]\d\d+\b|arg\d+_1|torch\.|\d+\.\d+\.\d+", texts[0])
    fused = r"^%\d+ = all_reduce_add_rms_norm\(.*group\)  \(f32\[s0, s1, 64\], f32\[s0, s1, 64\]\)"
    assert re.search(fused, texts[0], re.M), texts[0]
    assert "  # second" in texts[0]


def test_a_missing_golden_says_how_to_write_it(tmp_path):
    with fake_tp(2) as group:
        graph = trace(Model(group), INPUT, group).after
    path = tmp_path / "model.txt"
    with pytest.raises(
        TraceMismatchError, match=r"There is no golden graph .*model\.txt\. Run pytest --update-goldens"
    ):
        assert_golden(graph, path)
    assert not path.exists()


def test_a_graph_that_differs_is_shown_as_a_diff(tmp_path):
    with fake_tp(2) as group:
        traced = trace(Model(group), INPUT, group)
    path = tmp_path / "model.txt"
    path.write_text(graph_text(traced.after))
    assert_golden(traced.after, path)
    with pytest.raises(TraceMismatchError) as raised:
        assert_golden(traced.before, path)
    message = str(raised.value)
    assert message.startswith("The graph differs from the golden one (pytest --update-goldens accepts it):\n--- ")
    assert re.search(r"^-%\d+ = all_reduce_add_rms_norm\(", message, re.M)
    assert re.search(r"^\+%\d+ = all_reduce\(.*'sum', group\)", message, re.M)


A_USERS_TEST = """
import torch
import torch.distributed._functional_collectives as fc
from graphfuse.testing import assert_golden, fake_tp, trace


class Model(torch.nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        return fc.all_reduce(x, "sum", self.group)


def test_golden():
    with fake_tp(2) as group:
        assert_golden(trace(Model(group), torch.ones(3, 8), group).after, "golden/model.txt")
"""


def test_a_users_test_writes_its_goldens_when_asked_to(tmp_path):
    """In a project of its own, without a conftest: the option comes with the package."""
    (tmp_path / "test_mine.py").write_text(A_USERS_TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--update-goldens"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "= all_reduce(%1, 'sum', group)  f32[s0, 8]" in (tmp_path / "golden" / "model.txt").read_text()


# --- assert_fused ---------------------------------------------------------------------------------------------------


def test_what_is_fused_and_declined_can_be_asserted():
    with fake_tp(2) as group:
        report = assert_fused(Model(group), INPUT, group, fused=1, declined={"second": "no residual add follows"})
    assert report.totals["fused"] == 1


@pytest.mark.parametrize(
    ("fused", "declined", "message"),
    [
        (2, {"second": "no residual add follows"}, "1 reductions are fused, expected 2"),
        (1, {}, "second is declined, unexpectedly: "),
        (1, {"second": "bad weather"}, "expected 'bad weather' in it"),
        (1, {"second": "no residual add", "third": "no"}, "third is not among the declined ones"),
    ],
)
def test_an_assertion_that_fails_says_why_and_shows_the_report(fused, declined, message):
    with fake_tp(2) as group, pytest.raises(TraceMismatchError) as raised:
        assert_fused(Model(group), INPUT, group, fused=fused, declined=declined)
    assert message in str(raised.value)
    assert "graphfuse: 3 all-reduces: 1 fused, 0 merged, 2 declined" in str(raised.value)
