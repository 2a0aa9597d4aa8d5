"""EMAD-R5: is EMAD a better use of a large model than speculative decoding, which is lossless?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.decoding.switching import LARGE
from emad_ref.verdict.interval import accuracy_drop, log_ratio
from emad_ref.verdict.legs import counted, decided, estimated, not_applicable, row, weighed
from pytest_emad.family import other_legs
from pytest_emad.pairing import CORPUS, DRAFTED

LOSSLESS = ("speculative", "self-speculative")


@pytest.mark.emad(claim="EMAD-R5", measures=True)
def test_emad_beats_speculation(emad_pair, emad_record, emad_register, emad_settings):
    """EMAD of the large model at its calibrated default; the small model drafts for the same large model.

    Beside it, without gating: the large model drafts for itself at EMAD's first probe and verifies from there on. The
    same exits, no second model, no loss.
    """
    pair, claim = emad_pair, emad_register["EMAD-R5"]
    with emad_record.unless_unsupported(claim.id, pair.name):
        if reason := pair.without_quality:
            verdict = not_applicable(claim, pair.name, reason)
        else:
            others = other_legs(claim.id, emad_settings, emad_register, pair.large.stepper.layers)
            verdict = judged(pair, claim, others)
        emad_record.claim(verdict, corpus=CORPUS, fingerprint=pair.fingerprint)


def judged(pair, claim, others):
    timings, results = pair.rivals
    seconds, task, point = timings.seconds, pair.timed_task, pair.emad_point
    fastest, most = claim.thresholds["speedup_ratio"], claim.thresholds["accuracy_drop"]
    speed = log_ratio(seconds["speculative"], seconds["EMAD"], threshold=fastest)
    own, adaptive = (
        pair.alone(LARGE, task, "evaluate", pair.size.judged, chosen) for chosen in (pair.large.full, point)
    )
    drop = accuracy_drop(own.right, adaptive.right, threshold=most)
    tests = [
        weighed(f"{point.name} against speculation, k = {DRAFTED}", speed, "below", fastest, claim.minimum, "pairs"),
        weighed(f"{point.name}: accuracy on {task}", drop, "above", most, claim.minimum, "items"),
    ]
    rivals = [arm for arm in LOSSLESS if arm in seconds]
    beside = [
        counted(f"{arm}: tokens per second", pair.timed_new / np.median(seconds[arm]), len(seconds[arm]), "tokens/s")
        for arm in ("large", "EMAD", *rivals)
    ]
    if "self-speculative" in rivals:
        name = f"{point.name} against self-speculation after layer {pair.exit_layers[0]}, k = {DRAFTED}"
        beside.append(estimated(name, log_ratio(seconds["self-speculative"], seconds["EMAD"])))
    for arm in rivals:
        accepted = [done.acceptance for done in results[arm] if done.acceptance is not None]
        beside.append(counted(f"{arm}: acceptance", np.mean(accepted), len(accepted), "accepted per judged draft"))
        spent = [pair.spent(results[one]) for one in (arm, "EMAD")]
        if all(part is not None for part in spent):
            fewer = replace(log_ratio(*spent), unit="× fewer FLOPs")
            beside.append(estimated(f"FLOPs against {arm}", fewer))
    return row(claim, pair.name, [*decided(tests, others), *beside])
