"""What EMAD-F1 and its literal reading share: quality at every operating point that saves enough FLOPs.

Legs per judged point: one per corpus (perplexity rise), one for accuracy. Points that save less are listed as not
applicable. No judged point → not applicable, never survived.

The accuracy leg asks whether two or more of k tasks lose more than the threshold; single tasks are listed beside it as
measured. Its p-values are partial conjunctions (Benjamini & Heller 2008, Bonferroni form, valid whatever the dependence
of the tasks): falsify with (k − 1) · p₍₂₎ of "the drop exceeds the threshold", survive with 2 · p₍ₖ₋₁₎ of "the drop
stays below": all tasks but one are shown to hold. A task below the minimum of items shows neither. A task that full
depth does not solve (not above chance at 5 %, or by less than the threshold) takes no part: it cannot lose what it does
not have. Fewer than two tasks leave the leg unmeasured, so that the row cannot survive on perplexity alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from scipy.stats import binomtest

from emad_ref.errors import BadArgument
from emad_ref.evidence.points import AnswerPair, PointEvidence
from emad_ref.questions.asking import Asked
from emad_ref.record import Floats
from emad_ref.verdict.claims import Claim, Leg, Verdict
from emad_ref.verdict.interval import (
    Estimate,
    accuracy_drop,
    document_draws,
    needed_items,
    perplexity_rise,
    resamples_for,
)
from emad_ref.verdict.legs import LEVEL, Tested, corrected, cut, finite, row, unseen, weighed
from emad_ref.verdict.units import ByItem


@dataclass(frozen=True)
class Found:
    """``points``: those put forward, or a whole sweep. ``unmeasured``: task asked for → why it could not be scored."""

    points: Sequence[PointEvidence]
    unmeasured: Mapping[str, str] = field(default_factory=dict)


def judged(found: Found, asked: Asked, shown: int | None = None) -> Verdict:
    """The verdict over all points.

    Thresholds ``flop_reduction``, ``perplexity_rise``, ``accuracy_drop``; minimum ``documents`` and ``items``. Points
    of one corpus share their bootstrap samples.

    Args:
        shown: keep only the worst that many legs; the verdict's ``n`` then counts the legs judged.

    Raises:
        BadArgument: a net reduction that is no share, and as in ``interval``.
    """
    claim, smallest = asked.claim, asked.claim.thresholds["flop_reduction"]
    if not found.points:
        return asked.not_applicable("no operating point was put forward")
    _require_shares(found.points)
    saving = [point for point in found.points if point.net_reduction >= smallest]
    idle = [_too_small(point, smallest) for point in found.points if point.net_reduction < smallest]
    if not saving:
        best = max(point.net_reduction for point in found.points)
        said = (
            f"none of {len(found.points)} points saves {100 * smallest:g} % of FLOPs; the best {100 * best:.1f} % net"
        )
        return replace(asked.not_applicable(said), legs=tuple(idle))
    tests, listed = _legs(saving, asked)
    legs = [*corrected(tests, asked.other_legs), *idle, *listed]
    verdict = row(claim, asked.model, legs)
    if shown is not None and len(legs) > shown:
        verdict = cut(verdict, shown)
    return _with_unmeasured(verdict, found.unmeasured, claim)


def _require_shares(points: Sequence[PointEvidence]) -> None:
    for point in points:
        if not point.net_reduction <= 1:
            raise BadArgument(
                "net_reduction", point.net_reduction, "a share of at most 1", f"look at point {point.name!r}"
            )


def _too_small(point: PointEvidence, smallest: float) -> Leg:
    reason = f"saves {100 * point.net_reduction:.1f} % net, less than {100 * smallest:g} %"
    name, unit = f"{point.name}: reduction", "net FLOP reduction"
    return Leg(name, "not applicable", point.net_reduction, None, 0, smallest, unit, reason)


def _with_unmeasured(verdict: Verdict, reasons: Mapping[str, str], claim: Claim) -> Verdict:
    """The verdict with a leg for every task asked for that could not be scored: unseen is not survived."""
    if verdict.verdict == "not applicable" or not reasons:
        return verdict
    missing = [unseen(f"task {name}", reason) for name, reason in reasons.items()]
    return row(claim, verdict.model, [*verdict.legs, *missing])


def _legs(points: Sequence[PointEvidence], asked: Asked) -> tuple[list[Tested], list[Leg]]:
    """Legs that take part in Holm's correction, and those that do not."""
    claim, bound = asked.claim, asked.claim.thresholds["perplexity_rise"]
    draws = _Draws(points, asked)
    tests: list[Tested] = []
    listed: list[Leg] = []
    for point in points:
        for corpus, arms in point.perplexity.items():
            rise = perplexity_rise(*arms, threshold=bound, rng=asked.rng, draws=draws.of(len(arms[2])))
            tests.append(weighed(perplexity_leg(point.name, corpus), rise, "above", bound, claim.minimum))
        if not point.perplexity:
            listed.append(unseen(f"{point.name}: perplexity", "no corpus was scored"))
        accuracy, tasks = _accuracy(point, claim)
        listed += tasks
        if isinstance(accuracy, Tested):
            tests.append(accuracy)
        else:
            listed.append(accuracy)
    return tests, listed


def perplexity_leg(point: str, corpus: str) -> str:
    """The name of a point's leg on a corpus."""
    return f"{point}: perplexity on {corpus}"


class _Draws:
    """Bootstrap samples by number of documents, drawn once and shared by all points of a corpus.

    As many as Holm's smallest level asks for: fewer could not reach the p-values it wants.
    """

    def __init__(self, points: Sequence[PointEvidence], asked: Asked):
        family = sum(len(point.perplexity) + 1 for point in points) + asked.other_legs
        self._resamples = resamples_for(family)
        self._rng = asked.rng
        self._drawn: dict[int, Floats] = {}

    def of(self, documents: int) -> Floats:
        if documents not in self._drawn:
            self._drawn[documents] = document_draws(documents, self._resamples, self._rng)
        return self._drawn[documents]


def _accuracy(point: PointEvidence, claim: Claim) -> tuple[Tested | Leg, list[Leg]]:
    """The accuracy leg of one point, and each task as a leg that only reports."""
    name, threshold = f"{point.name}: accuracy on two or more tasks", claim.thresholds["accuracy_drop"]
    drops = {task: accuracy_drop(*answers, threshold=threshold) for task, answers in point.tasks.items()}
    unsolved = {task for task in drops if not _solved(point.tasks[task][0], point.chance.get(task, 0.0), threshold)}
    tasks = [
        Leg(
            f"{point.name}: {task}",
            "measured",
            drop.value,
            finite(drop),
            drop.n,
            threshold,
            drop.unit,
            "full depth does not solve it: it cannot fall" if task in unsolved else "",
        )
        for task, drop in drops.items()
    ]
    scored = len(drops)
    drops = {task: drop for task, drop in drops.items() if task not in unsolved}
    if len(drops) < 2:
        seen = f"{scored or 'no'} task was scored"
        if unsolved:
            seen = f"full depth solves {len(drops) or 'none'} of {scored} tasks"
        return unseen(name, f"{seen}; the criterion speaks of two"), tasks
    answers = {task: point.tasks[task] for task in drops}
    return _partial_conjunction(name, drops, answers, claim), tasks


def _partial_conjunction(
    name: str, drops: Mapping[str, Estimate], answers: Mapping[str, AnswerPair], claim: Claim
) -> Tested:
    """Whether two or more of the solved tasks lose more than the threshold; the value is the second-worst's."""
    threshold, least = claim.thresholds["accuracy_drop"], claim.minimum.get("items", 0)
    small = {task: drop.n for task, drop in drops.items() if drop.n < least}
    second = sorted(drops, key=lambda task: drops[task].value)[-2]
    above = sorted(1.0 if task in small else drop.p_above for task, drop in drops.items())
    below = sorted(1.0 if task in small else drop.p_below for task, drop in drops.items())
    leg = Leg(
        name,
        "inconclusive",
        drops[second].value,
        finite(drops[second]),
        drops[second].n,
        threshold,
        "accuracy drop",
        f"value of {second}, the second-worst of {len(drops)} tasks"
        + "".join(f"; {task} has {n} items, at least {least} are needed" for task, n in small.items()),
        p_falsify=min(1.0, (len(drops) - 1) * above[1]),
        p_survive=min(1.0, 2 * below[-2]),
    )

    def needed(error: float) -> int | None:
        items = [needed_items(*answers[task], threshold=threshold, error=error / 2) for task in drops]
        reachable = sorted(number for number in items if number is not None)
        return reachable[len(drops) - 2] if len(reachable) > len(drops) - 2 else None

    return Tested(leg, "items per task", needed)


def _solved(right: ByItem, chance: float, threshold: float) -> bool:
    """Whether full depth answers better than guessing, shown at 5 %, and has more than ``threshold`` to lose."""
    values = right.values
    shown = binomtest(int(values.sum()), len(values), chance, alternative="greater").pvalue <= LEVEL
    return bool(shown and values.mean() - chance > threshold)
