"""What claims about early exits share: their premise, a way to answer on items, and the same items under two rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from emad_ref.claims.base import Answer, ClaimContext, Question, ask
from emad_ref.measurements.attachments import AttachedTable, Attachments
from emad_ref.measurements.early_exits import EarlyExitMeasurements, ExitScores, LayerReadings
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.accuracy import exit_difference, score_difference
from emad_ref.statistics.estimate import Estimate
from emad_ref.statistics.legs import unmeasured_leg
from emad_ref.statistics.verdicts import Leg, Verdict

EXIT_TASKS = 3  # question → answer, dialogue → summary, story → worked chain
EXIT_SETTINGS = 2 * EXIT_TASKS  # at two minimum exit layers


def early_exit_premise(evidence: ModelMeasurements, asked: ClaimContext) -> Verdict | None:
    """Why a claim about early exits cannot be judged on this model; None where it can."""
    absence = evidence.exits.absence
    if absence is None:
        return None
    said = {"not applicable": asked.not_applicable, "unmeasured": asked.unmeasured}
    return said[absence.outcome](absence.reason)


def answer_on_items(
    evidence: ModelMeasurements,
    asked: ClaimContext,
    verdict: Callable[[], Verdict],
    tables: Callable[[], tuple[AttachedTable, ...]] = tuple,
) -> Answer:
    """``verdict()`` under the corpus of the items, or why there are none under the run's own.

    What a reader must know of the items stands beside it, whether or not the decoder under test declines the rules.

    Raises:
        RunStopped: a file that does not fit; every file is read before anything is decoded.
    """
    if absent := early_exit_premise(evidence, asked):
        return Answer(absent, evidence.corpus, evidence.fingerprint)
    notes = Attachments(notes=tuple(evidence.exits.asked.notes))

    def judged(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
        return Answer(verdict(), evidence.exits.corpus, evidence.fingerprint, Attachments(tables()))

    said = ask(Question(asked.claim.id, "model", judged), evidence, asked)
    return replace(said, exhibits=notes + said.exhibits)


def missing_task_legs(missing: Mapping[str, str], unsolved: Mapping[str, str] | None = None) -> list[Leg]:
    """A leg for each task that could not be asked (task → why): unseen is not survived.

    ``unsolved``: tasks that were asked and do not count, as no exit can cost anything on them.
    """
    idle = [inapplicable_leg(task, reason) for task, reason in (unsolved or {}).items()]
    return [*(unmeasured_leg(task, reason) for task, reason in missing.items()), *idle]


def inapplicable_leg(name: str, reason: str, n: int = 0) -> Leg:
    """A leg that the data at hand could not falsify, whatever the truth: it takes no part."""
    return Leg(name, "not applicable", None, None, n, None, "", reason)


def undecided_leg(name: str, reason: str, n: int = 0) -> Leg:
    """A leg that the data at hand could not falsify, of a row that must not survive without it."""
    return Leg(name, "inconclusive", None, None, n, None, "", reason)


ACTS = 0.05  # share of depth that a rule must save before a score under it says anything of the rule
SAME_EXITS = "both exit after the same blocks on every item"
SAME_SCORES = "both score the same on every item"


@dataclass(frozen=True)
class RuleComparison:
    """The same items, in the same order, under two rules; ``where``: task and minimum layer, in words.

    ``sizes``: how much either keeps of the vocabulary, in words; "" where neither prunes.
    """

    where: str
    ours: ExitScores
    theirs: ExitScores
    sizes: str = ""

    @property
    def exits_alike(self) -> bool:
        """Whether both sides decide the same on every item: then neither is earlier, whatever the truth."""
        return self.ours.exits_as(self.theirs)

    @property
    def scores_alike(self) -> bool:
        """Whether both sides have the same score on every item."""
        return np.array_equal(self.ours.score.values, self.theirs.score.values)

    def earlier(self, layers: int, threshold: float, rng: np.random.Generator) -> Estimate:
        """Blocks by which ours exits earlier; ``layers``: of the model."""
        blocks = self.ours.exit_block, self.theirs.exit_block
        return exit_difference(*blocks, layers=layers, threshold=threshold, rng=rng)

    def gained(self, threshold: float, rng: np.random.Generator, unit: str = "score gained") -> Estimate:
        """Score that ours has more."""
        return score_difference(self.ours.score, self.theirs.score, threshold=threshold, rng=rng, unit=unit)

    def lost(self, threshold: float, rng: np.random.Generator) -> Estimate:
        """Score that ours has less."""
        return score_difference(self.theirs.score, self.ours.score, threshold=threshold, rng=rng, unit="score lost")


@dataclass(frozen=True)
class RuleComparisons:
    """``contests``: of a model of ``layers`` blocks, on tasks that it solves.

    ``missing``: task that could not be asked → why; ``unsolved``: task that was asked and does not count → why.
    """

    contests: tuple[RuleComparison, ...]
    layers: int
    missing: Mapping[str, str] = field(default_factory=dict)
    unsolved: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, exits: EarlyExitMeasurements, contests: Iterable[RuleComparison]) -> RuleComparisons:
        """``contests`` of the model of ``exits``, with the tasks that it could not be asked or does not solve."""
        return cls(tuple(contests), exits.subject.stepper.layers, exits.missing, exits.unsolved)

    @property
    def left_out(self) -> list[Leg]:
        """Legs of the tasks without a contest."""
        return missing_task_legs(self.missing, self.unsolved)


@dataclass(frozen=True)
class ExitReadings:
    """``read``: task → what every layer says of the reference answers, token by token, each with its item."""

    read: Mapping[str, LayerReadings]


def compare_rules(exits: EarlyExitMeasurements, ours: str, theirs: str) -> RuleComparisons:
    """Rule ``ours`` against ``theirs`` at every minimum layer of every task that the model solves."""
    found = []
    for task, minimum in exits.counting:
        first, second = (exits.answered(task, rule, minimum).exited for rule in (ours, theirs))
        found.append(RuleComparison(f"{task}, j={minimum}", first, second))
    return RuleComparisons.of(exits, found)


def layer_readings(exits: EarlyExitMeasurements) -> ExitReadings:
    """Of every task that could be asked."""
    return ExitReadings({task: exits.read(task) for task in exits.tasks})
