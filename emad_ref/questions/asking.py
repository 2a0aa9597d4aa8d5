"""What a question is, and how one is asked.

Each row of the register has a module of this package with one ``QUESTION`` and two functions:

``answer(evidence, asked)``  gathers: which premise is absent, which numbers, which tables stand beside the verdict.
``decide(found, asked)``     decides: a pure, typed function of arrays whose unit of resampling is a type
                             (``verdict.units``). Premises that numbers show, legs and reason are its own. It is held
                             against simulated data whose truth is known (``tests/questions``).

``ask`` adds what all have in common: a decoder that declines makes its claim ``not applicable``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.evidence.exhibits import Exhibits
from emad_ref.evidence.study import BUDGETS, Budget, Study
from emad_ref.protocol import Unsupported
from emad_ref.verdict.claims import Claim, Verdict
from emad_ref.verdict.legs import not_applicable, unmeasured

About = Literal["model", "pair", "names"]
Suite = Literal["claims", "cost", "invariants"]


class Named(Protocol):
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


def _alone(claim: str) -> Asked:
    raise BadArgument("claim", claim, "a claim of the same run", "only a Docket knows what else a run asks")


@dataclass(frozen=True)
class Asked:
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
    also: Callable[[str], Asked] = _alone

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
    exhibits: Exhibits = field(default_factory=Exhibits)
    refused: str = ""


E = TypeVar("E", bound=Named)


@dataclass(frozen=True)
class Question(Generic[E]):
    """One claim as a question to evidence.

    ``about``     whether ``answer`` takes the evidence of a model (``evidence.gathered``), of a pair
                  (``evidence.pair.gathered``), or no more than the pair's names (``evidence.pair.names``).
    ``legs``      statistical legs of the row at a study, on a model of so many layers: an upper bound, for Holm.
    ``measures``  whether it takes time or energy, and so needs the machine to itself.
    ``suite``     the folder of ``suites`` that asks it.
    ``budget``    the smallest in which it is asked unless it gates or is asked for by name: whoever waits for a gate
                  must not wait for rows that take long and gate nothing.
    """

    claim: str
    about: About
    answer: Callable[[E, Asked], Answer]
    legs: Callable[[Study, int], int] = lambda study, layers: 0
    measures: bool = False
    suite: Suite = "claims"
    budget: str = "smoke"

    def within(self, budget: Budget) -> bool:
        """Whether a run of ``budget`` asks it unasked."""
        return BUDGETS[self.budget].rank <= budget.rank


def ask(question: Question[E], evidence: E, asked: Asked) -> Answer:
    """The answer, or ``not applicable`` with the reason for which the decoder under test declined."""
    try:
        return question.answer(evidence, asked)
    except Unsupported as refusal:
        reason = str(refusal)
        return Answer(asked.not_applicable(reason), evidence.corpus, evidence.fingerprint, refused=reason)
