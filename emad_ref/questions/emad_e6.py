"""EMAD-E6: does conditioning lower the damage that a profile from another corpus does? (EMAD, Limitations)

Damage: nats per token lost by the foreign profile's point over the own profile's, on the same text. Each conditioning
is held against thresholds without any. It does not apply to weights without quality, nor behind a decoder for which
replay does not speak; without a second corpus it is unmeasured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emad_ref.evidence.gathered import Evidence
from emad_ref.point import BinSpec
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.premises import quality_premise
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.interval import mean_rate
from emad_ref.verdict.legs import counted, judge_side
from emad_ref.verdict.units import ByDocument

CONDITIONINGS = (("position",), ("confidence",), ("position", "confidence"))


@dataclass(frozen=True)
class Damage:
    """Under one conditioning: nats [documents] that the foreign profile loses, and the share of FLOPs it saves, net."""

    name: str
    nats: ByDocument
    net_reduction: float


@dataclass(frozen=True)
class Found:
    """``plain``: damage without conditioning; ``tokens`` [documents]; ``foreign``: the corpus of the other profile."""

    plain: ByDocument
    conditioned: Sequence[Damage]
    tokens: ByDocument
    foreign: str


def decide(found: Found, asked: Asked) -> Verdict:
    """A leg per conditioning: its damage beyond that without conditioning, nats per token."""
    threshold, unit = asked.claim.thresholds["damage_nats"], asked.claim.unit
    legs = {
        f"{damage.name} against none, profile of {found.foreign}": mean_rate(
            found.plain.like(damage.nats.values - found.plain.values),
            found.tokens,
            threshold=threshold,
            rng=asked.rng,
            unit=unit,
        )
        for damage in found.conditioned
    }
    beside = [
        counted(f"{damage.name}: foreign profile", damage.net_reduction, len(found.tokens), "net FLOP reduction")
        for damage in found.conditioned
    ]
    return judge_side(asked.claim, asked.model, legs, "above", threshold, other_legs=asked.other_legs, beside=beside)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """Replays of the evaluation split under thresholds of two corpora."""
    verdict = quality_premise(evidence, asked)
    if verdict is None and evidence.shifted is None:
        verdict = asked.unmeasured(f"no second corpus beside {evidence.corpus}")
    if verdict is None:
        verdict = decide(found_in(evidence), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


def found_in(evidence: Evidence) -> Found:
    """What ``decide`` takes, of evidence that has a second corpus."""
    assert evidence.shifted is not None, "asked of a model that another corpus shifts"
    plain = damage(evidence, ())
    conditioned = [damage(evidence, features) for features in CONDITIONINGS]
    return Found(plain.nats, conditioned, evidence.traces.lengths, evidence.shifted.corpus)


def damage(evidence: Evidence, features: tuple[str, ...]) -> Damage:
    """Both corpora's profiles by ``features``, replayed on the evaluated text."""
    assert evidence.shifted is not None, "asked of a model that another corpus shifts"
    profiles = (each.traces.calibrated(features=features) for each in (evidence, evidence.shifted))
    own, foreign = (evidence.rivals.evaluated(profile.point(0.0)) for profile in profiles)
    lost, kept = (evidence.traces.by_document(loss.nll_nats) for loss in (foreign, own))
    return Damage(BinSpec(features).name, lost.like(lost.values - kept.values), foreign.net_reduction)


QUESTION = Question("EMAD-E6", "model", answer, legs=lambda study, layers: len(CONDITIONINGS))
