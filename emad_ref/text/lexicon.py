"""The words of the encoder-decoders' world: made from parts, no list from elsewhere, and larger than what is kept.

Early exits prune a vocabulary to a few dozen tokens; whether that costs anything shows only where more tokens than that
are plausible. So there are hundreds of names, of things and of towns, every one a single token (``training.seq2seq``),
and ``HOME``, a fact about each name that no passage tells: it has to be remembered.

This module knows nothing of texts.
"""

from __future__ import annotations

import random
from itertools import product


def _compounds(first: str, second: str) -> tuple[str, ...]:
    """Every word of ``first`` joined to every one of ``second``."""
    return tuple(a + b for a, b in product(first.split(), second.split()))


NAMES = _compounds(
    "Al Bel Cor Dan El Far Gal Hel Il Jor Kal Lor Mar Nor Ol Per Quin Ral Sel Tor Ul Val Wil Yor Zel",
    "a an ar as en er es ia in ira is o on or os una us wen yn ys",
)
THINGS = _compounds(
    "oak pine tin brass clay glass silk wool stone steel horn ivory paper copper amber wax reed cane",
    "boxes bowls combs cups dolls drums flutes forks hooks jars keys knobs lamps masks pins rings spoons trays",
)
TOWNS = _compounds(
    "Ash Birch Black Bridge Brook Cold Crow Deer East Elm Fair Fern Fox Green Hay Long Moor North",
    "bank bury combe dale field ford gate ham hill hurst ley mere mill ridge stead ton well wick",
)
PLACES = (
    "attic", "barn", "cellar", "chapel", "dairy", "forge", "garden", "hall", "harbour", "inn", "kitchen", "library",
    "market", "meadow", "office", "orchard", "pantry", "quarry", "school", "shed", "stable", "tower", "vault", "yard",
)  # fmt: skip
COLOURS = (
    "amber", "black", "blue", "brown", "cream", "crimson", "gold", "green", "grey", "indigo", "lilac", "olive",
    "orange", "pink", "purple", "red", "rust", "scarlet", "silver", "teal", "umber", "violet", "white", "yellow",
)  # fmt: skip
LARGEST = 150  # the largest number that is a word

_drawn = random.Random("homes")
HOME: dict[str, str] = {name: _drawn.choice(TOWNS) for name in NAMES}
