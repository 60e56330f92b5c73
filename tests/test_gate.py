"""The gate as a table: made-up facts in, decision and reasons out. No GPU, no processes."""

import dataclasses
from pathlib import Path

import pytest
import torch

from graphfuse.comm.table import FOLDER, REFERENCE_ONLY, SizeTable
from graphfuse.errors import ConfigError
from graphfuse.gate import Decision, Facts, SizeRange, decide
from tests.hosts import H200_X2

CPU_X2 = Facts(device_type="cpu", world_size=2, torch="2.13.0+cpu", triton="3.9.0")
FACTS_FOLDER = Path(__file__).parent.parent / "configs" / "facts"
H100 = "NVIDIA H100 80GB HBM3"
MIB = 1 << 20
PUSH_MIB = {2: 4, 4: 4 / 3, 8: 4 / 7}
"""What a one-shot kernel may serve unmeasured: a rank then pushes 4 MiB to its peers."""


def gate(allreduce="auto", dtype=torch.bfloat16, hidden_size=4096, facts=H200_X2, tables=None, **changes) -> Decision:
    facts = dataclasses.replace(facts, **changes)
    return decide(facts, dtype=dtype, hidden_size=hidden_size, allreduce=allreduce, tables=tables)


def flashinfer(max_bytes):
    return SizeRange(max_bytes, "flashinfer", "oneshot")


def one_shot(max_bytes=None):
    return SizeRange(max_bytes, "symm_mem", "one_shot")


def two_shot(max_bytes=None):
    return SizeRange(max_bytes, "symm_mem", "two_shot")


@pytest.fixture
def measured(tmp_path):
    """Writes a table of some ranges for a number of H200s, and gives the folders that hold it."""
    shipped = SizeTable.read(FOLDER / "device_name=NVIDIA_H200,tp=2.json")

    def write(*ranges, world_size=2):
        classes = ((None, ranges),)
        dataclasses.replace(shipped, world_size=world_size, classes=classes).write(tmp_path)
        return [tmp_path]

    return write


def test_two_h200_follow_the_measured_table():
    decision = gate()
    assert decision.allowed
    assert decision.table == "device_name=NVIDIA_H200,tp=2.json"
    assert decision.ranges == SizeTable.read(FOLDER / decision.table).ranges(4096)
    assert decision.reasons == ()


def test_a_gpu_with_alike_links_takes_the_table_that_stands_in_and_says_so():
    decision = gate(gpu=H100)
    assert decision.ranges == gate().ranges
    assert decision.table == "device_name=NVIDIA_H200,tp=2.json"
    assert decision.reasons == (
        f"No size table was measured on {H100}: the one of NVIDIA H200 stands in, whose links are alike.",
    )
    assert gate(gpu=H100, nvlink_mesh=False).table is None


def test_a_table_from_another_folder_is_named_with_its_path(measured, tmp_path):
    decision = gate(tables=measured(one_shot()))
    assert decision.ranges == (one_shot(),)
    assert decision.reasons == (
        f"The size table is not one that comes with graphfuse: {tmp_path / 'device_name=NVIDIA_H200,tp=2.json'}.",
    )


REPLACED = {
    "of two ranks, one-shot is pushed at every size": (
        2,
        {"flashinfer": None},
        (flashinfer(8 * MIB), one_shot(32 * MIB), *REFERENCE_ONLY),
        (one_shot(32 * MIB), *REFERENCE_ONLY),
    ),
    "of more ranks, two-shot serves what one-shot should not": (
        4,
        {"flashinfer": None},
        (flashinfer(8 * MIB), *REFERENCE_ONLY),
        (one_shot(4 * MIB // 3), two_shot(8 * MIB), *REFERENCE_ONLY),
    ),
    "a small range of more ranks stays one-shot": (
        4,
        {"flashinfer": None},
        (flashinfer(MIB), two_shot()),
        (one_shot(MIB), two_shot()),
    ),
    "a range that begins above one-shot's limit is two-shot": (
        8,
        {"flashinfer": None},
        (one_shot(MIB), flashinfer(8 * MIB), two_shot()),
        (one_shot(MIB), two_shot()),
    ),
    "flashinfer takes symm_mem's small messages only": (
        2,
        {"triton": None},
        (flashinfer(MIB), one_shot()),
        (flashinfer(4 * MIB), *REFERENCE_ONLY),
    ),
    "flashinfer takes nothing above its limit": (
        2,
        {"triton": None},
        (flashinfer(8 * MIB), one_shot(16 * MIB), *REFERENCE_ONLY),
        (flashinfer(8 * MIB), *REFERENCE_ONLY),
    ),
}


@pytest.mark.parametrize("case", REPLACED)
def test_what_a_table_gives_to_a_backend_that_cannot_run_goes_to_the_other_one(case, measured):
    world_size, changes, ranges, expected = REPLACED[case]
    decision = gate(tables=measured(*ranges, world_size=world_size), world_size=world_size, **changes)
    assert decision.ranges == expected
    refused = next(iter(changes)).replace("triton", "symm_mem")
    said = [reason for reason in decision.reasons if f"The sizes that the table gives to {refused} go to" in reason]
    assert len(said) == 1
    assert "is not installed" in said[0]


def test_a_backend_that_the_table_never_takes_is_not_missed(measured):
    decision = gate(tables=measured(one_shot()), flashinfer=None)
    assert decision.ranges == (one_shot(),)
    assert not any("FlashInfer" in reason for reason in decision.reasons)


@pytest.mark.parametrize("world_size", PUSH_MIB)
def test_without_a_table_flashinfer_serves_what_a_rank_pushes_in_4_mib_and_says_so(world_size):
    decision = gate(gpu="NVIDIA B200", compute_capability=(10, 0), world_size=world_size)
    limit = int(PUSH_MIB[world_size] * MIB)
    assert decision.table is None
    assert decision.ranges == (flashinfer(limit), *REFERENCE_ONLY)
    assert decision.reasons == (
        f"No size table was measured for {world_size} x NVIDIA B200 in bfloat16: flashinfer serves up to "
        f"{limit // 8192} tokens, a careful limit, and the reference backend more.",
    )


@pytest.mark.parametrize("world_size", PUSH_MIB)
def test_without_a_table_symm_mem_serves_as_much_where_flashinfer_cannot(world_size):
    decision = gate(gpu="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0), world_size=world_size)
    limit = int(PUSH_MIB[world_size] * MIB)
    assert decision.ranges == (one_shot(limit), *REFERENCE_ONLY)
    assert f"symm_mem serves up to {limit // 8192} tokens, a careful limit" in decision.reasons[0]
    assert "FlashInfer's fused all-reduce is for SM90 and SM100 GPUs, and these are SM80." in decision.reasons[0]


def test_links_slower_than_nvlink_are_given_less():
    decision = gate(gpu="NVIDIA H100 PCIe", world_size=4, nvlink_mesh=False)
    assert decision.ranges == (one_shot(256 * 1024 // 3), *REFERENCE_ONLY)
    assert "NVLink does not connect every pair" in decision.reasons[0]


def test_the_careful_limit_holds_at_least_one_row():
    row = {"dtype": torch.float32, "hidden_size": 16384}  # 64 KiB, more than one of 8 ranks should push over PCIe
    assert gate(world_size=8, nvlink_mesh=False, **row).ranges == (one_shot(64 * 1024), *REFERENCE_ONLY)


def test_float32_and_gpus_of_several_kinds_are_served_by_symm_mem():
    assert gate(dtype=torch.float32).ranges == (one_shot(4 * MIB), *REFERENCE_ONLY)
    decision = gate(gpu=None)
    assert decision.ranges == (one_shot(4 * MIB), *REFERENCE_ONLY)
    assert "No size table was measured for 2 different GPUs" in decision.reasons[0]


def test_where_no_backend_can_run_sites_stay_plain_with_the_reasons_of_both():
    decision = gate(dtype=torch.float64, flashinfer=None)
    assert decision == Decision(
        False,
        (),
        (
            "No fused comm backend can run for this group.",
            'FlashInfer is not installed: pip install "graphfuse[cuda]" brings version 0.7.2 or newer.',
            "The reduced tensors are float64, and FlashInfer's kernels are for float16 and bfloat16.",
            "The reduced tensors are float64, and symm_mem is for float16, bfloat16 and float32.",
        ),
    )


def test_a_reason_of_both_backends_is_said_once():
    decision = gate(one_host=False)
    assert not decision.allowed
    assert len([reason for reason in decision.reasons if "several hosts" in reason]) == 1


@pytest.mark.parametrize("hidden_size", [2880, 4096, 16384])
def test_flashinfer_asked_for_by_name_serves_32_mib_of_whole_rows_and_the_reference_more(hidden_size):
    decision = gate("flashinfer", hidden_size=hidden_size)
    tokens = 32 * MIB // (hidden_size * 2)
    assert decision.ranges == (flashinfer(tokens * hidden_size * 2), *REFERENCE_ONLY)
    assert decision.table is None
    assert f"serves up to {tokens} tokens, and the reference backend more" in decision.reasons[0]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_symm_mem_asked_for_by_name_serves_every_size(world_size):
    decision = gate("symm_mem", world_size=world_size)
    expected = (one_shot(),) if world_size == 2 else (one_shot(4 * MIB // (world_size - 1)), two_shot())
    assert decision == Decision(True, expected, ('allreduce="symm_mem" was asked for.',))


@pytest.mark.parametrize("allreduce", ["auto", "flashinfer", "symm_mem"])
def test_multicast_policy_is_known_and_leaves_nothing_that_needs_multicast(allreduce):
    decision = gate(allreduce, multicast_forbidden_by="TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
    assert "multicast is forbidden by TORCH_SYMM_MEM_DISABLE_MULTICAST=1" in decision.reasons[0]
    assert decision.ranges == gate(allreduce).ranges


@pytest.mark.parametrize("allreduce", ["auto", "flashinfer", "symm_mem"])
def test_deterministic_mode_keeps_the_fused_kernels_since_they_repeat_bit_by_bit(allreduce):
    decision = gate(allreduce, deterministic=True)
    assert "rank order" in decision.reasons[0]
    assert decision.ranges == gate(allreduce).ranges


@pytest.mark.parametrize("allreduce", ["auto", "reference", "flashinfer", "symm_mem"])
def test_a_group_of_one_has_nothing_to_reduce(allreduce):
    decision = gate(allreduce, world_size=1)
    assert not decision.allowed
    assert "nothing to reduce" in decision.reasons[0]


def test_the_cpu_is_served_by_the_reference_in_any_dtype():
    decision = gate(facts=CPU_X2, dtype=torch.float64, hidden_size=7)
    assert decision.allowed
    assert decision.ranges == REFERENCE_ONLY


def test_an_unknown_choice_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'auto', 'flashinfer', 'symm_mem', 'reference'"):
        gate("nccl")


def test_a_decision_is_plain_json(measured):
    data = gate(tables=measured(flashinfer(16 * MIB), *REFERENCE_ONLY)).to_json()
    assert data["ranges"] == [
        {"max_bytes": 16777216, "backend": "flashinfer", "variant": "oneshot"},
        {"max_bytes": None, "backend": "reference", "variant": None},
    ]
    assert {key: data[key] for key in ("allowed", "table")} == {
        "allowed": True,
        "table": "device_name=NVIDIA_H200,tp=2.json",
    }
    assert list(data) == ["allowed", "ranges", "reasons", "table", "workspace_bytes"]


SHIPPED = {
    "h100_x8": "flashinfer",
    "h200_x2": "a table",
    "h200_x8": "flashinfer",
    "b200_x8": "flashinfer",
    "a100_x8": "symm_mem",
    "h100_pcie_x4_without_nvlink": "symm_mem",
    "h100_two_hosts_x16": "nothing",
}


def test_every_shipped_facts_file_is_read_and_decided():
    assert {file.stem for file in FACTS_FOLDER.glob("*.json")} == set(SHIPPED)
    for name, served_by in SHIPPED.items():
        facts = Facts.from_json(FACTS_FOLDER / f"{name}.json")
        decision = gate(facts=facts)
        small = decision.ranges[0].backend if decision.allowed else "nothing"
        assert ("a table" if decision.table else small) == served_by, name
        assert Facts.from_json(facts.to_json()) == facts


def test_facts_of_a_host_serve_fewer_ranks_and_more_ranks_mean_several_hosts():
    eight = Facts.from_json(FACTS_FOLDER / "h100_x8.json")
    assert gate(facts=eight.for_world_size(4)).allowed
    decision = gate(facts=eight.for_world_size(16))
    assert any("several hosts" in reason for reason in decision.reasons)
