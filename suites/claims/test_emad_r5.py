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


@pytest.mark.emad(claim="EMAD-R5", measures=True)
def test_emad_beats_speculation(emad_pair, emad_record, emad_register, emad_settings):
    """EMAD of the large model at its calibrated default; the small model drafts for the same large model."""
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
    beside = [
        counted(f"{arm}: tokens per second", pair.timed_new / np.median(seconds[arm]), len(seconds[arm]), "tokens/s")
        for arm in ("large", "EMAD", "speculative")
    ]
    spent = [pair.spent(results[arm]) for arm in ("speculative", "EMAD")]
    if all(part is not None for part in spent):
        beside.append(estimated("FLOPs", replace(log_ratio(*spent), unit="× fewer FLOPs")))
    return row(claim, pair.name, [*decided(tests, others), *beside])
