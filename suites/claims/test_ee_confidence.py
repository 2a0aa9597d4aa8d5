"""EE-5, EE-6, EE-11: what layers say of reference answers under teacher forcing; intervals over items."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.sweep.exits import QUANTILES, expected_calibration_error, rank_quantiles, reliability
from emad_ref.verdict.interval import mean_rate, profile_slope
from emad_ref.verdict.legs import counted, estimated, row
from pytest_emad.exits import ALPHAS, decide


@pytest.mark.emad(claim="EE-5")
def test_early_layers_are_overconfident(emad_evidence, emad_record, emad_register, emad_rng):
    """One leg per task and layer: mean confidence minus accuracy, its ECE in the reason; all layers on a table."""
    evidence, claim = emad_evidence, emad_register["EE-5"]

    def judged():
        legs, table = [], []
        for task in evidence.exits.tasks:
            read = evidence.exits.read(task)
            tokens = read.by_item(np.ones(len(read.item)))
            for layer in reliability(read.response, read.correct):
                column = read.response[:, layer.layer - 1] - read.correct[:, layer.layer - 1]
                over = mean_rate(read.by_item(column), tokens, threshold=0.0, rng=emad_rng, unit=claim.unit)
                said = (
                    f"confidence {layer.confidence:.2f}, accuracy {layer.accuracy:.2f}, "
                    f"ECE {layer.calibration_error:.2f}"
                )
                legs.append(estimated(f"{task}, layer {layer.layer}", over, said))
                table.append(
                    {
                        "task": task,
                        "layer": layer.layer,
                        "confidence": layer.confidence,
                        "accuracy": layer.accuracy,
                        "ECE": layer.calibration_error,
                    }
                )
        emad_record.table("confidence and accuracy per layer", evidence.name, table, "confidence and accuracy")
        return row(claim, evidence.name, legs)

    decide(evidence, emad_record, claim, judged)


@pytest.mark.emad(claim="EE-6")
def test_the_rank_of_the_final_token_falls(emad_evidence, emad_record, emad_register, emad_rng):
    """Slope of log2 rank over the layers, and the quantiles of the rank after each."""
    evidence, claim = emad_evidence, emad_register["EE-6"]

    def judged():
        legs, table = [], []
        for task in evidence.exits.tasks:
            read = evidence.exits.read(task)
            tokens = read.by_item(np.ones(len(read.item)))
            slope = profile_slope(read.by_item(np.log2(read.ranks)), tokens, threshold=0.0, rng=emad_rng)
            slope = replace(slope, unit="doublings of the rank per layer")
            legs.append(estimated(f"{task}: slope of log2 rank", slope))
            for layer, ranks in enumerate(rank_quantiles(read.ranks), start=1):
                named = dict(zip((f"{q:.0%}" for q in QUANTILES), ranks.tolist(), strict=True))
                table.append({"task": task, "layer": layer, **named})
                legs.append(counted(f"{task}, layer {layer}: median", ranks[1], len(read.item), claim.unit))
        emad_record.table("rank of the final token per layer", evidence.name, table, "final token rank")
        return row(claim, evidence.name, legs)

    decide(evidence, emad_record, claim, judged)


@pytest.mark.emad(claim="EE-11")
def test_a_constant_alpha_is_overconfident_and_a_decaying_one_is_not(
    emad_evidence, emad_record, emad_register, emad_rng
):
    """Both contrasts over all layers that can decide: confidence minus whether what would be emitted is right."""
    evidence, claim = emad_evidence, emad_register["EE-11"]

    def judged():
        legs = []
        for task in evidence.exits.tasks:
            read = evidence.exits.read(task)
            tokens = read.by_item(np.ones(len(read.item)))
            for (signal, alpha), (confidence, correct) in read.contrasts.items():
                over = (confidence - correct).mean(axis=1)
                ece = expected_calibration_error(confidence.ravel(), correct.ravel())
                estimate = mean_rate(read.by_item(over), tokens, threshold=0.0, rng=emad_rng, unit=claim.unit)
                rate = "" if ALPHAS[alpha] is None else f", decay rate {ALPHAS[alpha]:g}: the paper gives none"
                said = f"ECE {ece:.3f}, confidence {confidence.mean():.2f}, accuracy {correct.mean():.2f}{rate}"
                legs.append(estimated(f"{task}, {signal.replace('_', ' ')}, {alpha}", estimate, said))
        return row(claim, evidence.name, legs)

    decide(evidence, emad_record, claim, judged)
