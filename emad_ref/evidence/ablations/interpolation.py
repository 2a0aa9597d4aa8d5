"""Exit to non-probe layers: what does interpolation between probes gain? (EMAD, "Ablations": optional)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import Trace
from emad_ref.evidence.ablations.rows import UNTIMED, Row, Rows, points, require_quality, speeds, strided, tried
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.gathered import Evidence
from emad_ref.point import OperatingPoint
from emad_ref.replay import depths

STRIDES = (3, 4, 6)  # three probes are the least that leave a line and a next threshold: twelve layers need stride 3


def ablation(evidence: Evidence, rng: np.random.Generator) -> Exhibits:
    """Each stride's profile with and without; speed at m = 0, only where there is a layer between probes to exit to.

    Raises:
        Unsupported: as ``require_quality``.
    """
    require_quality(evidence.subject, evidence.bridging)
    layers, rows = evidence.subject.stepper.layers, Rows(evidence, rng)
    shown: list[Row] = []
    notes: list[str] = []
    for stride in (s for s in STRIDES if s < layers):
        profile = evidence.traces.calibrated(strided(layers, stride))
        shown += both_ways(evidence, rows, profile, stride)
        if not layers_between(profile.probes):
            few = f"{evidence.name}: stride {stride} leaves {len(profile.probes)} probes on {layers} layers"
            notes.append(f"{few}: a line through two readings never meets a next threshold, interpolation is off")
    table = Table(f"ablation, interpolation between probes on {evidence.corpus}", shown)
    return Exhibits((table,), tuple(notes))


def both_ways(evidence: Evidence, rows: Rows, profile: Profile, stride: int) -> list[Row]:
    """Rows of one profile at every margin, interpolation off and on."""
    between, first = layers_between(profile.probes), {"stride": stride}
    shown: list[Row] = []
    for off in points(profile, tried(evidence)):
        on = replace(off, name=f"{off.name} interpolated", interpolate=True)
        arms = {"off": off, "on": on}
        timed = between and off.margin_nats == 0
        times = speeds(evidence.stopwatch, evidence.subject, arms) if timed else dict.fromkeys(arms, UNTIMED)
        for name, point in arms.items():
            (row,) = rows.at([point], first | {"interpolation": name, "layers between": len(between)})
            shown.append(row | times[name])
        require_layers_between(evidence.traces.evaluation, off, on, between)
    return shown


def layers_between(probes: Sequence[int]) -> list[int]:
    """Layers strictly between the second probe and the last: before there is no line, after it no threshold."""
    return sorted(set(range(probes[1], probes[-1])) - set(probes)) if len(probes) > 2 else []


def require_layers_between(trace: Trace, off: OperatingPoint, on: OperatingPoint, between: Sequence[int]) -> None:
    """More places to exit never let a token go deeper, and no place is made up."""
    plain, interpolated = (depths(trace, point) for point in (off, on))
    assert (interpolated <= plain).all()
    assert set(np.unique(interpolated)) <= {*off.probes, *between, off.ceiling}
    assert between or (interpolated == plain).all()
