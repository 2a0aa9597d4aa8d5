"""EE-7: do thresholds chosen by Learn-then-Test keep their promise over repeated calibration sets?"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.sweep.risk import coverage, textual_consistency
from emad_ref.verdict.legs import counted, judge_side
from pytest_emad.exit_tasks import scored
from pytest_emad.exits import decide, share_estimate
from pytest_emad.family import other_legs

THRESHOLDS = (0.99, 0.9, 0.7, 0.4)  # of softmax response, strict to loose
DRAWS = 500


@pytest.mark.emad(claim="EE-7")
def test_calibrated_exits_keep_their_promise(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    """Calibration sets are drawn with replacement from the evaluated items, whose mean loss is then the true risk."""
    evidence, claim = emad_evidence, emad_register["EE-7"]
    delta, least = claim.thresholds["tolerance"], claim.thresholds["coverage"]

    def judged():
        found, beside, layers = {}, list(evidence.exits.missing), evidence.stepper.layers
        for task in evidence.exits.tasks:
            losses, depths = consistency(evidence, task)
            kept = coverage(
                lambda rng, losses=losses: losses[rng.integers(len(losses), size=len(losses))],
                losses.mean(axis=0),
                depths,
                layers,
                draws=DRAWS,
                rng=emad_rng,
                tolerance=delta,
                level=1 - least,
            )
            held = round(kept.held * DRAWS)
            found[f"{task}, δ={delta:g}"] = share_estimate(held, DRAWS, len(losses), least, claim.unit)
            beside.append(counted(f"{task}: sets that chose any exit", kept.below_full, DRAWS, claim.unit))
            beside.append(counted(f"{task}: blocks saved per token", kept.blocks_saved, DRAWS, "blocks"))
            for threshold, loss, depth in zip(THRESHOLDS, losses.mean(axis=0), depths, strict=True):
                said = f"mean exit {depth:.2f}"
                beside.append(
                    counted(f"{task}, λ={threshold:g}: difference from full depth", loss, len(losses), "D", said)
                )
        others = other_legs(claim.id, emad_settings, emad_register, layers)
        return judge_side(claim, evidence.name, found, "below", least, "items", other_legs=others, beside=beside)

    decide(evidence, emad_record, claim, judged)


def consistency(evidence, task):
    """([items, λ] one minus the score of the early text against the full one, [λ] blocks per token)."""
    exits, minimum = evidence.exits, evidence.exits.minima[0]
    full = exits.under(task, exits.full)
    early = [exits.answered(task, "softmax", minimum, threshold=threshold) for threshold in THRESHOLDS]
    dissimilar = [
        [1 - scored(task, text, [own]) if text != own else 0.0 for text, own in zip(one.texts, full.texts, strict=True)]
        for one in early
    ]
    return textual_consistency(np.array(dissimilar).T), np.array([one.mean_exit for one in early])
