"""A selected margin whose losses of perplexity and accuracy are known, and selections that are none."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.emad_e10 import Answers, Found, Selected, Tested
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.units import ByDocument, ByItem
from tests.questions.simulation import Case

MARGIN = Selected("emad m=0.50", 0.3)
ITEMS = 4000


def lost(rise: float, drop: float | None = None, *, perplexity: float = 5.0, documents: int = 200):
    """Relative rise of perplexity over ``perplexity``; share of items that only full depth solves, None: no tasks."""

    def found(rng: np.random.Generator) -> Found:
        tokens = rng.integers(100, 300, documents)
        full = np.log(perplexity) + 0.2 * rng.standard_normal(documents)
        nats = full + np.log1p(rise) + 0.002 * rng.standard_normal(documents)
        sums = (ByDocument(column) for column in (nats * tokens, full * tokens, tokens))
        return Found(MARGIN, Tested(*sums, perplexity, None if drop is None else answers(drop, rng)))

    return found


def answers(drop: float, rng: np.random.Generator) -> Answers:
    luck = rng.random(ITEMS)
    full = luck < 0.8
    return Answers(["facts", "chart"], ByItem.distinct(full), ByItem.distinct(full & (luck >= drop)))


def selected(margin: Selected | None):
    return lambda rng: Found(margin)


def by_points(verdict: Verdict) -> None:
    """At perplexity 40 a rise of 0.1 points is the stricter bound."""
    assert verdict.legs[0].threshold == 0.1 / 40


def says_what_was_selected(verdict: Verdict) -> None:
    assert "no margin that saves 15% holds the bounds on validation" in verdict.reason
    assert verdict.reason.endswith(("none at all", "emad m=0.10 (+12.0% net)"))


CASES = [
    Case("nothing is lost", "holds", lost(0.0, 0.0), draws=5),
    Case("nothing is lost, and there are no tasks", "holds", lost(0.0), draws=5),
    Case("perplexity is lost", "fails", lost(0.02, 0.0), draws=5),
    Case("accuracy is lost", "fails", lost(0.0, 0.03), draws=5),
    Case("half a per cent is lost, more than 0.1 points", "fails", lost(0.005, perplexity=40.0), 5, check=by_points),
    Case("a per cent is lost", "edge", lost(0.01), draws=50),
    Case("no margin holds the bounds", "premise", selected(None), check=says_what_was_selected),
    Case("the margin saves 12 %", "premise", selected(Selected("emad m=0.10", 0.12)), check=says_what_was_selected),
]
