"""One bit a token: bit i % 32 of word i // 32 is token i's.

R rows, V vocabulary, W = ceil(V/32) words.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def num_words(vocab_size: int) -> int:
    return math.ceil(vocab_size / 32)


def allow_all(num_rows: int, vocab_size: int) -> Tensor:
    """[R, W] int32 on the CPU with every bit set: what rows without a guide keep."""
    return torch.full((num_rows, num_words(vocab_size)), -1, dtype=torch.int32)


def pack(bits: Tensor) -> Tensor:
    """bool [V] as int32 [W]; the bits beyond V are clear."""
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % 32))
    places = torch.arange(32, device=bits.device)
    return (padded.view(-1, 32).long() << places).sum(-1).to(torch.int32)


def unpack(words: Tensor, vocab_size: int) -> Tensor:
    """int32 [R, W] as bool [R, V]."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> places) & 1).bool().flatten(-2)[:, :vocab_size]
