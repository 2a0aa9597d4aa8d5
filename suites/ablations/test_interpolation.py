"""Exit to non-probe layers: what does interpolation between probes gain? (EMAD, "Ablations": optional)"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.replay import depths
from pytest_emad.ablated import UNTIMED, Table, margins, not_applicable, points, speeds, strided

STRIDES = (3, 4, 6)  # three probes are the least that leave a line and a next threshold: twelve layers need stride 3


@pytest.mark.emad(budget="standard", measures=True)
def test_interpolation(emad_evidence, emad_record, emad_rng):
    """Speed at m = 0, and only where there is a layer between probes to exit to."""
    evidence = emad_evidence
    if reason := not_applicable(evidence):
        pytest.skip(reason)
    layers, table, rows = evidence.stepper.layers, Table(evidence, emad_rng), []
    for stride in (s for s in STRIDES if s < layers):
        profile = evidence.calibrated(strided(layers, stride))
        between = layers_between(profile.probes)
        for off in points(profile, margins(evidence)):
            on = replace(off, name=f"{off.name} interpolated", interpolate=True)
            arms = {"off": off, "on": on}
            times = speeds(evidence, arms) if between and off.margin_nats == 0 else dict.fromkeys(arms, UNTIMED)
            for name, point in arms.items():
                (row,) = table.rows([point], stride=stride, interpolation=name, **{"layers between": len(between)})
                rows.append(row | times[name])
            held_to_the_layers_between(evidence.evaluation, off, on, between)
        if not between:
            few = f"{evidence.name}: stride {stride} leaves {len(profile.probes)} probes on {layers} layers"
            emad_record.note(f"{few}: a line through two readings never meets a next threshold, interpolation is off")
    emad_record.table(f"ablation, interpolation between probes on {evidence.corpus}", evidence.name, rows)
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)


def layers_between(probes):
    """Layers strictly between the second probe and the last: before there is no line, after it no threshold."""
    return sorted(set(range(probes[1], probes[-1])) - set(probes)) if len(probes) > 2 else []


def held_to_the_layers_between(trace, off, on, between):
    """More places to exit never let a token go deeper, and no place is made up."""
    plain, interpolated = (depths(trace, point) for point in (off, on))
    assert (interpolated <= plain).all()
    assert set(np.unique(interpolated)) <= {*off.probes, *between, off.ceiling}
    assert between or (interpolated == plain).all()
