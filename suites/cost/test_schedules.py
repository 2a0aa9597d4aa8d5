"""EMAD-E7: without the monotone constraint, does backfill leave no speed-up? The same rule under three repairs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.decoding.forcing import over
from emad_ref.sweep.losses import loss_table
from emad_ref.verdict.interval import log_ratio, perplexity_rise
from emad_ref.verdict.legs import counted, estimated, judge_side
from pytest_emad.family import other_legs

EXACT = {"eager backfill": "free_eager", "deferred fill": "free_deferred"}
DECODED, DECODED_TOKENS = 32, 32  # documents, and tokens of each, on which state copying is scored


@pytest.mark.emad(claim="EMAD-E7", measures=True)
def test_free_depth_saves_no_time(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    evidence, claim = emad_evidence, emad_register["EMAD-E7"]
    rule = evidence.stopwatch.point
    points = {name: replace(rule, name=name, schedule=schedule) for name, schedule in EXACT.items()}
    copying = replace(rule, name="state copying", schedule="copying")
    with emad_record.unless_unsupported(claim.id, evidence.name):
        timings = evidence.stopwatch.against_full(points | {copying.name: copying}).seconds
        ratios = {name: log_ratio(timings["full"], timings[name], threshold=1.0) for name in [*points, copying.name]}
        beside = [estimated(copying.name, ratios.pop(copying.name))]
        if not evidence.without_quality:
            saved = loss_table(evidence.evaluation, evidence.loaded.geometry, points.values())
            unit = "net FLOP reduction"
            beside += [counted(f"{loss.point.name}: FLOPs", loss.net_reduction, 1, unit) for loss in saved]
            beside.append(estimated("state copying: perplexity", copied_quality(evidence, copying, emad_rng)))
        others = other_legs(claim.id, emad_settings, emad_register, evidence.stepper.layers)
        verdict = judge_side(claim, evidence.name, ratios, "above", 1.0, "pairs", other_legs=others, beside=beside)
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


def copied_quality(evidence, copying, rng):
    """Relative rise of perplexity against exact free depth on the openings of documents: copies are decoded."""
    texts = [
        replace(window, tokens=window.tokens[:DECODED_TOKENS]) for window in evidence.sequences("evaluate", DECODED)
    ]
    with evidence.open(copying) as decoder:
        copied, tokens = over(decoder, texts)
    with evidence.open(replace(copying, schedule="free_eager")) as decoder:
        exact, _ = over(decoder, texts)
    document = np.array([window.document for window in texts])
    _, first = np.unique(document, return_index=True)
    sums = (np.add.reduceat(column, first) for column in (copied, exact, tokens))
    return perplexity_rise(*sums, threshold=0.0, rng=rng)
