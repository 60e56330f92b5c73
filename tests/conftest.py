"""Fixtures of all tests. Tests that are not marked `gpu` describe the CPU, and see no GPU even where there are some."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool


def pytest_configure(config: pytest.Config) -> None:
    selected = config.getoption("markexpr")
    if "gpu" not in selected or "not gpu" in selected:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks, and for the processes that tests start


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four gloo ranks for the whole run: `ranks.run(tp, function, *args)`; see tests/distributed/pool.py."""
    pool = RankPool()
    yield pool
    pool.close()
