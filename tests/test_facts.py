"""Facts: what one rank sees, how the ranks' views combine, that every rank ends with the same object, facts files."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from graphfuse.errors import SchemaError
from graphfuse.facts import Facts, combine, gather_facts
from graphfuse.gate import decide
from graphfuse.probe import Links, multicast_forbidden_by, nvml_links, probe, with_peers_from_cuda
from tests.hosts import H200_PEER, H200_RANK, H200_X2

RANK = dataclasses.replace(H200_RANK, nvlink_peers=("GPU-1", "GPU-2"), access_peers=("GPU-1", "GPU-2"))
PEER = H200_PEER


def test_equal_ranks_combine_to_their_common_facts():
    assert combine([RANK, PEER]) == H200_X2


DISAGREEMENTS = {
    "flashinfer version": (
        {"flashinfer": None},
        {"flashinfer": None},
        "different FlashInfer versions: 0.7.2 on rank 0, none on rank 1",
    ),
    "gpu": ({"gpu": "NVIDIA H100"}, {"gpu": None}, "different GPUs: NVIDIA H200 on rank 0, NVIDIA H100 on rank 1"),
    "capability": ({"compute_capability": (8, 0)}, {"compute_capability": (8, 0)}, "different compute capabilities"),
    "device": ({"device_type": "cpu"}, {"device_type": "cpu"}, "different devices: cuda on rank 0, cpu on rank 1"),
    "deterministic": ({"deterministic": True}, {"deterministic": True}, "on for some ranks only"),
    "a note": ({"notes": ("Links are unknown.",)}, {}, "rank 1: Links are unknown."),
    "one GPU for both": ({"gpu_id": "GPU-0"}, {"nvlink_mesh": False}, "Several ranks share one GPU"),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_what_ranks_disagree_on_takes_its_most_careful_value_and_a_note(case):
    change, expected, note = DISAGREEMENTS[case]
    facts = combine([RANK, dataclasses.replace(PEER, **change)])
    assert any(note in sentence for sentence in facts.notes), facts.notes
    for name, value in expected.items():
        assert getattr(facts, name) == value


def test_one_missing_link_breaks_the_mesh_and_one_blind_rank_makes_it_unknown():
    third = dataclasses.replace(RANK, gpu_id="GPU-2", nvlink_peers=("GPU-0",), access_peers=("GPU-0", "GPU-1"))
    second = dataclasses.replace(PEER, nvlink_peers=("GPU-0",), access_peers=("GPU-0", "GPU-2"))
    assert combine([RANK, second, third]).nvlink_mesh is False  # 1 and 2 have no link
    assert combine([RANK, second, third]).peer_access is True
    blind = dataclasses.replace(third, nvlink_peers=None)
    assert combine([RANK, second, blind]).nvlink_mesh is None


def test_several_hosts_and_a_multicast_ban_on_one_rank_hold_for_all():
    facts = combine([RANK, dataclasses.replace(PEER, host="host/2", multicast_forbidden_by="NCCL_NVLS_ENABLE=0")])
    assert not facts.one_host
    assert facts.multicast_forbidden_by == "NCCL_NVLS_ENABLE=0"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"NCCL_NVLS_ENABLE": "1", "NVSHMEM_DISABLE_NVLS": "0"}, None),
        ({"NCCL_NVLS_ENABLE": "0"}, "NCCL_NVLS_ENABLE=0"),
        ({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}, "TORCH_SYMM_MEM_DISABLE_MULTICAST=1"),
        ({"NVSHMEM_DISABLE_NVLS": "1"}, "NVSHMEM_DISABLE_NVLS=1"),
    ],
)
def test_each_variable_that_forbids_multicast_is_known(environment, expected):
    assert multicast_forbidden_by(environment) == expected


class FakeNvml(SimpleNamespace):
    """NVML on a host of some GPUs: `mesh` pairs have NVLink, `switch` GPUs have all links to an NVSwitch."""

    class NVMLError(Exception):
        pass

    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_CAPS_INDEX_WRITE, NVML_P2P_CAPS_INDEX_NVLINK = 0, 1, 2
    NVML_P2P_STATUS_OK, NVML_NVLINK_DEVICE_TYPE_SWITCH, NVML_NVLINK_MAX_LINKS = 0, 2, 36

    def __init__(self, count=3, mesh=(), switch=(), answers_p2p=True, starts=True):
        super().__init__(count=count, mesh=mesh, switch=switch, answers_p2p=answers_p2p, starts=starts, running=0)

    def nvmlInit(self):
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")
        self.running += 1

    def nvmlShutdown(self):
        self.running -= 1

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}".encode()

    def nvmlDeviceGetP2PStatus(self, a, b, capability):
        if capability != self.NVML_P2P_CAPS_INDEX_NVLINK:
            return 0
        if not self.answers_p2p:
            raise self.NVMLError("Not Supported")
        return 0 if {a, b} in [set(pair) for pair in self.mesh] else 3

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link >= 18:
            raise self.NVMLError("Invalid Argument")
        return int(handle in self.switch)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return self.NVML_NVLINK_DEVICE_TYPE_SWITCH


def test_nvml_tells_the_gpus_in_reach_by_uuid():
    nvml = FakeNvml(mesh=[(0, 1)])
    links = nvml_links("GPU-0", nvml)
    assert links.nvlink_peers == ("GPU-1",)
    assert links.access_peers == ("GPU-1", "GPU-2")
    assert nvml.running == 0


def test_gpus_on_an_nvswitch_reach_each_other_where_the_driver_does_not_answer_directly():
    links = nvml_links("GPU-0", FakeNvml(switch=(0, 2), answers_p2p=False))
    assert links.nvlink_peers == ("GPU-2",)
    assert links.num_nvlinks == 18


BLIND = {
    "no nvidia-ml-py": ("GPU-0", None, "nvidia-ml-py is not installed"),
    "no uuid": (None, FakeNvml(), "torch does not tell the GPU's uuid"),
    "no driver": ("GPU-0", FakeNvml(starts=False), "NVML does not start: Driver Not Loaded"),
    "a MIG slice": ("MIG-7", FakeNvml(), "does not list MIG-7"),
    "no answer": ("GPU-0", FakeNvml(answers_p2p=False), "NVML does not tell them: Not Supported"),
}


@pytest.mark.parametrize("case", BLIND)
def test_unknown_links_carry_their_reason(case):
    gpu_id, nvml, reason = BLIND[case]
    links = nvml_links(gpu_id, nvml)
    assert links == Links(notes=links.notes)
    assert reason in links.notes[0]
    assert nvml is None or nvml.running == 0


def fake_cuda(reach=((0, 1), (1, 0), (1, 2)), count=3, uuids=True):
    """torch.cuda on a host of GPUs where `reach` pairs have peer access."""

    def can_device_access_peer(one, other):
        if one == other:
            raise AssertionError("Invalid peer device id")
        return (one, other) in reach

    properties = {"name": "NVIDIA H200", "major": 9, "minor": 0}
    return SimpleNamespace(
        current_device=lambda: 1,
        device_count=lambda: count,
        can_device_access_peer=can_device_access_peer,
        get_device_properties=lambda d: SimpleNamespace(
            **properties, **({"uuid": str(d if isinstance(d, int) else d.index)} if uuids else {})
        ),
    )


UNKNOWN = Links(notes=("GPU links are unknown because nvidia-ml-py is not installed.",))


def test_without_nvml_cuda_tells_whose_memory_is_in_reach_and_nvlink_stays_unknown():
    links = with_peers_from_cuda(UNKNOWN, 1, fake_cuda())
    assert links.access_peers == ("GPU-0", "GPU-2")
    assert links.nvlink_peers is links.num_nvlinks is None
    assert links.notes == (*UNKNOWN.notes, "Peer access is known from CUDA.")
    assert with_peers_from_cuda(UNKNOWN, None, fake_cuda()) == links  # the current GPU is 1
    assert with_peers_from_cuda(UNKNOWN, 2, fake_cuda()).access_peers == ()


def broken(*_):
    raise RuntimeError("CUDA error: initialization error")


CUDA_DOES_NOT_TELL = {
    "one GPU": (fake_cuda(count=1), 0, "this process sees one GPU only"),
    "no uuids": (fake_cuda(uuids=False), 0, "torch does not tell the GPUs' uuids"),
    "an error": (SimpleNamespace(device_count=broken), 0, "CUDA does not tell it: CUDA error: initialization"),
}


@pytest.mark.parametrize("case", CUDA_DOES_NOT_TELL)
def test_where_cuda_does_not_tell_either_peer_access_is_unknown(case):
    cuda, index, reason = CUDA_DOES_NOT_TELL[case]
    links = with_peers_from_cuda(UNKNOWN, index, cuda)
    assert links == Links(notes=links.notes)
    assert reason in links.notes[-1]


def probed_as_gpu(monkeypatch, index, nvml, cuda):
    monkeypatch.setattr("graphfuse.probe.load_nvml", lambda: nvml)
    for name in ("device_count", "can_device_access_peer"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: cuda.get_device_properties(d))
    return dataclasses.replace(probe(torch.device("cuda", index)), flashinfer=None, triton="3.6.0")


def test_symm_mem_serves_a_host_without_flashinfer_and_nvidia_ml_py(monkeypatch):
    cuda = fake_cuda(reach=((0, 1), (1, 0)), count=2)
    facts = combine([probed_as_gpu(monkeypatch, index, None, cuda) for index in (0, 1)])
    assert (facts.peer_access, facts.nvlink_mesh) == (True, None)
    decision = decide(facts, dtype=torch.bfloat16, hidden_size=4096)
    assert {r.backend for r in decision.ranges} <= {"symm_mem", "reference"}
    assert decision.ranges[0].backend == "symm_mem"
    one_way = combine([probed_as_gpu(monkeypatch, i, None, fake_cuda(reach=((0, 1),), count=2)) for i in (0, 1)])
    assert one_way.peer_access is False
    assert not decide(one_way, dtype=torch.bfloat16, hidden_size=4096).allowed


def test_where_nvml_answers_cuda_is_not_asked(monkeypatch):
    cuda = SimpleNamespace(**{**vars(fake_cuda()), "device_count": broken})
    rank = probed_as_gpu(monkeypatch, 0, FakeNvml(mesh=[(0, 1)]), cuda)
    assert (rank.nvlink_peers, rank.access_peers, rank.notes) == (("GPU-1",), ("GPU-1", "GPU-2"), ())


def test_a_cpu_rank_probes_without_a_gpu():
    facts = probe(torch.device("cpu"))
    assert facts.device_type == "cpu"
    assert facts.torch == torch.__version__
    assert facts.gpu is facts.nvlink_peers is None


def test_one_rank_has_facts_without_a_group():
    facts = gather_facts(None, "cpu")
    assert facts.world_size == 1
    assert facts.one_host


def facts_with_one_rank_apart(group):
    if dist.get_rank(group) == 0:
        os.environ["NCCL_NVLS_ENABLE"] = "0"
    try:
        return gather_facts(group, "cpu"), gather_facts(group, "cpu")
    finally:
        os.environ.pop("NCCL_NVLS_ENABLE", None)


@pytest.mark.parametrize("tp", [2, 4])
def test_every_rank_gathers_equal_facts_and_a_subgroup_does_not_wait_for_the_world(ranks, tp):
    answers = ranks.run(tp, facts_with_one_rank_apart)  # at 2, the other two ranks of the world take no part
    first = answers[0][0]
    assert first.world_size == tp
    assert first.multicast_forbidden_by == "NCCL_NVLS_ENABLE=0"
    assert all(facts == first for answer in answers for facts in answer)


def test_a_group_of_one_exchanges_nothing(ranks):
    assert ranks.run(1, facts_with_one_rank_apart)[0][0].world_size == 1


BROKEN_FACTS = {
    "an unknown key": ({"nvlink": True}, "nvlink is not known"),
    "a wrong type": ({"one_host": "yes"}, "one_host is 'yes', which is not true or false"),
    "a bool for a number": ({"world_size": True}, "world_size is True, which is not an integer"),
    "more ranks than there are": (
        {"world_size": 10**30},
        "world_size is 1000000000000000000000000000000, which does not",
    ),
    "a capability that is none": ({"compute_capability": [9, -1]}, "compute_capability is [9, -1]"),
    "a name for terminals": ({"gpu": "\x1b[2J"}, r"gpu is '\x1b[2J', which has characters that cannot be shown"),
    "a note for terminals": ({"notes": ["\x1b[2J"]}, "notes holds something that is not a string of printable"),
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


@pytest.mark.parametrize(("capability", "kib"), [((9, 0), 227), ((8, 0), 163), ((8, 9), 99), ((12, 0), 99)])
def test_shared_memory_goes_by_the_compute_capability(capability, kib):
    assert Facts("cuda", 2, compute_capability=capability).shared_memory == kib * 1024


@pytest.mark.parametrize("capability", [None, (3, 7)])
def test_shared_memory_of_an_unknown_gpu_is_not_guessed(capability):
    assert Facts("cuda", 2, compute_capability=capability).shared_memory is None
