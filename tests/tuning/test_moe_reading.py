"""Tuned configs of vLLM and SGLang are read as they are, and what was changed is said; broken ones are errors."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from graphfuse.errors import ConfigError, SchemaError
from graphfuse.tuning.moe_file_names import FileName
from graphfuse.tuning.moe_files import read_table
from graphfuse.tuning.moe_shared_memory import Limits, shared_memory_bytes
from graphfuse.tuning.moe_table import MoeTable
from graphfuse.tuning.moe_tiles import Tile, Tiles
from tests.documents import ROOT
from tests.tuning.moe import FIXTURES, SMALL_MEMORY, both, find

pytestmark = pytest.mark.usefixtures("shipped_configs")

FP8, BLOCKS = "fp8_w8a8", (128, 128)


# --- what the peers write --------------------------------------------------------------------------------------------


def test_a_file_of_vllm_is_read_as_it_is():
    found = find("vllm", 128, 384)
    assert found.source == "E=128,N=384,device_name=NVIDIA_H200.json"
    assert [file.name for file in found.files] == [found.source]
    assert [n for n, _ in found.table.entries][:4] == [1, 2, 4, 8] and len(found.table.entries) == 18
    assert found.table.tiles(1) == both(16, 64, 128, 1, 4, 4)
    assert found.table.tiles(4096) == both(128, 256, 64, 32, 8, 3)
    assert found.notes == []


def test_another_triton_than_the_one_it_was_tuned_with_is_said():
    assert find("vllm", 128, 384, triton_version="3.4.1").notes == []
    assert find("vllm", 128, 384, triton_version="3.6.0").notes == ["it was tuned with Triton 3.4.0; 3.6.0 runs"]


@pytest.mark.usefixtures("known_heuristic")
def test_a_file_that_begins_at_96_tokens_does_not_serve_decoding():
    found = find("vllm", 128, 1024)
    assert found.notes == ["it begins at 96 tokens: the heuristic serves fewer"]
    assert found.table.tiles(8).gate_up.group_size_m == 8  # the heuristic
    assert found.table.tiles(100) == both(64, 128, 64, 16)


def test_holes_and_foreign_keys_are_said():
    assert find("vllm", 64, 640, device="NVIDIA H100 80GB HBM3").notes == [
        "SPLIT_K is ignored in 6 of 6 entries",
        "it has a hole at 4 … 64, 128 … 4096 tokens: the heuristic serves it",
    ]
    assert find("vllm", 8, 1792, device="AMD Instinct MI300X").notes == [
        f"{key} is ignored in 4 of 4 entries" for key in ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
    ]


def test_entries_may_stand_in_any_order_and_notes_come_to_an_end(tmp_path):
    tile = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4}
    entry = tile | {"num_stages": 3} | {f"KEY_{n}": n for n in range(20)}
    (tmp_path / "E=8,N=256,device_name=NVIDIA_H200.json").write_text(json.dumps({"8": entry, "2": entry, "4": entry}))
    found = find(tmp_path, 8, 256)
    assert [n for n, _ in found.table.entries] == [2, 4, 8]
    assert found.notes == [
        *(f"KEY_{n} is ignored in 3 of 3 entries" for n in range(8)),
        "12 more keys are ignored",
        "it begins at 2 tokens: the heuristic serves fewer",
    ]


def test_where_warps_and_stages_are_missing_tritons_own_count():
    found = find("vllm", 16, 96, device="NVIDIA L40S", dtype="int8_w8a16")
    assert found.table.tiles(2) == both(16, 32, 64, 1, 4, 3)
    assert found.notes == [
        "num_warps is missing and taken to be 4, as in Triton, in 1 of 2 entries",
        "num_stages is missing and taken to be 3, as in Triton, in 1 of 2 entries",
    ]


def test_a_step_over_inputs_is_a_block_that_shares_a_scale():
    found = find("vllm", 256, 256, dtype=FP8, block_shape=BLOCKS)
    assert [tiles.gate_up.block_size_k for _, tiles in found.table.entries] == [128] * 4
    assert "fit blocks of 128 inputs that share a scale for 1, 4 tokens" in found.notes[-1]


def test_a_block_shape_is_found_with_a_space_in_the_name_and_without():
    for folder, num_experts in (("vllm", 256), ("sglang", 257)):
        assert "block_shape=[128," in find(folder, num_experts, 256, dtype=FP8, block_shape=BLOCKS).source


def test_the_tile_for_down_takes_its_block_size_m_from_gate_up():
    found = find("sglang", 257, 256, dtype=FP8, block_shape=BLOCKS)
    name = "E=257,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128]"
    assert [file.name for file in found.files] == [f"{name}.json", f"{name}_down.json"]
    assert found.table.tiles(1) == Tiles(Tile(16, 64, 128), Tile(16, 128, 128, num_stages=4))
    assert found.table.tiles(4) == Tiles(Tile(64, 64, 128), Tile(64, 128, 128))
    assert found.table.tiles(16) == Tiles(Tile(64, 128, 128, 32), Tile(64, 256, 128, 16, 8))
    assert found.notes == [
        "it is for Triton 3.4.0",
        "USE_TMA is ignored in 1 of 3 entries",
        f"{name}_down.json: USE_TMA is ignored in 2 of 3 entries",
        f"{name}_down.json: BLOCK_SIZE_M is that of the file without _down for 4, 16 tokens, as both products share "
        "one sort",
    ]


@pytest.mark.parametrize(
    ("running", "taken", "note"),
    [
        ("3.2.0", "triton_3_2_0", "it is for Triton 3.2.0"),
        ("3.3.1", "triton_3_2_0", "it is for Triton 3.2.0; 3.3.1 runs"),
        ("3.5.0", "triton_3_4_0", "it is for Triton 3.4.0; 3.5.0 runs"),
        ("3.10.0+git12ab", "triton_3_5_1", "it is for Triton 3.5.1; 3.10.0 runs"),
        ("3.1.0", "triton_3_2_0", "it is for Triton 3.2.0; 3.1.0 runs"),
        ("unknown", "triton_3_5_1", "it is for Triton 3.5.1"),
    ],
)
def test_of_folders_for_triton_versions_the_newest_not_newer_than_the_running_one_is_taken(running, taken, note):
    found = find("sglang", 257, 256, dtype=FP8, block_shape=BLOCKS, triton_version=running)
    assert found.files[0].parent.name == taken and found.notes[0] == note


def test_a_version_without_the_file_does_not_count():
    found = find("sglang", 60, 352, triton_version="3.4.0")
    assert found.files[0].parent.name == "triton_3_5_1"
    assert found.notes == ["it is for Triton 3.5.1; 3.4.0 runs"]


def test_scales_of_each_channel_have_files_of_their_own():
    assert find("sglang", 32, 512, dtype=FP8).notes == [
        "it is for Triton 3.4.0",
        "it was tuned for a scale of each channel",
    ]


def test_what_a_smaller_gpu_cannot_hold_is_made_smaller():
    device = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    found = find("vllm", 16, 2048, device=device, shared_memory=SMALL_MEMORY)
    assert found.notes == [
        "stages or blocks are made to fit 101,376 bytes of shared memory for 4, 16, 64 tokens",
    ]
    limits = Limits(SMALL_MEMORY)
    assert all(shared_memory_bytes(tiles.gate_up, limits) <= SMALL_MEMORY for _, tiles in found.table.entries)
    assert found.table.tiles(1) == both(16, 64, 64)
    assert MoeTable.from_text(found.table.to_text()).tiles(4) == found.table.tiles(4) != both(64, 256, 64, 8, 8, 4)


def test_the_example_of_the_documentation_is_a_file(tmp_path):
    (example,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "moe.md").read_text(), re.DOTALL)
    (tmp_path / "E=128,N=384,device_name=NVIDIA_H200.json").write_text(example)
    found = find(tmp_path, 128, 384, triton_version="3.6.0")
    assert [n for n, _ in found.table.entries] == [1, 64] and found.table.measured_us == ((1, 27.1),)


# --- broken files ----------------------------------------------------------------------------------------------------

BROKEN = {
    "missing_key": "the key 64.BLOCK_SIZE_K is missing",
    "text_for_a_number": "the key 64.BLOCK_SIZE_N is '64', which is not an integer",
    "float_for_a_number": "the key 64.num_warps is 4.0, which is not an integer",
    "true_for_a_number": "the key 64.num_stages is True, which is not an integer",
    "zero": "the key 64.num_stages is 0, which is not one of 1 to 10",
    "negative": "the key 64.GROUP_SIZE_M is -1, which is not one of 1 to 1024",
    "not_a_power_of_two": "the key 64.BLOCK_SIZE_M is 48, which is not a power of two from 16 to 256",
    "too_large": "the key 64.BLOCK_SIZE_N is 1024, which is not a power of two from 16 to 512",
    "three_warps": "the key 64.num_warps is 3, which is not one of 1, 2, 4, 8, 16",
    "swap_is_a_number": "the key 64.SWAP_AB is 1, which is not true or false",
    "no_object": "the key 64 is [16, 64, 64], which is not an object",
    "no_entries": "has no entry for any number of tokens. Give it keys such as 1, 64 and 4096",
    "key_of_no_tokens": "the key default is no number of tokens from 1 to",
    "foreign_digits": "the key ٦٤ is no number of tokens from 1 to",
    "leading_zero": "the key 064 begins with a zero; a number of tokens is written 64",
    "zero_tokens": "the key 0 is no number of tokens from 1 to",
    "triton_version_is_a_number": "the key triton_version is 3.4, which is not a string",
    "cut_off": "cannot be read as JSON: Unterminated string",
    "key_twice": "the key '64' stands twice in one object",
    "not_a_number": "the key 64.us is nan, which is not a finite number",
    "a_list": "holds a list, not a JSON object",
    "deep": "it is nested more than 64 levels deep",
    "provenance_without_top_k": "the key provenance.top_k is missing",
}


def test_each_broken_fixture_has_its_message():
    assert {path.name for path in (FIXTURES / "broken").iterdir()} == set(BROKEN)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_an_error_that_names_file_key_and_what_to_do(fault):
    with pytest.raises(SchemaError, match=re.escape(BROKEN[fault])) as error:
        find(f"broken/{fault}", 8, 256)
    text = str(error.value)
    assert f"broken/{fault}/E=8,N=256,device_name=NVIDIA_H200.json" in text
    assert re.search(r"(Correct the file|Check the file( or give another one)?|or remove it)\.$", text)


def test_a_broken_file_for_down_is_named(tmp_path):
    name = "E=128,N=384,device_name=NVIDIA_H200"
    shutil.copy(FIXTURES / "vllm" / f"{name}.json", tmp_path)
    (tmp_path / f"{name}_down.json").write_text("{}")
    with pytest.raises(SchemaError, match=r"_down.json has no entry"):
        find(tmp_path, 128, 384)


def test_a_file_by_another_name_says_how_to_call_it():
    with pytest.raises(ConfigError, match=r'is not named like a tuned MoE config. Call it "E=128,N=384,device_name='):
        read_table(FIXTURES / "misnamed" / "E=8,N=256,device=NVIDIA_H200.json", 2048, 8)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(FIXTURES.rglob("*.json")), ids=lambda path: path.stem[:40])
def test_names_are_parsed_as_they_are_written(path):
    name = FileName.parse(path.name)
    if path.parent.name == "misnamed":
        assert name is None
    else:
        assert name is not None and path.name in name.spellings()


@pytest.mark.parametrize(
    "name",
    ["", "E=8.json", "E=8,N=,device_name=a.json", "E=٣,N=1,device_name=a.json", "E=8,N=1,device_name=a.json.bak",
     "E=8,N=1,device_name=a,block_shape=[128].json", "E=8,N=1,device_name=a,dtype=x,y=1.json"],
)  # fmt: skip
def test_other_names_are_none(name):
    assert FileName.parse(name) is None
