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

from emad_ref.evidence.beyond import Beyond
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.premises import exit_unjudged
from emad_ref.questions.promises import share_of_sets, shown
from emad_ref.record import Ints
from emad_ref.screening.bounded import EXCESS
from emad_ref.sweep.betting import betting, needed_documents
from emad_ref.sweep.risk import needed_sequences
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.interval import needed_n
from emad_ref.verdict.legs import LEVEL, Tested, corrected, counted, row, weighed
from emad_ref.verdict.rates import mean_rate
from emad_ref.verdict.units import ByDocument

SHARE = "share of calibration sets"


@dataclass(frozen=True, eq=False)
class Draws:
    """``chosen`` int64 [sets]: the threshold that each set certified, by its place, −1 for full depth.

    ``pool`` [documents, λ] losses in 0–B at each threshold, of documents that no set has.
    """

    chosen: Ints
    pool: ByDocument


@dataclass(frozen=True)
class Found:
    """``losses`` [documents] in 0–B of the exit on evaluated ones; None: full depth was chosen, and ``why`` says why.

    ``risk``, ``error``, ``cap``: δ, ε and B. ``documents``: it was calibrated on.
    ``power``: what it states of itself, or None.
    """

    losses: ByDocument | None
    risk: float
    error: float
    documents: int
    power: float | None = None
    draws: Draws | None = None
    why: str = ""
    cap: float = 1.0


def decide(found: Found, asked: Asked) -> Verdict:
    """Risk on fresh documents, promises kept over fresh sets, and power."""
    if found.losses is None and found.draws is None:
        return asked.not_applicable(f"full depth was chosen, which keeps any promise: {found.why or 'no exit'}")
    tests: list[Tested] = []
    beside: list[Leg] = []
    if found.losses is not None:
        tests.append(_risk(found.losses, found, asked))
    if found.draws is not None:
        kept = _kept(found.draws, found, asked)
        if isinstance(kept, Tested):
            tests.append(kept)
        else:
            beside.append(kept)
        tests.append(_certifying(found.draws, asked))
    else:
        beside.append(_stated(found, asked))
    return row(asked.claim, asked.model, [*corrected(tests, asked.other_legs), *beside])


def _risk(losses: ByDocument, found: Found, asked: Asked) -> Tested:
    ones, risk = losses.like(np.ones(len(losses))), found.risk
    mean = mean_rate(losses, ones, threshold=risk, rng=asked.rng, unit=asked.claim.unit)
    shares, tolerance = losses.values[:, None] / found.cap, risk / found.cap
    (certified,) = betting(shares, tolerance, LEVEL)
    mean = replace(mean, p_below=max(mean.p_below, float(certified)))
    tested = weighed(f"risk on fresh documents, δ={risk:g}", mean, "above", risk, asked.claim.minimum)

    def needed(error: float) -> int | None:
        if mean.value > risk:
            return needed_n(mean, error)
        number = needed_documents(shares, tolerance, error)
        return None if number is None else max(number, mean.n + 1)

    return replace(tested, needed=needed, to_survive=needed_sequences(tolerance, LEVEL))


def _kept(draws: Draws, found: Found, asked: Asked) -> Tested | Leg:
    """Sets whose choice is shown to keep the promise, among all; or why none could have broken it."""
    risk = found.risk
    name = f"promises kept, δ={risk:g}"
    means, sets = draws.pool.values.mean(axis=0), len(draws.chosen)
    if means.max() <= risk:
        said = f"no threshold risks more than {means.max():.3g}: nothing could break"
        return Leg(name, "not applicable", None, None, sets, None, SHARE, said)
    more, less = shown(draws.pool.values / found.cap, risk / found.cap)
    exiting = draws.chosen[draws.chosen >= 0]
    full = sets - len(exiting)
    return share_of_sets(
        name,
        sets,
        sure=full + int(less[exiting].sum()),
        not_so=int(more[exiting].sum()),
        seen=full + int((means[exiting] <= risk).sum()),
        least=1 - found.error,
        unit=SHARE,
        minimum=asked.claim.minimum,
    )


def _certifying(draws: Draws, asked: Asked) -> Tested:
    sets, exiting = len(draws.chosen), int((draws.chosen >= 0).sum())
    return share_of_sets(
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


def _stated(found: Found, asked: Asked) -> Leg:
    """The power that the guarantee states: enough, too little, or none stated."""
    name, least = "power of its calibration set, as stated", asked.claim.thresholds["power"]
    if found.power is None:
        return Leg(name, "unmeasured", None, None, 0, least, SHARE, "the guarantee states none")
    leg = counted(name, found.power, found.documents, SHARE)
    if found.power >= least:
        return replace(leg, threshold=least)
    said = f"a set of {found.documents} documents certifies an exit in {found.power:.0%} of draws"
    return replace(leg, outcome="inconclusive", threshold=least, good="higher", reason=said)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From the guarantee that the exit carries, and its losses on evaluated documents."""
    if unjudged := exit_unjudged(evidence, asked):
        return unjudged
    return Answer(_held(evidence.beyond, asked), evidence.corpus, evidence.fingerprint)


def _held(beyond: Beyond, asked: Asked) -> Verdict:
    guarantee, point = beyond.exit.guarantee, beyond.point
    if guarantee is None:
        return asked.unmeasured(f"the exit carries no guarantee{': ' if point is None else ''}{beyond.exit.why_none}")
    if guarantee.loss != EXCESS.name:
        return asked.unmeasured(f"its guarantee is about the loss {guarantee.loss!r}, which is not measured here")
    losses = None if point is None else beyond.excess
    return decide(
        Found(
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
QUESTION = Question("EMAD-X2", "model", answer, legs=lambda study, layers: 3, budget="standard")
