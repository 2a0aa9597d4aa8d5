"""EMAD-E10: does a margin selected on a validation set hold the drop on a test set? (EMAD, Margin selection)

Perplexity within the stricter of two bounds, points and relative; and the accuracy of each replayed task that counts
at the margin (``statistics.accuracy``), one by one: pooled, tasks on which the rule never acts would dilute the one
that falls. Where tasks are scored and fewer than two of them count, the accuracy leg is unmeasured, so that perplexity
or one task can refute the claim and cannot carry it.

It does not apply where no margin that saves what the paper calls an operating point holds the bounds on validation, to
weights without quality, nor behind a decoder for which replay does not speak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import quality_premise
from emad_ref.claims.quality import task_drop, uncounted_reason
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.point import OperatingPoint
from emad_ref.statistics.accuracy import FEWEST, TaskAccuracy
from emad_ref.statistics.legs import combine_verdict, decide_legs, estimate_leg, leg_test, unmeasured_leg
from emad_ref.statistics.rates import perplexity_rise
from emad_ref.statistics.units import ByDocument
from emad_ref.statistics.verdicts import Verdict
from emad_ref.text import world

USEFUL = 0.15  # net FLOP reduction below which the paper does not speak of an operating point


@dataclass(frozen=True)
class SelectedMargin:
    """The cheapest margin within bounds on validation, and the share of FLOPs it saves there, net."""

    name: str
    net_reduction: float


@dataclass(frozen=True)
class MarginTest:
    """On the test split: NLL sums at the selected margin and at full depth, nats, and tokens, by document.

    ``perplexity``: of full depth. ``tasks``: the replayed ones at the margin, whether or not they count.
    """

    nll_nats: ByDocument
    full_nll_nats: ByDocument
    tokens: ByDocument
    perplexity: float
    tasks: Mapping[str, TaskAccuracy] = field(default_factory=dict)


@dataclass(frozen=True)
class MarginEvidence:
    """``selected``: None where no margin holds the bounds. ``tested``: None where nothing useful is selected."""

    selected: SelectedMargin | None
    tested: MarginTest | None = None


def useful(selected: SelectedMargin | None) -> bool:
    """Whether there is an operating point to speak of."""
    return selected is not None and selected.net_reduction >= USEFUL


def decide(found: MarginEvidence, asked: ClaimContext) -> Verdict:
    """One leg for perplexity, one for each task that counts; the other tasks are listed with the reason."""
    selected, tested = found.selected, found.tested
    if selected is None or not useful(selected):
        saved = "none at all" if selected is None else f"{selected.name} ({selected.net_reduction:+.1%} net)"
        return asked.not_applicable(
            f"no margin that saves {USEFUL:.0%} holds the bounds on validation; selected: {saved}"
        )
    assert tested is not None, "a useful margin is tested"
    claim = asked.claim
    bound = min(claim.thresholds["perplexity_points"] / tested.perplexity, claim.thresholds["perplexity_rise"])
    sums = tested.nll_nats, tested.full_nll_nats, tested.tokens
    rise = perplexity_rise(*sums, threshold=bound, rng=asked.rng)
    legs = [leg_test(f"{selected.name}: perplexity", rise, "above", bound, claim.minimum)]
    least = claim.thresholds["accuracy_drop"]
    drops = {task: task_drop(held, least) for task, held in tested.tasks.items()}
    counting = [task for task, held in tested.tasks.items() if held.counts]
    legs += [leg_test(f"{selected.name}: {task}", drops[task], "above", least, claim.minimum) for task in counting]
    beside = [
        estimate_leg(f"{selected.name}: {task}", drops[task], held.standing, least)
        for task, held in tested.tasks.items()
        if not held.counts
    ]
    if tested.tasks and len(counting) < FEWEST:
        beside.append(unmeasured_leg(f"{selected.name}: accuracy", uncounted_reason(tested.tasks)))
    return combine_verdict(claim, asked.model, [*decide_legs(legs, asked.other_legs), *beside])


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """The margin that the run selects, replayed on the evaluation split."""
    verdict = quality_premise(evidence, asked)
    if verdict is None:
        chosen = evidence.points.selected
        selected = None if chosen is None else SelectedMargin(chosen.point.name, chosen.net_reduction)
        tested = tested_at(evidence, chosen.point) if chosen is not None and useful(selected) else None
        verdict = decide(MarginEvidence(selected, tested), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


def tested_at(evidence: ModelMeasurements, point: OperatingPoint) -> MarginTest:
    """What ``point`` loses on the evaluation split."""
    full, traces = evidence.points.full_loss, evidence.traces
    adaptive = evidence.rivals.evaluated(point)
    nll, reference = (traces.by_document(loss.nll_nats) for loss in (adaptive, full))
    tasks = {task: evidence.scored.at(task, point) for task in evidence.scored.replayed}
    return MarginTest(nll, reference, traces.lengths, full.perplexity, tasks)


QUESTIONS = (Question("EMAD-E10", "model", answer, legs=lambda study, layers: 1 + len(world.TASKS), decide=decide),)
