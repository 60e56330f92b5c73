"""A short causal convolution over the tokens of each channel, then SiLU, as one opaque op: `graphfuse::causal_conv`.

    y[t] = silu(sum over i of weight[:, i] * x[t - K + 1 + i])         one filter of K taps a channel

The K - 1 inputs before the next token are kept in a cache, written in place; as in `graphfuse::attention`, the schema
says nothing of it. Ragged calls on a GPU are done by Triton kernels, one for single tokens and one for more; all else
is plain torch.

Source: the short convolution of Mamba (Gu and Dao 2023, arXiv 2312.00752), as gated DeltaNet uses it (2412.06464).
Legend: B batch, S sequence of this call, C channels, K taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.errors import ArgumentError
from graphfuse.ops.layout import split


@torch.library.custom_op("graphfuse::causal_conv", mutates_args=())
def causal_conv(
    x: Tensor,
    weight: Tensor,
    positions: Tensor,
    lengths: Tensor | None,
    conv_cache: Tensor | None,
    states: Tensor | None = None,
    spans: Tensor | None = None,
) -> Tensor:
    """The convolution of `x` and of what the cache remembers before it.

    Args:
        x: `[B, S, C]`.
        weight: `[C, K]`; the last tap is that of the token itself.
        positions: `[B, S]` int64. A row whose first position is 0 starts anew, whatever the cache holds.
        lengths: `[B]` int64, how many tokens of each row are real. The others, at its end, leave no trace in the cache.
            None: of a ragged call.
        conv_cache: `[max_batch, C, K - 1]` of x's dtype, the newest input last; or None. Row b of the call is row b of
            the cache. Written **in place**. Of a ragged call rows are those that `states` names.
        states, spans: of a ragged call, B = 1, with a cache; see `graphfuse.ops.layout.Layout`.

    Returns:
        `[B, S, C]`, contiguous, in x's dtype.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit.

    Nothing depends on values, so a call can be captured in a CUDA graph.
    """
    _check(x, weight, positions, lengths, conv_cache)
    check_ragged_states(lengths, states, spans, conv_cache)
    if states is not None and spans is not None and conv_cache is not None:
        return _ragged(x[0], weight, positions[0], conv_cache, states, spans)[None]
    assert lengths is not None
    batch, _, channels = x.shape
    taps = weight.shape[1]
    before = x.new_zeros(batch, channels, taps - 1)
    if conv_cache is not None:
        check_rows(batch, conv_cache)
        before = _since(positions[:, 0], conv_cache[:batch])
    y, inputs = _convolved(x, weight, before)
    if conv_cache is not None:
        newest = lengths[:, None] + torch.arange(taps - 1, device=x.device)  # [B, K - 1]
        conv_cache[:batch] = inputs.gather(2, newest[:, None, :].expand(batch, channels, taps - 1))
    return y.contiguous()


@causal_conv.register_fake
def _(x, weight, positions, lengths, conv_cache, states=None, spans=None):
    _check(x, weight, positions, lengths, conv_cache)
    check_ragged_states(lengths, states, spans, conv_cache)
    return x.new_empty(x.shape)


def _ragged(x: Tensor, weight: Tensor, positions: Tensor, cache: Tensor, states: Tensor, spans: Tensor) -> Tensor:
    """x `[T, C]`: first the sequences with one token, all at once, then the others."""
    num_single, longer = split(len(x), spans)
    if not longer:
        return _one_token_each(x, weight, positions, cache, states).contiguous()
    kept = weight.shape[1] - 1
    out = x.new_empty(x.shape)
    if num_single:
        one = slice(0, num_single)
        out[one] = _one_token_each(x[one], weight, positions[one], cache, states[one])
    if x.is_cuda:
        from graphfuse.kernels.causal_conv_ragged import causal_conv_ragged  # Triton is published for Linux only
        from graphfuse.kernels.ragged_chunks import chunks_of

        causal_conv_ragged(x, weight, positions, states, chunks_of(tuple(longer), x.device), cache, out)
        return out
    for span in longer:
        row = states[span.row : span.row + 1]
        before = _since(positions[span.start : span.start + 1], cache[row])
        y, inputs = _convolved(x[None, span.here], weight, before)
        out[span.here] = y[0]
        cache.index_put_((row,), inputs.narrow(2, span.length, kept))
    return out


def _one_token_each(x: Tensor, weight: Tensor, positions: Tensor, cache: Tensor, states: Tensor) -> Tensor:
    """`[R, C]` for x `[R, C]`, positions and states `[R]`."""
    if x.is_cuda:
        from graphfuse.kernels.causal_conv_step import causal_conv_step  # Triton is published for Linux only

        return causal_conv_step(x, weight, positions, states, cache)
    y, inputs = _convolved(x[:, None], weight, _since(positions, cache[states]))
    cache.index_put_((states,), inputs[:, :, 1:])
    return y[:, 0]


def _since(first_positions: Tensor, inputs: Tensor) -> Tensor:
    """What the caches have, zero where a row's first position is zero: a text that starts."""
    return torch.where((first_positions == 0)[:, None, None], 0.0, inputs)


def _convolved(x: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The result `[B, S, C]` for x `[B, S, C]`, and all inputs `[B, C, K - 1 + S]`, of which `before` are the first."""
    inputs = torch.cat((before, x.transpose(1, 2)), dim=2)
    if x.shape[1] == 1:  # a product and a sum: no convolution's algorithm has to be chosen
        return F.silu((inputs.float() * weight.float()).sum(-1)).to(x.dtype)[:, None, :], inputs
    y = F.silu(F.conv1d(inputs, weight[:, None, :], groups=x.shape[2]))  # [B, C, S]
    return y.transpose(1, 2).contiguous(), inputs


def check_rows(batch: int, cache: Tensor) -> None:
    """The cache has a row for each of the batch."""
    if batch > cache.shape[0]:
        raise ArgumentError(
            f"The batch has {batch} rows but the cache holds {cache.shape[0]}. Allocate it with max_batch >= {batch}."
        )


def check_tokens(positions: Tensor, lengths: Tensor | None) -> None:
    """Positions and lengths are what ops with a state expect."""
    dims, dtypes = (lengths.dim(), lengths.dtype) if lengths is not None else (1, torch.int64)
    if positions.dim() != 2 or dims != 1 or {positions.dtype, dtypes} != {torch.int64}:
        raise ArgumentError(
            f"positions are {positions.dtype} of {positions.dim()} dimensions and lengths {dtypes} of {dims}. Pass "
            "int64, [B, S] and [B]."
        )


def check_ragged_states(
    lengths: Tensor | None, states: Tensor | None, spans: Tensor | None, cache: Tensor | None
) -> None:
    """A call is either of rows with lengths, or ragged, with a cache."""
    if (states is None) != (spans is None) or (states is None) == (lengths is None):
        raise ArgumentError("Neither rows nor a ragged call. Pass lengths, or else states and spans.")
    if states is not None and (cache is None or states.dtype != torch.int64 or states.dim() != 1):
        raise ArgumentError("A ragged call needs a cache, and states as int64 [R]. Pass both.")


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
    for t in (weight, positions, *(t for t in (lengths, conv_cache) if t is not None)):
        if t.device != x.device:
            raise ArgumentError(f"x is on {x.device} but another input is on {t.device}. Use one device for all.")
