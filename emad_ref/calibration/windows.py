"""Windows of text: token sequences cut from documents, each of at most the model's number of positions; and batches.

No model runs here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from operator import itemgetter

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Ints
from emad_ref.text.corpora import LazyDocumentTokens

LONGEST_WINDOW = 512
# Most windows per document in a judged split: documents are the resampled unit, and a few long ones among many short
# ones make a sample uninformative. Calibration text is not judged, so it has no such limit.
MOST_WINDOWS = 4
TOKENS_PER_BATCH = 2048  # bounds the logits of one layer; 2048 × 50,304 floats are 0.4 GB


@dataclass(frozen=True)
class TokenSequence:
    """``tokens`` int64 [n], opening token included; positions before ``first_decided`` are prompt, at full depth.

    ``document`` numbers the text it was cut from: windows of one document are not independent. ``source`` int64 [s]:
    the encoder input of an encoder-decoder model; None for decoder-only models.
    """

    tokens: Ints
    first_decided: int = 0
    document: int = 0
    source: Ints | None = None

    @property
    def n_decided(self) -> int:
        """Decided positions: those from ``first_decided`` on that have a next token."""
        return len(self.tokens) - 1 - self.first_decided

    @property
    def n_forward_tokens(self) -> int:
        """Tokens of one forward over it."""
        return len(self.tokens) + (0 if self.source is None else len(self.source))

    @property
    def forward_input_key(self) -> bytes:
        """Input of a forward over it: all tokens except the last, which predicts no token, and the source."""
        return self.tokens[:-1].tobytes() + (b"" if self.source is None else b"|" + self.source.tobytes())


def window_size(positions: int | None, longest: int | None = None) -> int:
    """Tokens per window: the model's number of positions (None: unlimited), up to 512, or up to ``longest`` if less."""
    return min(positions or LONGEST_WINDOW, longest or LONGEST_WINDOW, LONGEST_WINDOW)


def cut_windows(
    documents: Iterable[Ints | LazyDocumentTokens],
    window: int,
    opening: int | None,
    limit: int | None = None,
    per_document: int | None = None,
    group_of: Callable[[int], int] | None = None,
) -> Iterator[TokenSequence]:
    """Token sequences to score: one document per window, longer ones cut into windows that each start at full depth.

    ``documents`` yields int64 [n] without an opening token; ``opening`` (the model's beginning-of-text id, or None) is
    put before each window, so that its first token is predicted too. ``limit`` counts windows; ``per_document`` bounds
    the windows of one document, from its start. ``group_of``: number of a document that was read → its group,
    all of which counts as one document; None: each document is its own.

    Raises:
        BadArgument: a window that cannot hold two tokens, a negative limit, no window per document.
    """
    if window < 2:
        raise BadArgument("window", window, "at least 2 tokens", "one to see and one to predict")
    if limit is not None and limit < 0:
        raise BadArgument("limit", limit, "a count of windows ≥ 0", "None takes all")

    if per_document is not None and per_document < 1:
        raise BadArgument("per_document", per_document, "a count of windows ≥ 1", "None takes all")

    def cut() -> Iterator[TokenSequence]:
        room, given = window - (opening is not None), Counter[int]()
        for place, document in enumerate(documents):
            number = place if group_of is None else group_of(place)
            left = None if per_document is None else per_document - given[number]
            for start in count(0, room) if left is None else range(0, left * room, room):
                piece = np.asarray(document[start : start + room], dtype=np.int64)
                if not len(piece):
                    break
                tokens = piece if opening is None else np.concatenate([[opening], piece])
                if len(tokens) >= 2:
                    given[number] += 1
                    yield TokenSequence(tokens, document=number)

    return islice(cut(), limit)


def select_windows_round_robin(cut: Iterable[TokenSequence], count: int) -> list[TokenSequence]:
    """At most ``count`` of these windows: all first ones of a document before any second one, in order."""
    turns: Counter[int] = Counter()
    placed = []
    for place, window in enumerate(cut):
        placed.append((turns[window.document], place, window))
        turns[window.document] += 1
    chosen = sorted(placed, key=itemgetter(0))[:count]
    return [window for _, _, window in sorted(chosen, key=itemgetter(1))]


def iterate_batches(
    sequences: Iterable[TokenSequence], tokens: int = TOKENS_PER_BATCH
) -> Iterator[list[TokenSequence]]:
    """Batches of consecutive sequences: padded inputs, each counted once, and decided positions are ≤ ``tokens``."""
    batch: list[TokenSequence] = []
    inputs: set[bytes] = set()
    widest = decided = 0
    for sequence in sequences:
        if len(sequence.tokens) < 2:
            raise BadArgument("sequence", sequence.tokens.tolist(), "at least two tokens", "nothing is predicted in it")
        last = len(sequence.tokens) - 2
        if not 0 <= sequence.first_decided <= last:
            remedy = "nothing is decided in the sequence"
            raise BadArgument("first_decided", sequence.first_decided, f"a position in 0–{last}", remedy)
        n_decided, read = last + 1 - sequence.first_decided, sequence.forward_input_key
        rows = len(inputs) + (read not in inputs)
        if batch and max(max(widest, sequence.n_forward_tokens) * rows, decided + n_decided) > tokens:
            yield batch
            batch, inputs, widest, decided = [], set(), 0, 0
        batch.append(sequence)
        inputs.add(read)
        widest, decided = max(widest, sequence.n_forward_tokens), decided + n_decided
    if batch:
        yield batch


def padded_tokens_and_lengths(batch: Sequence[TokenSequence]) -> tuple[Ints, Ints]:
    """(tokens int64 [rows, widest] padded on the right with 0, lengths int64 [rows])."""
    return pad_rows([s.tokens for s in batch]), np.array([len(s.tokens) for s in batch])


def pad_rows(rows: Sequence[Ints]) -> Ints:
    """int64 [rows, widest] tokens, padded on the right with 0."""
    tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for row, each in enumerate(rows):
        tokens[row, : len(each)] = each
    return tokens


def deduplicate_inputs(batch: Sequence[TokenSequence]) -> tuple[list[TokenSequence], Ints]:
    """(Sequences to run, row of each of ``batch`` among them); one-token answers to one question share a row."""
    rows: dict[bytes, int] = {}
    place = np.array([rows.setdefault(sequence.forward_input_key, len(rows)) for sequence in batch])
    _, first = np.unique(place, return_index=True)
    return [replace(batch[i], tokens=batch[i].tokens[:-1]) for i in first], place


def decided_positions(batch: Sequence[TokenSequence]) -> Ints:
    """int64 [tokens] of all decided positions."""
    return np.concatenate([np.arange(s.first_decided, len(s.tokens) - 1) for s in batch])
