"""Probe stride: how much do more or fewer probes save, and what do they lose? (EMAD, "Ablations")"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.calibration.trace import Trace
from emad_ref.evidence.ablations.rows import Rows, points, require_quality, strided, tried
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.gathered import Evidence
from emad_ref.policy.thresholds import default_probes
from emad_ref.sweep.diagnostics import agreement_rate

STRIDES = (2, 4, 6, 8)


def ablation(evidence: Evidence, rng: np.random.Generator) -> Exhibits:
    """A profile of its own for every stride, from the same calibration text.

    Raises:
        Unsupported: as ``require_quality``.
    """
    require_quality(evidence.subject, evidence.bridging)
    rows, named = Rows(evidence, rng), probed(evidence.subject.stepper.layers)
    shown = [rows.full({"probes": "none", "layers": "–"})]
    for name, probes in named.items():
        at = points(evidence.traces.calibrated(probes), tried(evidence))
        assert at, f"{name}: nothing can exit at margin 0"
        shown += rows.at(at, {"probes": name, "layers": ", ".join(map(str, probes))})
    said = agreement_note(evidence.traces.evaluation, sorted(set().union(*named.values())))
    table = Table(f"ablation, probe stride on {evidence.corpus}", shown)
    return Exhibits((table,), (f"{evidence.name}: {said}",))


def probed(layers: int) -> dict[str, tuple[int, ...]]:
    """Name → probes: every stride that leaves one, and the default, which may be one of them."""
    default = default_probes(layers)
    found = {f"every {stride}": strided(layers, stride) for stride in STRIDES if stride < layers}
    named = {name + (" (default)" if probes == default else ""): probes for name, probes in found.items()}
    return named | ({} if default in found.values() else {"default": default})


def agreement_note(trace: Trace, probes: Sequence[int]) -> str:
    """What the layers probed are worth: an early-exit loss may have trained some of them and not others."""
    rates = agreement_rate(trace)
    said = ", ".join(f"{rates[layer - 1]:.0%} after layer {layer}" for layer in probes)
    return f"top-1 tokens that are already the last layer's: {said}"
