"""What every claim shares: a question and its answer, the context in which it is decided, and the plan of a run,
which counts Holm's family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.extending import added_parts
from emad_ref.measurements.attachments import Attachments
from emad_ref.measurements.study import BUDGETS, Budget, Study
from emad_ref.protocol import Unsupported
from emad_ref.statistics.legs import not_applicable, unmeasured
from emad_ref.statistics.verdicts import EXIT_PREFIX, Claim, Verdict

About = Literal["model", "pair", "names"]
Suite = Literal["claims", "cost", "invariants"]


class NamedMeasurements(Protocol):
    """Evidence, of a model, of a pair or of its names, as far as every question knows it."""

    @property
    def name(self) -> str:
        """How reports call it."""

    @property
    def corpus(self) -> str:
        """The text it was gathered on."""

    @property
    def fingerprint(self) -> str:
        """Of the weights."""


def _outside_a_run(claim: str) -> ClaimContext:
    raise BadArgument("claim", claim, "a claim of the same run", "only a Docket knows what else a run asks")


@dataclass(frozen=True)
class ClaimContext:
    """What a question is given beside evidence.

    ``model``       the name that the verdict carries.
    ``rng``         source of resamples, fresh for every question.
    ``other_legs``  gating legs of the run that are decided elsewhere (``company``).
    ``also``        id → what the question of another claim is given in this run, about the same model: a claim whose
                    premise is another claim's verdict asks it there, and hears what the report says.
    """

    claim: Claim
    model: str
    rng: np.random.Generator
    other_legs: int = 0
    also: Callable[[str], ClaimContext] = _outside_a_run

    def not_applicable(self, reason: str) -> Verdict:
        """A premise of the claim is absent."""
        return not_applicable(self.claim, self.model, reason)

    def unmeasured(self, reason: str) -> Verdict:
        """An instrument or data is absent."""
        return unmeasured(self.claim, self.model, reason)


@dataclass(frozen=True)
class Answer:
    """A verdict and what stands beside it.

    ``corpus``       what it was decided on; "" for claims that read no text.
    ``fingerprint``  of the weights, so that known verdicts follow them and not the name; "" for arithmetic.
    ``refused``      why the decoder under test, and not the model or the text, left the claim undecided; else "".
    """

    verdict: Verdict
    corpus: str = ""
    fingerprint: str = ""
    exhibits: Attachments = field(default_factory=Attachments)
    refused: str = ""


E = TypeVar("E", bound=NamedMeasurements)


@dataclass(frozen=True)
class Question(Generic[E]):
    """One claim as a question to evidence.

    ``about``     whether ``answer`` takes the evidence of a model (``measurements.model``), of a pair
                  (``emad_ref.measurements.pair``), or no more than the pair's names (``emad_ref.measurements.study``).
    ``legs``      statistical legs of the row at a study, on a model of so many layers: an upper bound, for Holm.
    ``measures``  whether it takes time or energy, and so needs the machine to itself.
    ``suite``     the folder of ``suites`` that asks it.
    ``budget``    the smallest in which it is asked unless it gates or is asked for by name: whoever waits for a gate
                  must not wait for rows that take long and gate nothing.
    """

    claim: str
    about: About
    answer: Callable[[E, ClaimContext], Answer]
    legs: Callable[[Study, int], int] = lambda study, layers: 0
    measures: bool = False
    suite: Suite = "claims"
    budget: str = "smoke"

    def within(self, budget: Budget) -> bool:
        """Whether a run of ``budget`` asks it unasked."""
        return BUDGETS[self.budget].rank <= budget.rank


def ask(question: Question[E], evidence: E, asked: ClaimContext) -> Answer:
    """The answer, or ``not applicable`` with the reason for which the decoder under test declined."""
    try:
        return question.answer(evidence, asked)
    except Unsupported as refusal:
        reason = str(refusal)
        return Answer(asked.not_applicable(reason), evidence.corpus, evidence.fingerprint, refused=reason)


def module_of(claim: str) -> str:
    """``EMAD-F1-literal`` → ``emad_ref.claims.emad_f1_literal``; an extension's claim → the module it names."""
    return added_parts("questions").get(claim) or f"{__package__}.{claim.lower().replace('-', '_')}"


def question_of(claim: str) -> Question[Any]:
    """The question that decides ``claim``.

    >>> question_of("EAD-H1").about
    'names'

    Raises:
        BadArgument: no module of this package is about it.
    """
    name = module_of(claim)
    try:
        question: Question[Any] = import_module(name).QUESTION
    except (ModuleNotFoundError, AttributeError) as error:
        expected = f"a row whose question is QUESTION of {name}"
        raise BadArgument("claim", claim, expected, f"{error}; see docs/own-claim.md") from error
    return question


def questions_of(register: Mapping[str, Claim]) -> dict[str, Question[Any]]:
    """Every row's question, in the register's order. Raises BadArgument as ``question_of``."""
    return {claim: question_of(claim) for claim in register}


@dataclass(frozen=True)
class RunPlan:
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
        brought = self.study.exit is not None and claim.startswith(EXIT_PREFIX)
        return named or brought or self.gates(claim) or question.within(self.study.budget)

    def asked(self, claim: str, model: str, layers: int) -> ClaimContext:
        """What the question of ``claim`` is given on a model of ``layers`` layers; the generator starts at the seed."""
        rng = np.random.default_rng(self.study.seed)
        also = partial(self.asked, model=model, layers=layers)
        return ClaimContext(self.register[claim], model, rng, self.other_legs(claim, layers), also)

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
