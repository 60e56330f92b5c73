"""Every reason that a reduction is declined for says what would change it."""

from __future__ import annotations

import ast

import pytest

from graphfuse.page.advice import ADVICE, NO_ADVICE, advice, general
from tests.documents import ROOT

SOURCES = [*sorted((ROOT / "passes").glob("*.py")), *[ROOT / "graphfuse" / p for p in ("gate.py", "comm/refusals.py")]]


def sentences() -> list[str]:
    """Every string of the code that gives reasons, formatted parts left out."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
    return found


ALL = "\n".join(sentences())


@pytest.mark.parametrize("part", [part for part, _ in ADVICE])
def test_each_known_wording_still_stands_in_the_code(part):
    assert part in ALL or part.removesuffix("torch.") in ALL, "the reason has another wording now"


def declines() -> list[str]:
    """The reasons of `Decline(...)` and `NearMiss(...)` in the rules that fuse, as far as they are written out."""
    found = []
    for name in ("fuse_add_rms_norm", "fuse_rms_norm", "norm_site", "reductions", "rms_norm", "reciprocal_root"):
        for node in ast.walk(ast.parse((ROOT / "passes" / f"{name}.py").read_text())):
            if not (
                isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Decline", "NearMiss") and node.args
            ):
                continue
            reason = node.args[0]
            if isinstance(reason, ast.Constant):
                found.append(str(reason.value))
            elif isinstance(reason, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "torch.x" for p in reason.values))
    return found


def test_the_fusing_rules_give_no_reason_without_advice():
    reasons = declines()
    assert len(reasons) > 20
    assert [reason for reason in reasons if advice(reason) == NO_ADVICE] == []


def test_a_refusal_of_several_sentences_has_advice_for_each():
    text = advice("No fused comm backend can run for this group. The ranks run on several hosts, and …")
    assert "One backend that may run" in text and "Keep tensor parallelism within one host" in text


def test_like_reasons_of_several_layers_are_one():
    first = "the reduced value has another user: sigmoid (sigmoid_7)"
    assert general(first) == general(first.replace("7", "12")) == "the reduced value has another user: sigmoid"
