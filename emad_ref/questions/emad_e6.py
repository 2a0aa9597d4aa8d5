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
from emad_ref.evidence.gathered import Evidence
from emad_ref.point import FEATURES
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.premises import quality_premise
from emad_ref.sweep.families import LEVELS, SETTINGS
from emad_ref.sweep.grids import Spacing, emad_margins
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.dominance import Family, Met, as_leg, at_equal_flops, enough_for
from emad_ref.verdict.legs import LEVEL, Tested, corrected, estimated, row
from emad_ref.verdict.units import ByDocument

CONDITIONINGS = [features for count in (1, 2) for features in combinations(FEATURES, count)]
MARGIN = "margin"
NO_DAMAGE = "the foreign profile does no damage"


@dataclass(frozen=True)
class Found:
    """Families on the same documents, losses in nats: ``own`` and ``plain`` at m = 0.

    ``plain`` has thresholds of the corpus ``foreign``, and so have the ``remedies``, by name.
    """

    own: Family
    plain: Family
    remedies: Mapping[str, Family]
    foreign: str


def decide(found: Found, asked: Asked) -> Verdict:
    """A leg per remedy: its damage beyond that of plain foreign thresholds, nats per token at the same net FLOPs."""
    reached = [level for level in LEVELS if level <= min(found.own.promised, found.plain.promised)]
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
    shown = [] if damage.estimate is None else [estimated(f"damage of the profile of {found.foreign}", damage.estimate)]
    return row(asked.claim, asked.model, [*corrected(tests, asked.other_legs), *beside, *shown])


def compared(ours: Family, rival: Family, level: float, asked: Asked) -> Met:
    """Both at ``level``, which both reach on validation."""
    threshold = asked.claim.thresholds["damage_nats"]
    resamples = enough_for(len(CONDITIONINGS) + 1 + asked.other_legs)
    (met,) = at_equal_flops(
        ours, rival, [level], threshold=threshold, rng=asked.rng, unit=asked.claim.unit, resamples=resamples
    )
    return met


def lost(damage: Met) -> str:
    """What was lost, where that was more than nothing at all."""
    if damage.estimate is None:
        return f": it decides as the own one at {damage.saving:.1%} net"
    found = damage.estimate
    return f" at {damage.saving:.1%} net: {found.value:.4f} nats per token [{found.low:.4f}, {found.high:.4f}]"


def leg(name: str, met: Met, asked: Asked) -> Tested:
    """One remedy, before Holm."""
    return as_leg(name, met, met.estimate, asked.claim.thresholds["damage_nats"], asked.claim)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """Replays of validation and evaluation split under thresholds of two corpora."""
    verdict = quality_premise(evidence, asked)
    if verdict is None and evidence.shifted is None:
        verdict = asked.unmeasured(f"no second corpus beside {evidence.corpus}")
    if verdict is None:
        verdict = decide(found_in(evidence), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


def found_in(evidence: Evidence) -> Found:
    """What ``decide`` takes, of evidence that has a second corpus."""
    assert evidence.shifted is not None, "asked of a model that another corpus shifts"
    rivals, foreign = evidence.rivals, evidence.shifted.traces

    def default(profile: Profile) -> Family:
        return rivals.family_of([profile.point(0.0)])

    plain = foreign.calibrated()
    saved = Spacing(rivals.validation, rivals.geometry)
    remedies = {"×".join(features): default(foreign.calibrated(features=features)) for features in CONDITIONINGS}
    remedies[MARGIN] = rivals.family_of(emad_margins(plain, saved, SETTINGS))
    return Found(default(evidence.traces.calibrated()), default(plain), remedies, evidence.shifted.corpus)


QUESTION = Question("EMAD-E6", "model", answer, legs=lambda study, layers: len(CONDITIONINGS) + 1)
