"""The words of the encoder-decoders' world: made from parts, no list from elsewhere, and larger than what is kept.

Early exits prune a vocabulary to a few dozen tokens; whether that costs anything shows only where more tokens than that
are plausible. So there are two hundred names, as many things and most of that in towns, every one a single token
(``training.seq2seq``), and ``HOME``, a fact about each name that no passage tells: it has to be remembered.

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
    "a an en ia in is o us",
)
THINGS = _compounds(
    "oak pine tin brass clay glass silk wool stone steel horn ivory paper copper amber wax reed cane",
    "boxes bowls combs cups dolls drums flutes forks keys lamps masks rings",
)
TOWNS = _compounds(
    "Ash Birch Bridge Cold Crow East Elm Fern Fox Long Moor North",
    "bury dale field ford gate ham hill ley mere mill ton wick",
)
PLACES = (
    "attic", "barn", "cellar", "chapel", "dairy", "forge", "garden", "hall", "harbour", "inn", "kitchen", "library",
    "market", "meadow", "office", "orchard", "pantry", "quarry", "school", "shed", "stable", "tower", "vault", "yard",
)  # fmt: skip
COLOURS = (
    "amber", "black", "blue", "brown", "cream", "crimson", "gold", "green", "grey", "indigo", "lilac", "olive",
    "orange", "pink", "purple", "red", "rust", "scarlet", "silver", "teal", "umber", "violet", "white", "yellow",
)  # fmt: skip
LARGEST = 99  # the largest number that is a word

_drawn = random.Random("homes")
HOME: dict[str, str] = {name: _drawn.choice(TOWNS) for name in NAMES}
