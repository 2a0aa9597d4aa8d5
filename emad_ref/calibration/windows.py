"""Windows of text: token sequences cut from documents, each of at most the model's number of positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count, islice
from operator import itemgetter

import numpy as np

from emad_ref.calibration.trace import TokenSequence
from emad_ref.errors import BadArgument
from emad_ref.record import Ints
from emad_ref.text.corpora import LongDocument

LONGEST_WINDOW = 512  # METHODS, "Depth and documents"
# Windows per document in a judged split: documents are the resampled unit, and a sample with a few long ones beside
# many short ones says little. Calibration text is not judged, so it has no such limit.
MOST_WINDOWS = 4


def window_size(positions: int | None) -> int:
    """Tokens per window: the model's number of positions (None: unlimited), up to 512."""
    return min(positions or LONGEST_WINDOW, LONGEST_WINDOW)


def windows(
    documents: Iterable[Ints | LongDocument],
    window: int,
    opening: int | None,
    limit: int | None = None,
    per_document: int | None = None,
) -> Iterator[TokenSequence]:
    """Token sequences to score: one document per window, longer ones cut into windows that each start at full depth.

    ``documents`` yields int64 [n] without an opening token; ``opening`` (the model's beginning-of-text id, or None) is
    put before each window, so that its first token is predicted too. ``limit`` counts windows; ``per_document`` bounds
    the windows of one document, from its start.

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
        room = window - (opening is not None)
        for number, document in enumerate(documents):
            for start in count(0, room) if per_document is None else range(0, per_document * room, room):
                piece = np.asarray(document[start : start + room], dtype=np.int64)
                if not len(piece):
                    break
                tokens = piece if opening is None else np.concatenate([[opening], piece])
                if len(tokens) >= 2:
                    yield TokenSequence(tokens, document=number)

    return islice(cut(), limit)


def round_robin_windows(cut: Iterable[TokenSequence], count: int) -> list[TokenSequence]:
    """At most ``count`` of these windows: all first ones of a document before any second one, in order."""
    turns: Counter[int] = Counter()
    placed = []
    for place, window in enumerate(cut):
        placed.append((turns[window.document], place, window))
        turns[window.document] += 1
    chosen = sorted(placed, key=itemgetter(0))[:count]
    return [window for _, _, window in sorted(chosen, key=itemgetter(1))]
