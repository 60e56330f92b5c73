"""The failure matrix in docs/reliability.md: each row is a test, each test of a failure is a row."""

from __future__ import annotations

import ast
import re

from tests.documents import ROOT

TEXT = (ROOT / "docs" / "reliability.md").read_text()
ROW = re.compile(r"^\| (.+) \| (.+) \| ([\d.]+) \| `(test_\w+)` \|$", re.MULTILINE)
ROWS = [match.groups() for match in ROW.finditer(TEXT)]


def measuring_tests() -> set[str]:
    """The tests that record seconds."""
    found = set()
    for path in (ROOT / "tests" / "failures").glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and _measures(node):
                found.add(node.name)
    return found


def _measures(test: ast.FunctionDef) -> bool:
    return any(argument.arg == "record_property" for argument in test.args.args)


def test_rows_and_tests_are_the_same():
    assert {test for *_, test in ROWS} == measuring_tests()


def test_every_failure_was_named_within_ten_seconds():
    assert len(ROWS) > 15
    assert all(float(seconds) < 10 for _, _, seconds, _ in ROWS)
