"""A short causal convolution over the tokens of each channel, then SiLU, as one opaque op: `graphfuse::causal_conv`.

    y[t] = silu(sum over i of weight[:, i] * x[t - K + 1 + i])         one filter of K taps a channel

The K - 1 inputs before the next token are kept in a cache, written in place; as in `graphfuse::attention`, the schema
says nothing of it. Everywhere this is plain torch: on a GPU a kernel (causal-conv1d, say) may take its place here.

Source: the short convolution of Mamba (Gu and Dao 2023, arXiv 2312.00752), as gated DeltaNet uses it (2412.06464).
Legend: B batch, S sequence of this call, C channels, K taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.errors import ArgumentError


@torch.library.custom_op("graphfuse::causal_conv", mutates_args=())
def causal_conv(
    x: Tensor,
    weight: Tensor,
    positions: Tensor,
    lengths: Tensor,
    conv_cache: Tensor | None,
) -> Tensor:
    """The convolution of `x` and of what the cache remembers before it.

    Args:
        x: `[B, S, C]`.
        weight: `[C, K]`; the last tap is that of the token itself.
        positions: `[B, S]` int64. A row whose first position is 0 starts anew, whatever the cache holds.
        lengths: `[B]` int64, how many tokens of each row are real. The others, at its end, leave no trace in the cache.
        conv_cache: `[max_batch, C, K - 1]` of x's dtype, the newest input last; or None. Row b of the call is row b of
            the cache. Written **in place**.

    Returns:
        `[B, S, C]`, contiguous, in x's dtype.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit.

    Nothing depends on values, so a call can be captured in a CUDA graph.
    """
    _check(x, weight, positions, lengths, conv_cache)
    batch, length, channels = x.shape
    taps = weight.shape[1]
    before = x.new_zeros(batch, channels, taps - 1)
    if conv_cache is not None:
        check_rows(batch, conv_cache)
        before = torch.where((positions[:, 0] == 0)[:, None, None], before, conv_cache[:batch])
    inputs = torch.cat((before, x.transpose(1, 2)), dim=2)  # [B, C, K - 1 + S]
    if conv_cache is not None:
        newest = lengths[:, None] + torch.arange(taps - 1, device=x.device)  # [B, K - 1]
        conv_cache[:batch] = inputs.gather(2, newest[:, None, :].expand(batch, channels, taps - 1))
    if length == 1:  # a product and a sum: no convolution's algorithm has to be chosen
        return F.silu((inputs.float() * weight.float()).sum(-1)).to(x.dtype)[:, None, :]
    y = F.silu(F.conv1d(inputs, weight[:, None, :], groups=channels))  # [B, C, S]
    return y.transpose(1, 2).contiguous()


@causal_conv.register_fake
def _(x, weight, positions, lengths, conv_cache):
    _check(x, weight, positions, lengths, conv_cache)
    return x.new_empty(x.shape)


def check_rows(batch: int, cache: Tensor) -> None:
    """The cache has a row for each of the batch."""
    if batch > cache.shape[0]:
        raise ArgumentError(
            f"The batch has {batch} rows but the cache holds {cache.shape[0]}. Allocate it with max_batch >= {batch}."
        )


def check_tokens(positions: Tensor, lengths: Tensor) -> None:
    """Positions and lengths are what ops with a state expect."""
    if positions.dim() != 2 or lengths.dim() != 1 or {positions.dtype, lengths.dtype} != {torch.int64}:
        raise ArgumentError(
            f"positions are {positions.dtype} of {positions.dim()} dimensions and lengths {lengths.dtype} of "
            f"{lengths.dim()}. Pass int64, [B, S] and [B]."
        )


def _check(x, weight, positions, lengths, conv_cache) -> None:
    """What can be checked without looking at a token dimension (they may be unknown while tracing)."""
    check_tokens(positions, lengths)
    if x.dim() != 3 or weight.dim() != 2 or x.shape[2] != weight.shape[0]:
        raise ArgumentError(
            f"causal_conv got x with {x.dim()} dimensions and weight of {tuple(weight.shape)}. Pass x [B, S, C] and "
            "weight [C, K]."
        )
    if conv_cache is not None and (
        conv_cache.dim() != 3 or conv_cache.shape[1:] != (*x.shape[2:], weight.shape[1] - 1)
    ):
        raise ArgumentError(
            f"A convolution's cache has shape {tuple(conv_cache.shape)}. Allocate it as [max_batch, {x.shape[2]}, "
            f"{weight.shape[1] - 1}]."
        )
    for t in (weight, *([] if conv_cache is None else [conv_cache])):
        if t.dtype != x.dtype:
            raise ArgumentError(f"x is {x.dtype} but another input is {t.dtype}. Use one dtype for all.")
    for t in (weight, positions, lengths, *([] if conv_cache is None else [conv_cache])):
        if t.device != x.device:
            raise ArgumentError(f"x is on {x.device} but another input is on {t.device}. Use one device for all.")
