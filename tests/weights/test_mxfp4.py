"""MXFP4 weights are read exactly, whatever box of them a rank takes, against a decoder that goes bit by bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from graphfuse.errors import CheckpointError
from graphfuse.models.parallel import parameter
from graphfuse.weights import stream
from graphfuse.weights.files import read_header
from graphfuse.weights.mxfp4 import decode
from graphfuse.weights.plan import Copy, TensorPlan
from tests.weights.mxfp4_reference import decoded


def random_packed(experts=3, rows=6, groups=4):
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
    return blocks, torch.randint(110, 140, (experts, rows, groups), dtype=torch.uint8)


def test_every_code_and_every_scale_is_exact():
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 254, 16, 16)
    scales = torch.arange(254, dtype=torch.uint8)[:, None].expand(1, 254, 16)
    want = decoded(blocks, scales)
    got = decode(blocks, scales)
    assert got.dtype == torch.float32
    assert torch.equal(got.double()[:, :252], want[:, :252])
    assert torch.equal(got[:, :252].bfloat16().double(), want[:, :252]), "bfloat16 holds them all"
    assert decode(blocks[:, :1], torch.full((1, 1, 16), 255, dtype=torch.uint8)).isnan().all()


class Weights(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = parameter(*shape, dtype=torch.bfloat16, device=None)


def filled(folder, target, copies, blocks, scales, *, apart=False, shape=None):
    stored = {"w_blocks": blocks, "w_scales": scales}
    if apart:
        save_file({"w_blocks": blocks}, folder / "1.safetensors")
        save_file({"w_scales": scales}, folder / "2.safetensors")
        tensors = read_header(folder / "1.safetensors") | read_header(folder / "2.safetensors")
    else:
        save_file(stored, folder / "1.safetensors")
        tensors = read_header(folder / "1.safetensors")
    shape = shape or (*blocks.shape[:2], 32 * blocks.shape[2])
    plan = TensorPlan("w_blocks", shape, tuple(copies), target.weight, scales="w_scales")
    stream.fill(target, [plan], tensors, lambda name: False, lambda n: None)
    return target.weight


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("buffer_bytes", [64 << 20, 4096])
@pytest.mark.parametrize(("start", "stop"), [(0, 128), (32, 96), (40, 41), (10, 70), (100, 128)])
def test_a_rank_takes_any_columns_also_of_part_of_a_block(tmp_path, monkeypatch, start, stop, buffer_bytes, apart):
    monkeypatch.setattr(stream, "BUFFER_BYTES", buffer_bytes)
    blocks, scales = random_packed()
    target = Weights(3, 6, stop - start)
    every = slice(None)
    got = filled(
        tmp_path, target, [Copy((every, every, slice(start, stop)), target.weight)], blocks, scales, apart=apart
    )
    want = decoded(blocks, scales)[:, :, start:stop]
    assert torch.equal(got.double(), want)


def test_a_rank_takes_rows_into_the_place_that_is_meant_and_the_rest_stays_zero(tmp_path):
    blocks, scales = random_packed()
    target = Weights(3, 4, 128)
    copy = Copy((slice(None), slice(3, 6), slice(None)), target.weight[:, 1:])
    got = filled(tmp_path, target, [copy], blocks, scales)
    assert torch.equal(got[:, 1:].double(), decoded(blocks, scales)[:, 3:])
    assert (got[:, 0] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blocks, scales: (blocks, scales[:, :5].contiguous()), "'w_scales' .* has shape .*3, 5, 4.* asks for"),
        (lambda blocks, scales: (blocks[..., :8].contiguous(), scales), "'w_blocks' .* has shape"),
        (lambda blocks, scales: (blocks, scales.float()), "'w_scales' .* has dtype F32; readable are U8"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, message):
    target = Weights(3, 6, 128)
    copy = Copy((slice(None),) * 3, target.weight)
    with pytest.raises(CheckpointError, match=message):
        filled(tmp_path, target, [copy], *change(*random_packed()), shape=(3, 6, 128))
