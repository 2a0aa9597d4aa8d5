"""EMAD-E6: do conditioning and margins lower the damage that a profile from another corpus does? (EMAD, Limitations)

    damage   nats per token that the foreign profile's decoder loses over the own profile's, at the same net FLOPs
    remedy   thresholds by position, by confidence, by frequency or by two of them; a margin chosen on validation

Own, foreign and conditioned thresholds stand at m = 0 and give some documents full depth instead, as many as bring all
of them to one net saving (``sweep.front``): the highest at which sweeps are compared that own and foreign thresholds
reach on validation. Where no damage is shown there, there is nothing to lower, and the claim does not apply; nor does
it to weights without quality, nor behind a decoder for which replay does not speak. Without a second corpus it is
unmeasured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from emad_ref.calibration.profile import Profile
from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import quality_premise
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.point import FEATURES
from emad_ref.statistics.fronts import (
    EqualFlopsComparison,
    PointFamily,
    at_equal_flops,
    comparison_leg,
    resamples_for_legs,
)
from emad_ref.statistics.legs import LEVEL, LegTest, combine_verdict, decide_legs, estimate_leg
from emad_ref.statistics.units import ByDocument
from emad_ref.statistics.verdicts import Leg, Verdict
from emad_ref.sweep.grids import SAVING_LEVELS, SETTINGS_PER_FAMILY, NetSaving, margin_points

CONDITIONINGS = [features for count in (1, 2) for features in combinations(FEATURES, count)]
MARGIN = "margin"
NO_DAMAGE = "the foreign profile does no damage"


@dataclass(frozen=True)
class ProfileShiftEvidence:
    """Families on the same documents, losses in nats: ``own`` and ``plain`` at m = 0.

    ``plain`` has thresholds of the corpus ``foreign``, and so have the ``remedies``, by name.
    """

    own: PointFamily
    plain: PointFamily
    remedies: Mapping[str, PointFamily]
    foreign: str


def decide(found: ProfileShiftEvidence, asked: ClaimContext) -> Verdict:
    """A leg per remedy: its damage beyond that of plain foreign thresholds, nats per token at the same net FLOPs."""
    reached = [level for level in SAVING_LEVELS if level <= min(found.own.promised, found.plain.promised)]
    if not reached:
        return asked.not_applicable("own and foreign thresholds do not both save 15 % of FLOPs on validation")
    level = max(reached)
    damage = compared(found.plain, found.own, level, asked)
    enough = len(damage.ours.loss) >= asked.claim.minimum[ByDocument.noun]
    if enough and (damage.estimate is None or damage.estimate.p_above > LEVEL):
        return asked.not_applicable(f"{NO_DAMAGE}{lost(damage)}")
    tests, beside = [], []
    for name, remedy in found.remedies.items():
        called = f"{name} against none, profile of {found.foreign}"
        if remedy.promised <= 0:
            beside.append(Leg(called, "not applicable", None, None, 0, None, "", "saves no FLOPs on validation"))
        else:
            tests.append(leg(called, compared(remedy, found.plain, min(level, remedy.promised), asked), asked))
    shown = (
        [] if damage.estimate is None else [estimate_leg(f"damage of the profile of {found.foreign}", damage.estimate)]
    )
    return combine_verdict(asked.claim, asked.model, [*decide_legs(tests, asked.other_legs), *beside, *shown])


def compared(ours: PointFamily, rival: PointFamily, level: float, asked: ClaimContext) -> EqualFlopsComparison:
    """Both at ``level``, which both reach on validation."""
    threshold = asked.claim.thresholds["damage_nats"]
    resamples = resamples_for_legs(len(CONDITIONINGS) + 1 + asked.other_legs)
    (met,) = at_equal_flops(
        ours, rival, [level], threshold=threshold, rng=asked.rng, unit=asked.claim.unit, resamples=resamples
    )
    return met


def lost(damage: EqualFlopsComparison) -> str:
    """What was lost, where that was more than nothing at all."""
    if damage.estimate is None:
        return f": it decides as the own one at {damage.saving:.1%} net"
    found = damage.estimate
    return f" at {damage.saving:.1%} net: {found.value:.4f} nats per token [{found.low:.4f}, {found.high:.4f}]"


def leg(name: str, met: EqualFlopsComparison, asked: ClaimContext) -> LegTest:
    """One remedy, before Holm."""
    return comparison_leg(name, met, met.estimate, asked.claim.thresholds["damage_nats"], asked.claim)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Replays of validation and evaluation split under thresholds of two corpora."""
    verdict = quality_premise(evidence, asked)
    if verdict is None and evidence.shifted is None:
        verdict = asked.unmeasured(f"no second corpus beside {evidence.corpus}")
    if verdict is None:
        verdict = decide(found_in(evidence), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


def found_in(evidence: ModelMeasurements) -> ProfileShiftEvidence:
    """What ``decide`` takes, of evidence that has a second corpus."""
    assert evidence.shifted is not None, "asked of a model that another corpus shifts"
    rivals, foreign = evidence.rivals, evidence.shifted.traces

    def default(profile: Profile) -> PointFamily:
        return rivals.family_of([profile.point(0.0)])

    plain = foreign.calibrated()
    saved = NetSaving(rivals.validation, rivals.geometry)
    remedies = {"×".join(features): default(foreign.calibrated(features=features)) for features in CONDITIONINGS}
    remedies[MARGIN] = rivals.family_of(margin_points(plain, saved, SETTINGS_PER_FAMILY))
    return ProfileShiftEvidence(
        default(evidence.traces.calibrated()), default(plain), remedies, evidence.shifted.corpus
    )


QUESTIONS = (Question("EMAD-E6", "model", answer, legs=lambda study, layers: len(CONDITIONINGS) + 1, decide=decide),)
