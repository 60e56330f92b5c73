"""Made-up hosts: what a rank sees on one of two H200s, and what the two together are."""

import dataclasses

from graphfuse.facts import Facts, RankFacts

H200_RANK = RankFacts(
    device_type="cuda",
    host="host/1",
    gpu="NVIDIA H200",
    gpu_id="GPU-0",
    compute_capability=(9, 0),
    nvlink_peers=("GPU-1",),
    access_peers=("GPU-1",),
    torch="2.11.0",
    triton="3.6.0",
    nccl="2.28.3",
    flashinfer="0.7.2",
    multicast_forbidden_by=None,
    deterministic=False,
)
H200_PEER = dataclasses.replace(H200_RANK, gpu_id="GPU-1", nvlink_peers=("GPU-0",), access_peers=("GPU-0",))
H200_X2 = Facts(
    device_type="cuda",
    world_size=2,
    gpu="NVIDIA H200",
    compute_capability=(9, 0),
    one_host=True,
    nvlink_mesh=True,
    peer_access=True,
    torch="2.11.0",
    triton="3.6.0",
    nccl="2.28.3",
    flashinfer="0.7.2",
)
