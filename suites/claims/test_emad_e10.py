"""EMAD-E10: does a margin selected on a validation set hold the drop on a test set?"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.verdict.interval import accuracy_drop, perplexity_rise
from emad_ref.verdict.legs import decided, not_applicable, row, weighed
from pytest_emad.family import other_legs
from pytest_emad.premises import quality_premise

USEFUL = 0.15  # net FLOP reduction below which the paper does not speak of an operating point


@pytest.mark.emad(claim="EMAD-E10")
def test_the_selected_margin_holds_on_the_test_split(
    emad_evidence, emad_record, emad_register, emad_rng, emad_settings
):
    evidence, claim = emad_evidence, emad_register["EMAD-E10"]
    with emad_record.unless_unsupported(claim.id, evidence.name):
        verdict = quality_premise(evidence, claim)
        if verdict is None:
            verdict = judged(evidence, claim, emad_rng, emad_settings, emad_register)
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


def judged(evidence, claim, rng, settings, register):
    """Perplexity within min(0.1 points, 1 %), accuracy over all replayed tasks within 0.5 points."""
    chosen = evidence.selected
    if chosen is None or chosen.net_reduction < USEFUL:
        saved = "none at all" if chosen is None else f"{chosen.point.name} ({chosen.net_reduction:+.1%} net)"
        reason = f"no margin that saves {USEFUL:.0%} holds the bounds on validation; selected: {saved}"
        return not_applicable(claim, evidence.name, reason)
    points = claim.thresholds["perplexity_points"] / evidence.full_loss.perplexity
    bound = min(points, claim.thresholds["perplexity_rise"])
    loss = evidence.rivals.evaluated(chosen.point)
    arms = [evidence.by_document(part.nll_nats) for part in (loss, evidence.full_loss)]
    tokens = evidence.by_document(evidence.evaluation.lengths)
    rise = perplexity_rise(*arms, tokens, threshold=bound, rng=rng)
    legs = [weighed(f"{chosen.point.name}: perplexity", rise, "above", bound, claim.minimum, "documents")]
    tasks = evidence.scored.replayed
    if tasks:
        full, adaptive = (
            np.concatenate([evidence.scored.correct(task, point) for task in tasks])
            for point in (evidence.full, chosen.point)
        )
        least = claim.thresholds["accuracy_drop"]
        drop = accuracy_drop(full, adaptive, threshold=least)
        name = f"{chosen.point.name}: accuracy over {', '.join(tasks)}"
        legs.append(weighed(name, drop, "above", least, claim.minimum, "items"))
    others = other_legs(claim.id, settings, register, evidence.stepper.layers)
    return row(claim, evidence.name, decided(legs, others))
