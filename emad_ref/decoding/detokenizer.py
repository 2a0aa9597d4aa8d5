"""Incremental detokenization: token ids one by one → pieces of text that join to the text of all ids.

A later token may change earlier text, so a piece holds only text that no later token can change:

    byte fallback   bytes ``<0x..>`` in a row become one U+FFFD each as soon as one of them does not fit: the text of a
                    row is final only when another token follows it
    byte level      U+FFFD at the end may be the first bytes of a character
    clean-up        ``clean_up_tokenization_spaces`` removes a space once it sees what follows it
    any other       all text waits for the end: decoders that this module does not know, and most tokenizers in Python

``tokenizers.decoders.DecodeStream`` does not suffice: it returns text of open rows of bytes, and raises an error when a
later byte changes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import ByT5Tokenizer, CodeGenTokenizer, PreTrainedTokenizerFast

from emad_ref.models.tokenizers import decode_tokens, keep_known_ids

INCOMPLETE = "\ufffd"
CLEANED = frozenset(
    " .?!,'ntmsver"
)  # characters of the patterns that clean-up replaces: none crosses another character
# Classes whose methods of DECODING are known, and may be inherited but not overridden.
KNOWN_CLASSES = (PreTrainedTokenizerFast, CodeGenTokenizer, ByT5Tokenizer)
DECODING = ("decode", "_decode", "clean_up_tokenization", "convert_tokens_to_string")
BPE_SETTING = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
ALONE = ("ByteLevel", "Metaspace", "WordPiece", "BPEDecoder")  # decoders that append text for each token


class IncrementalDetokenizer:
    """Converts ids to text one by one, after the ids ``read`` so far.

    All pieces and ``flush`` join to ``decode(read + ids)[len(decode(read)):]``, with special tokens kept. An id that
    the tokenizer lacks has no text. Each step decodes a window of a few ids. Some final text stands before the new ids
    in it, since the first token of a text may lose a leading space.
    """

    def __init__(self, tokenizer: Any, read: Iterable[int] = ()):
        self._tokenizer = tokenizer
        self._rule = _FinalTextRule(tokenizer)
        self._ids: list[int] = []
        self._start = 0  # first id of the window
        self._anchor = 0  # ids before it have complete, final text
        self._closed = 0  # ids before it belong to no open row of bytes
        self._seen = 0  # characters of the window's text that were returned
        self._length = 0  # characters of the whole text that were returned, those of ``read`` included
        read = [int(token) for token in read]
        self._skip = len(decode_tokens(tokenizer, read))
        self._advance(read)

    def add_token(self, token: int) -> str:
        """The text that becomes final with ``token``; often empty."""
        return self._advance([int(token)])

    def flush(self) -> str:
        """The rest of the text, after the last token."""
        return self._return(decode_tokens(self._tokenizer, self._ids)[self._length :])

    def _advance(self, tokens: Sequence[int]) -> str:
        before = self._closed
        for token in keep_known_ids(self._tokenizer, tokens):
            self._ids.append(token)
            if not self._rule.is_open_after(token):
                self._closed = len(self._ids)
        if self._closed == before:
            return ""
        text = decode_tokens(self._tokenizer, self._ids[self._start : self._closed])
        final = self._rule.final_length(text)
        piece, self._seen = text[self._seen : final], max(self._seen, final)
        if piece and final == len(text):
            self._move_window()
        return self._return(piece)

    def _move_window(self) -> None:
        """Start the window at the anchor if the text from there is not empty: then it has lost its leading space."""
        if context := decode_tokens(self._tokenizer, self._ids[self._anchor : self._closed]):
            self._start, self._anchor, self._seen = self._anchor, self._closed, len(context)

    def _return(self, text: str) -> str:
        self._length += len(text)
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        return text[skipped:]


class _FinalTextRule:
    """Which part of the text of a tokenizer's ids no later id can change."""

    def __init__(self, tokenizer: Any):
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        decoder = None if self._backend is None else self._backend.decoder
        steps = [] if decoder is None else _decoder_steps(json.loads(decoder.__getstate__()))
        kinds = {step["type"] for step in steps}
        self._all_waits = not (_is_known_class(type(tokenizer)) and _appends(steps))
        self._byte_fallback, self._byte_level = "ByteFallback" in kinds, "ByteLevel" in kinds
        self._cleans = _cleans_up(tokenizer)

    def is_open_after(self, token: int) -> bool:
        """Whether a later id may change the text of ``token`` itself."""
        return self._all_waits or (self._byte_fallback and _is_byte(self._backend.id_to_token(token)))

    def final_length(self, text: str) -> int:
        """Number of leading characters of ``text`` that are final, if its last id is not open."""
        length = len(text) - (self._byte_level and text.endswith(INCOMPLETE))
        while self._cleans and length and text[length - 1] in CLEANED:
            length -= 1
        return length


def _is_known_class(kind: type) -> bool:
    return any(all(getattr(kind, name, None) is getattr(known, name) for name in DECODING) for known in KNOWN_CLASSES)


def _is_byte(token: str) -> bool:
    return len(token) == len("<0x00>") and token.startswith("<0x") and token.endswith(">")


def _cleans_up(tokenizer: Any) -> bool:
    """Whether ``decode`` cleans up. Newer versions of Transformers do so for BPE only with a second setting."""
    is_bpe = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__ == "BPE"
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) and (
        not is_bpe or bool(getattr(tokenizer, BPE_SETTING, True))
    )


def _decoder_steps(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return (
        [part for each in step["decoders"] for part in _decoder_steps(each)] if step["type"] == "Sequence" else [step]
    )


def _appends(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each token appends to the text, apart from open rows of bytes and incomplete characters.

    In a sequence this holds for steps that work on single characters or on the start of the text. Before byte fallback
    only a replacement by a space is safe, since others could turn a token into a byte. ``Strip`` at the end of a text
    panics if that is empty, as it may be in a window.
    """
    kinds = [step["type"] for step in steps]
    if len(kinds) == 0 or (len(kinds) == 1 and kinds[0] in ALONE):
        return True
    first = kinds.index("ByteFallback") if "ByteFallback" in kinds else 0
    return all(_replaces_character(step) and step["content"] == " " for step in steps[:first]) and all(
        step["type"] in ("Fuse", "Metaspace")
        or (step["type"] == "ByteFallback" and at == 0)
        or (step["type"] == "Strip" and step["stop"] == 0)
        or _replaces_character(step)
        for at, step in enumerate(steps[first:])
    )


def _replaces_character(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1
