"""A selected margin whose losses of perplexity and accuracy are known, and selections that are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from emad_ref.claims.emad_e10 import MarginEvidence, MarginTest, SelectedMargin
from emad_ref.statistics.units import ByDocument
from emad_ref.statistics.verdicts import Verdict
from tests.questions import shapes
from tests.questions.points import items
from tests.questions.simulation import Case, celled

MARGIN = SelectedMargin("emad m=0.50", 0.3)
ITEMS = 4000
NOTHING: Mapping[str, float] = {"facts": 0.0, "chart": 0.0}


def lost(
    rise: float,
    drops: Mapping[str, float] = NOTHING,
    *,
    idle: Mapping[str, float] | None = None,
    perplexity: float = 5.0,
    count: int = 400,
    spread: float = 0.002,
    answered: int = ITEMS,
    **options: Any,
):
    """Relative rise of perplexity over ``perplexity``; by task, the share of items that only full depth solves.

    ``idle``: tasks on which the rule does not act; ``options`` of ``points.items``.
    """

    def found(rng: np.random.Generator) -> MarginEvidence:
        tokens = rng.integers(100, 300, count)
        full = np.log(perplexity) + 0.2 * rng.standard_normal(count)
        nats = full + np.log1p(rise) + spread * rng.standard_normal(count)
        sums = (ByDocument.distinct(column) for column in (nats * tokens, full * tokens, tokens))
        tasks = {task: items(rng, drop, answered, 0.8, **options) for task, drop in drops.items()}
        tasks |= {task: items(rng, drop, answered, 0.8, saving=0.004) for task, drop in (idle or {}).items()}
        measured = float(np.exp((full * tokens).sum() / tokens.sum()))
        return MarginEvidence(MARGIN, MarginTest(*sums, measured, tasks))

    return found


def selected(margin: SelectedMargin | None):
    return lambda rng: MarginEvidence(margin)


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


def risen(rise: float, **options: Any):
    return lambda n, icc: lost(rise, count=n, spread=0.004, answered=1000, **options)


def shaped(rises: str):
    """Documents whose rises have this shape, a per cent in all; no tasks."""

    def made(n: int, icc: float):
        def found(rng: np.random.Generator) -> MarginEvidence:
            return MarginEvidence(MARGIN, MarginTest(*shapes.documents(rng, 0.01, n, rises, "one window"), 5.0))

        return found

    return made


def fallen(**drops: float):
    """``n`` distinct items a task; of an ICC above 0, ``n`` paragraphs of four questions."""

    def made(n: int, icc: float):
        each = 4 if icc else 1
        return lost(0.0, drops, answered=n * each, each=each, correlation=icc)

    return made


FOUR = {"a": 0.0, "b": 0.0, "c": 0.0}
ITEMS_OF = {"n": (100, 200, 800)}  # a hundred are the least that decides

CASES = [
    Case("nothing is lost", "holds", lost(0.0), draws=5),
    Case("nothing is lost, and there are no tasks", "holds", lost(0.0, {}), draws=5),
    Case("perplexity is lost", "fails", lost(0.02), draws=5),
    Case("perplexity is lost in 40 documents", "fails", lost(0.02, count=40), draws=5),
    Case("accuracy is lost on one task of four", "fails", lost(0.0, FOUR | {"chart": 0.03}), 5, check=names_the_task),
    Case("half a per cent is lost, more than 0.1 points", "fails", lost(0.005, perplexity=40.0), 5, check=by_points),
    *celled("a per cent is lost", "edge", risen(0.01), icc=(0.0,)),
    *celled("a per cent is lost, log-normal", "edge", shaped("log-normal 1.6"), n=(200, 400), icc=(0.0,), draws=2),
    *celled("a per cent is lost by 1 % ruined", "edge", shaped("1 % ruined"), n=(200, 400), icc=(0.0,), draws=2),
    *celled("two per cent are lost", "power", risen(0.02), n=(40, 60, 200), icc=(0.0,)),
    *celled("0.1 points are lost at perplexity 40", "edge", risen(0.1 / 40, perplexity=40.0), icc=(0.0,)),
    *celled("half a point is lost on one task", "edge", fallen(facts=0.0, chart=0.005), **ITEMS_OF),
    *celled("half a point is lost on every task", "edge", fallen(facts=0.005, chart=0.005), **ITEMS_OF),
    *celled("a point is lost on one task", "power", fallen(facts=0.0, chart=0.01), n=(3000,), icc=(0.0,)),
    Case(
        "one task holds, the rule acts on no other",
        "tied",
        lost(0.0, {"chart": 0.0}, idle={"facts": 0.0, "recall": 0.0}),
        draws=5,
        check=not_survived,
    ),
    Case("no margin holds the bounds", "premise", selected(None), check=says_what_was_selected),
    Case(
        "the margin saves 12 %", "premise", selected(SelectedMargin("emad m=0.10", 0.12)), check=says_what_was_selected
    ),
]
