"""Criteria that save and lose known shares, one of them chosen, beside an oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.claims.emad_x1 import CriterionEvidence
from emad_ref.statistics.rates import DocumentCosts, FullDepthBaseline
from emad_ref.statistics.verdicts import Verdict
from tests.questions import shapes
from tests.questions.simulation import Case, celled
from tests.questions.spendings import Text

WEAK = ((0.05, 0.001), (0.1, 0.004), (0.12, 0.03), (0.3, 0.05))  # each saves too little, or loses too much


def criteria(
    *others: tuple[float, float],
    chosen: tuple[float, float] | None = None,
    count: int = 800,
    slack: float | None = 0.45,
) -> Callable[[np.random.Generator], CriterionEvidence]:
    """Of criteria that each (save, lose) so much the chosen one is screened with the ``others``, too."""

    def found(rng: np.random.Generator) -> CriterionEvidence:
        text = Text(rng, count)
        one = None if chosen is None else text.spent("chosen", *chosen)
        screened = [text.spent(f"criterion {at}", *each) for at, each in enumerate(others)]
        return CriterionEvidence(
            text.measured, one, [*screened, *([] if one is None else [one])], slack, "" if one else WHY
        )

    return found


WHY = "no criterion is within 1 % on validation"
DOCUMENTS = {"icc": (0.0,)}  # whole ones: independent by construction


def shaped(rises: str) -> Callable[[int, float], Callable[[np.random.Generator], CriterionEvidence]]:
    """The only criterion saves 30 % and loses a per cent, in documents whose rises have this shape."""

    def made(n: int, icc: float) -> Callable[[np.random.Generator], CriterionEvidence]:
        def found(rng: np.random.Generator) -> CriterionEvidence:
            lost, full, tokens = shapes.documents(rng, 0.01, n, rises, "one window")
            whole = tokens.like(1000.0 * tokens.values)
            less = tokens.like(whole.values * (0.7 + 0.02 * rng.standard_normal(n)))
            measured = FullDepthBaseline(DocumentCosts("full depth", full, whole), tokens)
            return CriterionEvidence(measured, DocumentCosts("chosen", lost, less), [], 0.45, "")

        return found

    return made


def says(*parts: str) -> Callable[[Verdict], None]:
    def check(verdict: Verdict) -> None:
        assert all(part in verdict.reason for part in parts), verdict.reason

    return check


def names(outcome: str, part: str) -> Callable[[Verdict], None]:
    """A leg of this outcome, whose name or reason holds this."""

    def check(verdict: Verdict) -> None:
        said = [f"{leg.name} {leg.reason}" for leg in verdict.legs if leg.outcome == outcome]
        assert any(part in each for each in said), said

    return check


def never_falsified(verdict: Verdict) -> None:
    assert verdict.verdict != "falsified", verdict.reason


CASES = [
    Case("one of five does it", "holds", criteria(*WEAK, chosen=(0.3, 0.003)), draws=10,
         check=names("measured", "others may be left")),
    Case("none of four does it, and none was chosen", "fails", criteria(*WEAK), draws=10),
    Case("nor does the oracle", "fails", criteria(*WEAK, slack=0.118), draws=5,
         check=names("measured", "no criterion on this lens")),
    Case("the chosen one fails beside all others, 40 documents", "fails",
         criteria((0.03, 0.0), chosen=(0.4, 0.05), count=40), draws=10, least=0.9),
    Case("the chosen one fails, another would do it", "tied", criteria((0.3, 0.003), chosen=(0.3, 0.05)), draws=10,
         check=never_falsified),
    *celled("the only one saves the threshold", "edge", lambda n, _: criteria(chosen=(0.15, 0.0), count=n),
            draws=8, **DOCUMENTS),
    *celled("the only one loses the threshold", "edge", lambda n, _: criteria(*WEAK, chosen=(0.3, 0.01), count=n),
            draws=8, **DOCUMENTS),
    *celled("the only one loses the threshold, log-normal", "edge", shaped("log-normal 1.6"), n=(200, 400), icc=(0.0,),
            draws=2),
    *celled("the only one ruins 1 %", "edge", shaped("1 % ruined"), n=(200, 400), icc=(0.0,), draws=2),
    *celled("the only one does both", "edge", lambda n, _: criteria(chosen=(0.15, 0.01), count=n), draws=8,
            **DOCUMENTS),
    *celled("three lose the threshold", "edge",
            lambda n, _: criteria((0.3, 0.01), (0.4, 0.01), chosen=(0.2, 0.01), count=n), draws=8, **DOCUMENTS),
    *celled("twice as much is saved, nothing lost", "power", lambda n, _: criteria(*WEAK, chosen=(0.3, 0.0), count=n),
            n=(400,), icc=(0.0,), wanted="survived"),
    *celled("the best lose twice as much, others save nothing", "power",
            lambda n, _: criteria((0.3, 0.02), (0.4, 0.02), (0.0, 0.0), chosen=(0.25, 0.02), count=n), n=(60, 200),
            icc=(0.0,)),
    Case("no slack", "premise", criteria(*WEAK, slack=0.047), check=says("no slack", "4.7 %", "leave this model")),
    Case("nothing was screened", "tied", criteria(), check=says(WHY)),
    Case("29 documents", "tied", criteria(*WEAK, chosen=(0.3, 0.0), count=29), draws=5, check=says("at least 30")),
    Case("200 documents never survive", "tied", criteria(chosen=(0.3, 0.0), count=200), draws=5,
         check=says("cannot exclude", "documents would decide it")),
]  # fmt: skip
