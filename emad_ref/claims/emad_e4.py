"""EMAD-E4: do top-K and low-rank estimators keep the entropy ranking of the full softmax? (EMAD, Method)

At the sizes the paper means (``EntropyEstimates.paper``): K of 32 and 128 or small shares of V, r ≤ d/8; half of d
would say nothing. Uncorrected estimates against full entropies of the same tokens, probe by probe, resampled by
document: the paper's two estimators decide at every size, the linear probe, which is ours, is listed beside. It does
not apply to weights without quality, nor behind a decoder for which replay does not speak: what its probes would read
is then not what was compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import quality_premise
from emad_ref.exit_rules.rules import default_probes
from emad_ref.measurements.attachments import AttachedTable, Attachments
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.traces import PAPER_KS, PAPER_RANKS, READ
from emad_ref.point import Estimator
from emad_ref.record import Floats
from emad_ref.statistics.estimate import Estimate
from emad_ref.statistics.legs import estimate_leg, judge_side
from emad_ref.statistics.rates import rank_correlation
from emad_ref.statistics.units import DocumentOf
from emad_ref.statistics.verdicts import Leg, Verdict
from emad_ref.sweep.diagnostics import estimator_agreements

ESTIMATORS = len(PAPER_KS) + len(PAPER_RANKS)  # of the paper


@dataclass(frozen=True)
class EstimatorReading:
    """Uncorrected estimates [tokens, probes] of one estimator and size, nats. ``listed``: ours, and so reports only."""

    estimator: str
    nats: Floats
    listed: bool = False


@dataclass(frozen=True)
class EstimatorRankingEvidence:
    """``full`` [tokens, probes] entropies of the full softmax after ``probes``, nats; ``document`` [tokens]."""

    probes: Sequence[int]
    full: Floats
    readings: Sequence[EstimatorReading]
    document: DocumentOf


def decide(found: EstimatorRankingEvidence, asked: ClaimContext) -> Verdict:
    """A leg per estimator, size and probe: Spearman's ρ against the threshold."""
    threshold = asked.claim.thresholds["spearman"]
    legs: dict[str, Estimate] = {}
    beside: list[Leg] = []
    for reading in found.readings:
        for i, probe in enumerate(found.probes):
            columns = reading.nats[:, i], found.full[:, i]
            rho = rank_correlation(*columns, found.document, threshold=threshold, rng=asked.rng)
            name = f"{reading.estimator}, layer {probe}"
            if reading.listed:
                beside.append(estimate_leg(name, rho, "ours, not the paper's"))
            else:
                legs[name] = rho
    return judge_side(asked.claim, asked.model, legs, "below", threshold, other_legs=asked.other_legs, beside=beside)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Estimators fitted on two splits, read on documents of the third; beside it what they err and change."""
    if absent := quality_premise(evidence, asked):
        return Answer(absent, evidence.corpus, evidence.fingerprint)
    estimates = evidence.estimates
    fitted = estimates.corrected([*estimates.paper, estimates.linear])
    trace, document = estimates.read_by_document("evaluate", READ, fitted)
    full = estimates.columns(trace.entropy_nats)
    read = {estimator: estimates.uncorrected(trace, estimator) for estimator in fitted}
    readings = [EstimatorReading(each.name, nats, each.kind == "linear") for each, nats in read.items()]
    verdict = decide(EstimatorRankingEvidence(estimates.probes, full, readings, document), asked)
    table = AttachedTable("entropy estimators against the full softmax", agreement_rows(evidence, full, read))
    return Answer(verdict, evidence.corpus, evidence.fingerprint, Attachments((table,)))


def agreement_rows(evidence: ModelMeasurements, full: Floats, read: Mapping[Estimator, Floats]) -> list[dict[str, Any]]:
    """RMSE after correction, and the share of exit decisions at τ = mean H that would change."""
    targets = [(float(target),) for target in evidence.traces.profile.targets_nats]
    vocabulary, width = evidence.subject.stepper.unembedding.shape
    return [
        {
            "estimator": row.estimator.name,
            "layer": row.probe,
            "K / V": row.estimator.k / vocabulary if row.estimator.k else None,
            "r / d": row.estimator.rank / width if row.estimator.rank else None,
            "ρ": row.spearman,
            "bias, nats": row.bias_nats,
            "RMSE, nats": row.rmse_nats,
            "decisions changed %": next(iter(row.changed.values())),
            "tokens": row.tokens,
        }
        for row in estimator_agreements(evidence.estimates.probes, full, read, targets)
    ]


QUESTIONS = (
    Question(
        "EMAD-E4", "model", answer, legs=lambda study, layers: ESTIMATORS * len(default_probes(layers)), decide=decide
    ),
)
