"""EMAD-E4: do top-K and low-rank estimators keep the entropy ranking of the full softmax?"""

from __future__ import annotations

import pytest

from emad_ref.sweep.estimators import agreements
from emad_ref.verdict.interval import rank_correlation
from emad_ref.verdict.legs import estimated, judge_side
from pytest_emad.estimates import READ
from pytest_emad.family import other_legs
from pytest_emad.premises import quality_premise


@pytest.mark.emad(claim="EMAD-E4")
def test_estimators_keep_the_ranking(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    """A leg per estimator and probe; the linear probe, which is not the paper's, is listed beside."""
    evidence, claim = emad_evidence, emad_register["EMAD-E4"]
    with emad_record.unless_unsupported(claim.id, evidence.name):
        verdict = quality_premise(evidence, claim)
        if verdict is None:
            others = other_legs(claim.id, emad_settings, emad_register, evidence.stepper.layers)
            verdict = judged(evidence, claim, emad_record, emad_rng, others)
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


def judged(evidence, claim, record, rng, others):
    estimates, threshold = evidence.estimates, claim.thresholds["spearman"]
    fitted = estimates.corrected([*estimates.paper, estimates.linear])
    trace = estimates.read("evaluate", READ, fitted)
    full, document = estimates.columns(trace.entropy_nats), trace.sequence
    read = {estimator: estimates.uncorrected(trace, estimator) for estimator in fitted}
    legs, beside = {}, []
    for estimator in fitted:
        for i, probe in enumerate(estimates.probes):
            rho = rank_correlation(read[estimator][:, i], full[:, i], document, threshold=threshold, rng=rng)
            name = f"{estimator.name}, layer {probe}"
            if estimator.kind == "linear":
                beside.append(estimated(name, rho, "ours, not the paper's"))
            else:
                legs[name] = rho
    record.table("entropy estimators against the full softmax", evidence.name, rows_of(evidence, full, read))
    return judge_side(claim, evidence.name, legs, "below", threshold, "documents", other_legs=others, beside=beside)


def rows_of(evidence, full, read):
    """RMSE after correction, and the share of exit decisions at τ = mean H that would change."""
    probes = evidence.estimates.probes
    targets = [(float(target),) for target in evidence.profile.targets_nats]
    return [
        {
            "estimator": row.estimator.name,
            "layer": row.probe,
            "ρ": row.spearman,
            "bias, nats": row.bias_nats,
            "RMSE, nats": row.rmse_nats,
            "decisions changed %": next(iter(row.changed.values())),
            "tokens": row.tokens,
        }
        for row in agreements(probes, full, read, targets)
    ]
