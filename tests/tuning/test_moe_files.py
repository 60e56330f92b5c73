"""Where tuned configs are looked for, how ours are written, and that the shipped ones are sound."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphfuse.errors import ConfigError, SchemaError
from graphfuse.tuning import moe_files
from graphfuse.tuning.moe_file_names import FileName, relatives
from graphfuse.tuning.moe_files import FOLDER, find_table, read_table, write_table
from graphfuse.tuning.moe_schema import Contents, Provenance
from graphfuse.tuning.moe_shared_memory import Limits, shared_memory_bytes
from graphfuse.tuning.moe_table import MoeTable
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles
from tests.tuning.moe import FIXTURES, SMALL_MEMORY, both, find

pytestmark = pytest.mark.usefixtures("shipped_configs")

H200, FP8, BLOCKS = "NVIDIA H200", "fp8_w8a8", (128, 128)


# --- where is looked -------------------------------------------------------------------------------------------------


def shipped_copy(folder: Path, name: str, new_name: str | None = None) -> None:
    folder.mkdir(exist_ok=True)
    shutil.copy(FIXTURES / "vllm" / name, folder / (new_name or name))


def test_the_users_folder_comes_before_the_shipped_one(shipped_configs):
    name = "E=128,N=384,device_name=NVIDIA_H200.json"
    shipped_copy(shipped_configs, "E=128,N=1024,device_name=NVIDIA_H200.json", name)
    assert find("vllm", 128, 384).files == (FIXTURES / "vllm" / name,)
    assert find(None, 128, 384).files == (shipped_configs / name,)
    found = find("misnamed", 128, 384)
    assert found.files == (shipped_configs / name,)
    assert f"{FIXTURES / 'misnamed'} has none for this shape and device" in found.notes


def test_a_like_device_stands_in_where_the_devices_own_file_is_nowhere(shipped_configs):
    found = find("vllm", 128, 384, device="NVIDIA H100 PCIe")
    assert found.source == "E=128,N=384,device_name=NVIDIA_H200.json"
    assert found.notes == ["it was tuned on NVIDIA H200, as there is none for NVIDIA H100 PCIe"]
    shipped_copy(shipped_configs, found.source, "E=128,N=384,device_name=NVIDIA_H100_PCIe.json")
    assert find("vllm", 128, 384, device="NVIDIA H100 PCIe").files[0].parent == shipped_configs


def test_devices_stand_in_only_within_a_family():
    assert {"NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"} <= set(relatives(H200))
    assert relatives("NVIDIA_H100_80GB_HBM3")[:1] and H200 not in relatives(H200)
    assert relatives("NVIDIA H20") == ["NVIDIA H20-3e"] and relatives("Tesla T4") == []


def test_without_a_file_the_heuristic_serves_and_what_was_looked_for_is_said(shipped_configs):
    found = find("misnamed", 8, 256)
    assert (found.source, found.files, found.table.entries) == ("heuristic", (), ())
    looked, similar = found.notes
    folder = FIXTURES / "misnamed"
    assert looked.startswith(
        f"there is no E=8,N=256,device_name=NVIDIA_H200.json in {folder} or the shipped configs, nor one for NVIDIA H"
    )
    assert similar == f"{folder} has E=8,N=256,device=NVIDIA_H200.json"
    alone = find(None, 8, 256, dtype=FP8, block_shape=BLOCKS, device="Tesla T4").notes
    assert alone == [
        "there is no E=8,N=256,device_name=Tesla_T4,dtype=fp8_w8a8,block_shape=[128,128].json in the shipped configs"
    ]


def test_the_heuristic_keeps_to_the_devices_memory_too():
    assert find(None, 8, 256, shared_memory=SMALL_MEMORY).table.limits == Limits(SMALL_MEMORY)


def test_the_device_is_asked_for_its_memory(monkeypatch):
    properties = SimpleNamespace(shared_memory_per_block_optin=232_448)
    for name, value in (("is_available", True), ("current_device", 0), ("get_device_properties", properties)):
        monkeypatch.setattr(torch.cuda, name, lambda *_args, value=value: value)
    assert find(None, 8, 256).table.limits == Limits(232_448)


def test_a_folder_that_is_gone_is_as_good_as_an_empty_one(tmp_path):
    assert find(tmp_path / "none", 8, 256).source == "heuristic"


@pytest.mark.parametrize("device", ["../../etc", "a/b", "\0", "x" * 500, ""])
def test_no_name_of_a_device_leads_out_of_the_folder(device, tmp_path):
    assert find(tmp_path, 8, 256, device=device).source == "heuristic"
    assert "/" not in str(FileName.of(MoeShape(8, 256, 64, 2), device))


# --- writing ---------------------------------------------------------------------------------------------------------

SHAPE = MoeShape(128, 384, 2048, 8, FP8, BLOCKS)
ORIGIN = Provenance(
    2048, 8, H200, {"torch": "2.11.0", "triton": "3.6.0"}, "2026-11-30", "CUDA graphs", "quick", "graphfuse tune moe"
)
ALIKE = MoeTable(
    SHAPE, ((1, both(16, 64, 128, swap_ab=True)), (4, both(64, 128, 128, 8))), measured_us=((1, 27.123), (4, 0.00012))
)
DIFFERING = replace(
    ALIKE, entries=(*ALIKE.entries[:1], (4, Tiles(Tile(64, 32, 128), Tile(64, 256, 128, num_stages=4))))
)


def written(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("E=128,N=384,device_name=NVIDIA_H200,") for path in folder.iterdir())


@pytest.mark.parametrize("table", [ALIKE, DIFFERING], ids=["alike", "differing"])
def test_what_is_written_is_found_again(table, tmp_path):
    file = write_table(tmp_path / "new", table, ORIGIN)
    found = find_table(SHAPE, H200, folder=tmp_path / "new", triton_version="3.6.0")
    assert found.files[0] == file and found.notes == []
    assert (found.table.entries, found.table.measured_us) == (table.entries, table.measured_us)


def test_a_file_for_down_is_there_only_where_it_differs(tmp_path):
    for table, names in ((ALIKE, [""]), (DIFFERING, ["", "_down"]), (ALIKE, [""])):
        write_table(tmp_path, table, ORIGIN)
        assert written(tmp_path) == [f"dtype=fp8_w8a8,block_shape=[128,128]{name}.json" for name in names]


def test_an_entry_is_a_line(tmp_path):
    lines = write_table(tmp_path, ALIKE, ORIGIN).read_text().splitlines()
    assert lines[-3] == (
        '  "1": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4, '
        '"num_stages": 3, "SWAP_AB": true, "us": 27.123},'
    )


def test_one_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    file = write_table(tmp_path, ALIKE, ORIGIN)
    before = file.read_text()
    with pytest.raises(SchemaError, match=r"the key 1.BLOCK_SIZE_M is 48"):
        write_table(tmp_path, replace(ALIKE, entries=((1, both(48, 64, 128)),)), ORIGIN)

    def full(*_args):
        raise OSError("No space left on device")

    monkeypatch.setattr(moe_files.os, "replace", full)
    with pytest.raises(ConfigError, match=r"cannot be written: No space left on device. Give another folder"):
        write_table(tmp_path, replace(ALIKE, entries=ALIKE.entries[:1]), ORIGIN)
    assert file.read_text() == before and len(written(tmp_path)) == 1


def test_tuned_for_another_hidden_size_or_top_k_it_serves_and_says_so(tmp_path):
    write_table(tmp_path, ALIKE, ORIGIN)
    found = find_table(replace(SHAPE, hidden_size=4096, top_k=4), H200, folder=tmp_path, triton_version="3.6.0")
    assert found.table.entries == ALIKE.entries
    assert found.notes == [
        "it was tuned for hidden size 2048, and serves 4096",
        "it was tuned for top-k 8, and serves 4",
    ]


# --- what is shipped -------------------------------------------------------------------------------------------------

SHIPPED = sorted(path for path in FOLDER.rglob("*") if path.is_file() and path.name != "README.md")


def test_all_shipped_configs_are_read_have_a_provenance_and_fit_99_kb():
    for path in SHIPPED:
        name = FileName.parse(path.name)
        assert name is not None and path.parent == FOLDER and path.name == str(name), path
        assert not name.down or path.with_name(path.name.replace("_down", "")) in SHIPPED, path
        if name.down:
            continue
        contents = Contents.read_file(path)
        assert contents.provenance is not None and not contents.ignored, path
        shape = read_table(path, contents.provenance.hidden_size, contents.provenance.top_k).shape
        assert FileName.of(shape, contents.provenance.device) == name, path
        limits = Limits.of(shape, SMALL_MEMORY)
        for _, tiles in read_table(path, shape.hidden_size, shape.top_k, limits=limits).entries:
            for tile in (tiles.gate_up, tiles.down):
                assert shared_memory_bytes(tile, limits) <= SMALL_MEMORY, path
