"""Decides a paired comparison: a leg per task or group, Holm over legs to falsify, each at its own level to survive.

Right-or-wrong scores of equal weight take Tango's score; all others a studentised bootstrap of differences,
which also pays for an item that loses everything and that no sample shows. Items that share a document are one cluster.
A group is one test by its own weights, and its tasks are a table beside it, without a verdict of their own.

Before the verdict each test says which true drop its items can tell from the margin in four of five samples, and an
open one says how many items would decide it (``statistics.accuracy_power``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Bools, Floats, Ints
from pytest_emad.accuracy.items import Omission, TaskGroup
from pytest_emad.accuracy.pairing import PairedEvaluations, PairedScores, number_clusters
from pytest_emad.statistics.accuracy import count_effective_items, estimate_accuracy_drop, estimate_score_difference
from pytest_emad.statistics.accuracy_power import (
    DetectableDrops,
    ItemForecast,
    ScoreSpread,
    find_detectable_drops,
    forecast_items,
)
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import (
    LEVEL,
    build_leg_test,
    build_measured_estimate_leg,
    decide_legs,
    verdict_from_legs,
)
from pytest_emad.statistics.rates import FEWEST_DIFFERING, draw_document_counts, mean_rate, required_resamples
from pytest_emad.statistics.units import ByItem, DocumentMembership
from pytest_emad.statistics.verdicts import Claim, Leg, Verdict

LEAST_ITEMS = 100  # below, no task is decided
LARGEST_MARGIN = 0.5
BLOCKS = (
    1_000  # sums of items at random that are resampled in place of more items: a sample is then a row of a thousand
)
SEED = 0
# items times margin from which a ruined item that no sample shows cannot decide: (1 − margin)^n is below 1e-13
UNSEEN_EXCLUDED = 30
UNIT = "accuracy drop"


@dataclass(frozen=True, eq=False)
class ScoreTest:
    """One line of the table: a task or a group under one metric and filter.

    ``items``        of both sides; ``independent``: clusters among them.
    ``base``, ``candidate``  mean scores, by the group's weights.
    ``lost``, ``gained``     items with a lower, a higher score.
    ``detectable``   drops that four of five samples of this size decide, known before the verdict.
    ``forecast``     of an open leg; None of a decided one, and of one with too few items.
    ``parts``        the tasks of a group.
    """

    name: str
    task: str
    metric: str
    filter: str
    items: int
    independent: int
    base: float
    candidate: float
    lost: int
    gained: int
    estimate: Estimate
    leg: Leg
    detectable: DetectableDrops | None = None
    forecast: ItemForecast | None = None
    parts: tuple[ScoreTest, ...] = ()
    scores: tuple[PairedScores, ...] = ()


def format_points(margin: float) -> str:
    """``1 point``, ``0.5 points``: a margin in points of accuracy."""
    return f"{100 * margin:g} point{'' if margin == 0.01 else 's'}"


def accuracy_claim(margin: float) -> Claim:
    """The claim that accuracy falls by at most ``margin``, which gates.

    Raises:
        BadArgument: a margin that is no fraction from 0 to one half.
    """
    if not 0 <= margin <= LARGEST_MARGIN:
        expected = f"a fraction from 0 to {LARGEST_MARGIN:g}"
        raise BadArgument("margin", margin, expected, "one point is 0.01, or 1% on the command line")
    title = f"Accuracy falls by at most {format_points(margin)}"
    minimum = {"items": LEAST_ITEMS}
    return Claim("accuracy", title, "", "statistical", {"accuracy_drop": margin}, UNIT, minimum, True, "")


def decide_accuracy(
    paired: PairedEvaluations, margin: float, candidate: str
) -> tuple[Verdict, list[ScoreTest], list[Omission]]:
    """The verdict on a comparison, its tests in their order, and metrics of a group's tasks that no test uses.

    Args:
        margin: the largest drop that is accepted, a fraction.
        candidate: the name of the candidate in the verdict.

    Raises:
        BadArgument: as ``accuracy_claim``.
    """
    claim = accuracy_claim(margin)
    singles, grouped, omissions = _split_groups(paired)
    family = len(singles) + len(grouped)
    measured = [_measure([scores], None, margin, family) for scores in singles]
    measured += [_measure(scores, group, margin, family) for group, scores in grouped]
    names = _name_tests([test for test, _ in measured])
    prepared = [
        build_leg_test(name, test.estimate, "above", margin, claim.minimum)
        for name, (test, _) in zip(names, measured, strict=True)
    ]
    counted = max(sum(each.leg.p_falsify is not None for each in prepared), 1)
    forecasts = [
        cache(partial(forecast_items, spread, test.estimate, margin, LEVEL / counted, LEVEL, test.items))
        for test, spread in measured
    ]
    legs = decide_legs(
        [
            replace(one, describe_open=partial(_describe_open_test, forecast, counted))
            for one, forecast in zip(prepared, forecasts, strict=True)
        ]
    )
    tests = [
        replace(test, name=name, leg=leg, **_detectable_and_forecast(spread, leg, margin, counted, forecast))
        for name, (test, spread), leg, forecast in zip(names, measured, legs, forecasts, strict=True)
    ]
    return verdict_from_legs(claim, candidate, [test.leg for test in tests]), tests, omissions


def _split_groups(
    paired: PairedEvaluations,
) -> tuple[list[PairedScores], list[tuple[TaskGroup, list[PairedScores]]], list[Omission]]:
    """Tests of single tasks, tests of groups, and metrics of group members that the group does not aggregate."""
    grouped: list[tuple[TaskGroup, list[PairedScores]]] = []
    for group in paired.groups:
        found = [
            scores
            for scores in paired.scores
            if scores.task in group.members and (scores.metric, scores.filter) == (group.metric, group.filter)
        ]
        if found:
            grouped.append((group, found))
    used = {id(scores) for _, found in grouped for scores in found}
    inside = {scores.task for _, found in grouped for scores in found}
    omissions: defaultdict[str, int] = defaultdict(int)
    singles = []
    for scores in paired.scores:
        if id(scores) in used:
            continue
        if scores.task in inside:
            omissions[scores.metric] += len(scores.ids)
        else:
            singles.append(scores)
    reason = "scores of a group's tasks by a metric that the group does not have; --task names a task to test it alone"
    return singles, grouped, [Omission(metric, count, reason) for metric, count in omissions.items()]


def _measure(
    parts: Sequence[PairedScores], group: TaskGroup | None, margin: float, family: int
) -> tuple[ScoreTest, ScoreSpread]:
    base, candidate = (np.concatenate([getattr(part, side) for part in parts]) for side in ("base", "candidate"))
    clusters = _join_clusters(parts)
    weights = np.ones(len(base))
    if group is not None and not group.by_size:
        weights = np.concatenate([np.full(len(part.ids), 1 / len(part.ids)) for part in parts])
        weights /= weights.min()
    estimate, spread = estimate_drop(base, candidate, clusters, weights, margin, family)
    first = parts[0]
    test = ScoreTest(
        "",
        first.task if group is None else group.name,
        first.metric,
        first.filter,
        len(base),
        estimate.n,
        float(np.average(base, weights=weights)),
        float(np.average(candidate, weights=weights)),
        int((candidate < base).sum()),
        int((candidate > base).sum()),
        estimate,
        build_measured_estimate_leg(first.task, estimate, threshold=margin),
        parts=() if group is None else tuple(_measure([part], None, margin, family)[0] for part in parts),
        scores=tuple(parts),
    )
    return test, spread


def _join_clusters(parts: Sequence[PairedScores]) -> Ints:
    """[items] clusters of several tasks: items of two tasks with one document are one cluster."""
    if len(parts) == 1:
        return parts[0].clusters
    return number_clusters(
        [
            (part.sides[0].clusters[int(mine)], part.sides[1].clusters[int(theirs)])
            for part in parts
            for mine, theirs in part.places
        ]
    )


def estimate_drop(
    base: Floats, candidate: Floats, clusters: Ints, weights: Floats, margin: float, family: int = 1
) -> tuple[Estimate, ScoreSpread]:
    """Paired drop of the mean score, with its p-values against ``margin``.

    Args:
        base, candidate: [items] scores in 0–1, larger is better.
        clusters: [items] items of one number depend on each other.
        weights: [items], the smallest of them 1.
        family: number of tests of the comparison, whose correction the bootstrap must reach.
    """
    difference = base - candidate
    square = float(np.average(difference**2, weights=weights))
    equal = float(np.ptp(weights)) == 0
    if equal and _is_right_or_wrong(base) and _is_right_or_wrong(candidate):
        reference, other = ByItem(base == 1, clusters), ByItem(candidate == 1, clusters)
        estimate = estimate_accuracy_drop(reference, other, threshold=margin)
        noise = max(0.0, square - abs(estimate.value))
        return estimate, ScoreSpread(noise, count_effective_items(reference, other), exact=True)
    rng = np.random.default_rng(SEED)
    columns = ByItem(base, clusters), ByItem(candidate, clusters)
    differing = np.count_nonzero(columns[0].with_values((difference != 0).astype(np.int64)).independent_values)
    if equal and differing < FEWEST_DIFFERING:
        estimate = estimate_score_difference(*columns, threshold=margin, rng=rng, unit=UNIT)
        noise = max(0.0, float(differing) / estimate.n - abs(estimate.value))  # its bounds are on how many differ
        return estimate, ScoreSpread(noise, estimate.n, exact=True)
    estimate = _studentised(difference, clusters, weights, margin, family, rng)
    return estimate, _spread_of(estimate, square)


def _is_right_or_wrong(scores: Floats) -> bool:
    right: Bools = (scores == 0) | (scores == 1)
    return bool(right.all())


def _studentised(
    difference: Floats, clusters: Ints, weights: Floats, margin: float, family: int, rng: np.random.Generator
) -> Estimate:
    """Weighted mean of differences by a studentised bootstrap; many clusters are resampled in blocks of them."""
    membership = DocumentMembership(clusters)
    independent = len(np.unique(clusters))
    units = clusters
    if independent > 2 * BLOCKS:
        # clusters at random in each block, so that their sums are as independent as the clusters are
        units = (rng.permutation(independent) % BLOCKS)[membership.document_index].astype(np.int64)
    sums, counts = ByItem(difference * weights, units), ByItem(weights, units)
    draws = draw_document_counts(len(np.unique(units)), required_resamples(family), rng)
    worst = 1.0 if independent * margin < UNSEEN_EXCLUDED else None
    estimate = mean_rate(sums, counts, threshold=margin, rng=rng, unit=UNIT, draws=draws, worst=worst)
    return replace(estimate, n=independent)


def _spread_of(estimate: Estimate, square: float) -> ScoreSpread:
    """The spread with the standard error of ``estimate``: clusters and weights are in it."""
    variance = max(0.0, square - estimate.value**2)
    if estimate.distance is None or estimate.distance.error == 0:
        return ScoreSpread(variance, estimate.n, exact=False)
    return ScoreSpread(variance, estimate.n, False, variance / (estimate.n * estimate.distance.error**2))


def _name_tests(tests: Sequence[ScoreTest]) -> list[str]:
    """The task of each test, with metric and filter where a task has several."""
    several: defaultdict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for test in tests:
        metrics, filters = several[test.task]
        metrics.add(test.metric)
        filters.add(test.filter)
    names = []
    for test in tests:
        metrics, filters = several[test.task]
        more = [word for word, of in ((test.metric, metrics), (test.filter, filters)) if len(of) > 1]
        names.append(f"{test.task} ({', '.join(more)})" if more else test.task)
    return names


def _describe_open_test(
    forecast: Callable[[], ItemForecast], family: int, falsified_alone: bool
) -> tuple[str, str, int | None]:
    """(Reason, remedy, items that would decide it) of an open leg."""
    few = "shown neither to exceed the margin nor to stay below it"
    alone = f"; falsified alone, but not after Holm over {family} tests" if falsified_alone else ""
    return f"{few}{alone}; {forecast()}", str(forecast()), forecast().items


def _detectable_and_forecast(
    spread: ScoreSpread, leg: Leg, margin: float, family: int, forecast: Callable[[], ItemForecast]
) -> dict[str, Any]:
    """Fields of a test beside its leg: its detectable drops and, if it is open, its forecast."""
    if leg.p_falsify is None:
        return {"detectable": DetectableDrops(None, None)}  # too few items decide nothing
    detectable = find_detectable_drops(spread, margin, LEVEL / family, LEVEL)
    return {"detectable": detectable} | ({"forecast": forecast()} if leg.outcome == "inconclusive" else {})
