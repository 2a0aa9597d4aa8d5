"""The names of a pair: all that a claim of arithmetic says of it. No weights are read for them."""

from __future__ import annotations

from dataclasses import dataclass


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
