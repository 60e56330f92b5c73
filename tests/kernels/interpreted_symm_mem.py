"""The symm_mem kernels between real processes on the CPU, run by `test_symm_mem.py` with TRITON_INTERPRET=1.

Each rank is a process; the kernels run in Triton's interpreter, on files that all ranks map (`shared_file_memory`).
What this cannot show, the GPUs' memory order and timing, is in tests/gpu.

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted_symm_mem WORLD_SIZE CASE
"""

import itertools
import os
import random
import sys
import tempfile
import time
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from triton.runtime import interpreter

from graphfuse.comm import symm_mem
from graphfuse.comm.call import FusedCall
from graphfuse.comm.control import control_channel
from graphfuse.comm.reference import add_rms_norm
from graphfuse.comm.workspace import WorkspaceRequest
from graphfuse.errors import GroupError
from graphfuse.kernels.norm_epilogue import quantize_fp8
from graphfuse.kernels.self_marking import EMPTY
from tests.kernels.interpreter_as_gpus import arithmetic_of_gpus
from tests.kernels.shared_file_memory import allocate

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VARIANTS = ("one_shot", "two_shot")
_masked_load = interpreter.InterpreterBuilder.create_masked_load


def _load_whole_elements(builder, pointers, mask, other, *policies):
    """The interpreter reads a 16-bit number in two steps, and a peer may write it in between; GPUs read it whole. While
    a row's writer is at work, only what reads alike twice is taken, since an element changes once: from EMPTY."""
    first = _masked_load(builder, pointers, mask, other, *policies)
    *_, is_volatile = policies  # what stands before differs between Triton's versions
    if is_volatile:
        second = _masked_load(builder, pointers, mask, other, *policies)
        first.data = np.where(first.data == second.data, first.data, EMPTY).astype(first.data.dtype)
        if (first.data == EMPTY).any():
            os.sched_yield()  # the ranks share few cores
    return first


class Rank:
    """One rank of a group with a symm_mem workspace of a dtype, and what the others hold."""

    def __init__(self, dtype, hidden_sizes, max_bytes=None):
        self.dtype, self.group = dtype, dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.channel = control_channel(self.group)
        backend = symm_mem.SymmMemBackend()
        for hidden_size in hidden_sizes:
            variants = tuple((variant, max_bytes) for variant in VARIANTS)
            request = WorkspaceRequest(self.group, dtype, hidden_size, max_bytes, torch.device("cpu"), variants)
            assert backend.refusal(request) is None
            if hidden_size == hidden_sizes[0]:
                self.workspace = backend.create(request, self.channel)
            self.workspace.reserve(request, self.channel)

    def inputs(self, tokens, hidden_size, seed):
        """x of this rank, and the residual and weight, which all ranks share."""
        own = torch.Generator().manual_seed(1000 * seed + self.rank)
        common = torch.Generator().manual_seed(1000 * seed + 999)
        x = torch.randn(tokens, hidden_size, generator=own).to(self.dtype)
        residual = torch.randn(tokens, hidden_size, generator=common).to(self.dtype)
        return x, residual, (1 + 0.2 * torch.randn(hidden_size, generator=common)).to(self.dtype)

    def total(self, x):
        """The sum as documented: in rank order, in float32, rounded once."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def check(self, call, variant):
        normed, summed, *quantised = self.workspace.run(call, variant)
        form = (call.residual, call.weight, call.eps, call.weight_bias, call.cast_before_weight)
        expected, expected_sum = add_rms_norm(self.total(call.x), *form)
        assert torch.equal(bits(summed), bits(expected_sum)), (variant, call.x.shape, self.dtype)
        ulp = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-21}[self.dtype]
        torch.testing.assert_close(normed.float(), expected.float(), rtol=ulp, atol=1e-6, equal_nan=True)
        if call.fp8:
            wanted, scale = quantize_fp8(normed, call.fp8, call.scale)
            torch.testing.assert_close(quantised[1], scale, rtol=1e-6, atol=0.0)
            assert (quantised[0].float() - wanted.float()).abs().max() <= 32  # one step of e4m3 at its largest values
            assert (quantised[0].float() != wanted.float()).float().mean() < 0.01
        return normed, summed

    def agree(self, *tensors):
        for tensor in tensors:
            everyone = self.channel.exchange(bits(tensor).numpy().tobytes())
            assert all(other == everyone[0] for other in everyone)


def bits(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def forms(rank):
    """Every form of the call, odd hidden sizes, no token and one token: exact sums, ranks equal."""
    for dtype, hidden_size in ((torch.bfloat16, 7), (torch.float16, 130), (torch.float32, 48), (torch.float32, 1)):
        this = Rank(dtype, [hidden_size])
        choices = itertools.product(VARIANTS, (True, False), (True, False), (0.0, 1.0), (True, False))
        for seed, (variant, with_residual, with_weight, weight_bias, cast) in enumerate(choices):
            x, residual, weight = this.inputs(seed % 5, hidden_size, seed)
            call = FusedCall(
                x, residual if with_residual else None, weight if with_weight else None, 1e-6, weight_bias, cast
            )
            this.agree(*this.check(call, variant))


def every_bit_pattern(rank):
    """All 65,536 patterns of 16 bits cross, the mark itself included: NaNs stay NaNs, and nothing hangs."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(16, 4096)
    for dtype, variant in itertools.product((torch.bfloat16, torch.float16), VARIANTS):
        this = Rank(dtype, [4096])
        x = patterns.view(dtype) if this.rank == 1 else torch.full(patterns.shape, -0.0, dtype=dtype)
        _, total = this.workspace.run(FusedCall(x, None, None, 1e-6), variant)
        expected = this.total(x)
        nan = expected.isnan()
        assert torch.equal(total.isnan(), nan)
        assert torch.equal(bits(total)[~nan], bits(expected)[~nan])
        assert nan.sum() == patterns.view(dtype).isnan().sum()
    this = Rank(torch.float32, [64])
    x = torch.full((3, 64), -1, dtype=torch.int32).view(torch.float32)  # every word is the mark
    for variant in VARIANTS:
        for _ in range(4):
            assert this.workspace.run(FusedCall(x, None, None, 1e-6), variant)[1].isnan().all()


def changing_sizes(rank):
    """Many calls with other token counts, two hidden sizes, both variants and late ranks, through small buffers."""
    draw, late = random.Random(5), random.Random(rank)
    with mock.patch.object(symm_mem, "BUFFER_BYTES", 96_000), mock.patch.object(symm_mem, "MOST_ROWS", 16):
        this = Rank(torch.bfloat16, [64, 40])
        counts = [rows.count for rows in this.workspace._rows.values()]
        assert max(counts) < 16 + this.size
        assert this.workspace.num_bytes <= 2 * (96_000 + 4 * 32)
        for seed in range(100 // (this.size - 1)):
            hidden_size, variant = draw.choice((64, 40)), draw.choice(VARIANTS)
            tokens = draw.choice((1, 2, 3, draw.randint(0, 16), draw.randint(17, 60)))  # the last in pieces
            x, residual, weight = this.inputs(tokens, hidden_size, seed)
            if late.random() < 0.1:
                time.sleep(late.random() / 50)
            this.agree(*this.check(FusedCall(x, residual, weight, 1e-5, 0.0, True), variant))


def quantised(rank):
    """FP8 outputs of each form are those of quantising the normed value afterwards."""
    for dtype, variant in itertools.product((torch.bfloat16, torch.float32), VARIANTS):
        this = Rank(dtype, [384])
        x, residual, weight = this.inputs(5, 384, 3)
        for form in ("static", "token", "group"):
            scale = torch.tensor(0.01) if form == "static" else None
            this.check(FusedCall(x, residual, weight, 1e-6, 0.0, True, fp8=form, scale=scale), variant)


def repeats(rank):
    """The same call gives the same bits again, and both variants give the same bits."""
    this = Rank(torch.float16, [96])
    x, residual, weight = this.inputs(9, 96, 1)
    call = FusedCall(x, residual, weight, 1e-6)
    first = this.workspace.run(call, "one_shot")
    for variant in VARIANTS * 4:
        again = this.workspace.run(call, variant)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True))


def absent_peer(rank):
    """With a time-out, a rank whose peer never calls says so instead of waiting for ever."""
    with mock.patch.dict(os.environ, {symm_mem.TIMEOUT_VARIABLE: "0.00002"}):
        this = Rank(torch.bfloat16, [64])
    x, residual, weight = this.inputs(3, 64, 1)
    if rank == 0:
        try:
            this.workspace.run(FusedCall(x, residual, weight, 1e-6), "one_shot")
        except GroupError as error:
            assert "waited longer than" in str(error), error
        else:
            raise AssertionError("nobody noticed the missing peer")
    this.channel.exchange("done")


CASES = {case.__name__: case for case in (forms, every_bit_pattern, changing_sizes, quantised, repeats, absent_peer)}


def main(rank, world_size, names, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    with (
        mock.patch.object(symm_mem, "allocate", allocate),
        arithmetic_of_gpus(),
        mock.patch.object(interpreter.InterpreterBuilder, "create_masked_load", _load_whole_elements),
    ):
        for name in names:
            started = time.monotonic()
            CASES[name](rank)
            if rank == 0:
                print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (int(world_size), names or list(CASES), folder), nprocs=int(world_size))
