"""SamplingParams refuses what it cannot use, and says what would do."""

import json

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
        ("stop", None, "neither text nor a list"),
        ("ignore_eos", "no", "True nor False"),
        ("min_p", -0.1, "Use 0.0"),
        ("min_p", 1.1, "Use 0.0"),
        ("min_p", float("nan"), "Use 0.0"),
        ("repetition_penalty", 0, "Use 1.0"),
        ("repetition_penalty", 101, "Use 1.0"),
        ("repetition_penalty", True, "Use 1.0"),
        ("min_tokens", -1, "Use 0 for no minimum"),
        ("min_tokens", 1.0, "Use 0 for no minimum"),
        ("min_tokens", 129, "Give a smaller one"),
        ("stop_token_ids", "12", "Give a list"),
        ("stop_token_ids", 12, "Give a list"),
        ("stop_token_ids", [-1], "whole numbers"),
        ("stop_token_ids", [True], "whole numbers"),
        ("logprobs", -1, "Use None"),
        ("logprobs", 21, "Use None"),
        ("logprobs", True, "Use None"),
        ("n", 0, "at least 1 completion"),
        ("n", 2, "Use a temperature above 0"),
        ("json_schema", [], "Give an object"),
        ("json_schema", {"type": "text"}, "Use one of"),
    ],
)
def test_an_unusable_value_is_named_with_what_to_do(field, value, advice):
    with pytest.raises(GenerationError, match=advice) as error:
        SamplingParams(**{field: value})
    assert field in str(error.value)


def test_stop_ids_are_kept_as_a_tuple():
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_several_completions_of_a_sampled_prompt():
    assert SamplingParams(temperature=1.0, n=4).n == 4


def test_a_schema_is_kept_as_text_in_the_order_of_its_properties():
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}, "required": ["b"]}
    params = SamplingParams(json_schema=schema)
    assert params.json_schema == json.dumps(schema)
    assert params == SamplingParams(json_schema=json.dumps(schema, indent=1))
    hash(params)


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_json_text_ends_when_it_is_complete(other):
    with pytest.raises(GenerationError, match="Leave it out with json_schema"):
        SamplingParams(json_schema={"type": "null"}, **other)
