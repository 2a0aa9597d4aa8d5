"""Holm's family: how many gating legs a run decides beside those of the row at hand (METHODS, "Level").

The family is declared by settings and register, not by what ``-k`` or a folder selected: a verdict must not change with
the company in which its test runs. Counts are upper bounds (a point that saves too little is no leg), hence
conservative. Exact rows compare integers or bounds of rounding; they have no error to share. A row that does not gate
is a family of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from emad_ref.verdict.claims import Claim
from pytest_emad.options import MARGINS, Settings

# Claim → legs on one model of so many layers. F1: perplexity and accuracy of the calibrated default, of the margin
# chosen on validation and of the one the user names. E1: one step per pair of adjacent layers.
LEGS: dict[str, Callable[[Settings, int], int]] = {
    "EMAD-F1": lambda settings, layers: 2 * (2 + (settings.margin is not None)),
    "EMAD-F1-literal": lambda settings, layers: 2 * MARGINS,
    "EMAD-F2": lambda settings, layers: len(settings.budget.batch_sizes),
    "EMAD-E1": lambda settings, layers: layers - 1,
}


def other_legs(claim: str, settings: Settings, register: Mapping[str, Claim], layers: int) -> int:
    """Gating statistical legs of the run outside ``claim`` on the model under test; 0 for a row that does not gate.

    Args:
        layers: of the model under test; the other models of the run are taken to have as many.
    """

    def gates(name: str) -> bool:
        return register[name].gate or name in settings.gate_claims

    if not gates(claim):
        return 0
    family = sum(legs(settings, layers) for name, legs in LEGS.items() if gates(name)) * len(settings.models)
    return family - LEGS[claim](settings, layers)
