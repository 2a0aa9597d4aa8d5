"""The names of a pair: all that a claim of arithmetic says of it. No weights are read for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from emad_ref.errors import BadArgument
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


def pair_asked(
    pair: tuple[str, str] | None, small: str | None, large: str | None, models: Iterable[str], prefix: str = "--"
) -> tuple[str, str] | None:
    """The pair a run is about: the one that was named, or the bundled one beside none but bundled ``models``.

    None: whoever judges a model of their own and names no pair has not asked about ours.

    Args:
        pair, small, large: what the options of these names said, ``prefix`` before each.

    Raises:
        BadArgument: the pair is named in two ways, or half of it.
    """
    if pair is not None and (small or large):
        remedy = f"leave {prefix}small-model and {prefix}large-model out"
        raise BadArgument(f"{prefix}pair", ",".join(pair), "no other option that names the pair", remedy)
    if pair is not None:
        return pair
    if small and large:
        return small, large
    for flag, one, other in (("small", small, "large"), ("large", large, "small")):
        if one:
            remedy = f"or name both: {prefix}pair SMALL,LARGE"
            raise BadArgument(f"{prefix}{flag}-model", one, f"{prefix}{other}-model beside it", remedy)
    return PAIR if set(models) <= set(bundled_names()) else None
