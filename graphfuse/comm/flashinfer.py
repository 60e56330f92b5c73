"""FlashInfer's fused all-reduce + add + RMSNorm (its `trtllm` kernels, one-shot) as a comm backend.

One kernel: each rank pushes its rows into the peers' buffers, waits until theirs have arrived (the data carries its own
readiness), sums in rank order in float32, rounds, adds the residual, rounds, normalises. The sum and the residual are
rounded exactly as the formula of `graphfuse.comm.call` does; the normed value is rounded once, after the weight. With
`cast_before_weight` that is one rounding less than the model's own, which keeps within the Faithful tier: the error
against float64 is smaller, the bits may differ by an ulp or two.

Only `backend="trtllm"` is ever asked for: FlashInfer's `auto`, `mnnvl` and `mnnvl-cutedsl` use NVLink multicast without
regard to the variables that forbid it. Its kernels check neither dtypes nor shapes, so `accepts` does.
"""

from __future__ import annotations

from typing import Any

import torch

from graphfuse.comm.call import FusedCall
from graphfuse.comm.control import STEP_TIMEOUT, ControlChannel
from graphfuse.comm.workspace import WorkspaceRequest
from graphfuse.errors import BackendUnavailableError

# Programmatic dependent launch saves about a microsecond by starting before the previous kernel has ended. Whether the
# data is complete then depends on every kernel before ours, and others have met NaN at each decode step from it.
LAUNCH_WITH_PDL = False
# The kernels load and store 16 bytes at a time.
ALIGNMENT = 16


class FlashInferWorkspace:
    """One FlashInfer workspace of a group, with a zero residual and unit weights for the forms the kernel lacks."""

    quantises = False

    def __init__(self, workspace: Any, capacity: int, num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        import flashinfer.comm

        self.capacity = capacity
        self._workspace = workspace
        self._allreduce_fusion = flashinfer.comm.allreduce_fusion
        self._pattern = flashinfer.comm.AllReduceFusionPattern.kARResidualRMSNorm
        self._dtype = dtype
        self.num_bytes = num_bytes
        self._zeros = torch.zeros(capacity // dtype.itemsize, dtype=dtype, device=device)
        self._ones: dict[int, torch.Tensor] = {}

    def reserve(self, request: WorkspaceRequest, channel: ControlChannel) -> None:
        if request.hidden_size not in self._ones:
            self._ones[request.hidden_size] = torch.ones(
                request.hidden_size, dtype=self._dtype, device=self._zeros.device
            )

    def accepts(self, call: FusedCall) -> bool:
        # A float32 weight read as bfloat16 is garbage, silently (vLLM #48324).
        return (
            call.x.dtype == self._dtype
            and call.num_bytes <= self.capacity
            and call.hidden_size in self._ones
            and (call.weight is None or call.weight.dtype == self._dtype)
        )

    def run(self, call: FusedCall, variant: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_size = call.hidden_size
        x = _aligned(call.x).view(-1, hidden_size)  # [T, H]
        normed, residual_out = torch.empty_like(x), torch.empty_like(x)
        if x.shape[0] == 0:
            return normed.view(call.x.shape), residual_out.view(call.x.shape)
        # Without a residual, adding zeros keeps it one kernel: that costs one more read of the message, where
        # FlashInfer's plain all-reduce with a norm after it would cost a launch, a write and a read.
        residual = self._zeros[: x.numel()] if call.residual is None else _aligned(call.residual)
        try:
            self._allreduce_fusion(
                input=x,
                workspace=self._workspace,
                pattern=self._pattern,
                launch_with_pdl=LAUNCH_WITH_PDL,
                output=residual_out,  # unused by this pattern; without it a tensor is allocated at each call
                residual_in=residual.view(-1, hidden_size),
                residual_out=residual_out,
                norm_out=normed,
                rms_gamma=self._ones[hidden_size] if call.weight is None else _aligned(call.weight),
                rms_eps=call.eps,
                weight_bias=0.0 if call.weight is None else call.weight_bias,
                use_oneshot=variant == "oneshot",  # never None: its own choice is tuned for B200
                fp32_acc=True,
            )
        except Exception as error:
            # Not retried on another backend: the peers are in this kernel, and this rank alone would leave them there.
            raise BackendUnavailableError(
                f"FlashInfer's fused all-reduce failed: {error}. The other ranks may be waiting for this one, so end "
                'all of them; allreduce="reference" runs without FlashInfer.'
            ) from error
        return normed.view(call.x.shape), residual_out.view(call.x.shape)

    def close(self) -> None:
        """FlashInfer frees nothing; this only tells it that the workspace is done with."""
        self._workspace.destroy()


class FlashInferBackend:
    """Makes `FlashInferWorkspace`s."""

    keeps_workspaces = True

    def refusal(self, request: WorkspaceRequest) -> str | None:
        if torch.cuda.is_current_stream_capturing():
            return "A CUDA graph is being captured; prepare the model before capturing."
        try:
            import flashinfer.comm  # noqa: F401
            from flashinfer.comm.trtllm_ar import get_trtllm_comm_module

            get_trtllm_comm_module()  # builds the kernels at the first use on a machine, which can take minutes
        except Exception as error:  # a missing package, no compiler, a failed build: all mean that this rank cannot
            return f"FlashInfer's all-reduce module cannot be loaded: {type(error).__name__}: {error}"
        needed = self.memory_needed(request)
        free = torch.cuda.mem_get_info(request.device)[0]
        if free < needed:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(request.device)[0]
        if free < needed:
            return f"FlashInfer's workspace needs {needed >> 20} MiB of GPU memory and {free >> 20} MiB are free."
        return None

    @staticmethod
    def memory_needed(request: WorkspaceRequest) -> int:
        """Bytes on each GPU: one two-shot and three one-shot buffers for every rank, the zero residual, and slack for
        allocation granularity."""
        return (4 * request.group.size() + 1) * request.capacity + (16 << 20)

    def create(self, request: WorkspaceRequest, channel: ControlChannel) -> FlashInferWorkspace:
        import flashinfer.comm

        max_tokens = request.capacity // (request.hidden_size * request.dtype.itemsize)
        with torch.cuda.device(request.device):
            workspace = flashinfer.comm.create_allreduce_fusion_workspace(
                backend="trtllm",
                world_size=channel.size,
                rank=channel.rank,
                max_token_num=max_tokens,
                hidden_dim=request.hidden_size,
                dtype=request.dtype,
                group=request.group,
                comm_backend=_ChannelBackend(channel),
            )
            needed = self.memory_needed(request)
            return FlashInferWorkspace(workspace, request.capacity, needed, request.dtype, request.device)


class _ChannelBackend:
    """The control channel in the shape FlashInfer wants. Its own `TorchDistBackend` would leave the peers of a rank
    that fails waiting until the group's time-out; through the channel they fail with it."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel

    def Get_rank(self) -> int:
        return self._channel.rank

    def Get_size(self) -> int:
        return self._channel.size

    def allgather(self, data: Any) -> tuple[Any, ...]:
        return tuple(self._channel.exchange(data, STEP_TIMEOUT))

    def bcast(self, data: Any, root: int) -> Any:
        return self._channel.exchange(data, STEP_TIMEOUT)[root]

    def barrier(self) -> None:
        self._channel.exchange(None, STEP_TIMEOUT)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it where it starts off a 16-byte boundary (a slice of another one)."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
