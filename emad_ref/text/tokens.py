"""Tokens of a document: as many as are read, not as many as it has.

A window of 512 tokens needs two or three thousand characters, and a document may have millions. ``tokens_of`` gives an
array, or for a long document something that is sliced like one and tokenises a growing beginning of it.

A text that is cut may have other tokens near its cut. So two beginnings are tokenised that end at different places;
tokens count where both agree and stand ``MARGIN`` before the end of either. Where they do not agree, the whole document
is tokenised.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emad_ref.record import Ints

LONG = 100_000  # characters; shorter documents are tokenised whole
MARGIN = 64  # tokens before a cut, which are not read
LONGER = 1009  # characters, a prime: by which the second beginning is longer than the first


def tokens_of(tokenizer: Any, text: str) -> Ints | LongDocument:
    """int64 [n] the tokens of ``text``, none of them special; of a long one, what gives any slice of them."""
    return _encoded(tokenizer, text) if len(text) <= LONG else LongDocument(tokenizer, text)


class LongDocument:
    """The tokens of a long text. ``document[start:stop]`` is what the array of all tokens would give."""

    def __init__(self, tokenizer: Any, text: str):
        self._tokenizer, self._text = tokenizer, text
        self._known, self._read = np.zeros(0, dtype=np.int64), 0  # tokens, and characters tokenised for them

    def __getitem__(self, part: slice) -> Ints:
        """int64; steps of one, from the front."""
        if part.stop is None:
            self._read_on(len(self._text))
        while part.stop is not None and len(self._known) < part.stop and self._read < len(self._text):
            self._read_on(max(LONG, 2 * self._read))
        return self._known[part]

    def _read_on(self, characters: int) -> None:
        """Tokenise the first so many ``characters``, or all where the rest is short or tokens depend on the cut."""
        if characters + LONGER < len(self._text) // 2:
            first, second = (_encoded(self._tokenizer, self._text[:end]) for end in (characters, characters + LONGER))
            sure = min(len(first), len(second)) - MARGIN
            if sure > 0 and np.array_equal(first[:sure], second[:sure]):
                self._known, self._read = first[:sure], characters
                return
        self._known, self._read = _encoded(self._tokenizer, self._text), len(self._text)


def _encoded(tokenizer: Any, text: str) -> Ints:
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
