"""What the page is told: layers in the model's order, folds, reasons with advice, measured times."""

from __future__ import annotations

import dataclasses
import json

import pytest

from graphfuse.comm.table import find_table
from graphfuse.facts import Facts
from graphfuse.page.data import page_data
from graphfuse.page.savings import times, why_none
from graphfuse.report import Report
from tests.hosts import H200_X2
from tests.page import reports


def chain(data, name):
    """A layer in words."""
    (layer,) = (layer for layer in data["layers"] if layer["name"] == name)
    words = []
    for item in layer["items"]:
        if "part" in item:
            words.append(item["part"])
        elif "site" in item:
            words.append(f"{data['sites'][item['site']]['status']} reduction")
        else:
            words.append(f"{data['experts'][item['experts']]['status']} experts")
    return words


def test_a_layer_is_a_chain_of_parts_and_what_they_end_in():
    data = page_data(reports.two_layers(), "")
    assert [layer["name"] for layer in data["layers"]] == ["embed_tokens", "layers.0", "layers.1"]
    assert chain(data, "layers.0") == [
        "self_attn", "fused reduction", "mlp", "lowered experts", "merged reduction", "fused reduction",
    ]  # fmt: skip
    assert chain(data, "layers.1")[-3:] == ["mlp", "declined experts", "declined reduction"]


def test_paths_of_every_kind_of_model_find_their_layer():
    paths = ["model.layers.12.mlp.down_proj", "visual.blocks.3.attn.proj", "h.0", "lm_head", ""]
    data = page_data(reports.report([reports.site(path) for path in paths], []), "")
    places = [(site["layer"], site["part"]) for site in data["sites"]]
    assert places == [
        ("model.layers.12", "mlp"), ("visual.blocks.3", "attn"), ("h.0", "h"),
        ("lm_head", "lm_head"), ("(top)", "(top)"),
    ]  # fmt: skip


def test_layers_that_are_alike_fold_and_the_last_one_stands_alone():
    """The last layer's reduction feeds the final norm, so it is unlike the others."""
    data = page_data(reports.many_layers(94), "")
    assert [(f["start"], f["period"], f["repeats"]) for f in data["folds"]] == [(0, 1, 1), (1, 1, 93), (94, 1, 1)]
    assert len(data["pictures"]) == 1
    assert len(json.dumps(data)) < 300_000


def test_one_odd_layer_breaks_a_fold():
    made = reports.many_layers(9)
    odd = dataclasses.replace(
        reports.site("layers.4.self_attn.o_proj", reason=reports.SECOND_USER), id=made.sites[9].id
    )
    made.sites[9] = odd
    repeats = [fold["repeats"] for fold in page_data(made, "")["folds"]]
    assert repeats == [1, 4, 1, 3, 1]


def test_the_kind_of_a_part_says_whether_it_has_experts():
    data = page_data(reports.many_layers(2), "")
    assert list(dict.fromkeys(site["kind"] for site in data["sites"])) == [
        "embed_tokens",
        "self_attn",
        "mlp with experts",
    ]


def test_the_reason_that_came_closest_is_first_and_has_advice():
    site = page_data(reports.two_layers(), "")["sites"][4]
    first, second = site["reasons"]
    assert (first["text"], first["main"], second["main"]) == (reports.SECOND_USER, True, False)
    assert "Let the residual add alone read the reduced value" in first["advice"]
    assert site["chain"] == ["all_reduce", "add", "rms_norm"]


# --- measured times ---------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_table():
    (found,) = times(reports.gate())
    table = find_table("NVIDIA H200", 2, "bfloat16")
    measured = {row.tokens: dict(row.us) for row in table.measured if row.hidden_size == reports.HIDDEN}
    assert {row["tokens"]: row["us"] for row in found["rows"]} == measured
    assert found["from_widths"] == [reports.HIDDEN]


def test_a_hidden_size_between_two_measured_ones_is_interpolated():
    (found,) = times(reports.gate(hidden=3072))
    (low,), (high,) = times(reports.gate()), times(reports.gate(hidden=4096))
    assert found["from_widths"] == [2048, 4096]
    for row, a, b in zip(found["rows"], low["rows"], high["rows"], strict=True):
        assert row["us"]["unfused"] == pytest.approx((a["us"]["unfused"] + b["us"]["unfused"]) / 2, abs=1e-3)


def test_without_a_measured_table_there_is_no_estimate_but_a_reason():
    four = dataclasses.replace(H200_X2, world_size=4)
    assert times(reports.gate(four)) == []
    assert "no size table was measured on 4 × NVIDIA H200" in why_none(reports.gate(four))
    assert "measured on GPUs only" in why_none(reports.gate(Facts("cpu", 2)))


def test_a_report_of_nothing_is_a_page_too():
    data = page_data(Report(), "empty")
    assert data["headline"].startswith("not traced yet") and data["layers"] == []
