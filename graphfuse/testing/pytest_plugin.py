"""The pytest option --update-goldens. Loaded by pytest through an entry point; imports nothing heavy."""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    parser.getgroup("graphfuse").addoption(
        "--update-goldens",
        action="store_true",
        help="write the graphs that graphfuse.testing.assert_golden is given, instead of comparing them",
    )


def pytest_configure(config: Any) -> None:
    if config.getoption("--update-goldens", default=False):
        from graphfuse.testing.golden import set_update

        set_update(True)
