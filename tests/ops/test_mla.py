"""`graphfuse::mla_attention` against a loop over rows, heads and tokens in float64."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from graphfuse.errors import ArgumentError
from graphfuse.ops.mla import _absorbed, _expanded, mla_attention

HEADS, NOPE, ROPE, VALUE, RANK, SCALE = 3, 6, 4, 5, 8, 0.3


def naive(q_nope, q_rope, latent, k_rope, kv_up, query_positions):
    """One row, as the paper writes it. q [S, H, N] and [S, H, P]; latent [L, R]; k_rope [L, P]; key l is at l."""
    q_nope, q_rope, latent, k_rope, kv_up = (t.double() for t in (q_nope, q_rope, latent, k_rope, kv_up))
    out = torch.zeros(*q_nope.shape[:2], VALUE, dtype=torch.float64)
    for h in range(HEADS):
        rows = kv_up[h * (NOPE + VALUE) : (h + 1) * (NOPE + VALUE)]
        keys = torch.stack([torch.cat((rows[:NOPE] @ c, r)) for c, r in zip(latent, k_rope, strict=True)])
        values = torch.stack([rows[NOPE:] @ c for c in latent])
        for s, p in enumerate(query_positions):
            weights = (SCALE * keys[: p + 1] @ torch.cat((q_nope[s, h], q_rope[s, h]))).softmax(0)
            out[s, h] = weights @ values[: p + 1]
    return out


def random_inputs(batch, length, dtype=torch.float32):
    shapes = [(HEADS, NOPE), (HEADS, ROPE), (RANK,), (ROPE,)]
    tokens = [torch.randn(batch, length, *shape, dtype=dtype) for shape in shapes]
    return tokens, torch.randn(HEADS * (NOPE + VALUE), RANK, dtype=dtype)


def at(tokens, rows, positions):
    return [t[rows, positions] for t in tokens]


def expect(got, tokens, kv_up, row, positions, atol=1e-5):
    q_nope, q_rope, latent, k_rope = (t[row] for t in tokens)
    end = max(positions) + 1
    want = naive(q_nope[positions], q_rope[positions], latent[:end], k_rope[:end], kv_up, positions)
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=atol)


def test_without_cache_every_token_sees_itself_and_the_tokens_before():
    tokens, kv_up = random_inputs(2, 7)
    got = mla_attention(*tokens, kv_up, torch.arange(7).expand(2, 7), None, None, SCALE)
    for b in range(2):
        expect(got[b], tokens, kv_up, b, list(range(7)))
    assert got.is_contiguous()


def test_prefill_then_decode_equals_one_pass_for_rows_of_unequal_length():
    lengths, steps = [3, 6], 3
    tokens, kv_up = random_inputs(2, 9)
    # What lies in unused slots must not be seen.
    caches = [torch.full((4, 12, RANK), 1e4), torch.full((4, 12, ROPE), 1e4)]
    padded = max(lengths)
    prompt = [t[:, :padded] for t in tokens]
    first = mla_attention(*prompt, kv_up, torch.arange(padded).expand(2, -1), *caches, SCALE)
    for b, n in enumerate(lengths):
        expect(first[b, :n], tokens, kv_up, b, list(range(n)))
    for step in range(steps):
        positions = torch.tensor([n + step for n in lengths])
        token = [t[:, None] for t in at(tokens, torch.arange(2), positions)]
        out = mla_attention(*token, kv_up, positions[:, None], *caches, SCALE)
        for b, p in enumerate(positions.tolist()):
            expect(out[b], tokens, kv_up, b, [p])
    assert all((cache[2:] == 1e4).all() for cache in caches), "rows outside the batch are not touched"


def test_a_second_chunk_of_a_prompt_sees_the_first():
    tokens, kv_up = random_inputs(1, 8)
    caches = [torch.zeros(1, 8, RANK), torch.zeros(1, 8, ROPE)]
    parts = [
        mla_attention(*[t[:, a:b] for t in tokens], kv_up, torch.arange(a, b)[None], *caches, SCALE)
        for a, b in [(0, 5), (5, 8)]
    ]
    expect(torch.cat(parts, 1)[0], tokens, kv_up, 0, list(range(8)))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
def test_the_expanded_and_the_absorbed_form_are_equal_within_rounding(dtype, atol):
    tokens, kv_up = random_inputs(2, 6, dtype)
    kv_up *= 0.3
    q_nope, q_rope, latent, k_rope = tokens
    positions = torch.arange(6).expand(2, 6)
    mask = positions[:, None, :] <= positions[:, :, None]
    for form in (_expanded, _absorbed):
        got = form(q_nope, q_rope, latent, k_rope, kv_up, mask, SCALE)
        assert got.dtype == dtype
        assert got.is_contiguous()
        for b in range(2):
            expect(got[b], tokens, kv_up, b, list(range(6)), atol)


def test_the_heads_of_two_ranks_are_the_heads_of_one():
    tokens, kv_up = random_inputs(2, 5)
    q_nope, q_rope, *shared = tokens
    positions, rows = torch.arange(5).expand(2, 5), NOPE + VALUE
    whole = mla_attention(*tokens, kv_up, positions, None, None, SCALE)
    parts = [
        mla_attention(q_nope[:, :, h], q_rope[:, :, h], *shared, kv_up[r], positions, None, None, SCALE)
        for h, r in [(slice(2), slice(2 * rows)), (slice(2, 3), slice(2 * rows, None))]
    ]
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_an_empty_batch_or_sequence_gives_an_empty_result(shape):
    tokens, kv_up = random_inputs(*shape)
    out = mla_attention(*tokens, kv_up, torch.zeros(shape, dtype=torch.int64), None, None, SCALE)
    assert out.shape == (*shape, HEADS, VALUE)


@pytest.mark.parametrize("length", [1, 3])
def test_the_fake_kernel_agrees_in_shape_dtype_and_strides(length):
    tokens, kv_up = random_inputs(2, length)
    inputs = [*tokens, kv_up, torch.arange(length).expand(2, length)]
    want = mla_attention(*inputs, None, None, SCALE)
    with FakeTensorMode() as mode:
        got = mla_attention(*[mode.from_tensor(t) for t in inputs], None, None, SCALE)
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    meta = mla_attention(*[t.to("meta") for t in inputs], None, None, SCALE)
    assert meta.shape == want.shape and meta.is_meta


def broken(**changes):
    (q_nope, q_rope, latent, k_rope), kv_up = random_inputs(2, 3)
    args = {
        "q_nope": q_nope, "q_rope": q_rope, "latent": latent, "k_rope": k_rope, "kv_up": kv_up,
        "positions": torch.arange(3).expand(2, 3), "latent_cache": torch.zeros(2, 4, RANK),
        "k_rope_cache": torch.zeros(2, 4, ROPE), "scale": SCALE,
    }  # fmt: skip
    return list({**args, **changes}.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent": torch.zeros(2, 3, 1, RANK)}, "dimensions"),
        ({"positions": torch.zeros(2, 3, dtype=torch.int32)}, "Pass int64"),
        ({"q_rope": torch.zeros(2, 3, 2, ROPE)}, "Rotary parts do not fit"),
        ({"k_rope": torch.zeros(2, 3, ROPE + 2)}, "Rotary parts do not fit"),
        ({"kv_up": torch.zeros(HEADS * (NOPE + VALUE) + 1, RANK)}, "kv_up is"),
        ({"kv_up": torch.zeros(HEADS * NOPE, RANK)}, "kv_up is"),
        ({"latent_cache": None}, "Pass both or neither"),
        ({"k_rope_cache": torch.zeros(2, 4, ROPE, dtype=torch.bfloat16)}, "Use one dtype"),
        ({"k_rope_cache": torch.zeros(2, 4, ROPE, device="meta")}, "Use one device"),
        ({"latent_cache": torch.zeros(2, 4, RANK + 1)}, "A cache has shape"),
        ({"latent": torch.zeros(2, 4, RANK)}, "disagree on"),
        ({"latent_cache": torch.zeros(1, 4, RANK)}, "The batch has 2 rows"),
        ({"positions": torch.arange(3).expand(2, 3) + 2}, "Position 4 lies outside the KV cache of 4 slots"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(changes, message):
    with pytest.raises(ArgumentError, match=message):
        mla_attention(*broken(**changes))
