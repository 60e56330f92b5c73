"""Whatever a file or a setting holds, only errors of ours come out, nothing outside is read, and no code is run.

The default run replays the corpus (tests/fuzz/corpus: inputs that once took a way of their own, or broke something) and
tries a few hundred new inputs, the same ones each time. `-m slow` fuzzes each parser for ten minutes, or for as many
seconds as GRAPHFUSE_FUZZ_SECONDS says, with new inputs each time; what takes a new way goes into the corpus.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.box import Box
from tests.fuzz.documents import Random, edit, strategy
from tests.fuzz.parsers import PARSERS

CORPUS = Path(__file__).parent / "corpus"
SECONDS = float(os.environ.get("GRAPHFUSE_FUZZ_SECONDS", "600"))
EXAMPLES = {"config": 400, "tokenizer": 300, "table": 300}
SMALL = 4096
PLAIN: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.generate, Phase.shrink),
}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Libraries warn about every other input. Tensors this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=PARSERS)
def box(request, tmp_path_factory) -> Box:
    return Box(PARSERS[request.param], tmp_path_factory.mktemp(request.param))


def corpus(name: str) -> list[Path]:
    return sorted((CORPUS / name).iterdir()) if (CORPUS / name).is_dir() else []


def keep(name: str, data: bytes) -> Path:
    """Into the corpus."""
    file = CORPUS / name / hashlib.sha256(data).hexdigest()[:12]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def test_what_once_took_a_way_of_its_own_is_still_answered(box):
    for file in corpus(box.parser.name):
        try:
            box.feed(file.read_bytes())
        except Exception as error:
            error.add_note(f"fed {file}")
            raise


def test_only_our_errors_come_out(box):
    @settings(**PLAIN, max_examples=EXAMPLES.get(box.parser.name, 500), derandomize=True)
    @given(data=strategy(box.parser.inputs))
    def feed(data: bytes) -> None:
        box.feed(data)

    feed()


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_only_our_errors_come_out_for_ten_minutes(box):
    """Half of the inputs are new ones; half are edited from those that took a way of their own, now or earlier."""
    pool = [file.read_bytes() for file in corpus(box.parser.name)]
    known = {box.feed(data) for data in pool}
    found: dict[str, bytes] = {}
    choices, executions = Random(), 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if pool and executions % 2:
            data = edit(choices, edit(choices, pool[choices.below(len(pool))]))
        else:
            data = box.parser.inputs(choices)
        executions += 1
        try:
            way = box.feed(data)
        except Exception as error:
            error.add_note(f"fed {keep(box.parser.name, data)}")
            raise
        if way not in known and len(data) < len(found.get(way, b" " * SMALL)):
            found[way] = data
            pool.append(data)
    for data in found.values():
        keep(box.parser.name, data)
    print(f"{box.parser.name}: {executions} inputs in {SECONDS:.0f} s, {len(found)} new ways, {len(known)} known")
