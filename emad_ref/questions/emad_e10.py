"""EMAD-E10: does a margin selected on a validation set hold the drop on a test set? (EMAD, Margin selection)

Perplexity within the stricter of two bounds, points and relative; and the accuracy of each replayed task that counts
at the margin (``verdict.counting``), one by one: pooled, tasks on which the rule never acts would dilute the one that
falls. Where tasks are scored and fewer than two of them count, the accuracy leg is unmeasured, so that perplexity or
one task can refute the claim and cannot carry it.

It does not apply where no margin that saves what the paper calls an operating point holds the bounds on validation, to
weights without quality, nor behind a decoder for which replay does not speak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from emad_ref.evidence.gathered import Evidence
from emad_ref.point import OperatingPoint
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.premises import quality_premise
from emad_ref.questions.quality import drop_of, too_few
from emad_ref.text import world
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.counting import FEWEST, TaskAt
from emad_ref.verdict.legs import corrected, estimated, row, unseen, weighed
from emad_ref.verdict.rates import perplexity_rise
from emad_ref.verdict.units import ByDocument

USEFUL = 0.15  # net FLOP reduction below which the paper does not speak of an operating point


@dataclass(frozen=True)
class Selected:
    """The cheapest margin within bounds on validation, and the share of FLOPs it saves there, net."""

    name: str
    net_reduction: float


@dataclass(frozen=True)
class Tested:
    """On the test split: NLL sums at the selected margin and at full depth, nats, and tokens, by document.

    ``perplexity``: of full depth. ``tasks``: the replayed ones at the margin, whether or not they count.
    """

    nll_nats: ByDocument
    full_nll_nats: ByDocument
    tokens: ByDocument
    perplexity: float
    tasks: Mapping[str, TaskAt] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """``selected``: None where no margin holds the bounds. ``tested``: None where nothing useful is selected."""

    selected: Selected | None
    tested: Tested | None = None


def useful(selected: Selected | None) -> bool:
    """Whether there is an operating point to speak of."""
    return selected is not None and selected.net_reduction >= USEFUL


def decide(found: Found, asked: Asked) -> Verdict:
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
    legs = [weighed(f"{selected.name}: perplexity", rise, "above", bound, claim.minimum)]
    least = claim.thresholds["accuracy_drop"]
    drops = {task: drop_of(held, least) for task, held in tested.tasks.items()}
    counting = [task for task, held in tested.tasks.items() if held.counts]
    legs += [weighed(f"{selected.name}: {task}", drops[task], "above", least, claim.minimum) for task in counting]
    beside = [
        estimated(f"{selected.name}: {task}", drops[task], held.standing, least)
        for task, held in tested.tasks.items()
        if not held.counts
    ]
    if tested.tasks and len(counting) < FEWEST:
        beside.append(unseen(f"{selected.name}: accuracy", too_few(tested.tasks)))
    return row(claim, asked.model, [*corrected(legs, asked.other_legs), *beside])


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """The margin that the run selects, replayed on the evaluation split."""
    verdict = quality_premise(evidence, asked)
    if verdict is None:
        chosen = evidence.points.selected
        selected = None if chosen is None else Selected(chosen.point.name, chosen.net_reduction)
        tested = tested_at(evidence, chosen.point) if chosen is not None and useful(selected) else None
        verdict = decide(Found(selected, tested), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


def tested_at(evidence: Evidence, point: OperatingPoint) -> Tested:
    """What ``point`` loses on the evaluation split."""
    full, traces = evidence.points.full_loss, evidence.traces
    adaptive = evidence.rivals.evaluated(point)
    nll, reference = (traces.by_document(loss.nll_nats) for loss in (adaptive, full))
    tasks = {task: evidence.scored.at(task, point) for task in evidence.scored.replayed}
    return Tested(nll, reference, traces.lengths, full.perplexity, tasks)


QUESTION = Question("EMAD-E10", "model", answer, legs=lambda study, layers: 1 + len(world.TASKS))
