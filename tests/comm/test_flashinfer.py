"""The FlashInfer backend against a stand-in for `flashinfer.comm`: what is asked of it, with what, and when not.

The stand-in computes what the kernel computes (rank order, float32 sum, one rounding of the normed value) over gloo;
the kernel itself is tested in tests/gpu.
"""

import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphfuse.comm import reference
from graphfuse.comm.call import FusedCall
from graphfuse.comm.control import PeerFailed, control_channel
from graphfuse.comm.flashinfer import FlashInferBackend
from graphfuse.comm.workspace import WorkspaceRequest
from graphfuse.errors import BackendUnavailableError

HIDDEN = 64


class StandIn(types.ModuleType):
    """`flashinfer.comm` as far as graphfuse uses it; signatures by keyword as in 0.7.2."""

    class AllReduceFusionPattern:
        kARResidualRMSNorm = 1

    def __init__(self):
        super().__init__("flashinfer.comm")
        self.created, self.calls, self.breaks = [], [], False

    def create_allreduce_fusion_workspace(
        self, *, backend, world_size, rank, max_token_num, hidden_dim, dtype, group, comm_backend
    ):
        self.created.append((backend, world_size, rank, max_token_num, hidden_dim, dtype))
        assert comm_backend.Get_rank() == rank
        assert comm_backend.Get_size() == world_size
        assert comm_backend.allgather(f"socket {rank}") == tuple(f"socket {r}" for r in range(world_size))
        assert comm_backend.bcast(rank, root=1) == 1
        comm_backend.barrier()
        return types.SimpleNamespace(group=group, destroy=lambda: None)

    def allreduce_fusion(
        self,
        *,
        input,
        workspace,
        pattern,
        launch_with_pdl,
        output,
        residual_in,
        residual_out,
        norm_out,
        rms_gamma,
        rms_eps,
        weight_bias,
        use_oneshot,
        fp32_acc,
    ):
        if self.breaks:
            raise RuntimeError("cudaErrorLaunchFailure")
        tensors = (input, output, residual_in, residual_out, norm_out)
        assert all(t.shape == input.shape and t.dtype == input.dtype and t.is_contiguous() for t in tensors)
        assert all(t.data_ptr() % 16 == 0 for t in (*tensors, rms_gamma))
        assert rms_gamma.dtype == input.dtype
        self.calls.append((pattern, launch_with_pdl, use_oneshot, fp32_acc))
        total = input.float()
        dist.all_reduce(total, group=workspace.group)
        residual_out.copy_(residual_in + total.to(input.dtype))
        f = residual_out.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + rms_eps)
        norm_out.copy_((f * (rms_gamma.float() + weight_bias)).to(input.dtype))


def workspace_on_the_cpu(group, max_tokens=4):
    """A workspace made through the backend with the stand-in installed; CUDA's device guard is not needed for it."""
    module = StandIn()
    package = types.ModuleType("flashinfer")
    package.comm = module
    sys.modules.update({"flashinfer": package, "flashinfer.comm": module})
    device = torch.device("cpu")
    request = WorkspaceRequest(group, torch.bfloat16, HIDDEN, max_tokens * HIDDEN * 2 + 100, device)
    real_guard: Any = torch.cuda.device
    torch.cuda.device = lambda _: torch.no_grad()  # type: ignore
    try:
        workspace = FlashInferBackend().create(request, control_channel(group))
    finally:
        torch.cuda.device = real_guard
    workspace.reserve(request, control_channel(group))
    return module, workspace


def forget_the_stand_in():
    for name in ("flashinfer", "flashinfer.comm"):
        sys.modules.pop(name, None)


def forms(group):
    """Every form of the op against the reference backend: distance in ulps of the normed value, equal residuals."""
    try:
        module, workspace = workspace_on_the_cpu(group)
        generator = torch.Generator().manual_seed(dist.get_rank(group))
        common = torch.Generator().manual_seed(9)
        x = torch.randn(1, 3, HIDDEN, generator=generator).bfloat16()
        residual = torch.randn(1, 3, HIDDEN, generator=common).bfloat16()
        weight = torch.rand(HIDDEN, generator=common).bfloat16()
        odd = torch.empty(x.numel() + 1, dtype=torch.bfloat16)[1:].view_as(x).copy_(x)  # off the 16-byte boundary
        checks = []
        for call in (
            FusedCall(x, residual, weight, 1e-6, 0.0, True),
            FusedCall(x, residual, weight, 1e-6, 1.0, False),
            FusedCall(x, None, weight, 1e-6, 0.0, False),
            FusedCall(x, residual, None, 1e-6, 1.0, False),
            FusedCall(odd, residual, weight, 1e-6, 0.0, False),
        ):
            assert workspace.accepts(call)
            normed, summed = workspace.run(call, "oneshot")
            expected, expected_sum = reference.run(call, group)
            distance = (normed.view(torch.int16).int() - expected.view(torch.int16).int()).abs().max().item()
            checks.append((normed.shape == x.shape, distance, torch.equal(summed, expected_sum)))
        return module.created, module.calls, checks
    finally:
        forget_the_stand_in()


def test_every_form_goes_to_the_one_shot_trtllm_kernel_and_matches_the_reference(ranks):
    for rank, (created, calls, checks) in enumerate(ranks.run(2, forms)):
        assert created == [("trtllm", 2, rank, 4, HIDDEN, torch.bfloat16)]  # whole rows of the limit
        assert calls == [(1, False, True, True)] * 5
        assert all(shape and residual_equal for shape, _, residual_equal in checks)
        distances = [distance for _, distance, _ in checks]
        assert distances[0] <= 2  # rounded once instead of twice
        assert max(distances[1:]) == 0


def limits(group):
    try:
        module, workspace = workspace_on_the_cpu(group)

        def call(tokens, dtype=torch.bfloat16, hidden=HIDDEN, weight_dtype=torch.bfloat16):
            x, weight = torch.zeros(tokens, hidden, dtype=dtype), torch.ones(hidden, dtype=weight_dtype)
            return FusedCall(x, None, weight, 1e-6)

        accepted = [
            workspace.accepts(call(4)),
            workspace.accepts(call(5)),
            workspace.accepts(call(4, dtype=torch.float16)),
            workspace.accepts(call(1, hidden=128)),
            workspace.accepts(call(4, weight_dtype=torch.float32)),
        ]
        empty = workspace.run(call(0), "oneshot")[0].shape
        module.breaks = True
        try:
            workspace.run(call(1), "oneshot")
        except BackendUnavailableError as error:
            return accepted, empty, str(error), len(module.calls)
    finally:
        forget_the_stand_in()


def test_what_the_kernel_would_misread_is_left_to_the_reference_and_its_errors_come_out(ranks):
    for accepted, empty, message, calls in ranks.run(2, limits):
        assert accepted == [True, False, False, False, False]
        assert empty == (0, HIDDEN)
        assert calls == 0
        assert "cudaErrorLaunchFailure" in message
        assert "end all of them" in message


def another_hidden_size(group):
    try:
        _, workspace = workspace_on_the_cpu(group)
        call = FusedCall(torch.zeros(2, 2 * HIDDEN).bfloat16(), None, None, 1e-6)
        before, bytes_before = workspace.accepts(call), workspace.num_bytes
        request = WorkspaceRequest(group, torch.bfloat16, 2 * HIDDEN, 2 * HIDDEN * 2, torch.device("cpu"))
        workspace.reserve(request, control_channel(group))
        return before, workspace.accepts(call), workspace.num_bytes - bytes_before, workspace.quantises
    finally:
        forget_the_stand_in()


def test_a_second_model_reserves_its_hidden_size_in_the_workspace_there_is(ranks):
    assert ranks.run(2, another_hidden_size) == [(False, True, 0, False)] * 2


def one_rank_fails_inside(group):
    try:
        if dist.get_rank(group) == 1:
            return control_channel(group).fail("out of memory")
        workspace_on_the_cpu(group)
    except PeerFailed as failure:
        return str(failure)
    finally:
        forget_the_stand_in()


def test_a_rank_that_fails_ends_its_peers_waiting_inside_flashinfer(ranks):
    assert ranks.run(2, one_rank_fails_inside) == ["rank 1: out of memory"] * 2


@pytest.mark.parametrize("ranks_of_group", [2, 8])
def test_the_memory_asked_for_covers_the_buffers(ranks_of_group):
    group = types.SimpleNamespace(size=lambda: ranks_of_group)
    request = WorkspaceRequest(group, torch.bfloat16, 4096, 1024 * 4096 * 2, torch.device("cuda", 0))
    buffers = 8 * ranks_of_group * 1024 * 4096
    assert buffers < FlashInferBackend.memory_needed(request) < 1.5 * buffers + (32 << 20)


def test_without_flashinfer_the_refusal_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    refusal = FlashInferBackend().refusal(WorkspaceRequest(None, torch.bfloat16, 64, 64, torch.device("cuda", 0)))
    assert "FlashInfer's all-reduce module cannot be loaded" in refusal


def test_nothing_is_made_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refusal = FlashInferBackend().refusal(WorkspaceRequest(None, torch.bfloat16, 64, 64, torch.device("cuda", 0)))
    assert "before capturing" in refusal
