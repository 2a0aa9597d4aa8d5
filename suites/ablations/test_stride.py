"""Probe stride: how much do more or fewer probes save, and what do they lose? (EMAD, "Ablations")"""

from __future__ import annotations

import pytest

from emad_ref.policy.thresholds import default_probes
from emad_ref.sweep.diagnostics import agreement_rate
from pytest_emad.ablated import Table, margins, not_applicable, points, strided

STRIDES = (2, 4, 6, 8)


@pytest.mark.emad(budget="standard")
def test_probe_stride(emad_evidence, emad_record, emad_rng):
    """A profile of its own for every stride, from the same calibration text."""
    evidence = emad_evidence
    if reason := not_applicable(evidence):
        pytest.skip(reason)
    layers, table = evidence.stepper.layers, Table(evidence, emad_rng)
    default = default_probes(layers)
    probed = {f"every {s}": strided(layers, s) for s in STRIDES if s < layers}
    named = {name + (" (default)" if probes == default else ""): probes for name, probes in probed.items()}
    named |= {} if default in probed.values() else {"default": default}
    rows = [table.full(probes="none", layers="–")]
    for name, probes in named.items():
        tried = points(evidence.calibrated(probes), margins(evidence))
        assert tried, f"{name}: nothing can exit at margin 0"
        assert all(point.probes == probes for point in tried)
        rows += table.rows(tried, probes=name, layers=", ".join(map(str, probes)))
    emad_record.table(f"ablation, probe stride on {evidence.corpus}", evidence.name, rows)
    emad_record.note(agreement_note(evidence, sorted(set().union(*named.values()))))

    assert (rows[0]["rise %"], rows[0]["net reduction %"]) == (0.0, 0.0)
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)
    assert all(row["mean depth"] >= int(row["layers"].split(",")[0]) for row in rows[1:])


def agreement_note(evidence, probes):
    """What the layers probed are worth: an early-exit loss may have trained some of them and not others."""
    rates = agreement_rate(evidence.evaluation)
    said = ", ".join(f"{rates[layer - 1]:.0%} after layer {layer}" for layer in probes)
    return f"{evidence.name}: top-1 tokens that are already the last layer's: {said}"
