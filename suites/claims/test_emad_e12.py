"""EMAD-E12: is adaptive depth orthogonal to quantisation? Invariants and F1's perplexity leg on an int8 copy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.calibration.profile import profile_of
from emad_ref.calibration.trace import joined, stepwise_logits, take_trace, trace_stepwise
from emad_ref.errors import BadArgument
from emad_ref.models.quantised import int8_copy
from emad_ref.policy.thresholds import default_probes
from emad_ref.protocol import Prompt
from emad_ref.sweep.losses import loss_table
from emad_ref.verdict.interval import perplexity_rise
from emad_ref.verdict.legs import counted, decided, not_applicable, row, unmeasured, weighed
from pytest_emad.family import other_legs

CALIBRATED = 40  # windows: means of a plain pass, in which the noise of shared scales averages out
EVALUATED = {"smoke": 36, "standard": 120, "full": 400}  # windows decoded token by token, which is slow
FED, PROMPT = 12, 6


@pytest.mark.emad(claim="EMAD-E12")
def test_an_int8_copy_keeps_invariants_and_quality(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    """Decoded token by token, as its dynamic scales demand; the reference is the copy's own full depth."""
    evidence, claim = emad_evidence, emad_register["EMAD-E12"]
    if reason := evidence.without_quality:
        verdict = not_applicable(claim, evidence.name, reason)
    else:
        others = other_legs(claim.id, emad_settings, emad_register, evidence.stepper.layers)
        try:
            int8 = int8_copy(evidence.loaded)
        except BadArgument as refusal:
            verdict = unmeasured(claim, evidence.name, str(refusal))
        else:
            verdict = judged(evidence, int8, claim, emad_rng, others)
    emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


def judged(evidence, int8, claim, rng, others):
    calibration = take_trace(int8.stepper, evidence.sequences("calibrate", CALIBRATED))
    texts = evidence.sequences("evaluate", EVALUATED[evidence.budget.name])
    trace = joined([trace_stepwise(int8.stepper, text) for text in texts])
    profile = profile_of(
        calibration,
        default_probes(int8.stepper.layers),
        model=int8.name,
        fingerprint=int8.fingerprint,
        corpus=evidence.corpus,
        dtype="int8",
    )
    bound = claim.thresholds["perplexity_rise"]
    point = profile.point(0.0)
    loss, full = loss_table(trace, int8.geometry, [point, evidence.full])
    reduction = counted(f"{point.name}: reduction", loss.net_reduction, len(trace.lengths), "net FLOP reduction")
    moved = invariant_error(evidence, int8)
    same = "survived" if moved <= evidence.tolerance else "falsified"
    invariant = counted("logits under drawn depths", moved, FED, "largest |difference| of a logit")
    legs = [reduction, replace(invariant, outcome=same, threshold=evidence.tolerance)]
    if loss.net_reduction >= claim.thresholds["flop_reduction"]:
        rise = perplexity_rise(loss.nll_nats, full.nll_nats, trace.lengths, threshold=bound, rng=rng)
        test = weighed(f"{point.name}: perplexity", rise, "above", bound, claim.minimum, "documents")
        legs += decided([test], others)
    return row(claim, evidence.name, legs)


def invariant_error(evidence, int8):
    """Largest difference of a logit between forced admissible depths and the copy's own token-by-token full depth."""
    rng = np.random.default_rng(evidence.seed)
    tokens = rng.integers(0, int8.stepper.vocabulary, PROMPT + FED)
    depths = np.sort(rng.integers(1, int8.stepper.layers + 1, FED))[::-1]
    reference = stepwise_logits(int8.stepper, tokens, PROMPT - 1)[1:]  # a prompt's last position is a step
    with evidence.of(int8).open(evidence.full) as decoder:
        session, _ = decoder.start([Prompt(tokens[:PROMPT])])
        forced = zip(tokens[PROMPT:], depths, strict=True)
        steps = [session.feed(token[None, None], np.array([[depth]])) for token, depth in forced]
    seen = np.array([step.logits[0, 0] for step in steps])
    return float(np.abs(seen - reference[np.arange(FED), depths - 1]).max())
