"""EMAD-N1: do joules per generated token fall? NVML windows in pairs; without a device, a reason and no number."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from emad_ref.meters.energy import Unmeasured, nvml, paired
from emad_ref.verdict.interval import log_ratio
from emad_ref.verdict.legs import judge_side, unmeasured
from pytest_emad.family import other_legs

SMOKE_PAIRS = 6  # of windows of five seconds; thirty, which decide, take minutes that the smallest budget has not


@pytest.mark.emad(claim="EMAD-N1", measures=True)
def test_energy_per_token_falls(emad_evidence, emad_record, emad_register, emad_settings):
    evidence, claim = emad_evidence, emad_register["EMAD-N1"]
    with emad_record.unless_unsupported(claim.id, evidence.name):
        legs, reasons = {}, []
        with energy_counter(evidence.stepper) as counter:
            for rows in evidence.budget.batch_sizes:
                found = counter if isinstance(counter, Unmeasured) else measured(evidence, counter, rows)
                if isinstance(found, Unmeasured):
                    reasons.append(found.reason)
                    break
                joules = [found.joules_per_token(arm) for arm in ("adaptive", "full")]
                ratio = log_ratio(*joules, threshold=claim.thresholds["energy_ratio"])
                legs[f"batch {rows}"] = replace(ratio, unit=claim.unit)
                said = "; ".join((found.source, *found.caveats, f"{len(found.spoiled)} windows spoiled"))
                emad_record.note(f"{evidence.name}: energy at batch {rows}: {said}")
        others = other_legs(claim.id, emad_settings, emad_register, evidence.stepper.layers)
        least = claim.thresholds["energy_ratio"]
        verdict = (
            unmeasured(claim, evidence.name, reasons[0])
            if reasons
            else judge_side(claim, evidence.name, legs, "above", least, "pairs", other_legs=others)
        )
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


def energy_counter(stepper):
    """NVML's counter of the one GPU that the model lies on, or why there is none."""
    places = {stepper.device, *stepper.places}
    if len(places) > 1:
        return nullcontext(Unmeasured(f"the model lies on {len(places)} devices, and a counter sees one of them"))
    return nvml(device_uuid(stepper.device))


def device_uuid(device):
    """The UUID by which NVML knows the decoder's device; None where it is not a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def measured(evidence, counter, rows):
    """Joules and tokens of full depth and of the timed point, requests of the same shape as those timed."""
    length, new = evidence.stopwatch.request_shape
    pairs = SMOKE_PAIRS if evidence.budget.rank == 0 else evidence.budget.pairs
    prompts = evidence.prompts(rows * (pairs + 1), length)
    with (
        evidence.open(evidence.full, max_rows=rows) as full,
        evidence.open(evidence.stopwatch.point, max_rows=rows) as adaptive,
    ):

        def arm(decoder):
            def run(pair, request):
                first = (pair + 1 + request) % (pairs + 1) * rows
                record = decoder.generate(prompts[first : first + rows], new, frozenset())
                return sum(len(emitted) for emitted in record.emitted)

            return run

        return paired(
            {"full": arm(full), "adaptive": arm(adaptive)},
            pairs,
            np.random.default_rng(evidence.seed),
            counter,
            synchronize=full.synchronize,
        )
