"""EMAD-E1: does mean entropy under teacher forcing fall from each layer to the next? (EMAD, Introduction and Method)

All layers of the trace, the last among them, not probes only. An adjacent rise that is shown to be above zero
falsifies; a step that is flat within its interval leaves the row inconclusive. It does not apply to weights without
quality; the decoder under test plays no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from emad_ref.calibration.monotonicity import correction_text, profile_warnings
from emad_ref.calibration.trace import Trace
from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.measurements.attachments import AttachedTable, Attachments
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import combine_verdict, decide_legs, estimate_leg, leg_test
from emad_ref.statistics.rates import profile_slope, profile_steps
from emad_ref.statistics.units import ByDocument
from emad_ref.statistics.verdicts import Verdict
from emad_ref.sweep.diagnostics import agreement_auroc, agreement_rate, echo_rate


@dataclass(frozen=True)
class EntropyProfileEvidence:
    """``entropy_sums`` [documents, L] Σ_t H_ℓ(t), nats; ``tokens`` [documents]."""

    entropy_sums: ByDocument
    tokens: ByDocument


def decide(found: EntropyProfileEvidence, asked: ClaimContext) -> Verdict:
    """One leg per step between adjacent layers; the slope over all layers is listed as measured."""
    threshold = asked.claim.thresholds["entropy_rise_nats"]
    steps = profile_steps(found.entropy_sums, found.tokens, threshold=threshold, rng=asked.rng)
    tests = [
        leg_test(step_name(layer), step, "above", threshold, asked.claim.minimum)
        for layer, step in enumerate(steps, start=1)
    ]
    slope = profile_slope(found.entropy_sums, found.tokens, threshold=threshold, rng=asked.rng)
    legs = [*decide_legs(tests, asked.other_legs), estimate_leg("slope over all layers", slope, threshold=threshold)]
    return combine_verdict(asked.claim, asked.model, legs)


def step_name(layer: int) -> str:
    """The leg of the step from ``layer`` to the next."""
    return f"layer {layer} → {layer + 1}"


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From the evaluation trace; beside it what each layer's readout is worth, and where the run's profile rises."""
    if reason := evidence.subject.without_quality:
        return Answer(asked.not_applicable(reason), evidence.corpus, evidence.fingerprint)
    traces = evidence.traces
    verdict = decide(EntropyProfileEvidence(traces.entropy_sums, traces.lengths), asked)
    profile = traces.profile
    targets = dict(zip(profile.probes, profile.targets_nats, strict=True))
    rises = {leg.name: leg.estimate for leg in verdict.legs if leg.outcome == "falsified"}
    rows = readouts(traces.evaluation, targets, rises)
    table = AttachedTable(f"readouts by layer on {evidence.corpus}", rows, "entropy profile")
    said = [each for each in (*profile_warnings(profile), correction_text(profile)) if each]
    notes = tuple(f"{evidence.name}, profile of {profile.corpus}: {each}" for each in said)
    return Answer(verdict, evidence.corpus, evidence.fingerprint, Attachments((table,), notes))


def readouts(trace: Trace, targets: Mapping[int, float], rises: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Why low entropy may mislead: how often a layer echoes its input, and how often it agrees with the last.

    ``targets``: probe layer → isotonic target of the calibration text, nats. ``rises``: step → its rise, nats, where
    it is shown to be one.
    """
    columns = zip(
        trace.entropy_nats.mean(axis=0), echo_rate(trace), agreement_rate(trace), agreement_auroc(trace), strict=True
    )
    return [
        {
            "layer": layer,
            "mean entropy, nats": float(entropy),
            "shown rise, nats": rises.get(step_name(layer - 1)),
            "target, nats": targets.get(layer),
            "echo %": float(echo),
            "agrees with last %": float(agrees),
            "AUROC of low entropy for that": None if np.isnan(auroc) else float(auroc),
        }
        for layer, (entropy, echo, agrees, auroc) in enumerate(columns, start=1)
    ]


QUESTIONS = (Question("EMAD-E1", "model", answer, legs=lambda study, layers: layers - 1, decide=decide),)
