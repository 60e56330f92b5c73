"""One fake group of four ranks for all graphs of these tests, and a group of two of them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from graphfuse.testing import fake_tp
from tests.faults.families import WORLD, traced


@pytest.fixture(scope="package")
def group():
    with fake_tp(WORLD) as group:
        yield group
    traced.cache_clear()


@pytest.fixture(scope="package")
def half_of_the_group(group):
    return dist.new_group([0, 1]).group_name
