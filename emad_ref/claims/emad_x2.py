"""EMAD-X2: does the guarantee given for an exit hold on fresh text, and are its calibration sets large enough?

A guarantee (``screening.guarantee``) says that the mean loss of a document, bounded by B, is at most δ, with
probability 1 − ε over calibration sets: Learn-then-Test chose by it. Three things are looked at, each a leg:

risk   of the exit put forward, on evaluated documents that nothing was fitted or chosen on: its mean loss against δ.
       An ε of honest guarantees fail here, too: of one exit there is but one draw. It survives by betting, as
       certified as the guarantee itself, and so with no fewer documents: a mean of few that happen to lose nothing
       knows nothing of the twentieth that loses B.
draws  where text can be drawn again and again, calibration sets that share no document: the share of them whose choice
       keeps the promise on a pool of others, against 1 − ε (``promises``).
power  the share of such sets that certify any exit, against ``power``: sets too small to certify one promise nothing
       wrong. Where no sets were drawn it is the power that the guarantee states for itself, and opens the row where it
       is less, for no reader can hold that number against data.

Full depth keeps any promise. Where it was chosen, and no sets were drawn, the row does not apply; nor does the leg on
draws where no threshold on the grid risks more than δ, for then none could break.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.calibration_promises import risk_shown, set_share_leg
from emad_ref.claims.premises import exit_answer_absent
from emad_ref.measurements.learned_exit import ExitEvaluation
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.record import Ints
from emad_ref.screening.guarantee import EXCESS
from emad_ref.statistics.estimate import needed_n
from emad_ref.statistics.legs import LEVEL, LegTest, combine_verdict, count_leg, decide_legs, leg_test
from emad_ref.statistics.rates import mean_rate
from emad_ref.statistics.units import ByDocument
from emad_ref.statistics.verdicts import Leg, Verdict
from emad_ref.sweep.risk import betting_p_values, needed_documents, needed_sequences

SHARE = "share of calibration sets"


@dataclass(frozen=True, eq=False)
class CalibrationDraws:
    """``chosen`` int64 [sets]: the threshold that each set certified, by its place, −1 for full depth.

    ``pool`` [documents, λ] losses in 0–B at each threshold, of documents that no set has.
    """

    chosen: Ints
    pool: ByDocument


@dataclass(frozen=True)
class GuaranteeEvidence:
    """``losses`` [documents] in 0–B of the exit on evaluated ones; None: full depth was chosen, and ``why`` says why.

    ``risk``, ``error``, ``cap``: δ, ε and B. ``documents``: it was calibrated on.
    ``power``: what it states of itself, or None.
    """

    losses: ByDocument | None
    risk: float
    error: float
    documents: int
    power: float | None = None
    draws: CalibrationDraws | None = None
    why: str = ""
    cap: float = 1.0


def decide(found: GuaranteeEvidence, asked: ClaimContext) -> Verdict:
    """Risk on fresh documents, promises kept over fresh sets, and power."""
    if found.losses is None and found.draws is None:
        return asked.not_applicable(f"full depth was chosen, which keeps any promise: {found.why or 'no exit'}")
    tests: list[LegTest] = []
    beside: list[Leg] = []
    if found.losses is not None:
        tests.append(_risk(found.losses, found, asked))
    if found.draws is not None:
        kept = _kept(found.draws, found, asked)
        if isinstance(kept, LegTest):
            tests.append(kept)
        else:
            beside.append(kept)
        tests.append(_certifying(found.draws, asked))
    else:
        beside.append(_stated(found, asked))
    return combine_verdict(asked.claim, asked.model, [*decide_legs(tests, asked.other_legs), *beside])


def _risk(losses: ByDocument, found: GuaranteeEvidence, asked: ClaimContext) -> LegTest:
    ones, risk = losses.like(np.ones(len(losses))), found.risk
    mean = mean_rate(losses, ones, threshold=risk, rng=asked.rng, unit=asked.claim.unit)
    shares, tolerance = losses.values[:, None] / found.cap, risk / found.cap
    (certified,) = betting_p_values(shares, tolerance, LEVEL)
    mean = replace(mean, p_below=max(mean.p_below, float(certified)))
    tested = leg_test(f"risk on fresh documents, δ={risk:g}", mean, "above", risk, asked.claim.minimum)

    def needed(error: float) -> int | None:
        if mean.value > risk:
            return needed_n(mean, error)
        number = needed_documents(shares, tolerance, error)
        return None if number is None else max(number, mean.n + 1)

    return replace(tested, needed=needed, to_survive=needed_sequences(tolerance, LEVEL))


def _kept(draws: CalibrationDraws, found: GuaranteeEvidence, asked: ClaimContext) -> LegTest | Leg:
    """Sets whose choice is shown to keep the promise, among all; or why none could have broken it."""
    risk = found.risk
    name = f"promises kept, δ={risk:g}"
    means, sets = draws.pool.values.mean(axis=0), len(draws.chosen)
    if means.max() <= risk:
        said = f"no threshold risks more than {means.max():.3g}: nothing could break"
        return Leg(name, "not applicable", None, None, sets, None, SHARE, said)
    more, less = risk_shown(draws.pool.values / found.cap, risk / found.cap)
    exiting = draws.chosen[draws.chosen >= 0]
    full = sets - len(exiting)
    return set_share_leg(
        name,
        sets,
        sure=full + int(less[exiting].sum()),
        not_so=int(more[exiting].sum()),
        seen=full + int((means[exiting] <= risk).sum()),
        least=1 - found.error,
        unit=SHARE,
        minimum=asked.claim.minimum,
    )


def _certifying(draws: CalibrationDraws, asked: ClaimContext) -> LegTest:
    sets, exiting = len(draws.chosen), int((draws.chosen >= 0).sum())
    return set_share_leg(
        "sets that certify an exit",
        sets,
        sure=exiting,
        not_so=sets - exiting,
        seen=exiting,
        least=asked.claim.thresholds["power"],
        unit=SHARE,
        minimum=asked.claim.minimum,
        misled=0.0,
    )


def _stated(found: GuaranteeEvidence, asked: ClaimContext) -> Leg:
    """The power that the guarantee states: enough, too little, or none stated."""
    name, least = "power of its calibration set, as stated", asked.claim.thresholds["power"]
    if found.power is None:
        return Leg(name, "unmeasured", None, None, 0, least, SHARE, "the guarantee states none")
    leg = count_leg(name, found.power, found.documents, SHARE)
    if found.power >= least:
        return replace(leg, threshold=least)
    said = f"a set of {found.documents} documents certifies an exit in {found.power:.0%} of draws"
    return replace(leg, outcome="inconclusive", threshold=least, good="higher", reason=said)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From the guarantee that the exit carries, and its losses on evaluated documents."""
    if unjudged := exit_answer_absent(evidence, asked):
        return unjudged
    return Answer(_held(evidence.learned_exit, asked), evidence.corpus, evidence.fingerprint)


def _held(beyond: ExitEvaluation, asked: ClaimContext) -> Verdict:
    guarantee, point = beyond.exit.guarantee, beyond.point
    if guarantee is None:
        return asked.unmeasured(f"the exit carries no guarantee{': ' if point is None else ''}{beyond.exit.why_none}")
    if guarantee.loss != EXCESS.name:
        return asked.unmeasured(f"its guarantee is about the loss {guarantee.loss!r}, which is not measured here")
    losses = None if point is None else beyond.excess
    return decide(
        GuaranteeEvidence(
            losses,
            guarantee.risk,
            guarantee.error,
            guarantee.documents,
            guarantee.power,
            why=beyond.exit.why_none,
            cap=guarantee.cap,
        ),
        asked,
    )


# Risk, promises kept, sets that certify.
QUESTIONS = (Question("EMAD-X2", "model", answer, legs=lambda study, layers: 3, budget="standard", decide=decide),)
