"""Savings worked out token by token, and claims that round them, miss them, or miss them by the threshold itself."""

from __future__ import annotations

import numpy as np

from emad_ref.claims.ead_h1 import PAPER, Headline, HeadlineEvidence
from tests.questions.simulation import Case

THRESHOLD = 0.005


def claimed(off: float):
    """A thousand tokens, some from a large model; the saving claimed for them is ``off``."""

    def found(rng: np.random.Generator) -> HeadlineEvidence:
        headlines = []
        for name in ("a", "b"):
            small, large = rng.uniform(1, 4), rng.uniform(5, 20)
            tokens = rng.random(1000) < rng.uniform(0.1, 0.9)
            spent = np.where(tokens, large, small).sum() / (large * len(tokens))
            headlines.append(Headline(name, float(tokens.mean()), small, large, round(1 - spent, 3) + off))
        return HeadlineEvidence(tuple(headlines))

    return found


def alone(off: float):
    """The large model alone saves exactly nothing, whatever is claimed."""
    return lambda rng: HeadlineEvidence((Headline("alone", 1.0, 1.0, 2.0, off),))


def survives(verdict) -> None:
    assert (verdict.verdict, verdict.estimate) == ("survived", THRESHOLD)


CASES = [
    Case("the paper's own", "holds", lambda rng: PAPER),
    Case("claimed to three digits", "holds", claimed(0.0), draws=20),
    Case("claimed one point too high", "fails", claimed(0.01), draws=20),
    Case("claimed one point too low", "fails", claimed(-0.01), draws=20),
    Case("off by exactly the threshold, which is still honest", "holds", alone(THRESHOLD), check=survives),
    Case("off by a hair more", "fails", alone(np.nextafter(THRESHOLD, 1))),
]
