"""The names of a pair: all that a claim of arithmetic says of it. No weights are read for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from emad_ref.models.bundled import PAIR, bundled_names


@dataclass(frozen=True)
class PairNames:
    """``small``, ``large``: as the user gave them."""

    small: str
    large: str

    @property
    def name(self) -> str:
        """How reports call the pair: both names, the small model first."""
        return f"{self.small} + {self.large}"

    @property
    def corpus(self) -> str:
        """No text is read."""
        return ""

    @property
    def fingerprint(self) -> str:
        """No weights either: the verdict follows the names."""
        return ""


def pair_asked(named: tuple[str, str] | None, models: Iterable[str]) -> tuple[str, str] | None:
    """The pair a run is about: the one that was named, or the bundled one beside none but bundled ``models``.

    None: whoever judges a model of their own and names no pair has not asked about ours.
    """
    if named is not None:
        return named
    return PAIR if set(models) <= set(bundled_names()) else None
