"""What each fast comm backend asks of a host and of tensors, as tables: a change of the facts, and the sentence."""

import dataclasses

import pytest
import torch

from graphfuse.errors import BackendUnavailableError
from graphfuse.gate import Facts, decide, flashinfer_refusals, symm_mem_refusals
from tests.hosts import H200_X2

CPU_X2 = Facts(device_type="cpu", world_size=2, torch="2.13.0+cpu", triton="3.9.0")


def split(changes):
    """Facts of two H200s with changes, and the tensors that the changes tell of."""
    tensors = {"dtype": torch.bfloat16, "hidden_size": 4096}
    facts = dataclasses.replace(H200_X2, **{key: changes[key] for key in changes.keys() - tensors.keys()})
    return facts, {key: changes.get(key, tensors[key]) for key in tensors}


BOTH = {
    "capability unknown": ({"compute_capability": None}, "compute capability of the ranks is unknown"),
    "two hosts": ({"one_host": False}, "several hosts"),
    "no peer access": ({"peer_access": False}, "cannot access each other's memory"),
    "peer access unknown": (
        {"peer_access": None, "notes": ("rank 0: GPU links are unknown because nvidia-ml-py is not installed.",)},
        "unknown whether the GPUs reach each other's memory. rank 0: GPU links are unknown because nvidia-ml-py",
    ),
    "one visible GPU": (
        {
            "peer_access": None,
            "notes": (
                "rank 0: GPU links are unknown because NVML does not start.",
                "rank 0: Peer access is unknown because this process sees one GPU only.",
            ),
        },
        "NVML does not start. rank 0: Peer access is unknown because this process sees one GPU only.",
    ),
}
FLASHINFER = {
    **BOTH,
    "SM80": ({"gpu": "NVIDIA A100-SXM4-80GB", "compute_capability": (8, 0)}, "these are SM80"),
    "SM89": ({"gpu": "NVIDIA L40S", "compute_capability": (8, 9)}, "these are SM89"),
    "SM120": ({"gpu": "NVIDIA RTX PRO 6000", "compute_capability": (12, 0)}, "these are SM120"),
    "mixed GPUs": (
        {"gpu": None, "notes": ("The ranks have different GPUs: NVIDIA H200 on rank 0, NVIDIA H100 on rank 1.",)},
        "NVIDIA H100 on rank 1",
    ),
    "3 ranks": ({"world_size": 3}, "for 2, 4 or 8 ranks, and the group has 3"),
    "16 ranks": ({"world_size": 16}, "for 2, 4 or 8 ranks, and the group has 16"),
    "bridged pairs": ({"world_size": 4, "nvlink_mesh": False}, "NVLink does not connect every pair"),
    "links unknown": (
        {"nvlink_mesh": None, "notes": ("rank 0: GPU links are unknown because nvidia-ml-py is not installed.",)},
        "nvidia-ml-py is not installed",
    ),
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
SYMM_MEM = {
    **BOTH,
    "SM75": ({"gpu": "Tesla T4", "compute_capability": (7, 5)}, "SM80 and newer GPUs, and these are SM75"),
    "9 ranks": ({"world_size": 9}, "for 2 to 8 ranks, and the group has 9"),
    "Triton missing": ({"triton": None}, "Triton is not installed: pip install triton"),
    "Triton differs": (
        {"triton": None, "notes": ("The ranks have different Triton versions: 3.6.0 on rank 0, none on rank 1.",)},
        "one version on every rank. The ranks have different Triton versions: 3.6.0 on rank 0",
    ),
    "float64": ({"dtype": torch.float64}, "float64, and symm_mem is for float16, bfloat16 and float32"),
    "hidden 16386": ({"hidden_size": 16386}, "above the 16384 symm_mem is for"),
}
CASES = [("flashinfer", case) for case in FLASHINFER] + [("symm_mem", case) for case in SYMM_MEM]


@pytest.mark.parametrize(("backend", "case"), CASES)
def test_what_a_backend_cannot_do_is_one_sentence_and_asking_for_it_by_name_an_error_that_holds_it(backend, case):
    changes, reason = {"flashinfer": FLASHINFER, "symm_mem": SYMM_MEM}[backend][case]
    facts, tensors = split(changes)
    (refusal,) = {"flashinfer": flashinfer_refusals, "symm_mem": symm_mem_refusals}[backend](facts, **tensors)
    assert reason in refusal
    with pytest.raises(BackendUnavailableError) as error:
        decide(facts, **tensors, allreduce=backend)
    assert refusal in str(error.value)
    assert f"The comm backend {backend} cannot run here" in str(error.value)
    assert 'Use allreduce="auto"' in str(error.value)


@pytest.mark.parametrize(("backend", "case"), CASES)
def test_the_reference_asked_for_by_name_runs_everywhere(backend, case):
    facts, tensors = split({"flashinfer": FLASHINFER, "symm_mem": SYMM_MEM}[backend][case][0])
    decision = decide(facts, **tensors, allreduce="reference")
    assert decision.allowed
    assert [(r.max_bytes, r.backend) for r in decision.ranges] == [(None, "reference")]


FLASHINFER_RUNS = {
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


@pytest.mark.parametrize("case", FLASHINFER_RUNS)
def test_where_flashinfer_can_run(case):
    facts, tensors = split(FLASHINFER_RUNS[case])
    assert flashinfer_refusals(facts, **tensors) == ()


SYMM_MEM_RUNS = {
    "SM80": {"gpu": "NVIDIA A100-SXM4-80GB", "compute_capability": (8, 0)},
    "SM120": {"gpu": "NVIDIA RTX PRO 6000", "compute_capability": (12, 0)},
    "mixed GPUs": {"gpu": None},
    "3 ranks": {"world_size": 3},
    "8 ranks": {"world_size": 8},
    "PCIe with peer access": {"nvlink_mesh": False},
    "no FlashInfer": {"flashinfer": None},
    "float32": {"dtype": torch.float32},
    "float16": {"dtype": torch.float16},
    "an odd hidden size": {"hidden_size": 4099},
    "hidden 1": {"hidden_size": 1},
    "hidden 16384": {"hidden_size": 16384},
    "multicast forbidden": {"multicast_forbidden_by": "NCCL_NVLS_ENABLE=0"},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("case", SYMM_MEM_RUNS)
def test_where_symm_mem_can_run(case):
    facts, tensors = split(SYMM_MEM_RUNS[case])
    assert symm_mem_refusals(facts, **tensors) == ()


@pytest.mark.parametrize("backend", ["flashinfer", "symm_mem"])
def test_on_the_cpu_that_is_the_only_reason(backend):
    with pytest.raises(BackendUnavailableError, match="NVIDIA GPUs only, and the group computes on the CPU") as error:
        decide(CPU_X2, dtype=torch.bfloat16, hidden_size=4096, allreduce=backend)
    assert "Triton" not in str(error.value)
