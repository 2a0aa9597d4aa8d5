"""Holm's family: how many gating legs a run decides beside those of the row at hand (METHODS, "Level").

The family is declared by settings and register, not by what ``-k`` or a folder selected: a verdict must not change with
the company in which its test runs. Counts are upper bounds (a point that saves too little is no leg), hence
conservative. Exact rows compare integers or bounds of rounding; they have no error to share. A row that does not gate
is a family of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from emad_ref.policy.thresholds import default_probes
from emad_ref.verdict.claims import Claim
from pytest_emad.options import MARGINS, Settings

REDUCTIONS = 4  # net reductions at which rivals meet (``sweep.pareto.LEVELS``)
ESTIMATORS = 2  # top-K and low-rank
CONDITIONINGS = 3  # by position, by confidence, by both
FREE_SCHEDULES = 2  # eager and deferred backfill
PAIR_TASKS = 5  # the world's: on how many of them a pair is worth routing, only validation knows
PAIR_SAVINGS = 2  # the paper's two results
EXIT_TASKS = 2  # of early exits: question → span, dialogue → summary
EXIT_SETTINGS = 2 * EXIT_TASKS  # at two minimum exit layers

# Claim → legs on one model of so many layers. F1: accuracy, and perplexity on the corpus and on each task that is one,
# of the calibrated default, of the margin chosen on validation and of the one the user names. E1: one step per pair of
# adjacent layers.
LEGS: dict[str, Callable[[Settings, int], int]] = {
    "EMAD-F1": lambda settings, layers: (2 + len(settings.tasks)) * (2 + (settings.margin is not None)),
    "EMAD-F1-literal": lambda settings, layers: 2 * MARGINS,
    "EMAD-F2": lambda settings, layers: len(settings.budget.batch_sizes),
    "EMAD-E1": lambda settings, layers: layers - 1,
    "EMAD-E4": lambda settings, layers: ESTIMATORS * len(default_probes(layers)),
    "EMAD-E6": lambda settings, layers: CONDITIONINGS,
    "EMAD-E7": lambda settings, layers: FREE_SCHEDULES,
    "EMAD-E9": lambda settings, layers: 1,
    "EMAD-E10": lambda settings, layers: 2,
    "EMAD-E12": lambda settings, layers: 1,
    "EMAD-N1": lambda settings, layers: len(settings.budget.batch_sizes),
    **dict.fromkeys(("EMAD-R1", "EMAD-R2", "EMAD-R3", "EMAD-R4"), lambda settings, layers: REDUCTIONS),
    "EMAD-R5": lambda settings, layers: 2,
    "EE-3": lambda settings, layers: 2 * EXIT_SETTINGS,  # exit and score
    "EE-7": lambda settings, layers: EXIT_TASKS,
    "EE-9": lambda settings, layers: 2 * EXIT_SETTINGS,  # against fixed and decaying
    **dict.fromkeys(("EE-1", "EE-13", "EE-15"), lambda settings, layers: EXIT_SETTINGS),
    "EAD-F1": lambda settings, layers: PAIR_SAVINGS * PAIR_TASKS,
    "EAD-F2": lambda settings, layers: 2,
}
ONCE = frozenset({"EMAD-R5", "EAD-F1", "EAD-F2"})  # of the pair: decided once, however many models a run judges


def other_legs(claim: str, settings: Settings, register: Mapping[str, Claim], layers: int) -> int:
    """Gating statistical legs of the run outside ``claim`` on the model under test; 0 for a row that does not gate.

    Args:
        layers: of the model under test; the other models of the run are taken to have as many.
    """

    def gates(name: str) -> bool:
        return register[name].gate or name in settings.gate_claims

    if not gates(claim):
        return 0
    family = sum(
        legs(settings, layers) * (1 if name in ONCE else len(settings.models))
        for name, legs in LEGS.items()
        if gates(name)
    )
    return family - LEGS[claim](settings, layers)
