"""The tiny checkpoints, made once for the session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.models import tiny, tiny_packed, tiny_wrapped


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tiny.Checkpoint]:
    """`tiny_checkpoint("llama")` and so on."""
    folder = tmp_path_factory.mktemp("tiny")
    makers = {"gpt_oss_packed": tiny_packed.save, "kimi_k25": tiny_wrapped.save}
    return cache(lambda family: makers.get(family, tiny.save)(family, folder / family))
