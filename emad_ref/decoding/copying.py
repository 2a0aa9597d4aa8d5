"""Drafts that are copied: what followed where the last tokens of a text stood before.

    … a b c d e f … a b c   →   d e f …

They cost no layer and no head; verification makes them exact, as any draft. A text that repeats itself with a period
shorter than what is copied goes on in that period. After prompt lookup decoding (Saxena 2023) and LLMA (Yang et al.
2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence

MATCHED = 3  # tokens: after two, every other copy is of a word that only looks alike


class Copies:
    """Of one text that grows: where each run of ``MATCHED`` tokens stood last."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._read = MATCHED

    def of(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow ``tokens``, all of the text so far; none where its end is new.

        ``tokens`` go on from those of the last call.
        """
        if most < 1:
            return []
        for end in range(self._read, len(tokens)):  # only runs that something follows
            self._after[tuple(tokens[end - MATCHED : end])] = end
        self._read = max(MATCHED, len(tokens))
        start = self._after.get(tuple(tokens[-MATCHED:]))
        if start is None:
            return []
        period = len(tokens) - start
        return [tokens[start + at % period] for at in range(most)]
