"""Flatness (EMAD-E11): over the models and corpora at hand, do steeper profiles gain more? (EMAD, "Limitations")"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.evidence.ablations.rows import Row, require_quality
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.flatness import LEAST_DOTS, Flatness, flatness, trend
from emad_ref.evidence.gathered import Evidence
from emad_ref.models.bundled import bundled_names


def ablation(evidence: Evidence, rng: np.random.Generator) -> Exhibits:
    """One row per model and corpus, steepest first: the model under test, and the bundled ones beside it.

    Raises:
        Unsupported: as ``require_quality``.
    """
    require_quality(evidence.subject, evidence.bridging)
    dots = [flatness(each.traces, each.rivals, rng) for each in at_hand(evidence)]
    dots.sort(key=lambda dot: dot.slope.value)
    table = Table("ablation, flatness of the profile", [row_of(dot) for dot in dots])
    return Exhibits((table,), (trend_note(evidence.name, dots),))


def at_hand(evidence: Evidence) -> list[Evidence]:
    """Each model that continues documents, on its corpus and on the one that shifts it."""
    others = [name for name in bundled_names() if name != evidence.name] if evidence.loaded.bundled else []
    models = [evidence, *(other for name in others if not (other := evidence.beside(name)).subject.seq2seq)]
    return [each for model in models for each in (model, model.shifted) if each is not None]


def row_of(dot: Flatness) -> Row:
    return {
        "model": dot.model,
        "corpus": dot.corpus,
        "slope, nats per layer": dot.slope.value,
        "interval": [dot.slope.low, dot.slope.high],
        "net reduction at equal quality %": dot.gain,
        "point": dot.point,
    }


def trend_note(name: str, dots: Sequence[Flatness]) -> str:
    """The trend over ``dots``, or that they are too few for one."""
    if len(dots) < LEAST_DOTS:
        return f"{name}: {len(dots)} profiles are no trend: EMAD-E11 needs {LEAST_DOTS}"
    rho, p = trend(dots)
    return (
        f"EMAD-E11 over {len(dots)} profiles: Spearman ρ of steepness and gain {rho:.2f}, exact p = {p:.3f}; "
        "the paper expects ρ > 0"
    )
