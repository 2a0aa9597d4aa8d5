"""A selected margin whose losses of perplexity and accuracy are known, and selections that are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from emad_ref.questions.emad_e10 import Found, Selected, Tested
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.units import ByDocument
from tests.questions.points import items
from tests.questions.simulation import Case

MARGIN = Selected("emad m=0.50", 0.3)
ITEMS = 4000
NOTHING: Mapping[str, float] = {"facts": 0.0, "chart": 0.0}


def lost(
    rise: float,
    drops: Mapping[str, float] = NOTHING,
    *,
    idle: Mapping[str, float] | None = None,
    perplexity: float = 5.0,
    count: int = 200,
    spread: float = 0.002,
    **options: Any,
):
    """Relative rise of perplexity over ``perplexity``; by task, the share of items that only full depth solves.

    ``idle``: tasks on which the rule does not act; ``options`` of ``points.items``.
    """

    def found(rng: np.random.Generator) -> Found:
        tokens = rng.integers(100, 300, count)
        full = np.log(perplexity) + 0.2 * rng.standard_normal(count)
        nats = full + np.log1p(rise) + spread * rng.standard_normal(count)
        sums = (ByDocument(column) for column in (nats * tokens, full * tokens, tokens))
        tasks = {task: items(rng, drop, ITEMS, 0.8, **options) for task, drop in drops.items()}
        tasks |= {task: items(rng, drop, ITEMS, 0.8, saving=0.004) for task, drop in (idle or {}).items()}
        measured = float(np.exp((full * tokens).sum() / tokens.sum()))
        return Found(MARGIN, Tested(*sums, measured, tasks))

    return found


def selected(margin: Selected | None):
    return lambda rng: Found(margin)


def by_points(verdict: Verdict) -> None:
    """At perplexity 40 a rise of 0.1 points is the stricter bound."""
    assert 0.1 / 44 < verdict.legs[0].threshold < 0.1 / 36


def names_the_task(verdict: Verdict) -> None:
    assert "emad m=0.50: chart" in verdict.reason


def not_survived(verdict: Verdict) -> None:
    """One task that counts, which holds: beside tasks that cannot fall it says little."""
    assert verdict.verdict == "inconclusive", verdict.reason
    (leg,) = (leg for leg in verdict.legs if leg.outcome == "unmeasured")
    assert leg.reason.startswith("1 of 3 tasks counts: facts not exercised: saves 0.4 %")


def says_what_was_selected(verdict: Verdict) -> None:
    assert "no margin that saves 15% holds the bounds on validation" in verdict.reason
    assert verdict.reason.endswith(("none at all", "emad m=0.10 (+12.0% net)"))


FOUR = {"a": 0.0, "b": 0.0, "c": 0.0}

CASES = [
    Case("nothing is lost", "holds", lost(0.0), draws=5),
    Case("nothing is lost, and there are no tasks", "holds", lost(0.0, {}), draws=5),
    Case("perplexity is lost", "fails", lost(0.02), draws=5),
    Case("perplexity is lost in 30 documents", "fails", lost(0.02, count=30), draws=5),
    Case("accuracy is lost on one task of four", "fails", lost(0.0, FOUR | {"chart": 0.03}), 5, check=names_the_task),
    Case("twice the threshold is lost on one of two", "fails", lost(0.0, {"a": 0.0, "b": 0.01}), draws=30, least=0.8),
    Case("half a per cent is lost, more than 0.1 points", "fails", lost(0.005, perplexity=40.0), 5, check=by_points),
    *(
        Case(f"a per cent is lost in {n} documents", "edge", lost(0.01, count=n, spread=0.004), draws=50)
        for n in (30, 60, 200)
    ),
    Case("half a point is lost on one task", "edge", lost(0.0, {"facts": 0.0, "chart": 0.005}), draws=40),
    Case("half a point is lost on every task", "edge", lost(0.0, {"facts": 0.005, "chart": 0.005}), draws=40),
    Case(
        "half a point is lost on one task of paragraphs",
        "edge",
        lost(0.0, {"facts": 0.0, "chart": 0.005}, each=4, correlation=0.3),
        draws=40,
    ),
    Case(
        "one task holds, the rule acts on no other",
        "edge",
        lost(0.0, {"chart": 0.0}, idle={"facts": 0.0, "recall": 0.0}),
        draws=5,
        check=not_survived,
    ),
    Case("no margin holds the bounds", "premise", selected(None), check=says_what_was_selected),
    Case("the margin saves 12 %", "premise", selected(Selected("emad m=0.10", 0.12)), check=says_what_was_selected),
]
