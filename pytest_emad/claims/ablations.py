"""Ablations at equal net FLOPs, by replay: EMAD against rivals (EMAD-R1 to R4), and a profile of another corpus (E6).

No claim here applies to weights without quality, or to a decoder for which replay is not valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from emad_ref.calibration.profile import Profile
from emad_ref.exit_rules import EMAD_FAMILY
from emad_ref.point import FEATURES
from emad_ref.replay.grids import SAVING_LEVELS, SETTINGS_PER_FAMILY, NetSavingFunction, margin_points
from emad_ref.signals import perplexity_rise_from_nats
from pytest_emad.claims.base import ClaimContext, Question, make_model_question, make_unmet_quality_verdict
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.statistics.fronts import (
    EqualFlopsComparison,
    PointFamily,
    build_comparison_leg_test,
    compare_families_at_saving_levels,
    resample_count_for_legs,
)
from pytest_emad.statistics.legs import LEVEL, LegTest, build_measured_estimate_leg
from pytest_emad.statistics.units import ByDocument
from pytest_emad.statistics.verdicts import Leg, Verdict

CONDITIONINGS = [features for count in (1, 2) for features in combinations(FEATURES, count)]
MARGIN = "margin"
NO_DAMAGE = "the foreign profile does no damage"
NO_SAVING = "own and foreign thresholds do not both save 15 % of FLOPs on validation"


def decide_against_baseline(found: tuple[PointFamily, PointFamily], asked: ClaimContext) -> Verdict:
    """EMAD-R1 to R4: a leg per net saving, EMAD's relative rise of perplexity over the rival's at equal savings.

    At every saving that both sweeps reach on validation, each side is the mixture of two points with exactly this
    saving on evaluation (``sweep.front``); the interval resamples both splits (``statistics.fronts``). Sides with equal
    decisions tie, and so do sides shown to differ by no more than ``tie_margin``. Only a larger difference lets a leg
    survive, or falsifies it.
    """
    threshold = asked.claim.thresholds["perplexity_rise"]
    met = compare_families_at_saving_levels(
        *found,  # EMAD's, and the rival's
        SAVING_LEVELS,
        threshold=math.log1p(threshold),
        rng=asked.rng,
        unit="nats per token",
        resamples=resample_count_for_legs(len(SAVING_LEVELS) + asked.other_legs),
        tie_margin=math.log1p(asked.claim.thresholds["tie_margin"]),
    )
    if not met:
        return asked.not_applicable("no point of both sweeps saves 15 % of FLOPs on validation")
    tests = [_equal_flops_leg(each, asked, threshold) for each in met]
    return asked.decide_tests(tests)


def _equal_flops_leg(met: EqualFlopsComparison, asked: ClaimContext, threshold: float) -> LegTest:
    """The leg of one saving, before Holm; nats per token become a rise of perplexity."""
    estimate = met.estimate
    if estimate is not None:
        rise, low, high = (perplexity_rise_from_nats(nats) for nats in (estimate.value, estimate.low, estimate.high))
        estimate = replace(estimate, value=rise, low=low, high=high, unit=asked.claim.unit)
    name = f"{met.level:.0%} net: {met.ours.name} against {met.rival.name}"
    return build_comparison_leg_test(name, met, estimate, threshold, asked.claim)


# ---------------------------------------------------------------- EMAD-E6: a profile of another corpus


@dataclass(frozen=True)
class ForeignProfileEvidence:
    """Families on the same documents, losses in nats: ``own`` and ``plain`` at m = 0.

    ``plain`` has thresholds of the corpus ``foreign``, and so have the ``remedies``, by name.
    """

    own: PointFamily
    plain: PointFamily
    remedies: Mapping[str, PointFamily]
    foreign: str


def decide_foreign_profile_remedies(found: ForeignProfileEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-E6: a leg per remedy, its damage minus that of plain foreign thresholds, at the same net FLOPs.

    Own, foreign and conditioned thresholds have m = 0. Each gives some documents full depth instead, so that all have
    one net saving (``sweep.front``): the highest level that own and foreign thresholds reach on validation. Without
    proven damage there, no remedy can lower it, and the claim does not apply.
    """
    reached = [
        level
        for level in SAVING_LEVELS
        if level <= min(found.own.largest_validation_saving, found.plain.largest_validation_saving)
    ]
    if not reached:
        return asked.not_applicable(NO_SAVING)
    level = max(reached)
    damage = _at_level(found.plain, found.own, level, asked)
    enough = len(damage.ours.loss) >= asked.claim.minimum[ByDocument.noun]
    if enough and (damage.estimate is None or damage.estimate.p_above > LEVEL):
        return asked.not_applicable(f"{NO_DAMAGE}{_lost_text(damage)}")
    tests, beside = [], []
    for name, remedy in found.remedies.items():
        called = f"{name} against none, profile of {found.foreign}"
        if remedy.largest_validation_saving <= 0:
            beside.append(Leg(called, "not applicable", None, None, 0, None, "", "saves no FLOPs on validation"))
        else:
            met = _at_level(remedy, found.plain, min(level, remedy.largest_validation_saving), asked)
            tests.append(
                build_comparison_leg_test(called, met, met.estimate, asked.claim.thresholds["damage_nats"], asked.claim)
            )
    shown = (
        []
        if damage.estimate is None
        else [build_measured_estimate_leg(f"damage of the profile of {found.foreign}", damage.estimate)]
    )
    return asked.decide_tests(tests, [*beside, *shown])


def _at_level(ours: PointFamily, rival: PointFamily, level: float, asked: ClaimContext) -> EqualFlopsComparison:
    """Both sides at ``level``, which both reach on validation."""
    threshold = asked.claim.thresholds["damage_nats"]
    resamples = resample_count_for_legs(len(CONDITIONINGS) + 1 + asked.other_legs)
    (met,) = compare_families_at_saving_levels(
        ours, rival, [level], threshold=threshold, rng=asked.rng, unit=asked.claim.unit, resamples=resamples
    )
    return met


def _lost_text(damage: EqualFlopsComparison) -> str:
    """Text about the loss, if any."""
    if damage.estimate is None:
        return f": it decides as the own one at {damage.saving:.1%} net"
    found = damage.estimate
    return f" at {damage.saving:.1%} net: {found.value:.4f} nats per token [{found.low:.4f}, {found.high:.4f}]"


def make_unmet_foreign_profile_verdict(evidence: ModelMeasurements, asked: ClaimContext) -> Verdict | None:
    """The verdict if quality, a second corpus or savings of the own profile are absent; None if all are present."""
    absent = make_unmet_quality_verdict(evidence, asked)
    if absent is None and evidence.on_shifted_corpus is None:
        absent = asked.unmeasured(f"no second corpus beside {evidence.corpus}")
    if absent is None and _own_family(evidence).largest_validation_saving < min(SAVING_LEVELS):
        absent = asked.not_applicable(NO_SAVING)  # decided before the model generates text for a foreign profile
    return absent


def _own_family(evidence: ModelMeasurements) -> PointFamily:
    return evidence.baseline_comparison.make_family_of_points([evidence.traces.calibrate_profile().point(0.0)])


def gather_foreign_profile(evidence: ModelMeasurements) -> ForeignProfileEvidence:
    """Point families of own and foreign profiles; the evidence must have a second corpus."""
    assert evidence.on_shifted_corpus is not None, "asked of a model that another corpus shifts"
    rivals, foreign = evidence.baseline_comparison, evidence.on_shifted_corpus.traces

    def default(profile: Profile) -> PointFamily:
        return rivals.make_family_of_points([profile.point(0.0)])

    plain = foreign.calibrate_profile()
    saved = NetSavingFunction(rivals.validation_trace, rivals.geometry)
    remedies = {"×".join(features): default(foreign.calibrate_profile(features=features)) for features in CONDITIONINGS}
    remedies[MARGIN] = rivals.make_family_of_points(margin_points(plain, saved, SETTINGS_PER_FAMILY))
    return ForeignProfileEvidence(_own_family(evidence), default(plain), remedies, evidence.on_shifted_corpus.corpus)


def make_baseline_question(claim: str, family: str) -> Question[ModelMeasurements]:
    """The claim that EMAD as published beats ``family``, a key of ``replay.grids.point_families``."""

    def both(evidence: ModelMeasurements) -> tuple[PointFamily, PointFamily]:
        return evidence.baseline_comparison.replay_point_family_by_document(
            EMAD_FAMILY
        ), evidence.baseline_comparison.replay_point_family_by_document(family)

    return make_model_question(claim, both, decide_against_baseline, legs=lambda study, layers: len(SAVING_LEVELS))


QUESTIONS = (
    make_baseline_question("EMAD-R1", "fixed truncation"),  # the same first layers for every token, at the best depth
    make_baseline_question("EMAD-R2", "fixed entropy"),  # one threshold after every probe, without a profile
    make_baseline_question("EMAD-R3", "softmax response"),  # it exits if the two largest probabilities differ enough
    make_baseline_question("EMAD-R4", "chunked"),  # EMAD's profile, but decided once per chunk of tokens
    make_model_question(
        "EMAD-E6",
        gather_foreign_profile,
        decide_foreign_profile_remedies,
        premise=make_unmet_foreign_profile_verdict,
        legs=lambda study, layers: len(CONDITIONINGS) + 1,
    ),
)
