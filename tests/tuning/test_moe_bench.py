"""A measurement of MoE layers: what is timed, what is absent and why. On the CPU with made-up times."""

import pytest
import torch

from graphfuse.tuning import moe_bench
from graphfuse.tuning.moe_alternatives import grouped_mm
from graphfuse.tuning.moe_bench import Plan, measure
from graphfuse.tuning.moe_floor import floor_us
from graphfuse.tuning.moe_shapes import Workload
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles

SHAPE = MoeShape(8, 32, 64, 2)
ENTRY = Tiles(Tile(64, 64, 64), Tile(64, 32, 32))
US = {"tuned": 10.0, "heuristic": 12.0, "grouped_mm": 30.0}


@pytest.fixture
def cpu(monkeypatch):
    """Stands in for a GPU: recordings are names, with times of their own; the kernels are torch's grouped products."""
    timed: list[list[str]] = []

    def replay_rounds(recordings, rounds):
        timed.append(list(recordings))
        return {name: [US[name]] * rounds for name in recordings}

    monkeypatch.setattr(moe_bench, "check_gpu", lambda: None)
    monkeypatch.setattr(moe_bench, "current_gpu", lambda: (torch.device("cpu"), "GPU"))
    monkeypatch.setattr(moe_bench, "num_sets", lambda num_tokens: 2)
    monkeypatch.setattr(moe_bench, "new_pool", lambda: None)
    monkeypatch.setattr(moe_bench, "kernels_of", lambda calls: [call() for call in calls] and [])
    monkeypatch.setattr(moe_bench, "record", lambda calls, pool: [call() for call in calls])
    monkeypatch.setattr(moe_bench, "replay_rounds", replay_rounds)
    monkeypatch.setattr(moe_bench, "ours", lambda layer, table: grouped_mm(layer))
    return timed


@pytest.fixture
def table_for_4_tokens(monkeypatch):
    found = moe_bench.find_table(SHAPE, "GPU", shared_memory=232_448)
    table = type(found.table)(SHAPE, ((4, ENTRY),), "E=8,N=32.json", limits=found.table.limits)
    monkeypatch.setattr(moe_bench, "find_table", lambda *a, **k: type(found)(table))


def run(tokens, **options):
    return measure(Plan((("tiny", Workload(SHAPE, "bf16")),), tokens, rounds=3, **options))


def test_a_row_has_time_error_and_floor_of_each_candidate(cpu, table_for_4_tokens):
    measured = run((4,))
    (shape,), (row,) = measured.shapes, measured.rows
    assert (shape.name, shape.key, shape.table) == ("tiny", (8, 32, 64, 2, "bf16"), "E=8,N=32.json")
    assert row.us == US and set(row.spread) == set(row.error) == set(US)
    assert max(row.error.values()) < 1e-2 and row.tuned_by == "E=8,N=32.json"
    assert 2 <= row.experts_touched <= 8
    assert row.floor_us == pytest.approx(floor_us(SHAPE, 4, row.experts_touched, "bf16"), abs=0.01)
    assert "FlashInfer" in shape.absent["flashinfer"] or "SM90" in shape.absent["flashinfer"]


def test_where_the_heuristic_serves_it_is_timed_once(cpu, table_for_4_tokens):
    many = run((4, 64)).rows[1]
    assert cpu == [["tuned", "heuristic", "grouped_mm"], ["heuristic", "grouped_mm"]]
    assert many.us["tuned"] == many.us["heuristic"] == 12.0 and many.tuned_by == "heuristic"
    assert many.error["tuned"] == many.error["heuristic"] and many.spread["tuned"] == 0


def test_a_candidate_that_is_wrong_or_fails_is_absent_with_the_reason(cpu, monkeypatch, table_for_4_tokens):
    def wrong(layer):
        return lambda tokens, ids, shares: torch.zeros_like(tokens)

    monkeypatch.setattr(moe_bench, "grouped_mm", wrong)
    measured = run((4,))
    assert measured.shapes[0].absent["grouped_mm"] == "At 4 tokens: its result is wrong by 1.0e+00"
    assert set(measured.rows[0].us) == {"tuned", "heuristic"}

    def failing(layer):
        return lambda tokens, ids, shares: 1 / 0

    monkeypatch.setattr(moe_bench, "grouped_mm", failing)
    assert run((4,)).shapes[0].absent["grouped_mm"] == "At 4 tokens: ZeroDivisionError: division by zero"


def test_kernels_that_cannot_run_are_absent(cpu, monkeypatch):
    monkeypatch.setattr(moe_bench, "ours", lambda layer, table: "It needs SM80.")
    measured = run((2,))
    assert measured.shapes[0].absent["tuned"] == measured.shapes[0].absent["heuristic"] == "It needs SM80."
    assert measured.rows[0].us == {"grouped_mm": 30.0}


def test_the_usual_shapes_have_names_that_tell_model_ranks_and_dtype():
    shapes = moe_bench.benched_shapes()
    assert shapes["qwen3-30b-a3b-tp2-bf16"] == Workload(MoeShape(128, 384, 2048, 8), "bf16")
    assert shapes["gpt-oss-120b-tp2-bf16"] == Workload(MoeShape(128, 1440, 2880, 4), "bf16_bias_interleaved")
    blocks = MoeShape(256, 256, 7168, 8, "fp8_w8a8", (128, 128))
    assert shapes["deepseek-v3-tp8-fp8_block"] == Workload(blocks, "fp8_block")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        (MoeShape(16, 256, 512, 4), "bf16"),
        (MoeShape(16, 256, 512, 4), "bf16_bias_interleaved"),
        (MoeShape(16, 256, 512, 4, "fp8_w8a8"), "fp8_tensor"),
        (MoeShape(16, 256, 512, 4, "fp8_w8a8"), "fp8_channel"),
        (MoeShape(16, 256, 512, 4, "fp8_w8a8", (128, 128)), "fp8_block"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_each_form_is_measured_on_a_gpu(shape, form, routing):
    measured = measure(Plan((("tiny", Workload(shape, form)),), (1, 100), routing))
    assert set(measured.shapes[0].absent) <= {"flashinfer", "grouped_mm"}
    for row in measured.rows:
        assert {"tuned", "heuristic"} <= set(row.us)
        assert min(row.us.values()) > row.floor_us / 2
