"""Holm's family: how many gating legs a run decides beside those of the row at hand (METHODS, "Level").

The legs of the row and those of the gating rows of the run share the error of ``falsified``; what survives shares none.
The family is declared by what the run was asked, not by what ``-k`` or a folder selected: a verdict must not change
with the company in which it is decided. Counts are upper bounds (a point that saves too little is no leg), hence
conservative. Exact rows compare integers or bounds of rounding; they have no error to share. A row that does not gate
is a family of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from emad_ref.evidence.study import Study
from emad_ref.questions.asking import Asked, Question
from emad_ref.questions.register import question_of
from emad_ref.verdict.choosing import OF_EXITS
from emad_ref.verdict.claims import Claim


@dataclass(frozen=True)
class Docket:
    """What one run was asked: the register in force, which further rows gate, and on how many models."""

    register: Mapping[str, Claim]
    study: Study
    gate_claims: frozenset[str] = frozenset()
    models: int = 1

    def gates(self, claim: str) -> bool:
        """Whether the row fails the run when it is falsified."""
        return self.register[claim].gates(self.gate_claims)

    def asks(self, claim: str, *, pair_named: bool = False) -> bool:
        """Whether the run asks the row although nobody named it: within its budget, or a gate, at every budget; or,
        where an exit was brought, about exits.

        ``pair_named``: by a user, who thereby asks for the rows about it.
        """
        question = question_of(claim)
        named = pair_named and question.about == "pair"
        brought = self.study.exit is not None and claim.startswith(OF_EXITS)
        return named or brought or self.gates(claim) or question.within(self.study.budget)

    def asked(self, claim: str, model: str, layers: int) -> Asked:
        """What the question of ``claim`` is given on a model of ``layers`` layers; the generator starts at the seed."""
        rng = np.random.default_rng(self.study.seed)
        also = partial(self.asked, model=model, layers=layers)
        return Asked(self.register[claim], model, rng, self.other_legs(claim, layers), also)

    def other_legs(self, claim: str, layers: int) -> int:
        """Gating statistical legs of the run outside ``claim``; 0 for a row that does not gate.

        Args:
            layers: of the model under test; the other models of the run are taken to have as many.
        """
        if not self.gates(claim):
            return 0
        gating = [question_of(name) for name in self.register if self.gates(name)]
        family = sum(question.legs(self.study, layers) * self._times(question) for question in gating)
        return family - question_of(claim).legs(self.study, layers)

    def _times(self, question: Question[object]) -> int:  # type: ignore[type-var]  # any evidence will do
        """How often a run decides a row: of a pair once, however many models it judges."""
        return self.models if question.about == "model" else 1
