"""Turn tokens into text while they arrive: never half a character, never part of a stop string.

Two things keep text back. A character of several bytes may be split over tokens: decoding shows U+FFFD until the rest
is there. And the end of the text may be the beginning of a stop string, which the next tokens complete or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"


Decode = Callable[[list[int]], str]
"""A tokenizer's decoding: token ids to text, special tokens left out, U+FFFD for bytes that are no character."""


class TextStream:
    """The text of one completion. `push` and `finish` return what may be shown, `text` is all of that so far."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        # Decoding depends on the tokens before (a leading space is dropped at the very start): `_context` … `_read` are
        # the last tokens whose text was taken, decoded again with each new one and cut off.
        self._context = 0
        self._read = 0
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Add a token. Returns the text that became certain, possibly none; sets `stopped` at a stop string."""
        self._token_ids.append(token_id)
        known, now = self._decode_tail()
        if now.endswith(_INCOMPLETE):
            return ""
        if len(now) > len(known):  # special tokens have no text, and a space behind nothing is dropped
            self._context = self._read
        self._read = len(self._token_ids)
        return self._release(now[len(known) :], last=False)

    def finish(self) -> str:
        """No token follows: returns what was kept back."""
        if self.stopped:
            return ""
        known, now = self._decode_tail()
        self._context = self._read = len(self._token_ids)
        return self._release(now[len(known) :], last=True)

    def _decode_tail(self) -> tuple[str, str]:
        known = self._decode(self._token_ids[self._context : self._read])
        now = self._decode(self._token_ids[self._context :])
        return known, now

    def _release(self, piece: str, *, last: bool) -> str:
        waiting = self._held + piece
        ends = [at for at in (waiting.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            shown, self._held = waiting[: min(ends)], ""
        else:
            kept = 0 if last else _longest_beginning(waiting, self._stop)
            shown, self._held = waiting[: len(waiting) - kept], waiting[len(waiting) - kept :]
        self.text += shown
        return shown


def _longest_beginning(text: str, stop: Sequence[str]) -> int:
    """The length of the longest end of `text` that begins one of the stop strings."""
    longest = max((len(s) - 1 for s in stop), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-length:]) for s in stop):
            return length
    return 0
