"""Base of all claims: question, answer, context of a decision, plan of a run (with the size of Holm's family), and
premises of several claims.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, Unpack
from weakref import WeakKeyDictionary

import numpy as np

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument
from emad_ref.protocol import Unsupported
from pytest_emad.extensions import JUDGE_EXTENSIONS
from pytest_emad.measurements.attachments import Attachments
from pytest_emad.measurements.study import Study
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.gate import UNDECIDED
from pytest_emad.statistics.legs import (
    LegTest,
    Side,
    build_leg_test,
    build_measured_count_leg,
    decide_legs,
    not_applicable_verdict,
    outcome_and_deciding_leg,
    unmeasured_verdict,
    verdict_from_legs,
)
from pytest_emad.statistics.verdicts import Claim, Leg, LegIdentity, Verdict

if TYPE_CHECKING:
    from pytest_emad.measurements.model_measurements import ModelMeasurements
    from pytest_emad.measurements.replay_and_flop_checks import FlopVerification

About = Literal["model", "pair", "names"]
Suite = Literal["claims", "cost", "invariants"]
COUNTED_DOCUMENTS = re.compile(r"((?:\d[\d,]*|unseen|unequal|number of|samples of) )document(s?)\b")  # in reasons


class ModelOrPairMeasurements(Protocol):
    """Common interface of the measurements of a model, of a pair and of a pair's names."""

    @property
    def name(self) -> str:
        """Name of the model or pair in reports."""

    @property
    def corpus(self) -> str:
        """Name of the corpus that was read."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights."""


def _outside_a_run(claim: str, evidence: ModelOrPairMeasurements | None = None) -> Any:
    raise BadArgument("claim", claim, "a claim of the same run", "only a RunPlan decides what a claim needs")


@dataclass(frozen=True)
class ClaimContext:
    """Context of a claim's decision besides measurements: its row, random generator, and other claims of the run.

    ``model``       the name that the verdict carries.
    ``rng``         source of resamples, fresh for every claim.
    ``other_legs``  gating legs of the run that are decided elsewhere (``RunPlan.count_other_legs``).
    ``verdict_of``  (id, evidence) → the verdict of a claim that this one needs: decided once a run, at the first
                    request, also if the run does not report it.
    ``row_of``      id → the row in force of such a claim.
    ``evidence_legs``  legs about the evidence behind the numbers, asked for and listed last in a verdict that has any.
    """

    claim: Claim
    model: str
    rng: np.random.Generator
    other_legs: int = 0
    verdict_of: Callable[[str, Any], Verdict] = _outside_a_run
    row_of: Callable[[str], Claim] = _outside_a_run
    evidence_legs: Callable[[], Sequence[Leg]] = tuple

    def make_leg_test(
        self, name: str, estimate: Estimate, bad: Side, threshold: float, **identity: Unpack[LegIdentity]
    ) -> LegTest:
        """Make a leg that fails on side ``bad`` of ``threshold``, under the claim's minimum of units."""
        return build_leg_test(name, estimate, bad, threshold, self.claim.minimum, **identity)

    def combine_legs(
        self,
        legs: Sequence[Leg],
        *,
        headline: Sequence[Leg] = (),
        notes: Sequence[str] = (),
        listed: int | None = None,
    ) -> Verdict:
        """The verdict of decided ``legs``; ``headline``, ``notes`` and ``listed`` as in ``verdict_from_legs``."""
        has_numbers = outcome_and_deciding_leg(legs)[0] not in UNDECIDED
        told = [*legs, *(self.evidence_legs() if has_numbers else ())]
        return verdict_from_legs(self.claim, self.model, told, headline=headline, notes=notes, listed=listed)

    def decide_tests(self, tests: Sequence[LegTest], beside: Sequence[Leg] = ()) -> Verdict:
        """The verdict of ``tests`` under Holm's correction, and of legs ``beside``."""
        return self.combine_legs([*decide_legs(tests, self.other_legs), *beside])

    def judge_against_threshold(
        self, legs: Mapping[str, Estimate], bad: Side, threshold: float, beside: Sequence[Leg] = ()
    ) -> Verdict:
        """The verdict of ``legs``, each tested against ``threshold``; values on its ``bad`` side fail."""
        tests = [self.make_leg_test(name, estimate, bad, threshold) for name, estimate in legs.items()]
        return self.decide_tests(tests, beside) if tests or beside else self.unmeasured("nothing was compared")

    def not_applicable(self, reason: str, legs: Sequence[Leg] = ()) -> Verdict:
        """The verdict ``not applicable``: a premise of the claim is unmet, for this ``reason``; lists ``legs``."""
        return not_applicable_verdict(self.claim, self.model, reason, legs)

    def lacking(self, absent: Absent, legs: Sequence[Leg] = ()) -> Verdict:
        """The verdict where something is ``absent``: ``not applicable`` for a premise, else ``unmeasured``."""
        decide = self.not_applicable if absent.lacking == "premise" else self.unmeasured
        return decide(absent.reason, legs)

    def unmeasured(self, reason: str, legs: Sequence[Leg] = ()) -> Verdict:
        """The verdict ``unmeasured``: an instrument or data is absent, for this ``reason``; lists ``legs``."""
        return unmeasured_verdict(self.claim, self.model, reason, legs)


@dataclass(frozen=True)
class Answer:
    """The verdict on a claim, with its corpus, fingerprint and tables.

    ``corpus``       name of the corpus; "" for claims that read no text.
    ``fingerprint``  of the weights, which identifies known verdicts instead of the name; "" for arithmetic.
    ``refused``      why the decoder under test left the claim undecided; None for other causes.
    """

    verdict: Verdict
    corpus: str = ""
    fingerprint: str = ""
    attachments: Attachments = field(default_factory=Attachments)
    refused: Absent | None = None


E = TypeVar("E", bound=ModelOrPairMeasurements)


@dataclass(frozen=True)
class Question(Generic[E]):
    """Definition of one claim: a row of a module's ``QUESTIONS``, or an extension's ``QUESTION``.

    ``about``     whether ``answer`` takes the measurements of a model (``measurements.model_measurements``), of a pair
                  (``measurements.pair_measurements``), or only the pair's names (``measurements.study``).
    ``answer``    gathers the evidence and passes it to ``decide``.
    ``decide``    pure function from evidence to verdict; None if an extension does not expose its own.
    ``legs``      (study, layers) → upper bound of the row's number of statistical legs, for Holm.
    ``needs``     claims whose verdict or thresholds it reads (``ClaimContext.verdict_of`` and ``row_of``).
    ``measures``  whether it measures time or energy, and so needs an otherwise idle machine.
    ``suite``     the folder of ``suites`` with its test.
    ``budget``    the smallest budget that includes it by default; gating or named claims always run. So a user who
                  waits for a gate does not wait for slow rows that do not gate.
    """

    claim: str
    about: About
    answer: Callable[[E, ClaimContext], Answer]
    legs: Callable[[Study, int], int] = lambda study, layers: 0
    measures: bool = False
    suite: Suite = "claims"
    budget: str = "smoke"
    decide: Callable[[Any, ClaimContext], Verdict] | None = None
    needs: tuple[str, ...] = ()


def answer_question(question: Question[E], evidence: E, asked: ClaimContext) -> Answer:
    """The answer, or ``not applicable`` with the decoder's reason for declining."""
    try:
        return question.answer(evidence, asked)
    except Unsupported as refusal:
        refused = Absent(str(refusal), "premise")
        return Answer(asked.lacking(refused), evidence.corpus, evidence.fingerprint, refused=refused)


@cache
def _own_questions() -> dict[str, Question[Any]]:
    """The rows of ``QUESTIONS`` of every module of this package, by claim."""
    package = import_module(__package__)
    rows = [
        row
        for module in iter_modules(package.__path__, f"{__package__}.")
        for row in getattr(import_module(module.name), "QUESTIONS", ())
    ]
    found = {row.claim: row for row in rows}
    if len(found) < len(rows):
        raise BadArgument("QUESTIONS", [row.claim for row in rows], "each claim in one row of one module")
    return found


def find_question_of_claim(claim: str) -> Question[Any]:
    """The question that decides ``claim``: a row of this package, or ``QUESTION`` of an extension's module.

    >>> find_question_of_claim("EAD-H1").about
    'names'

    Raises:
        BadArgument: no row or extension for this claim.
    """
    place = JUDGE_EXTENSIONS.places("questions").get(claim)
    if place is None:
        if claim not in _own_questions():
            raise BadArgument(
                "claim", claim, "a row of QUESTIONS of a module of pytest_emad.claims", "see docs/own-claim.md"
            )
        return _own_questions()[claim]
    try:
        question: Question[Any] = import_module(place).QUESTION
    except (ModuleNotFoundError, AttributeError) as error:
        expected = f"a row whose question is QUESTION of {place}"
        raise BadArgument("claim", claim, expected, f"{error}; see docs/own-claim.md") from error
    return question


def find_questions_by_claim(register: Mapping[str, Claim]) -> dict[str, Question[Any]]:
    """Claim id → question, in the register's order. Raises BadArgument as ``find_question_of_claim``."""
    return {claim: find_question_of_claim(claim) for claim in register}


@dataclass(frozen=True)
class RunPlan:
    """Plan of one run: the register in force, additional gating rows, and the number of models.

    It caches every answer for the lifetime of the evidence, so that a claim is decided once.
    """

    register: Mapping[str, Claim]
    study: Study
    gate_claims: frozenset[str] = frozenset()
    models: int = 1
    _outcomes: WeakKeyDictionary[Any, dict[str, Answer | Absent]] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def is_gating(self, claim: str) -> bool:
        """Whether a falsified row fails the run."""
        return self.register[claim].is_gating(self.gate_claims)

    def make_context(self, claim: str, model: str, layers: int) -> ClaimContext:
        """The context to decide ``claim`` on a model of ``layers`` layers; its generator starts at the seed."""
        rng = np.random.default_rng(self.study.seed)
        needed = partial(self._needed, claim, layers), partial(self._needed_row, claim)
        return ClaimContext(self.register[claim], model, rng, self.count_other_legs(claim, layers), *needed)

    def answer_claim(
        self, claim: str, evidence: ModelOrPairMeasurements, layers: int, question: Question[Any] | None = None
    ) -> Answer:
        """The answer of ``claim``, decided now unless another claim needed it before.

        Args:
            question: replaces the registered one, for a suite that draws its own evidence.

        Raises:
            AuditRefutedError: an audit refutes the evidence.
        """
        asks = question or find_question_of_claim(claim)
        once = replace(asks, answer=partial(self._decided, asks))
        return answer_question(once, evidence, self.make_context(claim, evidence.name, layers))

    def _decided(self, question: Question[Any], evidence: ModelOrPairMeasurements, asked: ClaimContext) -> Answer:
        """The run's cached answer, else a new one. Raises Unsupported again if the decoder declined."""
        outcomes = self._outcomes.setdefault(evidence, {})
        if question.claim not in outcomes:
            try:
                outcomes[question.claim] = self._with_counted_groups(question.answer(evidence, asked))
            except Unsupported as refusal:
                # the error itself refers to frames, and so to the evidence
                outcomes[question.claim] = Absent(str(refusal), "premise")
        outcome = outcomes[question.claim]
        if isinstance(outcome, Absent):
            raise Unsupported(outcome.reason)
        return outcome

    def _with_counted_groups(self, answer: Answer) -> Answer:
        """The answer with counts of groups where documents are grouped and so counted by group."""
        study, verdict = self.study, answer.verdict
        if study.corpus_group is None or answer.corpus != study.corpus:
            return answer

        def counted(text: str) -> str:
            return COUNTED_DOCUMENTS.sub(r"\1group\2", text)

        legs = tuple(replace(leg, reason=counted(leg.reason), remedy=counted(leg.remedy)) for leg in verdict.legs)
        said = replace(verdict, legs=legs, reason=counted(verdict.reason), why=counted(verdict.why))
        return replace(answer, verdict=said)

    def _needed(self, by: str, layers: int, claim: str, evidence: ModelOrPairMeasurements) -> Verdict:
        self._require_need(by, claim)
        return self._decided(
            find_question_of_claim(claim), evidence, self.make_context(claim, evidence.name, layers)
        ).verdict

    def _needed_row(self, by: str, claim: str) -> Claim:
        self._require_need(by, claim)
        return self.register[claim]

    def _require_need(self, by: str, claim: str) -> None:
        if claim not in find_question_of_claim(by).needs:
            raise BadArgument("claim", claim, f"one that {by} needs", f"name it in needs of the question of {by}")

    def count_other_legs(self, claim: str, layers: int) -> int:
        """Gating statistical legs of the run outside ``claim``; 0 for a row that does not gate.

        Args:
            layers: of the model under test; assumed for the other models of the run.
        """
        if not self.is_gating(claim):
            return 0
        gating = [find_question_of_claim(name) for name in self.register if self.is_gating(name)]
        family = sum(question.legs(self.study, layers) * self._decisions_per_run(question) for question in gating)
        return family - find_question_of_claim(claim).legs(self.study, layers)

    def _decisions_per_run(self, question: Question[object]) -> int:  # type: ignore[type-var]  # any evidence
        """How often a run decides a row: once for a pair, else once per model."""
        return self.models if question.about == "model" else 1


# ---------------------------------------------------------------- premises that several claims share


def make_unmet_quality_verdict(evidence: ModelMeasurements, asked: ClaimContext) -> Verdict | None:
    """``not applicable`` without trained causal weights, or if replay does not predict the decoder; else None."""
    absent = evidence.subject.absent_quality or evidence.replay_validity.absent_replay
    return None if absent is None else asked.lacking(absent)


def is_point_quality_unfalsified(verdict: Verdict, point: str) -> bool:
    """Whether a verdict of ``decide_quality`` judged the point of this digest and falsified none of its legs."""
    outcomes = [leg.outcome for leg in verdict.legs if leg.point == point]
    return "falsified" not in outcomes and any(said in ("survived", "inconclusive") for said in outcomes)


def make_model_question(
    claim: str,
    gather: Callable[[ModelMeasurements], Any],
    decide: Callable[[Any, ClaimContext], Verdict],
    *,
    premise: Callable[[ModelMeasurements, ClaimContext], Verdict | None] = make_unmet_quality_verdict,
    attach: Callable[[ModelMeasurements], Attachments] = lambda evidence: Attachments(),
    **options: Any,
) -> Question[ModelMeasurements]:
    """Make a question about one model: ``decide`` judges the result of ``gather`` if ``premise`` returns None.

    ``premise``: the verdict if a premise is unmet. ``attach``: attachments of the verdict. ``options``: of
    ``Question``.
    """

    def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
        if absent := premise(evidence, asked):
            return Answer(absent, evidence.corpus, evidence.fingerprint)
        verdict = decide(gather(evidence), asked)
        return Answer(verdict, evidence.corpus, evidence.fingerprint, attach(evidence))

    return Question(claim, "model", answer, decide=decide, **options)


def absent_for_decoder(evidence: ModelMeasurements) -> Absent | None:
    """Why the decoder under test prevents judging quality; None if it does not, or if the weights have no quality."""
    return None if evidence.subject.absent_quality else evidence.replay_validity.absent_replay


def make_unmet_causal_lm_verdict(evidence: ModelMeasurements, asked: ClaimContext) -> Verdict | None:
    """``not applicable`` for an encoder-decoder, which does not continue plain documents; else None."""
    from pytest_emad.measurements.model_under_test import ENCODER_DECODER_REFUSAL  # imports torch, so only on demand

    return asked.not_applicable(ENCODER_DECODER_REFUSAL) if evidence.subject.is_seq2seq else None


def make_unmet_learned_exit_verdict(evidence: ModelMeasurements, asked: ClaimContext) -> Verdict | None:
    """``not applicable`` for untrained weights, ``unmeasured`` without a learned exit; else None."""
    if absent := evidence.subject.absent_quality:
        return asked.lacking(absent)
    found = evidence.exit_evaluation.exit_if_any
    return asked.lacking(found) if isinstance(found, Absent) else None


def answer_unmet_learned_exit_premise(evidence: ModelMeasurements, asked: ClaimContext) -> Answer | None:
    """The answer if no exit can be judged, or the decoder under test refuses it; else None."""
    verdict, refused = make_unmet_learned_exit_verdict(evidence, asked), None
    if verdict is None and (refused := evidence.exit_evaluation.absent_for_decoder):
        verdict = asked.lacking(refused)
    return None if verdict is None else Answer(verdict, evidence.corpus, evidence.fingerprint, refused=refused)


def make_context_with_flop_evidence(evidence: ModelMeasurements, asked: ClaimContext) -> ClaimContext:
    """The context of a claim whose verdict lists the evidence for its FLOPs."""
    return replace(asked, evidence_legs=lambda: [make_flop_evidence_grade_leg(evidence.flop_verification)])


def make_flop_evidence_grade_leg(witnessed: FlopVerification) -> Leg:
    """The leg about the evidence for FLOPs."""
    finding = witnessed.finding
    grade = f"evidence: {witnessed.evidence_grade}"
    return build_measured_count_leg(grade, finding.n, finding.n, "looked at", finding.detail)
