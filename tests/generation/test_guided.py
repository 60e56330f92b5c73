"""Whatever the model would say, guided text parses and satisfies the schema."""

import json
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode

from graphfuse.errors import BackendUnavailableError, GenerationError
from graphfuse.generation.bitmask import allow_all, unpack
from graphfuse.generation.guided import Guide, GuideCompiler
from graphfuse.generation.sampler import Sampler, Uniforms
from graphfuse.generation.sampling import SamplingParams
from tests.generation.conftest import make_tokenizer

pytest.importorskip("xgrammar", reason="xgrammar is not installed (the extra 'guided')")
from jsonschema import Draft202012Validator

CPU = torch.device("cpu")
TOKENIZER = make_tokenizer()
V = 400  # the tokenizer has 320: the other ids stand for no text
SECOND_EOS = TOKENIZER.convert_tokens_to_ids("<|user|>")
EOS = frozenset({TOKENIZER.eos_token_id, SECOND_EOS})

# How byte-level tokenizers write each byte.
BYTES = bytes_to_unicode()

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"enum": ["Paris", "Oslo", "日本"]},
        "pets": {"type": "array", "items": {"$ref": "#/$defs/pet"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "city", "pets"],
    "$defs": {
        "pet": {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer", "multipleOf": 3}},
                    "required": ["kind", "lives"],
                },
                {
                    "type": "object",
                    "properties": {"kind": {"const": "dog"}, "weight": {"type": "number", "exclusiveMinimum": 0.5}},
                    "required": ["kind"],
                },
            ]
        }
    },
}


@pytest.fixture(scope="module")
def compiler():
    return GuideCompiler(TOKENIZER, V, EOS)


def generate(compiler, schema, seed, temperature=1.0, max_tokens=2000):
    """The text and ids of a model whose logits are random, but for a liking of the end and of closing brackets."""
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, json_schema=schema)
    guide, uniforms = compiler.guide(params.json_schema), Uniforms(seed)
    sampler = Sampler(2, V, CPU)
    sampler.begin(1, params, [], EOS)
    generator = torch.Generator().manual_seed(seed)
    likely = [*EOS, *TOKENIZER.convert_tokens_to_ids(['"', "}", "]", ","]), 350]
    bitmask, token_ids = allow_all(1, V), []
    while not guide.finished:
        assert len(token_ids) < max_tokens
        logits = 2 * torch.randn(1, V, generator=generator)
        logits[0, likely] += 5
        guide.fill(bitmask[0])
        uniform = torch.tensor([uniforms.next()], dtype=torch.float64)
        token_id = int(sampler(logits, [1], [len(token_ids)], uniform, bitmask).tokens)
        guide.accept(token_id)
        token_ids.append(token_id)
    return TOKENIZER.decode(token_ids, skip_special_tokens=True), token_ids


@pytest.mark.parametrize("seed", range(25))
def test_random_text_of_a_schema_satisfies_it(compiler, seed):
    text, token_ids = generate(compiler, PERSON, seed, temperature=[0.0, 1.0][seed % 2])
    Draft202012Validator(PERSON).validate(json.loads(text))
    assert token_ids[-1] in EOS
    assert max(token_ids) < len(TOKENIZER)


NUMBERS = st.integers(-1000, 1000)
SCALARS = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "integer"}, {"type": "number"}, {"const": "a\n"}]),
    st.sampled_from([{"type": "string", "pattern": p} for p in ("^[a-f]{2,4}$", "^[^a]?$", r"^\d+-\w$", "^(a|b)+$")]),
    st.sampled_from([{"type": "string", "format": f} for f in ("date", "ipv4", "uuid")]),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 9)] * 2
    ),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, NUMBERS, st.integers(0, 99)
    ),
    st.builds(
        lambda low, more: {"type": "number", "minimum": low, "exclusiveMaximum": low + more}, NUMBERS, st.just(3)
    ),
    st.lists(st.sampled_from(["x", 'quo"te', 3, 2.5, None, True, [], {"k": 1}]), min_size=1).map(lambda v: {"enum": v}),
)


def composites(children):
    named = st.dictionaries(st.sampled_from(["a", "b", "key", 'q"']), children, min_size=1, max_size=3)
    return st.one_of(
        named.flatmap(
            lambda p: st.lists(st.sampled_from(sorted(p)), unique=True).map(
                lambda required: {"type": "object", "properties": p, "required": required}
            )
        ),
        st.builds(lambda v: {"type": "object", "additionalProperties": v}, children),
        st.builds(
            lambda v, n: {"type": "array", "items": v, "minItems": n, "maxItems": n + 1}, children, st.integers(0, 2)
        ),
        st.lists(children, min_size=1, max_size=2).map(
            lambda v: {"type": "array", "prefixItems": v, "items": False, "minItems": len(v)}
        ),
        st.lists(children, min_size=1, max_size=2).map(lambda v: {"anyOf": v}),
    )


@settings(max_examples=60, deadline=None)
@given(schema=st.recursive(SCALARS, composites, max_leaves=4), seed=st.integers(0, 2**32))
def test_text_of_any_accepted_schema_satisfies_it(compiler, schema, seed):
    text, _ = generate(compiler, schema, seed)
    Draft202012Validator(schema).validate(json.loads(text))


def test_any_json_is_an_empty_schema(compiler):
    for seed in range(5):
        json.loads(generate(compiler, {}, seed)[0])


def test_properties_come_in_the_order_of_the_schema(compiler):
    schema = {"type": "object", "properties": {n: {"type": "null"} for n in "zay"}, "required": list("zay")}
    assert list(json.loads(generate(compiler, schema, 0)[0])) == list("zay")


def test_what_may_come_next(compiler):
    guide, row = compiler.guide({"type": "boolean"}), allow_all(1, V)[0]

    def allowed():
        guide.fill(row)
        return {i for i in range(V) if row[i // 32] >> i % 32 & 1}

    first = allowed()
    starts = {i for i in range(len(TOKENIZER)) if TOKENIZER.decode([i]) and "true".startswith(TOKENIZER.decode([i]))}
    assert starts <= first
    assert not first & EOS
    for token_id in TOKENIZER.encode("true", add_special_tokens=False):
        guide.accept(token_id)
    assert allowed() >= EOS
    assert not guide.finished
    guide.accept(SECOND_EOS)
    assert guide.finished
    assert allowed() >= set(range(V))


def test_a_token_that_was_not_allowed_is_refused(compiler):
    with pytest.raises(GenerationError, match="Token 350 does not continue the JSON text"):
        compiler.guide({"type": "boolean"}).accept(350)


def test_a_schema_nothing_satisfies_is_refused(compiler):
    with pytest.raises(GenerationError, match=r"minimum greater than maximum'\)\. Change the schema"):
        compiler.guide({"type": "integer", "minimum": 5, "maximum": 3})


def test_a_model_without_an_end_cannot_be_guided():
    for eos in ((), {V}):
        with pytest.raises(GenerationError, match="no end-of-sequence token"):
            GuideCompiler(TOKENIZER, V, eos)


def test_a_tokenizer_without_a_vocabulary_cannot_guide():
    with pytest.raises(GenerationError, match="The tokenizer cannot guide generation"):
        GuideCompiler(object(), V, EOS)


def test_without_xgrammar_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install \"graphfuse\[guided\]\""):
        GuideCompiler(TOKENIZER, V, EOS)


def test_guides_of_one_schema_stand_for_themselves(compiler):
    first, second = (compiler.guide({"type": "boolean"}) for _ in range(2))
    for token_id in [*TOKENIZER.encode("true", add_special_tokens=False), SECOND_EOS]:
        first.accept(token_id)
    assert isinstance(second, Guide)
    assert first.finished and not second.finished


def test_special_tokens_stand_in_no_string():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<|spare|>", special=True)])
    spare = tokenizer.convert_tokens_to_ids("<|spare|>")
    guide, row = GuideCompiler(tokenizer, V, EOS).guide({"type": "string"}), allow_all(1, V)
    guide.accept(tokenizer.convert_tokens_to_ids('"'))
    guide.fill(row[0])
    assert not unpack(row, V)[0, [*tokenizer.all_special_ids, spare]].any()


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 50}, {}])
@pytest.mark.parametrize(
    ("lead", "rest"),
    [
        (0xC3, range(0x80, 0xC0)),
        (0xE0, range(0xA0, 0xC0)),
        (0xED, range(0x80, 0xA0)),
        (0xF0, range(0x90, 0xC0)),
        (0xF4, range(0x80, 0x90)),
    ],
)
def test_strings_hold_no_control_characters_and_only_utf_8(compiler, schema, lead, rest):
    def token(*values):
        return TOKENIZER.convert_tokens_to_ids([BYTES[v] for v in values])

    guide, row = compiler.guide(schema), allow_all(1, V)
    [quote] = token(ord('"'))
    guide.accept(quote)

    def allowed():
        guide.fill(row[0])
        return set(unpack(row, V)[0].nonzero().flatten().tolist())

    assert not allowed() & set(token(*range(0x20), 0xC0, 0xC1, *range(0xF5, 0x100)))
    [start] = token(lead)
    assert start in allowed()
    guide.accept(start)
    first = {BYTES[byte] for byte in rest}
    assert {TOKENIZER.convert_ids_to_tokens(i)[0] for i in allowed()} == first
