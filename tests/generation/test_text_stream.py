"""Streamed text: whole characters only, nothing of a stop string, and in the end exactly the decoded text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphfuse.generation.text import TextStream

WORDS = (" the", " cat", " sat", "s", ".", "")
SPECIAL = 5


def as_bytes(token_ids):
    """A tokenizer whose tokens are bytes."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def as_words(token_ids):
    """A tokenizer whose tokens are words, with the leading space dropped at the start of a text, as SentencePiece's."""
    return "".join(WORDS[i] for i in token_ids).removeprefix(" ")


def stream(decode, token_ids, stop=()):
    """The pieces shown, up to a stop string or the end, and the stream."""
    text = TextStream(decode, stop)
    pieces = []
    for token_id in token_ids:
        pieces.append(text.push(token_id))
        if text.stopped:
            break
    pieces.append(text.finish())
    return pieces, text


def test_a_character_is_shown_when_its_last_byte_is_there():
    pieces, _ = stream(as_bytes, "aé日".encode())
    assert pieces == ["a", "", "é", "", "", "日", ""]


def test_an_unfinished_character_shows_as_the_decoder_shows_it():
    pieces, text = stream(as_bytes, "aé".encode()[:-1])
    assert pieces == ["a", "", "\ufffd"]
    assert text.text == "a\ufffd"


def test_spaces_between_words_survive():
    pieces, _ = stream(as_words, [0, 1, 3, 2, 4])
    assert pieces == ["the", " cat", "s", " sat", ".", ""]


def test_spaces_behind_special_tokens_survive():
    pieces, text = stream(as_words, [SPECIAL, 0, 1, SPECIAL, SPECIAL, 2, SPECIAL])
    assert pieces == ["", "the", " cat", "", "", " sat", "", ""]
    assert text.text == as_words([SPECIAL, 0, 1, SPECIAL, SPECIAL, 2, SPECIAL])


def test_text_ends_before_a_stop_string_that_spans_tokens():
    pieces, text = stream(as_bytes, b"one STOP two", ["STOP"])
    assert text.stopped
    assert "".join(pieces) == text.text == "one "


def test_the_beginning_of_a_stop_string_is_shown_once_it_leads_elsewhere():
    pieces, text = stream(as_bytes, b"STOSTO!", ["STOP"])
    assert pieces == ["", "", "", "STO", "", "", "STO!", ""]
    assert not text.stopped


def test_the_beginning_of_a_stop_string_at_the_end_is_shown():
    pieces, text = stream(as_bytes, b"a STO", ["STOP"])
    assert "".join(pieces) == "a STO"
    assert not text.stopped


def test_the_first_of_several_stop_strings_counts():
    _, text = stream(as_words, [0, 1, 2, 4], ["sat", "cat sat."])
    assert text.text == "the cat "


def test_a_stop_string_may_end_in_the_middle_of_a_token():
    _, text = stream(as_words, [0, 1, 2], ["c"])
    assert text.text == "the "


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_what_was_shown_is_the_decoded_text_before_the_first_stop_string(text, stop):
    token_ids = text.encode()
    pieces, result = stream(as_bytes, token_ids, stop)
    ends = [at for at in (text.find(s) for s in stop) if at >= 0]
    first_to_complete = min((text.find(s) + len(s) for s in stop if s in text), default=None)
    assert "".join(pieces) == result.text
    assert result.stopped == bool(ends)
    if not ends:
        assert result.text == text
    else:
        seen = text[:first_to_complete]  # what was generated when the first stop string was complete
        assert result.text == seen[: min(at for at in (seen.find(s) for s in stop) if at >= 0)]


@given(st.binary(max_size=30))
def test_any_bytes_come_out_as_the_decoder_shows_them(data):
    pieces, _ = stream(as_bytes, data)
    assert "".join(pieces) == data.decode("utf-8", errors="replace")


@pytest.mark.parametrize("stop", [(), ["zzz"]])
def test_finish_twice_adds_nothing(stop):
    text = TextStream(as_bytes, stop)
    text.push(ord("a"))
    text.push(ord("z"))
    text.finish()
    assert text.finish() == ""
    assert text.text == "az"
