"""The static cache: as given, or as long as needed and growing."""

import torch

from graphfuse.generation.cache import StaticCache


class Model:
    def __init__(self):
        self.made = []

    def new_kv_caches(self, max_batch, max_length):
        self.made.append((max_batch, max_length))
        return [(torch.empty(max_batch, max_length, 1, 1), torch.empty(max_batch, max_length, 1, 1))]


def test_given_sizes_are_made_once():
    model = Model()
    cache = StaticCache(model, max_batch_size=4, max_length=512, limit=8192)
    assert cache.reserve(1, 10)
    tensors = cache.tensors
    assert not cache.reserve(4, 512)
    assert cache.tensors is tensors
    assert model.made == [(4, 512)]


def test_without_sizes_it_follows_the_need_and_doubles():
    model = Model()
    cache = StaticCache(model, max_batch_size=6, max_length=None, limit=2000)
    for batch_size, length in [(1, 10), (1, 200), (1, 300), (3, 300), (6, 2000)]:
        cache.reserve(batch_size, length)
        assert cache.batch_size >= batch_size and cache.length >= length
    assert model.made == [(1, 256), (1, 512), (3, 512), (6, 2000)]


def test_it_never_exceeds_the_models_limit():
    model = Model()
    cache = StaticCache(model, max_batch_size=1, max_length=None, limit=100)
    cache.reserve(1, 100)
    assert model.made == [(1, 100)]
