"""One point put forward, or two, whose perplexity and accuracy are lost at known rates."""

from __future__ import annotations

from typing import Any

import numpy as np

from emad_ref.claims.quality import QualityEvidence
from emad_ref.measurements.operating_points import PointMeasurements
from emad_ref.statistics.verdicts import Verdict
from tests.questions import shapes
from tests.questions.points import documents, point
from tests.questions.simulation import Case, celled


def put_forward(**options: Any):
    def found(rng: np.random.Generator) -> QualityEvidence:
        return QualityEvidence([point(rng, **options)])

    return found


def two_points(rng: np.random.Generator) -> QualityEvidence:
    return QualityEvidence([point(rng, "good"), point(rng, "bad", rise=0.03)])


def unscored(rng: np.random.Generator) -> QualityEvidence:
    return QualityEvidence([point(rng, saves=0.1)], {"humaneval": "it runs generated programs"})


def itself(rng: np.random.Generator) -> QualityEvidence:
    """Full depth against itself under another name: nothing is lost, and nothing is seen to be saved on any task."""
    nll, _, tokens = documents(rng, 0.0, 200)
    tasks = point(rng, lost={}, idle={"a": 0.0, "b": 0.0, "c": 0.0}).tasks
    return QualityEvidence([PointMeasurements("full depth again", 0.3, {"world": (nll, nll, tokens)}, tasks)])


def names_the_bad_point(verdict: Verdict) -> None:
    assert "bad: perplexity on world" in verdict.reason


def by_accuracy(verdict: Verdict) -> None:
    assert verdict.unit == "accuracy drop"


def names_a(verdict: Verdict) -> None:
    assert "worst task that counts: a loses " in verdict.reason


def open_for_want_of_tasks(verdict: Verdict) -> None:
    """Never survived: one task that falls, or none, beside tasks that cannot."""
    assert verdict.verdict == "inconclusive", verdict.reason
    (leg,) = (leg for leg in verdict.legs if leg.outcome == "unmeasured")
    assert "not exercised: saves 0.4 %" in leg.reason
    assert "the criterion speaks of two" in leg.reason


def open_and_names_inventory(verdict: Verdict) -> None:
    open_for_want_of_tasks(verdict)
    assert "worst task that counts: inventory loses 9" in verdict.reason


IDLE = {"facts": 0.0, "chart": 0.0, "recall": 0.0}
PARAGRAPH = 4  # questions about one


def risen(rise: float):
    return lambda n, icc: put_forward(rise=rise, count=n, lost={"a": 0.0, "b": 0.0}, answered=500)


def shaped(rise: float, rises: str, lengths: str, longer_lose_more: bool = False):
    """Documents of this shape beside tasks that lose nothing."""

    def made(n: int, icc: float):
        def found(rng: np.random.Generator) -> QualityEvidence:
            tasks = point(rng, lost={"a": 0.0, "b": 0.0}, answered=500).tasks
            arms = shapes.documents(rng, rise, n, rises, lengths, longer_lose_more)
            return QualityEvidence([PointMeasurements("p", 0.3, {"world": arms}, tasks)])

        return found

    return made


SHAPES = [
    *((rises, "one window", False, (200, 400, 800)) for rises in shapes.RISES),
    *(
        (rises, lengths, False, (400,))
        for rises in ("normal", "log-normal 1.2")
        for lengths in ("unequal", "log-normal")
    ),
    *(("normal", lengths, True, (200, 800)) for lengths in ("unequal", "log-normal")),
    ("normal", "one dominates", False, (200, 800)),
]


def at_the_threshold():
    """A case for every shape: one draw in every run, 500 where rates are measured."""
    for rises, lengths, longer, numbers in SHAPES:
        name = f"rises {rises}, lengths {lengths}{', longer ones lose more' * longer}"
        yield from celled(name, "edge", shaped(0.01, rises, lengths, longer), n=numbers, draws=1, icc=(0.0,))


def fallen(**lost: float):
    """``n`` distinct items a task; of an ICC above 0, ``n`` paragraphs of four questions."""

    def made(n: int, icc: float):
        each = PARAGRAPH if icc else 1
        return put_forward(lost=lost, answered=n * each, each=each, correlation=icc)

    return made


DOCUMENTS = {"icc": (0.0,)}  # whole ones: independent by construction
ITEMS = {"n": (100, 200, 800)}  # a hundred are the least that decides

CASES = [
    Case("quality holds", "holds", put_forward(rise=0.002), draws=10),
    Case(
        "one task of three falls", "holds", put_forward(lost={"a": 0.06, "b": 0.0, "c": 0.0}), draws=10, check=names_a
    ),
    Case("as much is gained as is lost", "holds", put_forward(gained=0.003, answered=2500), draws=20, least=0.8),
    Case("perplexity rises", "fails", put_forward(rise=0.03), draws=10),
    Case("perplexity rises by 3 % in 40 documents", "fails", put_forward(rise=0.03, count=40), draws=10),
    Case("two tasks fall", "fails", put_forward(lost={"a": 0.06, "b": 0.05, "c": 0.0}), draws=10, check=by_accuracy),
    Case("one point of two is bad", "fails", two_points, draws=10, check=names_the_bad_point),
    *celled("perplexity rises by the threshold", "edge", risen(0.01), **DOCUMENTS),
    *celled("perplexity rises by twice the threshold", "power", risen(0.02), n=(40, 60, 200), **DOCUMENTS),
    *at_the_threshold(),
    *celled(
        "twice the threshold, log-normal",
        "power",
        shaped(0.02, "log-normal 1.2", "one window"),
        n=(200, 400),
        icc=(0.0,),
    ),
    *celled(
        "nothing is lost, nor gained",
        "power",
        shaped(0.001, "normal", "unequal"),
        n=(400, 800),
        icc=(0.0,),
        wanted="survived",
    ),
    *celled("the second-worst task falls by the threshold", "edge", fallen(a=0.06, b=0.01), **ITEMS),
    *celled("two tasks fall by the threshold", "edge", fallen(a=0.01, b=0.01, c=0.0), **ITEMS),
    *celled("every task falls by the threshold", "edge", fallen(a=0.01, b=0.01, c=0.01), **ITEMS),
    *celled("two tasks fall by twice the threshold", "power", fallen(a=0.02, b=0.02), n=(3000,), icc=(0.0,)),
    Case(
        "a task loses everything beside tasks on which the rule never fires",
        "tied",
        put_forward(lost={"inventory": 0.97}, solved=0.98, idle=IDLE),
        draws=10,
        check=open_and_names_inventory,
    ),
    Case("the rule fires on no task", "tied", put_forward(lost={}, idle=IDLE), draws=10, check=open_for_want_of_tasks),
    Case("full depth against itself", "tied", itself, draws=10, check=open_for_want_of_tasks),
    Case("nothing saves enough", "premise", put_forward(rise=0.5, saves=0.149)),
    Case("nothing saves enough, and a task was not scored", "premise", unscored),
    Case("no point at all", "premise", lambda rng: QualityEvidence([])),
]
