"""Flatness (EMAD-E11): over the models and corpora at hand, do steeper profiles gain more? (EMAD, "Limitations")"""

from __future__ import annotations

import pytest

from emad_ref.models.loading import bundled_names
from pytest_emad.ablated import not_applicable
from pytest_emad.flatness import LEAST_DOTS, flatness, trend


@pytest.mark.emad(budget="standard")
def test_flatness(emad_evidence, emad_record, emad_rng):
    """One row per model and corpus, steepest first: the model under test, and the bundled ones beside it."""
    evidence = emad_evidence
    if reason := not_applicable(evidence):
        pytest.skip(reason)
    others = [name for name in bundled_names() if name != evidence.name] if evidence.loaded.bundled else []
    models = [evidence, *(other for name in others if not (other := evidence.beside(name)).seq2seq)]
    at_hand = [each for model in models for each in (model, model.shifted) if each is not None]
    dots = sorted((flatness(each, emad_rng) for each in at_hand), key=lambda dot: dot.slope.value)
    rows = [
        {
            "model": dot.model,
            "corpus": dot.corpus,
            "slope, nats per layer": dot.slope.value,
            "interval": [dot.slope.low, dot.slope.high],
            "net reduction at equal quality %": dot.gain,
            "point": dot.point,
        }
        for dot in dots
    ]
    emad_record.table("ablation, flatness of the profile", evidence.name, rows)
    if len(dots) < LEAST_DOTS:
        emad_record.note(f"{evidence.name}: {len(dots)} profiles are no trend: EMAD-E11 needs {LEAST_DOTS}")
    else:
        rho, p = trend(dots)
        emad_record.note(
            f"EMAD-E11 over {len(dots)} profiles: Spearman ρ of steepness and gain {rho:.2f}, exact p = {p:.3f}; "
            "the paper expects ρ > 0"
        )
    assert len({(row["model"], row["corpus"]) for row in rows}) == len(rows)
    assert all(0 <= row["net reduction at equal quality %"] < 1 for row in rows)
