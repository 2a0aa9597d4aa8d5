"""Simulated operating points with known loss on documents and items."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from emad_ref.absent import Absent
from pytest_emad.claims.quality import QualityEvidence, SelectedMarginEvidence
from pytest_emad.measurements.operating_points import NllPair, PointMeasurements
from pytest_emad.statistics.accuracy import TaskAccuracy
from pytest_emad.statistics.units import ByDocument, ByItem
from pytest_emad.statistics.verdicts import Verdict
from tests.claims import document_shapes as shapes
from tests.claims.simulation import SCORED, Case, celled

# ---------------------------------------------------------------- building blocks
#
# Operating points of known truth: documents with their own perplexity rise, items with known accuracy.

SPREAD_NATS = 0.004  # per token, between documents of one text


def documents(rng: np.random.Generator, rise: float, count: int, spread: float = SPREAD_NATS) -> NllPair:
    """Make documents of different length and level whose perplexity rises by ``rise`` on average."""
    tokens = rng.integers(100, 300, count)
    full = tokens * rng.uniform(1.0, 3.0, count)
    each = math.log1p(rise) + spread * rng.standard_normal(count)
    # a rate that depended on the length would move Σ x / Σ n away from the mean rate; the truth is the mean rate
    return (
        ByDocument.from_whole_documents(full + tokens * each),
        ByDocument.from_whole_documents(full),
        ByDocument.from_whole_documents(tokens),
    )


def items(
    rng: np.random.Generator,
    lost: float,
    count: int,
    solved: float = 0.9,
    *,
    saving: float = 0.3,
    guess: float = 0.0,
    gained: float = 0.0,
    each: int = 1,
    correlation: float = 0.0,
) -> TaskAccuracy:
    """Make items: full depth solves a share ``solved``, the point a share ``lost`` fewer.

    ``gained``: share that only the point solves, in which case as many more are lost.
    ``each``: items per cluster; ``correlation``: probability that the items of a cluster share one draw.
    """
    clusters = -(-count // each)
    cluster = np.repeat(np.arange(clusters), each)[:count]
    alike = rng.random(clusters) < correlation
    luck, drop = (_luck(rng, cluster, alike) for _ in range(2))
    full = luck < solved
    kept = drop >= (lost + gained) / solved
    won = drop < (gained / (1 - solved) if gained else 0.0)
    return TaskAccuracy(ByItem(full, cluster), ByItem(np.where(full, kept, won), cluster), guess, saving)


def _luck(rng: np.random.Generator, cluster: np.ndarray, alike: np.ndarray) -> np.ndarray:
    """Return uniform numbers, one per item; items of a cluster that is ``alike`` share theirs."""
    shared = rng.random(len(alike))[cluster]
    return np.where(alike[cluster], shared, rng.random(len(cluster)))


def point(
    rng: np.random.Generator,
    name: str = "p",
    rise: float = 0.0,
    lost: Mapping[str, float] | None = None,
    saves: float = 0.3,
    count: int = 500,
    answered: int = 1500,
    idle: Mapping[str, float] | None = None,
    **options: float,
) -> PointMeasurements:
    """Make a point that saves ``saves``, with one corpus, and tasks on which it loses ``lost`` of all items.

    ``idle``: tasks without savings, and the loss there; ``options`` of ``items``.
    """
    lost = {"a": 0.0, "b": 0.0, "c": 0.0} if lost is None else lost
    tasks = {task: items(rng, share, answered, **options) for task, share in lost.items()}
    tasks |= {task: items(rng, share, answered, saving=0.004) for task, share in (idle or {}).items()}
    return PointMeasurements(name, name, saves, {"world": documents(rng, rise, count)}, tasks)


# ---------------------------------------------------------------- EMAD-F1
#
# One or two points put forward, with known losses of perplexity and accuracy.


def put_forward(**options: Any):
    def found(rng: np.random.Generator) -> QualityEvidence:
        return QualityEvidence([point(rng, **options)])

    return found


def two_points(rng: np.random.Generator) -> QualityEvidence:
    return QualityEvidence([point(rng, "good"), point(rng, "bad", rise=0.03)])


def unscored(rng: np.random.Generator) -> QualityEvidence:
    return QualityEvidence([point(rng, saves=0.1)], {"humaneval": Absent("it runs generated programs")})


def itself(rng: np.random.Generator) -> QualityEvidence:
    """Full depth against itself under another name: no loss, and no observed saving on any task."""
    nll, _, tokens = documents(rng, 0.0, 200)
    tasks = point(rng, lost={}, idle={"a": 0.0, "b": 0.0, "c": 0.0}).tasks
    return QualityEvidence([PointMeasurements("again", "full depth again", 0.3, {"world": (nll, nll, tokens)}, tasks)])


def names_the_bad_point(verdict: Verdict) -> None:
    assert "bad: perplexity on world" in verdict.reason


def asks_for_thirty(verdict: Verdict) -> None:
    assert " documents, at least 30 are needed" in verdict.reason
    assert "20 unequal documents count as " in verdict.reason


def by_accuracy(verdict: Verdict) -> None:
    assert verdict.unit == "accuracy drop"


def names_a(verdict: Verdict) -> None:
    assert "worst task that counts: a loses " in verdict.reason


def open_for_want_of_tasks(verdict: Verdict, outcome: str = "unmeasured") -> None:
    """Never survived: one task with a loss, or none, and tasks that cannot decide."""
    assert verdict.verdict == "inconclusive", verdict.reason
    (leg,) = (leg for leg in verdict.legs if "the criterion requires two" in leg.reason)
    assert leg.outcome == outcome
    assert "not exercised: saves 0.4 %" in leg.reason


def open_and_names_inventory(verdict: Verdict) -> None:
    """One task counts: its loss is in a leg that decides nothing."""
    open_for_want_of_tasks(verdict, "inconclusive")
    assert "worst task that counts: inventory loses 9" in verdict.reason


IDLE = {"facts": 0.0, "chart": 0.0, "recall": 0.0}
PARAGRAPH = 4  # questions about one


def risen(rise: float):
    return lambda n, icc: put_forward(rise=rise, count=n, lost={"a": 0.0, "b": 0.0}, answered=500)


def shaped(rise: float, rises: str, lengths: str, longer_lose_more: bool = False):
    """Make documents of this shape, and tasks without loss."""

    def made(n: int, icc: float):
        def found(rng: np.random.Generator) -> QualityEvidence:
            tasks = point(rng, lost={"a": 0.0, "b": 0.0}, answered=500).tasks
            arms = shapes.documents(rng, rise, n, rises, lengths, longer_lose_more)
            return QualityEvidence([PointMeasurements("p", "p", 0.3, {"world": arms}, tasks)])

        return found

    return made


def authored(rise: float, marked: bool = False):
    """Make documents by authors, whose documents stand beside each other, ``marked`` or not; tasks without loss."""

    def made(n: int, icc: float):
        def found(rng: np.random.Generator) -> QualityEvidence:
            tasks = point(rng, lost={"a": 0.0, "b": 0.0}, answered=500).tasks
            return QualityEvidence(
                [PointMeasurements("p", "p", 0.3, {"world": shapes.by_authors(rng, rise, n, marked)}, tasks)]
            )

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
]


def at_the_threshold():
    """Return a case for every shape: one draw in every run, 500 where rates are measured."""
    for rises, lengths, longer, numbers in SHAPES:
        name = f"rises {rises}, lengths {lengths}{', longer ones lose more' * longer}"
        yield from celled(name, "edge", shaped(0.01, rises, lengths, longer), n=numbers, draws=1, icc=(0.0,))


def fallen(**lost: float):
    """Make ``n`` distinct items per task; with ICC above 0, ``n`` paragraphs of four questions."""

    def made(n: int, icc: float):
        each = PARAGRAPH if icc else 1
        return put_forward(lost=lost, answered=n * each, each=each, correlation=icc)

    return made


DOCUMENTS = {"icc": (0.0,)}  # whole documents, independent by construction
ITEMS = {"n": (*SCORED, 800)}
EMAD_F1 = [
    Case("quality holds", "holds", put_forward(rise=0.002), draws=10),
    Case(
        "one task of three falls", "holds", put_forward(lost={"a": 0.06, "b": 0.0, "c": 0.0}), draws=10, check=names_a
    ),
    Case("as much is gained as is lost", "holds", put_forward(gained=0.003, answered=2500), draws=20, least=0.8),
    Case("one document has 60 % of all tokens", "tied", shaped(0.01, "normal", "one dominates")(800, 0.0), draws=5),
    Case("perplexity rises", "fails", put_forward(rise=0.03), draws=10),
    Case("perplexity rises by 3 % in 40 documents", "fails", put_forward(rise=0.03, count=40), draws=10),
    Case("two tasks fall", "fails", put_forward(lost={"a": 0.06, "b": 0.05, "c": 0.0}), draws=10, check=by_accuracy),
    Case("one point of two is bad", "fails", two_points, draws=10, check=names_the_bad_point),
    *celled("perplexity rises by the threshold", "edge", risen(0.01), **DOCUMENTS),
    *celled("perplexity rises by twice the threshold", "power", risen(0.02), n=(40, 60, 200), **DOCUMENTS),
    *at_the_threshold(),
    *celled("ten documents an author, at the threshold", "edge", authored(0.01), n=(200, 400), icc=(0.0,), draws=20),
    *celled("ten documents an author, twice the threshold", "power", authored(0.02), n=(400,), icc=(0.0,)),
    *celled("marked authors, at the threshold", "edge", authored(0.01, True), n=(400, 2400), icc=(0.0,), draws=20),
    *celled("marked authors, twice the threshold", "power", authored(0.02, True), n=(400,), icc=(0.0,)),
    *celled("marked authors lose nothing", "power", authored(0.001, True), n=(4000,), icc=(0.0,), wanted="survived"),
    Case("twenty marked authors", "tied", authored(0.03, True)(200, 0.0), draws=5, check=asks_for_thirty),
    *celled(
        "twice the threshold, log-normal",
        "power",
        shaped(0.02, "log-normal 1.2", "one window"),
        n=(200, 400),
        icc=(0.0,),
    ),
    *celled(
        "twice the threshold, lengths log-normal",
        "power",
        shaped(0.02, "normal", "log-normal"),
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


# ---------------------------------------------------------------- EMAD-F1-literal
#
# Sweeps of margins: a larger margin saves and loses less. One bad point falsifies.


def sweep(rises: Sequence[float], **options: Any):
    """Make points that save between 50 % and 10 %; the last saves too little to be judged."""

    def found(rng: np.random.Generator) -> QualityEvidence:
        saved = np.linspace(0.5, 0.1, len(rises))
        named = enumerate(zip(rises, saved, strict=True))
        return QualityEvidence(
            [point(rng, f"m{i}", rise, saves=saves, answered=800, **options) for i, (rise, saves) in named]
        )

    return found


def lists_the_worst(verdict: Verdict) -> None:
    assert len(verdict.legs) == 20
    assert verdict.legs[0].name == "m0: perplexity on world"
    assert "worst 20 of" in verdict.reason
    assert "worst task that counts: " in verdict.reason


def never_survives(verdict: Verdict) -> None:
    assert verdict.verdict == "inconclusive", verdict.reason
    assert "worst task that counts: inventory loses 9" in verdict.reason


ALONE = {"lost": {"inventory": 0.97}, "solved": 0.98, "idle": {"facts": 0.0, "recall": 0.0}}
EMAD_F1_LITERAL = [
    Case("quality holds at every point", "holds", sweep([0.002, 0.001, 0.0, 0.3]), draws=10),
    Case("quality is lost at one point", "fails", sweep([0.04, 0.001, *[0.0] * 7]), draws=8, check=lists_the_worst),
    Case("two tasks are lost at every point", "fails", sweep([0.0, 0.0], lost={"a": 0.06, "b": 0.06}), draws=8),
    Case("one point loses what the threshold allows", "edge", sweep([0.01, 0.0, 0.3]), draws=20),
    Case(
        "every point loses one task, and acts on no other", "tied", sweep([0.0, 0.0], **ALONE), 8, check=never_survives
    ),
    Case(
        "no point saves enough", "premise", lambda rng: QualityEvidence([point(rng, saves=0.1), point(rng, saves=-0.2)])
    ),
]


# ---------------------------------------------------------------- EMAD-E10
#
# A selected margin with known losses of perplexity and accuracy, and selections of no margin.

MARGIN = ("emad m=0.50", "0123456789ab", 0.3)
MARGIN_ITEMS = 4000
NOTHING: Mapping[str, float] = {"facts": 0.0, "chart": 0.0}


def lost(
    rise: float,
    drops: Mapping[str, float] = NOTHING,
    *,
    idle: Mapping[str, float] | None = None,
    perplexity: float = 5.0,
    count: int = 400,
    spread: float = 0.002,
    answered: int = MARGIN_ITEMS,
    **options: Any,
):
    """Make a selection with a rise over ``perplexity`` and, by task, the share of items that only full depth solves.

    ``idle``: tasks on which the rule does not act; ``options`` of ``points.items``.
    """

    def found(rng: np.random.Generator) -> SelectedMarginEvidence:
        tokens = rng.integers(100, 300, count)
        full = np.log(perplexity) + 0.2 * rng.standard_normal(count)
        nats = full + np.log1p(rise) + spread * rng.standard_normal(count)
        nll, reference, read = (
            ByDocument.from_whole_documents(column) for column in (nats * tokens, full * tokens, tokens)
        )
        tasks = {task: items(rng, drop, answered, 0.8, **options) for task, drop in drops.items()}
        tasks |= {task: items(rng, drop, answered, 0.8, saving=0.004) for task, drop in (idle or {}).items()}
        measured = float(np.exp((full * tokens).sum() / tokens.sum()))
        return SelectedMarginEvidence(*MARGIN, (nll, reference, read), measured, tasks)

    return found


def selected(*margin: Any):
    return lambda rng: SelectedMarginEvidence(*margin)


def by_points(verdict: Verdict) -> None:
    """At perplexity 40 a rise of 0.1 points is the stricter bound."""
    assert 0.1 / 44 < verdict.legs[0].threshold < 0.1 / 36


def names_the_task(verdict: Verdict) -> None:
    assert "emad m=0.50: chart" in verdict.reason


def not_survived(verdict: Verdict) -> None:
    """Never survived: one task counts and holds, the other tasks cannot lose anything."""
    assert verdict.verdict == "inconclusive", verdict.reason
    (leg,) = (leg for leg in verdict.legs if leg.outcome == "unmeasured")
    assert leg.reason.startswith("1 of 3 tasks counts: facts not exercised: saves 0.4 %")


def says_what_was_selected(verdict: Verdict) -> None:
    assert "no margin that saves 15% holds the bounds on validation" in verdict.reason
    assert verdict.reason.endswith(("none at all", "emad m=0.10 (+12.0% net)"))


def margin_risen(rise: float, **options: Any):
    return lambda n, icc: lost(rise, count=n, spread=0.004, answered=1000, **options)


def margin_shaped(rises: str):
    """Make documents with rises of this shape, one per cent in all, and no tasks."""

    def made(n: int, icc: float):
        def found(rng: np.random.Generator) -> SelectedMarginEvidence:
            return SelectedMarginEvidence(*MARGIN, shapes.documents(rng, 0.01, n, rises, "one window"), 5.0)

        return found

    return made


def margin_fallen(**drops: float):
    """Make ``n`` distinct items per task; with ICC above 0, ``n`` paragraphs of four questions."""

    def made(n: int, icc: float):
        each = 4 if icc else 1
        return lost(0.0, drops, answered=n * each, each=each, correlation=icc)

    return made


FOUR = {"a": 0.0, "b": 0.0, "c": 0.0}
EMAD_E10 = [
    Case("nothing is lost", "holds", lost(0.0), draws=5),
    Case("nothing is lost, and there are no tasks", "holds", lost(0.0, {}), draws=5),
    Case("perplexity is lost", "fails", lost(0.02), draws=5),
    Case("perplexity is lost in 40 documents", "fails", lost(0.02, count=40), draws=5),
    Case("accuracy is lost on one task of four", "fails", lost(0.0, FOUR | {"chart": 0.03}), 5, check=names_the_task),
    Case("half a per cent is lost, more than 0.1 points", "fails", lost(0.005, perplexity=40.0), 5, check=by_points),
    *celled("a per cent is lost", "edge", margin_risen(0.01), icc=(0.0,)),
    *celled(
        "a per cent is lost, log-normal", "edge", margin_shaped("log-normal 1.6"), n=(200, 400), icc=(0.0,), draws=2
    ),
    *celled("a per cent is lost by 1 % ruined", "edge", margin_shaped("1 % ruined"), n=(200, 400), icc=(0.0,), draws=2),
    *celled("two per cent are lost", "power", margin_risen(0.02), n=(40, 60, 200), icc=(0.0,)),
    *celled("0.1 points are lost at perplexity 40", "edge", margin_risen(0.1 / 40, perplexity=40.0), icc=(0.0,)),
    *celled("half a point is lost on one task", "edge", margin_fallen(facts=0.0, chart=0.005), **ITEMS),
    *celled("half a point is lost on every task", "edge", margin_fallen(facts=0.005, chart=0.005), **ITEMS),
    *celled("a point is lost on one task", "power", margin_fallen(facts=0.0, chart=0.01), n=(3000,), icc=(0.0,)),
    Case(
        "one task holds, the rule acts on no other",
        "tied",
        lost(0.0, {"chart": 0.0}, idle={"facts": 0.0, "recall": 0.0}),
        draws=5,
        check=not_survived,
    ),
    Case("no margin holds the bounds", "premise", selected(), check=says_what_was_selected),
    Case(
        "the margin saves 12 %", "premise", selected("emad m=0.10", "ba9876543210", 0.12), check=says_what_was_selected
    ),
]


CASES = {
    "EMAD-F1": EMAD_F1,
    "EMAD-F1-literal": EMAD_F1_LITERAL,
    "EMAD-E10": EMAD_E10,
}
