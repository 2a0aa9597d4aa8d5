"""Simulated answers of inference engines with known correctness."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.protocol import StatedRule
from pytest_emad.measurements.engine import (
    HEAD,
    INT8,
    REPORTED,
    SECOND_PATH,
    TAIL,
    TEMPERATURES,
    AcceptanceEvidence,
    DistributionEvidence,
    GivenTextLosses,
    PrecisionEvidence,
    SamplingEvidence,
)
from pytest_emad.measurements.stated_rule import OwnRuleSpeedupEvidence
from pytest_emad.statistics.units import ByDocument, ByPair
from tests.claims.simulation import Case, celled, says

TOKENS = 16  # of a document
TWIN_KL, SECOND_KL = 1e-4, 1e-8  # mean KL of the folder's model in bfloat16, and by its own kernels
BOUND = REPORTED + 2 * (TWIN_KL + SECOND_KL)  # of an engine that states bfloat16
ERRORS = {"float16": 1e-3, "bfloat16": 8e-3, INT8: 0.02}  # mean errors of the folder's model
HARD = 0.6  # spread of the logarithm of a document's difficulty, which all runs of it share


def drawn_around(rng: np.random.Generator, hard: np.ndarray, spread: float):
    """Return a function from a mean to sums over documents that all share their difficulty ``hard``."""

    def around(mean: float) -> ByDocument:
        own = np.exp(spread * rng.standard_normal(len(hard)) - spread**2 / 2)
        return ByDocument.from_whole_documents(TOKENS * mean * hard * own)

    return around


def difficulties(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.exp(HARD * rng.standard_normal(n) - HARD**2 / 2)


def answers(
    n: int = 200,
    *,
    kl: float = 1e-5,
    rise: float = 0.0,
    spread: float = 0.5,
    ruined: float = 0.0,
    reported: bool = True,
):
    """Make documents of mean KL ``kl`` of an engine that states bfloat16, and perplexity rise ``rise``.

    KL of the engine and of the twins is spread log-normally, by the same difficulty of a document and its own.
    ``ruined``: share of documents that lose half a nat per token. ``reported``: log-probabilities of given text.
    """

    def found(rng: np.random.Generator) -> DistributionEvidence:
        around, own = drawn_around(rng, difficulties(rng, n), spread), rng.gamma(4.0, 0.2, n)
        losses = own + np.log1p(rise) + 0.004 * rng.standard_normal(n)
        losses += 0.5 * (rng.uniform(size=n) < ruined)
        agreeing = rng.binomial(TOKENS, 0.999, n) / TOKENS
        columns = (agreeing, np.ones(n), losses, own, np.ones(n))
        *new, loss, own_loss, tokens = (ByDocument.from_whole_documents(TOKENS * column) for column in columns)
        given = GivenTextLosses(loss, own_loss, tokens) if reported else Absent("no prompt log-probabilities")
        twins = {SECOND_PATH: around(SECOND_KL), "bfloat16 here": around(TWIN_KL)}
        return DistributionEvidence(around(kl), *new, given, "bfloat16", twins)

    return found


def diverging(kl: float):
    return lambda n, icc: answers(n, kl=kl)


def errors(error: float, *twins: str, dtype: str = "", n: int = 200, spread: float = 0.3, **changed: float):
    """Make mean errors ``error`` of an engine of the first of ``twins``, or ``dtype``; ``changed``: of a twin."""

    def found(rng: np.random.Generator) -> PrecisionEvidence:
        around = drawn_around(rng, difficulties(rng, n), spread)
        means = {name: changed.get(name.partition(" ")[0], ERRORS[name]) for name in twins}
        tokens = ByDocument.from_whole_documents(np.full(n, TOKENS))
        return PrecisionEvidence(
            around(error), tokens, dtype or twins[0], {name: around(mean) for name, mean in means.items()}
        )

    return found


def middle(*twins: str) -> float:
    """Geometric mean of the errors of both."""
    return float(np.sqrt(np.prod([ERRORS[name] for name in twins])))


def erring(factor: float, *twins: str):
    return lambda n, icc: errors(factor * middle(*twins), *twins, n=n)


def parted(**rows: list[int]):
    return lambda rng: {name: np.array(each) for name, each in rows.items()}


def has_bound(verdict) -> None:
    """The rounding of what is reported; the engine's KL stands beside, and those of the folder's model."""
    assert verdict.legs[0].threshold == REPORTED
    measured = {leg.name: leg.estimate for leg in verdict.legs if leg.outcome == "measured"}
    assert verdict.legs[0].estimate == pytest.approx(
        measured["KL"] - 2 * measured["KL of bfloat16 here"] - 2 * measured[f"KL of {SECOND_PATH}"]
    )


def leaves_perplexity_open(verdict) -> None:
    (leg,) = [leg for leg in verdict.legs if leg.name == "perplexity of given text"]
    assert (leg.outcome, leg.reason) == ("not applicable", "no prompt log-probabilities")


ENG_1 = [
    Case("rounding alone", "holds", answers(800), draws=10, check=has_bound),
    Case("int8 under the name of bfloat16", "fails", answers(kl=2e-3), draws=10),
    Case("another model", "fails", answers(kl=0.3, rise=0.2), draws=5),
    Case("as near, but losses rise by a per cent", "fails", answers(rise=0.01), draws=10),
    Case("without losses of given text", "holds", answers(800, reported=False), check=leaves_perplexity_open),
    Case("another model, without them", "fails", answers(kl=0.3, reported=False)),
    Case("one document in a hundred is ruined", "edge", answers(800, ruined=0.01), draws=60),
    *celled("at the bound of its precision", "edge", diverging(BOUND), icc=(0.0,), draws=20),
    *celled("twice the bound of its precision", "power", diverging(2 * BOUND), n=(60, 200), icc=(0.0,)),
    *celled("at the limit of perplexity", "edge", lambda n, icc: answers(n, rise=0.005), icc=(0.0,), draws=20),
]
ENG_2 = [
    Case("no row parts", "holds", parted(beside=[0] * 16, reordered=[0] * 16)),
    Case("one row beside others parts", "fails", parted(beside=[0] * 15 + [1], reordered=[0] * 16)),
    Case("nothing was asked", "premise", parted()),
]
ENG_3 = [
    Case("the same again", "holds", parted(again=[0] * 16)),
    Case("one row is another the second time", "fails", parted(again=[0] * 16, later=[1] + [0] * 15)),
    Case("nothing was asked", "premise", parted()),
]
ENG_4 = [
    Case("as precise as float16", "holds", errors(1e-3, "float16", "bfloat16", INT8), draws=10),
    Case("bfloat16 under the name of float16", "fails", errors(8e-3, "float16", "bfloat16"), draws=10),
    *celled("in the middle", "edge", erring(1.0, "float16", "bfloat16"), icc=(0.0,), draws=20),
    *celled("between bfloat16 and int8", "edge", erring(1.0, "bfloat16", INT8), n=(200, 800), icc=(0.0,), draws=20),
    *celled("twice the middle", "power", erring(2.0, "float16", "bfloat16"), n=(60, 200), icc=(0.0,)),
    Case("sixty times as far off as bfloat16", "fails", errors(0.3, "bfloat16", INT8), draws=10),
    Case("as precise as bfloat16", "holds", errors(8e-3, "bfloat16", INT8, n=800), draws=10),
    Case("as precise as float32", "holds", errors(1e-7, "float16", dtype="float32"), draws=10),
    Case("float16 under the name of float32", "fails", errors(1e-3, "float16", dtype="float32"), draws=10),
    Case(
        "twins err alike",
        "tied",
        errors(0.3, "bfloat16", INT8, int8=8e-3),
        draws=10,
        check=says("not shown to err more"),
    ),
    Case(
        "eight bits err less than sixteen",
        "tied",
        errors(0.3, "bfloat16", INT8, int8=4e-3),
        check=says("not shown to err more"),
    ),
    Case(
        "no twin errs",
        "tied",
        errors(0.3, "bfloat16", INT8, bfloat16=0.0, int8=0.0),
        check=says("not shown to err more"),
    ),
]


def timed(
    speedup: float,
    saved: float | None = 0.5,
    *,
    states: StatedRule,
    rise: float = 0.0,
    n: int = 400,
    explained: float | None = None,
    generate_s: float | None = None,
):
    """Make requests that a rule answers ``speedup`` times as fast while it skips a share ``saved`` of blocks."""

    def found(rng: np.random.Generator) -> OwnRuleSpeedupEvidence:
        full = np.exp(0.05 * rng.standard_normal(n))
        rule = np.exp(0.05 * rng.standard_normal(n)) / speedup
        own = TOKENS * rng.gamma(4.0, 0.2, n)
        losses = own + TOKENS * (np.log1p(rise) + 0.004 * rng.standard_normal(n))
        blocks = np.full(40, 12.0 * TOKENS)
        skipped = (
            None
            if saved is None
            else ByDocument.from_whole_documents(blocks * (saved + 0.05 * rng.standard_normal(40)))
        )
        return OwnRuleSpeedupEvidence(
            states,
            *(ByPair(times) for times in (full, rule)),
            *(ByDocument.from_whole_documents(column) for column in (losses, own, np.full(n, TOKENS))),
            skipped,
            None if saved is None else ByDocument.from_whole_documents(blocks),
            explained,
            None if generate_s is None else ByPair(generate_s * np.exp(0.05 * rng.standard_normal(60))),
        )

    return found


TWICE = StatedRule("theirs", saved_blocks=0.5, speedup=2.0)
TRIPLE = StatedRule("exits everywhere", speedup=3.0)
FASTER = StatedRule("theirs", speedup=2.0)
NOTHING_STATED = StatedRule("silent")


def is_timed_alone(verdict) -> None:
    """The blocks of this rule cannot be observed, so only its time is judged."""
    outcomes = {leg.name.partition(",")[0]: leg.outcome for leg in verdict.legs}
    assert outcomes["blocks saved"] == "unmeasured"
    assert outcomes["speed-up"] == "survived"


def at_the_slack(n: int, icc: float):
    return timed(2.0 * 0.95, states=FASTER, n=n)


ENG_7 = [
    Case("what it states is so", "holds", timed(2.0, states=TWICE, explained=2.6), draws=10),
    Case(
        "as fast as it states, since full depth is slowed",
        "fails",
        timed(3.0, 0.0, states=TRIPLE, explained=1.3),
        draws=10,
    ),
    Case("3.00× is stated, every block runs", "fails", timed(1.0, 0.0, states=TRIPLE), draws=10),
    Case("half of the blocks is stated, a quarter is saved", "fails", timed(2.0, 0.25, states=TWICE), draws=10),
    Case(
        "full depth as fast as generate, no block seen",
        "holds",
        timed(2.0, None, states=FASTER, generate_s=1),
        draws=10,
    ),
    Case(
        "full depth slower than generate, no block seen",
        "tied",
        timed(2.0, None, states=FASTER, generate_s=0.5),
        draws=5,
        check=says("may have been slowed"),
    ),
    Case("as fast as it states, at a loss", "fails", timed(2.0, states=TWICE, rise=0.05), draws=10),
    Case("its blocks cannot be seen", "tied", timed(2.0, None, states=TWICE), draws=5, check=is_timed_alone),
    *celled("at the slack", "edge", at_the_slack, icc=(0.0,), draws=20),
    Case("it states nothing", "premise", timed(2.0, states=NOTHING_STATED), check=says("neither a saving")),
]


DRAWN = 64  # sampled tokens of a document at one temperature


def sampled(n: int = 208, icc: float = 0.0, *, head: float = 1.0, tail: float = 1.0, copied: float = 0.0):
    """Make documents with tokens in head and tail ``head`` and ``tail`` times as often as stated.

    ``copied``: share of second draws that repeat the first token. ``icc``: of the shares of documents.
    """

    def found(rng: np.random.Generator) -> SamplingEvidence:
        def counts(share: float) -> dict[float, ByDocument]:
            k = np.inf if not icc else (1 - icc) / icc
            shares = {
                t: np.full(n, share) if icc == 0 else rng.beta(share * k, (1 - share) * k, n) for t in TEMPERATURES
            }
            return {t: ByDocument.from_whole_documents(rng.binomial(DRAWN, each)) for t, each in shares.items()}

        def repeated() -> ByDocument:
            chance = 0.5 * rng.beta(1.0, 2.0, n)  # probability that two draws of a prompt are equal
            equal = (rng.uniform(size=(2, n)) < chance + copied * (1 - chance)).mean(axis=0)
            return ByDocument.from_whole_documents((equal - chance) / (1 - chance))

        tokens = ByDocument.from_whole_documents(np.full(n, DRAWN))
        repeats = {name: repeated() for name in ("seeds", "rows of a request")}
        return SamplingEvidence(counts(HEAD * head), counts(TAIL * tail), tokens, repeats)

    return found


def often(**share: float):
    return lambda n, icc: sampled(n, icc, **share)


ENG_6 = [
    Case("as stated", "holds", sampled(), draws=20, least=0.8),
    Case("greedy under the name of a temperature", "fails", sampled(head=2.0, tail=0.0, copied=1.0), draws=5),
    Case("the tail is cut at a mass of 0.95", "fails", sampled(tail=0.5), draws=10),
    Case("each seed draws the same", "fails", sampled(copied=1.0), draws=10),
    Case("few documents of a right engine", "tied", sampled(20), draws=10),
    *celled("the tail too often by the effect", "edge", often(tail=1.1), draws=20),
    *celled("the tail too rarely by the effect", "edge", often(tail=0.9), icc=(0.0, 0.02), draws=20),
    *celled("the head too often by the effect", "edge", often(head=1.1), icc=(0.0,), draws=20),
    *celled("a tenth of the draws is copied", "edge", often(copied=0.1), icc=(0.0,), draws=20),
    *celled("the tail too often by twice the effect", "power", often(tail=1.2), n=(200,), icc=(0.0,), draws=20),
    *celled("the tail too rarely by twice the effect", "power", often(tail=0.8), n=(200,), icc=(0.0,), draws=20),
    *celled("the head too rarely by twice the effect", "power", often(head=0.8), n=(200,), icc=(0.0,), draws=20),
    *celled("a fifth of the draws is copied", "power", often(copied=0.2), n=(200,), icc=(0.0,), draws=20),
]

RECORD = (0.70, 0.55, 0.45, 0.35)  # share of drafts accepted at each position


def accepting(n: int = 200, icc: float = 0.0, *, shift: float = 0.0, positions: int = len(RECORD)):
    """Make documents of about ten drafts; each position is accepted at the recorded rate plus ``shift``."""

    def found(rng: np.random.Generator) -> AcceptanceEvidence:
        drafts = rng.integers(7, 14, n)
        levels = 0.0 if not icc else 0.5 * np.sqrt(icc) * (2 * rng.beta(2.0, 2.0, n) - 1)
        accepted, left = [], drafts
        for at in range(positions):
            before = 1.0 if not at else RECORD[at - 1] + shift
            left = rng.binomial(left, np.clip((RECORD[at] + shift) / before + (levels if not at else 0.0), 0, 1))
            accepted.append(ByDocument.from_whole_documents(left))
        return AcceptanceEvidence(ByDocument.from_whole_documents(drafts), accepted)

    return found


def shifted(shift: float):
    return lambda n, icc: accepting(n, icc, shift=shift)


def measures_length(verdict) -> None:
    """The expected length is 1 + the recorded shares."""
    assert abs(verdict.estimate - LENGTH) < 0.2


LENGTH = 1 + sum(RECORD)
GIVEN = {"thresholds": {"length": LENGTH}, "draws": 20}
SLACK = 0.05 * LENGTH / len(RECORD)  # points by which each position must fall, for a length of 0.95 of the record
ENG_5 = [
    Case("as on record", "holds", accepting(), least=0.8, **GIVEN),
    Case("better than on record", "holds", accepting(shift=0.05), **GIVEN),
    Case("acceptance length falls from 3.05 to 2.45", "fails", accepting(shift=-0.15), **GIVEN),
    Case("one position less is drafted", "fails", accepting(positions=3), **GIVEN),
    Case("few documents", "tied", accepting(20), **GIVEN),
    Case("nothing on record", "value", accepting(), check=measures_length),
    *celled("at the slack", "edge", shifted(-SLACK), **GIVEN),
    *celled("lower by twice the slack", "power", shifted(-2 * SLACK), n=(200,), **GIVEN),
]

CASES = {"ENG-1": ENG_1, "ENG-2": ENG_2, "ENG-3": ENG_3, "ENG-4": ENG_4, "ENG-5": ENG_5, "ENG-6": ENG_6, "ENG-7": ENG_7}
