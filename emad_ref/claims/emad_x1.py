"""EMAD-X1: does some criterion save 15 % of FLOPs net at a rise of perplexity of at most 1 % on this model?

The claim is that something exists, and what shows it is not what refutes it:

survived   one point does it. It was chosen on validation, so that it alone is tested: that it saves more than the
           threshold, and that perplexity rises by less (an intersection–union test over both). Everything executed is
           charged, heads, gates and K/V fills too.
falsified  no criterion does, of all that were screened: for each it is shown that it saves less, or that it loses more.
           Each alone is tested twice (Bonferroni), all must fail (intersection–union: the largest p-value is the
           row's). One that lost more than it seemed to on validation refutes itself and no other. Screened criteria are
           taken at their best, with exact K/V at the price of copied ones, so that their failing is the criterion's.

No criterion knows more than the final distribution. An oracle that does, exits free, and pays nothing bounds them all
(EMAD-X5): where it saves at most ``slack`` of FLOPs net there is no slack, and the claim does not apply. Between
that and the threshold it stands beside: where not even the oracle gets there, no other criterion on this lens could,
and where it does, the row speaks of those that were screened.

Perplexity alone, on the run's text: what tasks lose at the chosen point is not looked at, and EMAD-F1 has shown that it
may be everything. The claim does not apply to weights without quality, nor behind a decoder of somebody else that does
not decode at the exit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import exit_answer_absent
from emad_ref.measurements.learned_exit import ExitEvaluation
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.record import Floats
from emad_ref.statistics.estimate import Estimate, needed_n
from emad_ref.statistics.legs import LEVEL, LegTest, Side, combine_verdict, count_leg, decide_legs, leg_test
from emad_ref.statistics.rates import DocumentCosts, FullDepthBaseline, document_draws, resamples_for
from emad_ref.statistics.verdicts import Leg, Verdict

SIDES = 2  # a criterion fails by what it saves, or by what it loses


@dataclass(frozen=True)
class CriterionEvidence:
    """``full``: full depth on the evaluated documents, FLOPs as its work.

    ``chosen``     the point chosen on validation, as it decodes; None where none was, and ``why`` says why.
    ``criteria``   all that were screened, at their best.
    ``slack``      the largest net share that an oracle saves at the threshold's loss; None: it was not asked.
    """

    full: FullDepthBaseline
    chosen: DocumentCosts | None
    criteria: Sequence[DocumentCosts]
    slack: float | None
    why: str = ""


@dataclass(frozen=True)
class _CriterionFailure:
    """How far a criterion is from doing it: the side on which that is seen, and the p-value of its failing."""

    spent: DocumentCosts
    seen: Estimate
    by_saving: bool
    p: float


def decide(found: CriterionEvidence, asked: ClaimContext) -> Verdict:
    """What the chosen point saves and loses, and whether any criterion is left; or that there is no slack."""
    most = asked.claim.thresholds["slack"]
    beside = [] if found.slack is None else [_oracle(found.slack, len(found.full.tokens), asked)]
    if found.slack is not None and found.slack <= most:
        said = f"no slack: an oracle saves {100 * found.slack:.1f} % net at that loss, {100 * most:g} % is none"
        return replace(asked.not_applicable(f"{said}; leave this model alone"), legs=tuple(beside))
    resamples = resamples_for(1 + asked.other_legs)
    draws = document_draws(len(found.full.tokens), resamples, asked.rng)
    chosen = _chosen(found, asked, draws)
    legs = decide_legs(chosen)
    if found.criteria or found.chosen is None:
        legs += decide_legs([_any(found, asked, draws, chosen)], asked.other_legs)
    return combine_verdict(asked.claim, asked.model, [*legs, *beside])


def _chosen(found: CriterionEvidence, asked: ClaimContext, draws: Floats) -> list[LegTest]:
    """Both sides of the point that was chosen; neither falsifies the claim that some criterion does it."""
    if found.chosen is None:
        return []
    saving, rise = _sides(found, found.chosen, asked, draws)
    tests = [
        leg_test(f"{found.chosen.name}: net saving", saving, "below", _least(asked), asked.claim.minimum),
        leg_test(f"{found.chosen.name}: perplexity", rise, "above", _most(asked), asked.claim.minimum),
    ]
    return [replace(test, leg=_alone(test.leg)) for test in tests]


def _alone(leg: Leg) -> Leg:
    """One point that fails leaves the others: its leg is never falsified, and says that it fails."""
    if leg.p_falsify is None:
        return leg
    failing = leg.p_falsify <= LEVEL
    return replace(leg, p_falsify=1.0, reason="this one is shown to fail; others may not" if failing else leg.reason)


def _any(found: CriterionEvidence, asked: ClaimContext, draws: Floats, chosen: Sequence[LegTest]) -> LegTest:
    """Whether any criterion is left: the one that is least sure to fail stands for all."""
    name, shown = f"any of {len(found.criteria)} criteria", [test.leg.p_survive for test in chosen]
    survive = max((1.0 if p is None else p for p in shown), default=1.0)
    if not found.criteria:
        return LegTest(
            replace(_open(name, found, 0), reason=found.why or "nothing was screened"), "documents", _unknown
        )
    nearest = max((_criterion_failure(found, one, asked, draws) for one in found.criteria), key=lambda each: each.p)
    bad: Side = "below" if nearest.by_saving else "above"
    threshold = _least(asked) if nearest.by_saving else _most(asked)
    tested = leg_test(name, nearest.seen, bad, threshold, asked.claim.minimum)
    said = f"{nearest.spent.name} is least sure to fail" + (f"; {found.why}" if found.chosen is None else "")
    if tested.leg.p_falsify is None:  # too few documents, as its reason says
        return tested
    leg = replace(tested.leg, p_falsify=nearest.p, p_survive=survive, reason=said)
    return replace(tested, leg=leg, needed=lambda error: needed_n(nearest.seen, error / SIDES))


def _criterion_failure(
    found: CriterionEvidence, one: DocumentCosts, asked: ClaimContext, draws: Floats
) -> _CriterionFailure:
    saving, rise = _sides(found, one, asked, draws)
    by_saving = saving.p_below < rise.p_above
    p = min(1.0, SIDES * min(saving.p_below, rise.p_above))
    return _CriterionFailure(one, saving if by_saving else rise, by_saving, p)


def _sides(
    found: CriterionEvidence, one: DocumentCosts, asked: ClaimContext, draws: Floats
) -> tuple[Estimate, Estimate]:
    saving = found.full.saving(one, _least(asked), asked.rng, draws)
    return saving, found.full.rise(one, _most(asked), asked.rng, draws)


def _least(asked: ClaimContext) -> float:
    return asked.claim.thresholds["flop_reduction"]


def _most(asked: ClaimContext) -> float:
    return asked.claim.thresholds["perplexity_rise"]


def _open(name: str, found: CriterionEvidence, n: int) -> Leg:
    return Leg(name, "inconclusive", None, None, n or len(found.full.tokens), None, "")


def _unknown(error: float) -> int | None:
    """No number of documents decides what was never screened."""
    return None


def _oracle(slack: float, documents: int, asked: ClaimContext) -> Leg:
    room = "others may be left" if slack >= _least(asked) else "no criterion on this lens can reach the threshold"
    return count_leg("an oracle's net saving at that loss", slack, documents, "net FLOP reduction", room)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """The exit's point, decoded; every criterion, replayed; the oracle that they are held against."""
    if unjudged := exit_answer_absent(evidence, asked):
        return unjudged
    return Answer(decide(found_of(evidence.learned_exit), asked), evidence.corpus, evidence.fingerprint)


def found_of(beyond: ExitEvaluation) -> CriterionEvidence:
    """What an exit's evidence holds, as ``decide`` takes it."""
    return CriterionEvidence(beyond.full, beyond.chosen, beyond.criteria, beyond.slack, beyond.exit.why_none)


QUESTIONS = (Question("EMAD-X1", "model", answer, legs=lambda study, layers: 1, budget="standard", decide=decide),)
