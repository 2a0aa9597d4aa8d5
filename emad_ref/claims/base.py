"""What every claim shares: a question and its answer, the context in which it is decided, the plan of a run, which
counts Holm's family, and the premises of several claims, with the leg that says on what a verdict about FLOPs rests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.extensions import added_part_locations
from emad_ref.measurements.attachments import Attachments
from emad_ref.measurements.study import BUDGETS, Budget, Study
from emad_ref.protocol import Unsupported
from emad_ref.statistics.estimate import Estimate
from emad_ref.statistics.legs import (
    LegTest,
    Side,
    build_count_leg,
    build_leg_test,
    decide_legs,
    judge_against_threshold,
    not_applicable_verdict,
    unmeasured_verdict,
    verdict_from_legs,
)
from emad_ref.statistics.verdicts import EXIT_PREFIX, Claim, Leg, Verdict

if TYPE_CHECKING:
    from emad_ref.measurements.model_measurements import ModelMeasurements
    from emad_ref.measurements.verification import FlopVerification

About = Literal["model", "pair", "names"]
Suite = Literal["claims", "cost", "invariants"]


class NamedMeasurements(Protocol):
    """What the measurements of a model, of a pair and of a pair's names have in common."""

    @property
    def name(self) -> str:
        """Name of the model or pair in reports."""

    @property
    def corpus(self) -> str:
        """Name of the corpus that was read."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights."""


def _outside_a_run(claim: str, evidence: NamedMeasurements | None = None) -> Any:
    raise BadArgument("claim", claim, "a claim of the same run", "only a RunPlan decides what a claim needs")


@dataclass(frozen=True)
class ClaimContext:
    """Everything but measurements that decides a claim: its row, random generator, and other claims of the run.

    ``model``       the name that the verdict carries.
    ``rng``         source of resamples, fresh for every claim.
    ``other_legs``  gating legs of the run that are decided elsewhere (``RunPlan.count_other_legs``).
    ``verdict_of``  (id, evidence) → the verdict of a claim that this one needs: decided once a run, whoever asks first,
                    whether or not the run reports it.
    ``row_of``      id → the row in force of such a claim.
    """

    claim: Claim
    model: str
    rng: np.random.Generator
    other_legs: int = 0
    verdict_of: Callable[[str, Any], Verdict] = _outside_a_run
    row_of: Callable[[str], Claim] = _outside_a_run

    def make_leg_test(self, name: str, estimate: Estimate, bad: Side, threshold: float) -> LegTest:
        """A leg whose estimate fails on side ``bad`` of ``threshold``, under the claim's minimum of units."""
        return build_leg_test(name, estimate, bad, threshold, self.claim.minimum)

    def combine_legs(self, legs: Sequence[Leg]) -> Verdict:
        """The verdict of decided ``legs``."""
        return verdict_from_legs(self.claim, self.model, legs)

    def decide_tests(self, tests: Sequence[LegTest], beside: Sequence[Leg] = ()) -> Verdict:
        """The verdict of ``tests`` under Holm's correction, and of legs ``beside``."""
        return self.combine_legs([*decide_legs(tests, self.other_legs), *beside])

    def judge_against_threshold(
        self, legs: Mapping[str, Estimate], bad: Side, threshold: float, beside: Sequence[Leg] = ()
    ) -> Verdict:
        """The verdict of ``legs``, each tested against ``threshold``: a value on its ``bad`` side fails."""
        others = self.other_legs
        return judge_against_threshold(self.claim, self.model, legs, bad, threshold, other_legs=others, beside=beside)

    judge_side = judge_against_threshold  # its earlier name, for code of others

    def not_applicable(self, reason: str) -> Verdict:
        """The verdict ``not applicable``: a premise of the claim is unmet, for this ``reason``."""
        return not_applicable_verdict(self.claim, self.model, reason)

    def unmeasured(self, reason: str) -> Verdict:
        """The verdict ``unmeasured``: an instrument or data is absent, for this ``reason``."""
        return unmeasured_verdict(self.claim, self.model, reason)


@dataclass(frozen=True)
class Answer:
    """The verdict on a claim, with its corpus, fingerprint and tables.

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
    """One claim as a question to evidence: a row of a module's ``QUESTIONS``, or an extension's ``QUESTION``.

    ``about``     whether ``answer`` takes the evidence of a model (``measurements.model_measurements``), of a pair
                  (``measurements.pair_measurements``), or no more than the pair's names (``measurements.study``).
    ``answer``    gathers, and hands what was found to ``decide``.
    ``decide``    the verdict on what was found, a pure function; None where an extension keeps its own to itself.
    ``legs``      statistical legs of the row at a study, on a model of so many layers: an upper bound, for Holm.
    ``needs``     claims whose verdict or thresholds it reads (``ClaimContext.verdict_of`` and ``row_of``).
    ``measures``  whether it takes time or energy, and so needs the machine to itself.
    ``suite``     the folder of ``suites`` that asks it.
    ``budget``    the smallest at which it is asked unless it gates or is asked for by name: a user who waits for a gate
                  must not wait for rows that take long and gate nothing.
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

    def is_within_budget(self, budget: Budget) -> bool:
        """Whether a run of ``budget`` includes this question by default."""
        return BUDGETS[self.budget].rank <= budget.rank


def answer_question(question: Question[E], evidence: E, asked: ClaimContext) -> Answer:
    """The answer, or ``not applicable`` with the reason for which the decoder under test declined."""
    try:
        return question.answer(evidence, asked)
    except Unsupported as refusal:
        reason = str(refusal)
        return Answer(asked.not_applicable(reason), evidence.corpus, evidence.fingerprint, refused=reason)


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


def find_question(claim: str) -> Question[Any]:
    """The question that decides ``claim``: a row of this package, or ``QUESTION`` of the module an extension names.

    >>> find_question("EAD-H1").about
    'names'

    Raises:
        BadArgument: no row and no extension is about it.
    """
    place = added_part_locations("questions").get(claim)
    if place is None:
        if claim not in _own_questions():
            raise BadArgument(
                "claim", claim, "a row of QUESTIONS of a module of emad_ref.claims", "see docs/own-claim.md"
            )
        return _own_questions()[claim]
    try:
        question: Question[Any] = import_module(place).QUESTION
    except (ModuleNotFoundError, AttributeError) as error:
        expected = f"a row whose question is QUESTION of {place}"
        raise BadArgument("claim", claim, expected, f"{error}; see docs/own-claim.md") from error
    return question


def find_questions_by_claim(register: Mapping[str, Claim]) -> dict[str, Question[Any]]:
    """Claim id → question, in the register's order. Raises BadArgument as ``find_question``."""
    return {claim: find_question(claim) for claim in register}


@dataclass(frozen=True)
class RunPlan:
    """Plan of one run: the register in force, which further rows gate, and the number of models.

    It keeps every answer as long as the evidence lives, so that a claim is decided once.
    """

    register: Mapping[str, Claim]
    study: Study
    gate_claims: frozenset[str] = frozenset()
    models: int = 1
    _outcomes: WeakKeyDictionary[Any, dict[str, Answer | str]] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def is_gating(self, claim: str) -> bool:
        """Whether the row fails the run when it is falsified."""
        return self.register[claim].is_gating(self.gate_claims)

    def should_ask(self, claim: str, *, pair_named: bool = False) -> bool:
        """Whether the run includes the row by default: its budget allows it, it gates, or it is about the user's exit.

        ``pair_named``: whether a user named a pair, which includes the rows about pairs.
        """
        question = find_question(claim)
        named = pair_named and question.about == "pair"
        brought = self.study.exit is not None and claim.startswith(EXIT_PREFIX)
        return named or brought or self.is_gating(claim) or question.is_within_budget(self.study.budget)

    def make_context(self, claim: str, model: str, layers: int) -> ClaimContext:
        """The context to decide ``claim`` on a model of ``layers`` layers; its generator starts at the seed."""
        rng = np.random.default_rng(self.study.seed)
        needed = partial(self._needed, claim, layers), partial(self._needed_row, claim)
        return ClaimContext(self.register[claim], model, rng, self.count_other_legs(claim, layers), *needed)

    def answer_claim(
        self, claim: str, evidence: NamedMeasurements, layers: int, question: Question[Any] | None = None
    ) -> Answer:
        """The answer of ``claim``, decided now unless another claim needed it before.

        Args:
            question: in place of the registered one, for a suite that draws its evidence in a way of its own.

        Raises:
            AuditRefutedError: what the verdict would be read from is refuted.
        """
        asks = question or find_question(claim)
        once = replace(asks, answer=partial(self._decided, asks))
        return answer_question(once, evidence, self.make_context(claim, evidence.name, layers))

    def _decided(self, question: Question[Any], evidence: NamedMeasurements, asked: ClaimContext) -> Answer:
        """The answer given before in this run, else a new one. Raises Unsupported again where the decoder declined."""
        outcomes = self._outcomes.setdefault(evidence, {})
        if question.claim not in outcomes:
            try:
                outcomes[question.claim] = question.answer(evidence, asked)
            except Unsupported as refusal:
                outcomes[question.claim] = str(refusal)  # the error itself holds frames, and so the evidence
        outcome = outcomes[question.claim]
        if isinstance(outcome, str):
            raise Unsupported(outcome)
        return outcome

    def _needed(self, by: str, layers: int, claim: str, evidence: NamedMeasurements) -> Verdict:
        self._require_need(by, claim)
        return self._decided(find_question(claim), evidence, self.make_context(claim, evidence.name, layers)).verdict

    def _needed_row(self, by: str, claim: str) -> Claim:
        self._require_need(by, claim)
        return self.register[claim]

    def _require_need(self, by: str, claim: str) -> None:
        if claim not in find_question(by).needs:
            raise BadArgument("claim", claim, f"one that {by} needs", f"name it in needs of the question of {by}")

    def count_other_legs(self, claim: str, layers: int) -> int:
        """Gating statistical legs of the run outside ``claim``; 0 for a row that does not gate.

        Args:
            layers: of the model under test; the other models of the run are taken to have as many.
        """
        if not self.is_gating(claim):
            return 0
        gating = [find_question(name) for name in self.register if self.is_gating(name)]
        family = sum(question.legs(self.study, layers) * self._times(question) for question in gating)
        return family - find_question(claim).legs(self.study, layers)

    def _times(self, question: Question[object]) -> int:  # type: ignore[type-var]  # any evidence will do
        """How often a run decides a row: of a pair once, however many models it judges."""
        return self.models if question.about == "model" else 1


# ---------------------------------------------------------------- premises that several claims share


def make_unmet_quality_verdict(evidence: ModelMeasurements, asked: ClaimContext) -> Verdict | None:
    """``not applicable`` if weights are untrained or replay is invalid for the decoder under test; else None."""
    if reason := evidence.subject.quality_unavailable_reason or evidence.replay_validity.replay_invalid_reason:
        return asked.not_applicable(reason)
    return None


def is_point_usable(verdict: Verdict, point: str) -> bool:
    """Whether a verdict of ``decide_quality`` lets the point of this name stand: judged, and no leg of it falsified."""
    outcomes = [leg.outcome for leg in verdict.legs if leg.name.startswith(f"{point}: ")]
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
    """The question of a claim on one model: ``decide`` judges what ``gather`` returns, if ``premise`` returns None.

    ``premise``: the verdict if a premise is unmet. ``attach``: tables beside the verdict. ``options``: of ``Question``.
    """

    def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
        if absent := premise(evidence, asked):
            return Answer(absent, evidence.corpus, evidence.fingerprint)
        verdict = decide(gather(evidence), asked)
        return Answer(verdict, evidence.corpus, evidence.fingerprint, attach(evidence))

    return Question(claim, "model", answer, decide=decide, **options)


def decoder_unusable_reason(evidence: ModelMeasurements) -> str:
    """Why quality cannot be judged through the decoder under test; empty if it can, or if the weights have none."""
    return "" if evidence.subject.quality_unavailable_reason else evidence.replay_validity.replay_invalid_reason


def make_unmet_decoder_only_verdict(evidence: ModelMeasurements, asked: ClaimContext) -> Verdict | None:
    """``not applicable`` for an encoder-decoder, which does not continue plain documents; else None."""
    from emad_ref.measurements.model_under_test import ENCODER_DECODER_REFUSAL  # brings torch: not at the start

    return asked.not_applicable(ENCODER_DECODER_REFUSAL) if evidence.subject.is_seq2seq else None


def make_unmet_exit_verdict(evidence: ModelMeasurements, asked: ClaimContext) -> Verdict | None:
    """``not applicable`` for untrained weights, ``unmeasured`` without a learned exit; else None."""
    if reason := evidence.subject.quality_unavailable_reason:
        return asked.not_applicable(reason)
    return asked.unmeasured(missing) if (missing := evidence.exit_evaluation.exit_unavailable_reason) else None


def answer_unmet_exit_premise(evidence: ModelMeasurements, asked: ClaimContext) -> Answer | None:
    """The answer if an exit cannot be judged, or the decoder under test refuses it; None if it can be judged."""
    verdict, refused = make_unmet_exit_verdict(evidence, asked), ""
    if verdict is None and (refused := evidence.exit_evaluation.decoder_unusable_reason):
        verdict = asked.not_applicable(refused)
    return None if verdict is None else Answer(verdict, evidence.corpus, evidence.fingerprint, refused=refused)


def add_flop_evidence_leg(verdict: Verdict, witnessed: FlopVerification) -> Verdict:
    """``verdict`` with a last leg that states how its FLOPs are evidenced; unchanged if nothing was measured."""
    if verdict.verdict in ("not applicable", "unmeasured"):
        return verdict
    finding = witnessed.finding
    leg = build_count_leg(f"evidence: {witnessed.evidence_grade}", finding.n, finding.n, "looked at", finding.detail)
    return replace(verdict, legs=(*verdict.legs, leg))
