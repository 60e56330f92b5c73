"""Size tables: what ships is what the measurements say, tables are found, written and read, damage names its place."""

import copy
import dataclasses
import json

import pytest

from graphfuse.comm.table import (
    FOLDER,
    REFERENCE_ONLY,
    TABLE_FOLDER_VARIABLE,
    Measurement,
    SizeRange,
    SizeTable,
    find_table,
)
from graphfuse.errors import ConfigError, SchemaError

SHIPPED = sorted(FOLDER.glob("*.json"))
NOISE = 1.03
SMALL = (SizeRange(1 << 20, "flashinfer", "oneshot"), *REFERENCE_ONLY)
WIDE = (SizeRange(1 << 21, "symm_mem", "one_shot"), SizeRange(None, "symm_mem", "two_shot"))
TABLE = SizeTable(
    device_name="NVIDIA B300",
    world_size=2,
    dtypes=("bfloat16", "float16"),
    stands_in_for=("NVIDIA B200",),
    classes=((2048, SMALL), (4096, REFERENCE_ONLY), (None, WIDE)),
    provenance={
        "host": "a made-up host",
        "link": "18 NVLinks",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "date": "2026-12-01",
        "method": "none",
        "source": "this test",
        "note": "Not [measured] at {all}.",
        "measured": [
            {"hidden": 2048, "tokens": 1, "us": {"unfused": 8, "flashinfer/oneshot": 5.5}},
            {"hidden": 2048, "tokens": 64, "us": {"unfused": 12.0}},
        ],
    },
)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_table_follows_the_schema_and_is_named_after_its_host(file):
    table = SizeTable.read(file)
    assert file.name == f"device_name={table.device_name.replace(' ', '_')},tp={table.world_size}.json"
    assert find_table(table.device_name, table.world_size, table.dtypes[0]) == table


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_table_takes_a_fused_kernel_only_where_it_was_measured_no_slower_than_unfused(file):
    table = SizeTable.read(file)
    for row in table.measured:
        num_bytes = row.tokens * row.hidden_size * 2
        chosen = next(r for r in table.ranges(row.hidden_size) if r.max_bytes is None or num_bytes <= r.max_bytes)
        if chosen.backend != "reference":
            assert row.us[chosen.label] < row.us["unfused"] * NOISE, row


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_table_is_laid_out_as_one_is_written(file, tmp_path):
    assert SizeTable.read(file).write(tmp_path).read_text() == file.read_text()


CLASSES = [(1, SMALL), (2048, SMALL), (2049, REFERENCE_ONLY), (4096, REFERENCE_ONLY), (4097, WIDE), (65536, WIDE)]


@pytest.mark.parametrize(("hidden_size", "ranges"), CLASSES)
def test_a_hidden_size_belongs_to_the_first_class_that_holds_it(hidden_size, ranges):
    assert TABLE.ranges(hidden_size) == ranges


def test_measurements_are_by_candidate_and_a_range_knows_the_name_of_its_own():
    assert TABLE.measured == (
        Measurement(2048, 1, {"unfused": 8, "flashinfer/oneshot": 5.5}),
        Measurement(2048, 64, {"unfused": 12.0}),
    )
    assert [r.label for r in SMALL + WIDE] == [
        "flashinfer/oneshot",
        "reference",
        "symm_mem/one_shot",
        "symm_mem/two_shot",
    ]


def test_a_table_that_was_written_is_read_as_it_was(tmp_path):
    file = TABLE.write(tmp_path / "new folder")
    assert file == tmp_path / "new folder" / "device_name=NVIDIA_B300,tp=2.json"
    table = SizeTable.read(file)
    assert table == TABLE
    assert (table.path, table.file) == (file, TABLE.file)
    assert json.loads(file.read_text()) == TABLE.to_json()
    assert TABLE.write(tmp_path / "other.json") == tmp_path / "other.json"


@pytest.mark.parametrize("name", ["a/../../b", "/b", "a\\b", "a\0b", "a b\tc"])
def test_a_table_stays_in_its_folder_whatever_the_device_is_called(name, tmp_path):
    folder = tmp_path / "tables"
    assert find_table(name, 2, "bfloat16", [folder]) is None
    try:
        file = dataclasses.replace(TABLE, device_name=name).write(folder)
    except SchemaError as error:
        assert "characters that cannot be shown" in str(error)
    else:
        assert file.resolve().parent == folder
        assert find_table(name, 2, "bfloat16", [folder]) is not None


def test_a_table_whose_name_no_file_can_have_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"The size table cannot be written: .*too long"):
        dataclasses.replace(TABLE, device_name="x" * 5000).write(tmp_path)
    assert find_table("x" * 5000, 2, "bfloat16", [tmp_path]) is None


def test_a_written_table_has_a_line_for_each_range_and_each_measured_size(tmp_path):
    lines = [line.strip().rstrip(",") for line in TABLE.write(tmp_path).read_text().splitlines()]
    assert '"dtypes": [ "bfloat16", "float16" ]' in lines
    assert '{ "max_bytes": 1048576, "backend": "flashinfer", "variant": "oneshot" }' in lines
    assert '{ "hidden": 2048, "tokens": 1, "us": { "unfused": 8, "flashinfer/oneshot": 5.5 } }' in lines


def test_a_table_against_the_schema_is_not_written(tmp_path):
    table = dataclasses.replace(TABLE, classes=((None, SMALL[:1]),))
    with pytest.raises(SchemaError, match=r"ranges\[0\]\.max_bytes must be null"):
        table.write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_table_that_cannot_be_written_says_what_to_give(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*Give another file or folder"):
        TABLE.write(tmp_path / "file" / "table.json")


def test_no_table_for_an_unmeasured_host_number_of_ranks_or_dtype():
    assert find_table("NVIDIA H200", 7, "bfloat16") is None
    assert find_table("NVIDIA B200", 2, "bfloat16") is None
    assert find_table("NVIDIA H200", 2, "float64") is None
    assert find_table(None, 2, "bfloat16") is None


def test_a_table_stands_in_for_the_gpus_it_names_at_its_number_of_ranks(tmp_path):
    TABLE.write(tmp_path)
    assert find_table("NVIDIA B200", 2, "bfloat16", [tmp_path]) == TABLE
    assert find_table("NVIDIA B200", 4, "bfloat16", [tmp_path]) is None
    assert find_table("NVIDIA B200", 2, "float32", [tmp_path]) is None
    assert find_table("NVIDIA B100", 2, "bfloat16", [tmp_path]) is None


def test_a_table_measured_on_the_gpu_comes_before_one_that_stands_in(tmp_path):
    own = dataclasses.replace(TABLE, device_name="NVIDIA B200", stands_in_for=(), classes=((None, WIDE),))
    own.write(tmp_path / "later")
    TABLE.write(tmp_path / "first")
    folders = [tmp_path / "first", tmp_path / "later"]
    assert find_table("NVIDIA B200", 2, "bfloat16", folders) == own
    assert find_table("NVIDIA B300", 2, "bfloat16", folders) == TABLE


def test_a_folder_of_ones_own_is_looked_at_before_the_shipped_one(tmp_path, monkeypatch):
    monkeypatch.setenv(TABLE_FOLDER_VARIABLE, str(tmp_path))
    shipped = find_table("NVIDIA H200", 2, "bfloat16")
    assert shipped is not None
    assert shipped.path.parent == FOLDER
    own = dataclasses.replace(TABLE, device_name="NVIDIA H200", dtypes=("bfloat16",))
    file = own.write(tmp_path)
    assert find_table("NVIDIA H200", 2, "bfloat16").path == file
    assert find_table("NVIDIA H200", 2, "float16") == shipped


def test_a_folder_of_ones_own_that_is_none_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv(TABLE_FOLDER_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"GRAPHFUSE_ALLREDUCE_TABLES='.*absent' is not a folder\. Give an existing"):
        find_table("NVIDIA H200", 2, "bfloat16")


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


FIRST, LAST = ("hidden_sizes", 0, "ranges", 0), ("hidden_sizes", 0, "ranges", 1)
MEASURED = ("provenance", "measured", 0)
BROKEN = {
    "unknown key": (at("device")("H200"), "the key device is not known"),
    "unknown key in a class": (at("hidden_sizes", 0, "upto")(1), "hidden_sizes[0].upto is not known"),
    "unknown key in a range": (at(*FIRST, "blocks")(1), "ranges[0].blocks is not known"),
    "the schema before": (at("schema")(1), "schema is 1; this version of graphfuse reads 2"),
    "no ranks": (at("world_size")(0), "world_size is 0, which is not above zero"),
    "more bytes than there are": (at(*FIRST, "max_bytes")(2**63), "which does not fit 64 bits"),
    "no time at all": (at(*MEASURED, "us", "unfused")(0), "measured[0].us.unfused is 0, which is not above zero"),
    "a time that is none": (
        at(*MEASURED, "us", "unfused")(float("nan")),
        "unfused is nan, which is not a finite number",
    ),
    "a negative size": (at(*MEASURED, "tokens")(-1), "measured[0].tokens is -1, which is not above zero"),
    "unknown backend": (at(*FIRST, "backend")("nccl"), "backend is 'nccl'"),
    "unknown variant": (at(*FIRST, "variant")("twoshot"), "variant is 'twoshot'; flashinfer has 'oneshot'"),
    "variant of another backend": (at(*FIRST, "backend")("symm_mem"), "symm_mem has 'one_shot', 'two_shot'"),
    "variant of reference": (at(*LAST, "variant")("oneshot"), "variant is 'oneshot'; reference has null"),
    "a limited last range": (at(*LAST, "max_bytes")(1 << 30), "max_bytes must be null in the"),
    "an unlimited first range": (at(*FIRST, "max_bytes")(None), "flashinfer takes less than 1"),
    "more than the buffers": (at(*FIRST, "max_bytes")(1 << 29), "flashinfer takes less than 1"),
    "a limit of nothing": (at(*FIRST, "max_bytes")(0), "is 0, which is not above the 0 before it"),
    "falling classes": (at("hidden_sizes", 1, "up_to")(1024), "up_to is 1024, which is not above the 2048 before it"),
    "no class for the rest": (at("hidden_sizes", 2, "up_to")(9999), "up_to must be null in the last entry"),
    "no classes": (at("hidden_sizes")([]), "hidden_sizes is an empty list"),
    "a number for a list": (at("hidden_sizes")(3), "hidden_sizes is 3, which is not a list"),
    "a string for a limit": (at(*FIRST, "max_bytes")("4M"), "is '4M', which is not an integer"),
    "an unknown dtype": (at("dtypes")(["bf16"]), "dtypes holds 'bf16'"),
    "one GPU for a list": (at("stands_in_for")("NVIDIA B200"), "stands_in_for is 'NVIDIA B200', which is not a list"),
    "GPUs that are not text": (at("stands_in_for")([200]), "stands_in_for holds something that is not a string"),
    "an incomplete measurement": (at(*MEASURED)({"hidden": 1}), "measured[0].tokens is missing"),
    "a measurement as it was before": (at(*MEASURED, "unfused_us")(8), "measured[0].unfused_us is not known"),
    "no time": (at(*MEASURED, "us", "unfused")(None), "measured[0].us.unfused is None, which is not an integer or a n"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_table_names_the_file_and_the_key(case, tmp_path):
    change, problem = BROKEN[case]
    file = tmp_path / "table.json"
    file.write_text(json.dumps(change(copy.deepcopy(TABLE.to_json()))))
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
