"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four gloo ranks for the whole run: `ranks.run(tp, function, *args)`; see tests/distributed/pool.py."""
    pool = RankPool()
    yield pool
    pool.close()
