"""What claims about pruned vocabularies share: FLOPs that a pruned readout saves, on items and by arithmetic.

FLOPs are counted, so such a leg has no interval: at one operating point and on these items, that is what was executed.
Beside it stands the token that never exits, by arithmetic, on the model under test and on the paper's T5-large.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from emad_ref.exit_rules.rules import early_exit_point
from emad_ref.measurements.early_exits import (
    PUBLISHED_MINIMA,
    RULES,
    EarlyExitMeasurements,
    FlopSaving,
    MissingPremise,
    flop_saving,
    flops_per_item,
    has_room,
    minimum_layers,
)
from emad_ref.measurements.model_under_test import ModelUnderTest
from emad_ref.models.geometry import Geometry, geometry_named
from emad_ref.statistics.accuracy import score_difference
from emad_ref.statistics.estimate import Estimate
from emad_ref.statistics.legs import count_leg
from emad_ref.statistics.units import ByItem
from emad_ref.statistics.verdicts import Leg, Outcome
from emad_ref.sweep.diagnostics import work_without_exit

PAPERS = "t5-large"
CONTEXT = {"keys": 16, "source_keys": 128}  # a short answer to a paragraph
UNIT = "× fewer FLOPs"
NEVER = 2.0  # a threshold that no confidence reaches


@dataclass(frozen=True)
class PruningComparison:
    """The same items under a rule (``before``: their scores) and under its pruned sister (``after``)."""

    where: str
    saved: FlopSaving
    before: ByItem
    after: ByItem

    @property
    def scores_alike(self) -> bool:
        """Whether pruning changes no item's score: then none could be lost."""
        return np.array_equal(self.before.values, self.after.values)

    def lost(self, threshold: float, rng: np.random.Generator) -> Estimate:
        """Score that pruning costs."""
        return score_difference(self.before, self.after, threshold=threshold, rng=rng, unit="score lost")


@dataclass(frozen=True)
class NeverExitingToken:
    """What pruning saves a token that never exits; adaptive sizes as if every readout were sure."""

    where: str
    saved: FlopSaving


def compare_pruning(
    exits: EarlyExitMeasurements, before: str, after: str, settings: Iterable[tuple[str, int]]
) -> tuple[PruningComparison, ...]:
    """Two rules of ``RULES`` at each (task, minimum layer) of ``settings``.

    Raises:
        Unsupported: the decoder under test does not count its work, or declines a rule.
    """
    geometry, found = exits.subject.loaded.geometry, []
    for task, minimum in settings:
        first, second = (exits.answered(task, rule, minimum) for rule in (before, after))
        saved = flop_saving(first.costs(geometry), second.costs(geometry))
        found.append(PruningComparison(f"{task}, j={minimum}", saved, first.exited.score, second.exited.score))
    return tuple(found)


def never_exiting(subject: ModelUnderTest, before: str, after: str) -> tuple[NeverExitingToken, ...]:
    """On the model under test, at the paper's minimum layers; () for a model that has no room for them."""
    geometry = subject.loaded.geometry
    if not subject.seq2seq or not has_room(geometry):
        return ()
    return never_exiting_tokens(subject.name, geometry, minimum_layers(geometry.layers), before, after)


def paper_never_exiting(before: str, after: str) -> tuple[NeverExitingToken, ...]:
    """On the paper's own model."""
    return never_exiting_tokens(PAPERS, geometry_named(PAPERS), PUBLISHED_MINIMA, before, after)


def never_exiting_tokens(
    name: str, geometry: Geometry, minima: Iterable[int], before: str, after: str
) -> tuple[NeverExitingToken, ...]:
    """One token of ``geometry`` that never exits, under two rules of ``RULES``."""
    found = []
    for minimum in minima:
        signals = (RULES[rule] for rule in (before, after))
        points = (
            early_exit_point(signal, geometry.layers, geometry.vocabulary, minimum, NEVER, pruning=pruning)
            for signal, pruning in signals
        )
        parts = [flops_per_item(work_without_exit(point, geometry, **CONTEXT), geometry) for point in points]
        found.append(NeverExitingToken(f"{name}, never exiting, j={minimum}", flop_saving(*parts)))
    return tuple(found)


def part_legs(found: PruningComparison, least: float | None) -> list[Leg]:
    """FLOP ratios of the three parts; the confidence part is judged where a threshold is given."""
    items = len(found.before)
    return [
        judged_count(f"{found.where}: confidence FLOPs", found.saved.confidence, items, least),
        count_leg(f"{found.where}: decoder and confidence FLOPs", found.saved.decoding, items, UNIT),
        count_leg(f"{found.where}: all FLOPs, encoder included", found.saved.together, items, UNIT),
    ]


def never_legs(found: Iterable[NeverExitingToken], least: float | None) -> list[Leg]:
    """Both parts that a rule touches, token by token; the confidence part is judged where a threshold is given."""
    legs = []
    for each in found:
        legs.append(judged_count(f"{each.where}: confidence FLOPs", each.saved.confidence, 1, least))
        legs.append(count_leg(f"{each.where}: decoder and confidence FLOPs", each.saved.decoding, 1, UNIT))
    return legs


def judged_count(name: str, value: float, n: int, least: float | None) -> Leg:
    """A counted number against a threshold, or a measured one where there is none."""
    if least is None:
        return count_leg(name, value, n, UNIT)
    outcome: Outcome = "survived" if value >= least else "falsified"
    return Leg(name, outcome, float(value), None, n, least, UNIT, "counted", good="higher")


def instead_of_items(absence: MissingPremise) -> dict[str, str]:
    """What stands beside arithmetic where no item can be asked: a leg where data is absent, none without a premise."""
    return {"items": absence.reason} if absence.outcome == "unmeasured" else {}
