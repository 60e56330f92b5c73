"""Bits of a word are tokens in order, the highest one of a word included."""

import pytest
import torch

from graphfuse.generation.bitmask import allow_all, num_words, pack, unpack


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_unpacking_gives_back_what_was_packed(vocab_size):
    bits = torch.rand(vocab_size, generator=torch.Generator().manual_seed(0)) < 0.5
    words = pack(bits)
    assert words.dtype == torch.int32
    assert words.shape == (num_words(vocab_size),)
    assert torch.equal(unpack(words[None], vocab_size)[0], bits)


def test_the_place_of_each_bit():
    for token_id, word in ((0, [1, 0]), (31, [-(2**31), 0]), (32, [0, 1]), (63, [0, -(2**31)])):
        assert pack(torch.arange(64) == token_id).tolist() == word


def test_all_are_allowed():
    assert unpack(allow_all(3, 70), 70).all()
