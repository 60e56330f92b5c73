"""Size tables: what ships is what the measurements say, and a damaged file names itself and the key."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest

from graphfuse.comm.table import FOLDER, SizeRange, SizeTable, find_table
from graphfuse.errors import SchemaError

ROOT = Path(__file__).parent.parent.parent
SHIPPED = sorted(FOLDER.glob("*.json"))
H200_X2 = FOLDER / "device_name=NVIDIA_H200,tp=2.json"


def maker():
    """The script that makes tables, as a module."""
    spec = importlib.util.spec_from_file_location("make_allreduce_table", ROOT / "benchmarks/make_allreduce_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_table_follows_the_schema_and_is_named_after_its_host(file):
    table = SizeTable.read(file)
    assert file.name == f"device_name={table.device_name.replace(' ', '_')},tp={table.world_size}.json"
    assert find_table(table.device_name, table.world_size, table.dtypes[0]) == table


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_table_takes_flashinfer_only_where_it_was_measured_faster_than_unfused(file):
    table = SizeTable.read(file)
    for row in table.provenance["measured"]:
        num_bytes = row["tokens"] * row["hidden"] * 2
        ranges = table.ranges(row["hidden"])
        chosen = next(r for r in ranges if r.max_bytes is None or num_bytes <= r.max_bytes)
        if chosen.backend == "flashinfer":
            assert row["flashinfer_us"] < row["unfused_us"], row


def test_the_table_of_two_h200_is_what_the_script_makes_of_the_measurements():
    script = maker()
    sources = sorted((ROOT / "benchmarks/results").glob("allreduce_fused_vs_unfused_h200x2.json"))
    table = script.make_table(sources, "NVIDIA H200", 2, 2048, "18 NVLinks a GPU, a peer copy reaches 392 GB/s")
    assert script.to_text(table) == H200_X2.read_text()


def test_the_script_stops_at_the_first_size_where_flashinfer_loses():
    def row(tokens, unfused, flashinfer):
        return {"hidden": 64, "tokens": tokens, "nccl+norm": unfused, "fi1": flashinfer}

    paying_tokens = maker().paying_tokens
    assert paying_tokens([row(1, 10, 5), row(8, 10, 9), row(64, 10, 11), row(512, 40, 20)], 1024) == 8
    assert paying_tokens([row(1, 10, 5), row(2048, 10, 9)], 1024) == 1
    with pytest.raises(ValueError, match="never beat"):
        paying_tokens([row(1, 10, 10)], 1024)
    with pytest.raises(ValueError, match="measured twice"):
        paying_tokens([row(1, 10, 5), row(1, 10, 6)], 1024)


CLASSES = [(1024, 4096), (2048, 2048), (2880, 2912), (4096, 2048), (7168, 2048)]


@pytest.mark.parametrize(("hidden_size", "tokens"), CLASSES)
def test_a_hidden_size_belongs_to_the_first_class_that_holds_it(hidden_size, tokens):
    limit, rest = SizeTable.read(H200_X2).ranges(hidden_size)
    assert limit.max_bytes // (hidden_size * 2) == tokens
    assert rest == SizeRange(None, "reference")


def test_no_table_for_an_unmeasured_host_number_of_ranks_or_dtype():
    assert find_table("NVIDIA H200", 4, "bfloat16") is None
    assert find_table("NVIDIA B200", 2, "bfloat16") is None
    assert find_table("NVIDIA H200", 2, "float32") is None
    assert find_table(None, 2, "bfloat16") is None


def at(*path):
    """A change of one value inside a table."""

    def change(value):
        def apply(table):
            target = table
            for key in path[:-1]:
                target = target[key]
            target[path[-1]] = value
            return table

        return apply

    return change


BROKEN = {
    "unknown key": (at("device")("H200"), "the key device is not known"),
    "unknown key in a class": (at("hidden_sizes", 0, "upto")(1), "hidden_sizes[0].upto is not known"),
    "unknown key in a range": (at("hidden_sizes", 0, "ranges", 0, "blocks")(1), "ranges[0].blocks is not known"),
    "another schema": (at("schema")(2), "schema is 2; this version of graphfuse reads 1"),
    "unknown backend": (at("hidden_sizes", 0, "ranges", 0, "backend")("nccl"), "backend is 'nccl'"),
    "unknown variant": (at("hidden_sizes", 0, "ranges", 0, "variant")("twoshot"), "variant is 'twoshot'"),
    "variant of reference": (at("hidden_sizes", 0, "ranges", 1, "variant")("oneshot"), "variant is 'oneshot'"),
    "a limited last range": (at("hidden_sizes", 0, "ranges", 1, "max_bytes")(1 << 30), "max_bytes must be null in the"),
    "an unlimited first range": (at("hidden_sizes", 0, "ranges", 0, "max_bytes")(None), "flashinfer takes less than 1"),
    "more than the buffers": (at("hidden_sizes", 0, "ranges", 0, "max_bytes")(1 << 29), "flashinfer takes less than 1"),
    "a limit of nothing": (at("hidden_sizes", 0, "ranges", 0, "max_bytes")(0), "flashinfer takes less than"),
    "falling classes": (at("hidden_sizes", 1, "up_to")(1024), "up_to is 1024, which is not above the 2048 before it"),
    "no class for the rest": (at("hidden_sizes", 2, "up_to")(9999), "up_to must be null in the last entry"),
    "no classes": (at("hidden_sizes")([]), "hidden_sizes is an empty list"),
    "a number for a list": (at("hidden_sizes")(3), "hidden_sizes is 3, which is not a list"),
    "a string for a limit": (at("hidden_sizes", 0, "ranges", 0, "max_bytes")("4M"), "is '4M', which is not an integer"),
    "an unknown dtype": (at("dtypes")(["bf16"]), "dtypes holds 'bf16'"),
    "an incomplete measurement": (at("provenance", "measured", 0)({"hidden": 1}), "measured[0].tokens is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_table_names_the_file_and_the_key(case, tmp_path):
    change, problem = BROKEN[case]
    table = change(copy.deepcopy(json.loads(H200_X2.read_text())))
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table))
    with pytest.raises(SchemaError) as error:
        SizeTable.read(file)
    assert str(file) in str(error.value)
    assert problem in str(error.value)


def test_a_file_that_is_no_json_object_says_so(tmp_path):
    file = tmp_path / "table.json"
    file.write_text("[]")
    with pytest.raises(SchemaError, match="holds a list, not a JSON object"):
        SizeTable.read(file)
    file.write_text("{")
    with pytest.raises(SchemaError, match="cannot be read as JSON"):
        SizeTable.read(file)
