"""The gate as a table: made-up facts in, decision and reasons out. No GPU, no processes."""

import dataclasses
from pathlib import Path

import pytest
import torch

from graphfuse.errors import BackendUnavailableError, ConfigError, SchemaError
from graphfuse.gate import Decision, Facts, SizeRange, decide
from tests.hosts import H200_X2

CPU_X2 = Facts(device_type="cpu", world_size=2, torch="2.13.0+cpu", triton="3.9.0")
FACTS_FOLDER = Path(__file__).parent.parent / "configs" / "facts"


def gate(allreduce="auto", dtype=torch.bfloat16, hidden_size=4096, facts=H200_X2, **changes) -> Decision:
    return decide(dataclasses.replace(facts, **changes), dtype=dtype, hidden_size=hidden_size, allreduce=allreduce)


def test_two_h200_follow_the_measured_table():
    decision = gate()
    assert decision.allowed
    assert decision.table == "device_name=NVIDIA_H200,tp=2.json"
    assert decision.ranges == (SizeRange(2048 * 4096 * 2, "flashinfer", "oneshot"), SizeRange(None, "reference"))
    assert decision.reasons == ()


REFUSED = {
    "SM80": ({"gpu": "NVIDIA A100-SXM4-80GB", "compute_capability": (8, 0)}, "these are SM80"),
    "SM89": ({"gpu": "NVIDIA L40S", "compute_capability": (8, 9)}, "these are SM89"),
    "SM120": ({"gpu": "NVIDIA RTX PRO 6000", "compute_capability": (12, 0)}, "these are SM120"),
    "capability unknown": ({"compute_capability": None}, "compute capability of the ranks is unknown"),
    "mixed GPUs": (
        {"gpu": None, "notes": ("The ranks have different GPUs: NVIDIA H200 on rank 0, NVIDIA H100 on rank 1.",)},
        "NVIDIA H100 on rank 1",
    ),
    "3 ranks": ({"world_size": 3}, "for 2, 4 or 8 ranks, and the group has 3"),
    "16 ranks": ({"world_size": 16}, "for 2, 4 or 8 ranks, and the group has 16"),
    "two hosts": ({"one_host": False}, "several hosts"),
    "bridged pairs": ({"world_size": 4, "nvlink_mesh": False}, "NVLink does not connect every pair"),
    "links unknown": (
        {"nvlink_mesh": None, "notes": ("rank 0: GPU links are unknown because nvidia-ml-py is not installed.",)},
        "nvidia-ml-py is not installed",
    ),
    "no peer access": ({"peer_access": False}, "cannot access each other's memory"),
    "peer access unknown": ({"peer_access": None}, "unknown whether the GPUs reach each other's memory"),
    "FlashInfer missing": ({"flashinfer": None}, 'pip install "graphfuse[cuda]"'),
    "FlashInfer 0.7.1": ({"flashinfer": "0.7.1"}, "FlashInfer 0.7.1 is too old"),
    "FlashInfer 0.6.12": ({"flashinfer": "0.6.12"}, "FlashInfer 0.6.12 is too old"),
    "FlashInfer 0.7.2rc1": ({"flashinfer": "0.7.2rc1"}, "FlashInfer 0.7.2rc1 is too old"),
    "FlashInfer differs": (
        {
            "flashinfer": None,
            "notes": ("The ranks have different FlashInfer versions: 0.7.2 on rank 0, none on rank 1.",),
        },
        "one version on every rank. The ranks have different FlashInfer versions: 0.7.2 on rank 0",
    ),
    "float32": ({"dtype": torch.float32}, "are float32"),
    "float64": ({"dtype": torch.float64}, "are float64"),
    "hidden 4100": ({"hidden_size": 4100}, "4100 does not fill whole 16-byte words"),
    "hidden 128": ({"hidden_size": 128}, "below the 256"),
    "hidden 8200": ({"hidden_size": 8200}, "no launch shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_where_flashinfer_cannot_run_sites_stay_plain_with_the_reason(case):
    changes, reason = REFUSED[case]
    decision = gate(**changes)
    assert not decision.allowed
    assert decision.ranges == ()
    assert any(reason in sentence for sentence in decision.reasons), decision.reasons


@pytest.mark.parametrize("case", REFUSED)
def test_flashinfer_asked_for_by_name_where_it_cannot_run_is_an_error_with_the_reason(case):
    changes, reason = REFUSED[case]
    with pytest.raises(BackendUnavailableError) as error:
        gate("flashinfer", **changes)
    assert reason in str(error.value)
    assert 'Use allreduce="auto"' in str(error.value)


@pytest.mark.parametrize("case", REFUSED)
def test_reference_asked_for_by_name_runs_everywhere(case):
    decision = gate("reference", **REFUSED[case][0])
    assert decision.allowed
    assert decision.ranges == (SizeRange(None, "reference"),)


ALLOWED = {
    "SM90": {},
    "SM100": {"gpu": "NVIDIA B200", "compute_capability": (10, 0)},
    "4 ranks": {"world_size": 4},
    "8 ranks": {"world_size": 8},
    "float16": {"dtype": torch.float16},
    "H20, gated by version and not by name": {"gpu": "NVIDIA H20"},
    "newer FlashInfer": {"flashinfer": "0.8.0"},
    "hidden 576": {"hidden_size": 576},
    "hidden 2880": {"hidden_size": 2880},
    "hidden 16384": {"hidden_size": 16384},
    "multicast forbidden": {"multicast_forbidden_by": "NCCL_NVLS_ENABLE=0"},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("case", ALLOWED)
@pytest.mark.parametrize("allreduce", ["auto", "flashinfer"])
def test_where_flashinfer_can_run_it_serves_small_messages_and_the_reference_large_ones(case, allreduce):
    decision = gate(allreduce, **ALLOWED[case])
    assert decision.allowed
    assert [r.backend for r in decision.ranges] == ["flashinfer", "reference"]
    assert decision.ranges[-1].max_bytes is None


def test_multicast_policy_is_known_and_leaves_nothing_that_needs_multicast():
    decision = gate(multicast_forbidden_by="TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
    assert "multicast is forbidden by TORCH_SYMM_MEM_DISABLE_MULTICAST=1" in decision.reasons[0]
    assert {(r.backend, r.variant) for r in decision.ranges} == {("flashinfer", "oneshot"), ("reference", None)}


def test_deterministic_mode_keeps_the_fused_kernels_since_they_repeat_bit_by_bit():
    decision = gate(deterministic=True)
    assert "rank order" in decision.reasons[0]
    assert decision.ranges == gate().ranges


@pytest.mark.parametrize(("world_size", "megabytes"), [(2, 4), (4, 4 / 3), (8, 4 / 7)])
def test_without_a_table_the_limit_is_what_a_rank_pushes_in_4_mib_and_says_so(world_size, megabytes):
    decision = gate(gpu="NVIDIA B200", compute_capability=(10, 0), world_size=world_size)
    assert decision.table is None
    assert decision.ranges[0].max_bytes == int(megabytes * 2**20)
    assert f"No size table was measured for {world_size} x NVIDIA B200" in decision.reasons[0]
    assert "a careful limit" in decision.reasons[0]


@pytest.mark.parametrize("allreduce", ["auto", "reference", "flashinfer"])
def test_a_group_of_one_has_nothing_to_reduce(allreduce):
    decision = gate(allreduce, world_size=1)
    assert not decision.allowed
    assert "nothing to reduce" in decision.reasons[0]


def test_the_cpu_is_served_by_the_reference_in_any_dtype():
    decision = gate(facts=CPU_X2, dtype=torch.float64, hidden_size=7)
    assert decision.allowed
    assert decision.ranges == (SizeRange(None, "reference"),)
    with pytest.raises(BackendUnavailableError, match="computes on the CPU"):
        gate("flashinfer", facts=CPU_X2)


@pytest.mark.parametrize("facts", [H200_X2, CPU_X2])
def test_symm_mem_is_refused_until_it_exists_and_never_replaced(facts):
    with pytest.raises(BackendUnavailableError, match="symm_mem does not exist yet"):
        gate("symm_mem", facts=facts)


def test_an_unknown_choice_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'auto', 'flashinfer', 'symm_mem', 'reference'"):
        gate("nccl")


def test_a_decision_is_plain_json():
    assert gate().to_json() == {
        "allowed": True,
        "ranges": [
            {"max_bytes": 16777216, "backend": "flashinfer", "variant": "oneshot"},
            {"max_bytes": None, "backend": "reference", "variant": None},
        ],
        "reasons": [],
        "table": "device_name=NVIDIA_H200,tp=2.json",
    }


SHIPPED = {
    "h100_x8": True,
    "h200_x2": True,
    "h200_x8": True,
    "b200_x8": True,
    "a100_x8": False,
    "h100_pcie_x4_without_nvlink": False,
    "h100_two_hosts_x16": False,
}


def test_every_shipped_facts_file_is_read_and_decided():
    assert {file.stem for file in FACTS_FOLDER.glob("*.json")} == set(SHIPPED)
    for name, allowed in SHIPPED.items():
        facts = Facts.from_json(FACTS_FOLDER / f"{name}.json")
        assert gate(facts=facts).allowed is allowed, name
        assert Facts.from_json(facts.to_json()) == facts


def test_facts_of_a_host_serve_fewer_ranks_and_more_ranks_mean_several_hosts():
    eight = Facts.from_json(FACTS_FOLDER / "h100_x8.json")
    assert gate(facts=eight.for_world_size(4)).allowed
    decision = gate(facts=eight.for_world_size(16))
    assert any("several hosts" in reason for reason in decision.reasons)


BROKEN_FACTS = {
    "an unknown key": ({"nvlink": True}, "nvlink is not known"),
    "a wrong type": ({"one_host": "yes"}, "one_host is 'yes', which is not true or false"),
    "a bool for a number": ({"world_size": True}, "world_size is True, which is not an integer"),
    "no ranks": ({"world_size": 0}, "world_size is 0"),
    "another device": ({"device_type": "tpu"}, "device_type is 'tpu'"),
    "a strange capability": ({"compute_capability": "9.0"}, "compute_capability is '9.0'"),
    "a half capability": ({"compute_capability": [9]}, "compute_capability is [9]"),
    "another schema": ({"schema": 2}, "schema is 2; this version of graphfuse reads 1"),
    "notes that are not text": ({"notes": [1]}, "notes holds something that is not a string"),
}


@pytest.mark.parametrize("case", BROKEN_FACTS)
def test_broken_facts_name_the_key(case):
    changes, problem = BROKEN_FACTS[case]
    with pytest.raises(SchemaError) as error:
        Facts.from_json({**H200_X2.to_json(), **changes})
    assert f"facts: the key {problem}" in str(error.value)


def test_a_missing_key_of_a_facts_file_names_the_file(tmp_path):
    file = tmp_path / "host.json"
    file.write_text('{"schema": 1, "device_type": "cpu"}')
    with pytest.raises(SchemaError, match=r"host\.json: the key world_size is missing"):
        Facts.from_json(file)
    with pytest.raises(SchemaError, match="cannot be read as JSON"):
        Facts.from_json(tmp_path / "absent.json")
