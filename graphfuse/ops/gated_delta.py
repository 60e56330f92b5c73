"""The gated delta rule, a recurrence with a matrix of fast weights a head, as one opaque op: `graphfuse::gated_delta`.

    S <- exp(g) S                         forget                 S [Dk, Dv], one matrix a value head
    u  = beta (v - S^T k)                 what S gets wrong      k and q have unit length
    S <- S + k u^T                        correct it
    y  = S^T q / sqrt(Dk)

One token is done as written. More are done in chunks: within one, all u at once solve a triangular system, since each
depends on the earlier ones through their keys (the WY or UT form), and only the state goes from chunk to chunk.

The state is kept in a cache, written in place; as in `graphfuse::attention`, the schema says nothing of it. Ragged
calls on a GPU are done by Triton kernels, one for single tokens and others for chunks (where `why_not` of
`graphfuse.kernels.gated_delta_chunks` has nothing against it); all else is plain torch in float32.

Source: Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464), section 3.
Legend: B batch, S sequence of this call, Hk and Hv key and value heads, Dk and Dv their sizes, N chunks, C tokens in
one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.errors import ArgumentError
from graphfuse.ops.causal_conv import check_ragged_states, check_rows, check_tokens
from graphfuse.ops.layout import Span, split

CHUNK = 64
_EPS = 1e-6


@torch.library.custom_op("graphfuse::gated_delta", mutates_args=())
def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    positions: Tensor,
    lengths: Tensor | None,
    state_cache: Tensor | None,
    states: Tensor | None = None,
    spans: Tensor | None = None,
) -> Tensor:
    """The recurrence over the tokens of this call, from the state in the cache.

    Args:
        q, k: `[B, S, Hk, Dk]`, of any length: they are normalised here, with 1e-6 added to the sum of squares.
        v: `[B, S, Hv, Dv]` with Hv a multiple of Hk; value head h reads key head `h // (Hv // Hk)`.
        g: `[B, S, Hv]` float32, the logarithm of what is kept of the state, at most 0.
        beta: `[B, S, Hv]`, how much of an error is corrected.
        positions: `[B, S]` int64. A row whose first position is 0 starts anew, whatever the cache holds.
        lengths: `[B]` int64, how many tokens of each row are real. The others, at its end, leave the state as it is,
            and what is returned for them means nothing. None: of a ragged call.
        state_cache: `[max_batch, Hv, Dk, Dv]` float32, or None. Row b of the call is row b of the cache. Written
            **in place**. Of a ragged call rows are those that `states` names.
        states, spans: of a ragged call, B = 1, with a cache; see `graphfuse.ops.layout.Layout`.

    Returns:
        `[B, S, Hv, Dv]`, contiguous, in v's dtype.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit.

    Nothing depends on values, so a call can be captured in a CUDA graph.
    """
    _check(q, k, v, g, beta, positions, lengths, state_cache)
    check_ragged_states(lengths, states, spans, state_cache)
    if states is not None and spans is not None and state_cache is not None:
        return _ragged((q[0], k[0], v[0], g[0], beta[0]), positions[0], state_cache, states, spans)[None]
    assert lengths is not None
    batch, length, num_heads, value_dim = v.shape
    is_real = (torch.arange(length, device=v.device) < lengths[:, None])[:, :, None]  # [B, S, 1]
    state = v.new_zeros(batch, num_heads, q.shape[-1], value_dim, dtype=torch.float32)
    if state_cache is not None:
        check_rows(batch, state_cache)
        state = _since(positions[:, 0], state_cache[:batch])
    y, state = _advance(q, k, v, g.float().where(is_real, 0.0), beta.float().where(is_real, 0.0), state)
    if state_cache is not None:
        state_cache[:batch] = state
    return y.contiguous()


@gated_delta.register_fake
def _(q, k, v, g, beta, positions, lengths, state_cache, states=None, spans=None):
    _check(q, k, v, g, beta, positions, lengths, state_cache)
    check_ragged_states(lengths, states, spans, state_cache)
    return v.new_empty(v.shape)


Tokens = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, g and beta."""


def _ragged(tokens: Tokens, positions: Tensor, cache: Tensor, states: Tensor, spans: Tensor) -> Tensor:
    """Tokens and positions `[T, ...]`: first the sequences with one token, all at once, then the others."""
    q, k, v, g, beta = tokens
    num_single, longer = split(len(v), spans)
    if not longer:
        return _one_token_each(tokens, positions, cache, states).contiguous()
    out = v.new_empty(v.shape)
    if num_single:
        one = slice(0, num_single)
        out[one] = _one_token_each((q[one], k[one], v[one], g[one], beta[one]), positions[one], cache, states[one])
    _longer(tokens, positions, cache, states, longer, out)
    return out


def _longer(tokens: Tokens, positions: Tensor, cache: Tensor, states: Tensor, longer: list[Span], out: Tensor) -> None:
    """All of them at once on a GPU, else one after the other; results go into `out` `[T, Hv, Dv]`."""
    q, k, v, g, beta = tokens
    if v.is_cuda:
        from graphfuse.kernels.gated_delta_chunks import gated_delta_chunks, why_not
        from graphfuse.kernels.ragged_chunks import chunks_of

        if why_not(q, v) is None:
            chunks = chunks_of(tuple(longer), v.device)
            gated_delta_chunks(q, k, v, g, beta, positions, states, chunks, cache, out, _EPS)
            return
    beta = beta.float()
    for span in longer:
        here, rows = span.here, states[span.row : span.row + 1]
        before = _since(positions[span.start : span.start + 1], cache[rows])
        y, state = _advance(q[None, here], k[None, here], v[None, here], g[None, here], beta[None, here], before)
        out[here] = y[0]
        cache.index_put_((rows,), state)


def _one_token_each(tokens: Tokens, positions: Tensor, cache: Tensor, states: Tensor) -> Tensor:
    """`[R, Hv, Dv]` for tokens, positions and states `[R, ...]`."""
    q, k, v, g, beta = tokens
    if v.is_cuda:
        from graphfuse.kernels.gated_delta_step import gated_delta_step  # Triton is published for Linux only

        return gated_delta_step(q, k, v, g, beta, positions, states, cache, _EPS)
    before = _since(positions, cache[states])
    y, state = _advance(q[:, None], k[:, None], v[:, None], g[:, None], beta.float()[:, None], before)
    cache.index_put_((states,), state)
    return y[:, 0]


def _since(first_positions: Tensor, states: Tensor) -> Tensor:
    """States `[R, ...]`, zero where a row's first position `[R]` is zero: a text that starts."""
    return torch.where((first_positions == 0).view(-1, *[1] * (states.dim() - 1)), 0.0, states)


def _advance(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over tokens `[B, S, heads, ...]` from `state` `[B, Hv, Dk, Dv]`; g and beta in float32."""
    group = v.shape[2] // k.shape[2]
    q, k = (_unit(x).repeat_interleave(group, dim=2).transpose(1, 2) for x in (q, k))  # [B, Hv, S, Dk]
    q = q * q.shape[-1] ** -0.5
    step = _one_token if v.shape[1] == 1 else _chunks
    y, state = step(q, k, v.float().transpose(1, 2), g.transpose(1, 2), beta.transpose(1, 2), state)
    return y.transpose(1, 2).to(v.dtype).contiguous(), state


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def _one_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state = state * g[..., None].exp()
    error = beta[..., None] * (v - k @ state)  # [B, Hv, 1, Dv]
    state = state + k.transpose(-1, -2) * error
    return q @ state, state


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    length = v.shape[2]
    size = min(CHUNK, length)
    padding = -length % size  # tokens that keep the state and add nothing to it
    q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, size)) for x in (q, k, v))  # [B, Hv, N, C, D]
    g, beta = (F.pad(x, (0, padding)).unflatten(2, (-1, size)) for x in (g, beta))  # [B, Hv, N, C]

    since_start = g.cumsum(-1)  # the logarithm of what a token still sees of the state before the chunk
    later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    between = since_start[..., :, None] - since_start[..., None, :]  # from token j to i
    between = between.masked_fill(later, -torch.inf).exp()  # masked first: exp of a large positive number is infinite
    # u_i = beta_i (v_i - exp(since_start_i) S^T k_i - sum over j < i of between_ij (k_i k_j) u_j)
    system = beta[..., None] * between * (k @ k.transpose(-1, -2))  # [B, Hv, N, C, C]; its diagonal counts as one
    right = torch.cat((v, since_start[..., None].exp() * k), dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_values, from_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)  # u = from_values - from_state S
    scores = between * (q @ k.transpose(-1, -2))  # [B, Hv, N, C, C]
    to_state = since_start[..., None].exp() * q
    to_end = (since_start[..., -1:] - since_start)[..., None].exp() * k
    kept = since_start[..., -1].exp()[..., None, None]  # [B, Hv, N, 1, 1]

    outputs = []
    for n in range(v.shape[2]):
        error = from_values[:, :, n] - from_state[:, :, n] @ state  # [B, Hv, C, Dv]
        outputs.append(to_state[:, :, n] @ state + scores[:, :, n] @ error)
        state = kept[:, :, n] * state + to_end[:, :, n].transpose(-1, -2) @ error
    return torch.cat(outputs, dim=2)[:, :, :length], state


def _check(q, k, v, g, beta, positions, lengths, state_cache) -> None:
    """What can be checked without looking at a token dimension (they may be unknown while tracing)."""
    check_tokens(positions, lengths)
    if not (q.dim() == k.dim() == v.dim() == 4 and g.dim() == beta.dim() == 3):
        raise ArgumentError(
            f"gated_delta got q, k, v of {q.dim()}, {k.dim()}, {v.dim()} dimensions, g and beta of {g.dim()} and "
            f"{beta.dim()}. Pass q and k [B, S, Hk, Dk], v [B, S, Hv, Dv], g and beta [B, S, Hv]."
        )
    num_heads, value_dim = v.shape[2:]
    if q.shape[2:] != k.shape[2:] or k.shape[2] == 0 or num_heads % k.shape[2] != 0:
        raise ArgumentError(
            f"Heads do not fit: q {tuple(q.shape[2:])}, k {tuple(k.shape[2:])}, v {tuple(v.shape[2:])}. q and k need "
            "the same, and the number of v's heads must be a multiple of theirs."
        )
    if g.shape[2] != num_heads or beta.shape[2] != num_heads or g.dtype != torch.float32:
        raise ArgumentError(
            f"g is {g.dtype} for {g.shape[2]} heads and beta is for {beta.shape[2]}. Pass float32 g, and both for the "
            f"{num_heads} heads of v."
        )
    if state_cache is not None and (
        state_cache.dtype != torch.float32 or state_cache.dim() != 4
        or state_cache.shape[1:] != (num_heads, k.shape[3], value_dim)
    ):  # fmt: skip
        raise ArgumentError(
            f"The cache of states is {state_cache.dtype} of shape {tuple(state_cache.shape)}. Allocate it as float32 "
            f"[max_batch, {num_heads}, {k.shape[3]}, {value_dim}]."
        )
    for t in (q, k, beta):
        if t.dtype != v.dtype:
            raise ArgumentError(f"v is {v.dtype} but another input is {t.dtype}. Use one dtype for q, k, v and beta.")
    for t in (q, k, g, beta, positions, *(t for t in (lengths, state_cache) if t is not None)):
        if t.device != v.device:
            raise ArgumentError(f"v is on {v.device} but another input is on {t.device}. Use one device for all.")
