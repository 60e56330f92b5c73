"""Text that is JSON of a given schema: which tokens may come next, by xgrammar (the extra `guided`).

    compiler = GuideCompiler(tokenizer, vocab_size, eos)       one for each tokenizer; schemas are compiled once
    guide = compiler.guide(params.json_schema)                 one for each completion

    guide.fill(bitmask[row])  ─►  sampler(…, bitmask=…)  ─►  guide.accept(token_id)      until guide.finished

All of it runs on the host, and comes to the same on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from graphfuse.errors import BackendUnavailableError, GenerationError, brief
from graphfuse.generation.bitmask import pack
from graphfuse.generation.json_schema import checked_schema

_MAX_WHITESPACE = 32  # between two parts of the JSON text: room for indentation, none for a model that never stops
_CACHE_BYTES = 256 << 20  # of compiled schemas

# xgrammar (0.2.9) lets control characters into strings of limited length, which JSON forbids, and bytes that are not
# UTF-8 into all: half surrogates and code points spelt too long or out of range, each of them several characters where
# it counts one. Line ends may stand between the parts of the JSON text, and it keeps them out of strings.
_CONTROL = rb"[\x00-\x09\x0b\x0c\x0e-\x1f]"
_NOT_AFTER = {b"\xe0": rb"[\x80-\x9f]", b"\xed": rb"[\xa0-\xbf]", b"\xf0": rb"[\x80-\x8f]", b"\xf4": rb"[\x90-\xbf]"}
_FORBIDDEN = re.compile(
    b"|".join([_CONTROL, rb"[\xc0\xc1\xf5-\xff]", *(lead + rest for lead, rest in _NOT_AFTER.items())])
)


class GuideCompiler:
    """Makes guides for one tokenizer.

    Args:
        tokenizer: of transformers.
        vocab_size: the model's, which may be larger than the tokenizer's. What only the model has is never allowed.
        eos: the ids that end a completion, allowed once the JSON text is complete.

    Raises:
        BackendUnavailableError: xgrammar is not installed.
        GenerationError: its vocabulary cannot be used, or nothing ends a sequence.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Iterable[int]) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise BackendUnavailableError(
                'json_schema needs xgrammar, which is not installed. Run pip install "graphfuse[guided]".'
            ) from error
        stop_token_ids = sorted(token_id for token_id in eos if token_id < vocab_size)
        if not stop_token_ids:
            raise GenerationError(
                "The model has no end-of-sequence token to end JSON text with. Generate without json_schema."
            )
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocab_size, stop_token_ids=stop_token_ids
            )
        except Exception as error:  # ValueError, RuntimeError, … from its native code
            raise GenerationError(
                f"The tokenizer cannot guide generation ({brief(error)}). Generate without json_schema."
            ) from error
        self._xgrammar = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
        self._text = _TokenText(info.decoded_vocab, _special_ids(tokenizer), stop_token_ids)

    def guide(self, json_schema: dict[str, Any] | str) -> Guide:
        """A guide for a completion that has no token yet. Raises `GenerationError` if the schema is refused."""
        schema = checked_schema(json_schema)
        try:
            compiled = self._compiler.compile_json_schema(schema, max_whitespace_cnt=_MAX_WHITESPACE)
        except Exception as error:
            reason = str(error).split(": ", 1)[-1]  # behind the place in xgrammar's source
            raise GenerationError(f"json_schema is refused ({brief(reason.strip())}). Change the schema.") from error
        return Guide(self._xgrammar.GrammarMatcher(compiled), self._text)


def _special_ids(tokenizer: Any) -> set[int]:
    """What decoding leaves out. xgrammar counts it as the text that it is named by."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}


class _TokenText:
    """Which tokens are right as bytes, whatever the grammar says."""

    def __init__(self, vocabulary: list[bytes], special: set[int], stop_token_ids: list[int]) -> None:
        allowed = torch.tensor([i not in special and not _FORBIDDEN.search(text) for i, text in enumerate(vocabulary)])
        allowed[stop_token_ids] = True
        self._vocabulary = vocabulary
        self._anywhere = pack(allowed)  # [W]
        self._after = {
            lead: pack(allowed & torch.tensor([re.match(rest, text) is None for text in vocabulary]))
            for lead, rest in _NOT_AFTER.items()
        }

    def allowed_after(self, token_id: int | None) -> Tensor:
        """The bitmask [W] of the tokens that may follow one, or stand first."""
        last = b"" if token_id is None else self._vocabulary[token_id][-1:]
        return self._after.get(last, self._anywhere)


class Guide:
    """Where one completion stands in its JSON text."""

    def __init__(self, matcher: Any, text: _TokenText) -> None:
        self._matcher = matcher
        self._text = text
        self._allowed = text.allowed_after(None)

    @property
    def finished(self) -> bool:
        """Whether the text is complete and ended, by an end-of-sequence token."""
        return bool(self._matcher.is_terminated())

    def fill(self, bitmask_row: Tensor) -> None:
        """Set bit i % 32 of word i // 32 for each token i that may come next, and clear the others.

        Args:
            bitmask_row: [ceil(V/32)] int32, contiguous, on the CPU. All tokens are allowed once `finished`: whatever
                is sampled then is thrown away.
        """
        if self.finished:
            bitmask_row.fill_(-1)
        else:
            self._matcher.fill_next_token_bitmask(bitmask_row)
            bitmask_row &= self._allowed

    def accept(self, token_id: int) -> None:
        """Go on to the next token. Raises `GenerationError` if `fill` had not allowed this one."""
        if not self._matcher.accept_token(token_id):
            raise GenerationError(
                f"Token {token_id} does not continue the JSON text. Sample under the bitmask that the guide fills."
            )
        self._allowed = self._text.allowed_after(token_id)
