"""SamplingParams refuses what it cannot use, and says what would do."""

import pytest

from graphfuse.errors import GenerationError
from graphfuse.generation import SamplingParams


def test_defaults_are_greedy():
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.5).greedy


def test_one_stop_string_is_the_same_as_a_list_of_one():
    assert SamplingParams(stop="\n") == SamplingParams(stop=["\n"])


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [
        ("max_tokens", 0, "at least 1 token"),
        ("max_tokens", True, "at least 1 token"),
        ("temperature", -0.1, "Use 0 for greedy"),
        ("temperature", float("nan"), "Use 0 for greedy"),
        ("temperature", float("inf"), "Use 0 for greedy"),
        ("top_p", 0.0, "Use 1.0"),
        ("top_p", 1.1, "Use 1.0"),
        ("top_k", -1, "Use 0"),
        ("top_k", 2.0, "Use 0"),
        ("seed", -1, "whole number"),
        ("seed", 2**63, "whole number"),
        ("stop", ["a", ""], "non-empty strings"),
        ("stop", [3], "non-empty strings"),
    ],
)
def test_an_unusable_value_is_named_with_what_to_do(field, value, advice):
    with pytest.raises(GenerationError, match=advice) as error:
        SamplingParams(**{field: value})
    assert field in str(error.value)
