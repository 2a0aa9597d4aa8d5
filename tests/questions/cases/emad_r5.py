"""Requests whose time and work stand in known ratios between EMAD and speculation; items of which EMAD loses some."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from emad_ref.claims.emad_r5 import ARMS, SpeculationEvidence
from emad_ref.screening.drafts import ASSISTED, LOOKUP
from emad_ref.statistics.accuracy import TaskAccuracy
from emad_ref.statistics.units import ByItem, ByPair
from emad_ref.statistics.verdicts import Verdict
from tests.questions.cases.answered import covers, raced, right
from tests.questions.simulation import Case, celled

WORK = {"large": 2.0, "EMAD": 1.0, "speculative": 2.6, "self-speculative": 1.8}
ACCEPTED = {"speculative": 0.7, "self-speculative": 0.8}
GUESS, SAVED = 0.25, 0.4
WITHOUT_ITSELF = tuple(arm for arm in ARMS if arm != "self-speculative")


def emad(
    faster: float,
    drop: float,
    arms: tuple[str, ...] = ARMS,
    *,
    items: int = 2000,
    pairs: int = 40,
    saving: float = SAVED,
    unusable: str = "",
    assisted: float = 1.0,
):
    """``faster``: than speculation, ours; by transformers that takes ``assisted`` times as long. ``drop``: of accuracy
    on one task of two, nothing gained; full depth is always right. A third task is guessed by either arm, each for
    itself.
    """

    def found(rng: np.random.Generator) -> SpeculationEvidence:
        times = dict.fromkeys(arms, 1.0) | {"EMAD": 1 / faster, ASSISTED: assisted}
        drafting = {arm: rate for arm, rate in ACCEPTED.items() if arm in arms}
        made = raced(rng, times, {arm: WORK[arm] for arm in arms if arm in WORK}, drafting, pairs=pairs)
        tasks = {
            "task": TaskAccuracy(*right(rng, items, 1.0, drop, 0.0), GUESS, saving),
            "other": TaskAccuracy(*right(rng, items, 1.0, 0.0, 0.0), GUESS, saving),
            "guessed": TaskAccuracy(*(ByItem.distinct(rng.random(items) < GUESS) for _ in range(2)), GUESS, SAVED),
        }
        return SpeculationEvidence(made, 8, "emad", 4 if "self-speculative" in arms else None, tasks, unusable)

    return found


def at_equal_flops(faster: float, drop: float, pairs: int = 40, items: int = 2000):
    """Speculation saves 20 %, the point 50 %: 40 % of requests at it spend as much. It loses 2.5 times what the mixture
    does, which is ``faster`` than speculation."""
    share, point = 0.4, 0.6  # the point's time, full depth's being 1

    def found(rng: np.random.Generator) -> SpeculationEvidence:
        made = emad(1 / point, drop / share, items=items, pairs=pairs)(rng)
        spent = {"large": 1.0, "EMAD": 0.5, "speculative": 0.8, "self-speculative": 0.9}
        arms = {
            name: replace(arm, spent=ByPair(np.full(pairs, spent[name])) if name in spent else None)
            for name, arm in made.arms.items()
        }
        slower = faster * (share * point + 1 - share)
        both = {
            name: replace(arms[name], seconds=ByPair(arms[name].seconds.values * slower))
            for name in ("speculative", ASSISTED)
        }
        return replace(made, arms=arms | both)

    return found


def never_fires(rng: np.random.Generator) -> SpeculationEvidence:
    """EMAD is full depth under another name: no task is exercised."""
    return emad(1.5, 0.0, saving=0.0)(rng)


def itself(rng: np.random.Generator) -> SpeculationEvidence:
    """EMAD is timed as speculation was, by either implementation."""
    found = emad(1.0, 0.0)(rng)
    arms, same = dict(found.arms), found.arms["speculative"]
    return replace(found, arms=arms | {"EMAD": same, ASSISTED: replace(same, spent=None)})


def lists_the_rivals(verdict: Verdict) -> None:
    legs = {leg.name: leg for leg in verdict.legs}
    covers(legs["emad against self-speculation after layer 4, k = 4"], 1.5)
    for arm in ACCEPTED:
        covers(legs[f"FLOPs against {arm}"], WORK[arm])
    assert legs["emad against assisted generation"].outcome == "survived"
    covers(legs[f"emad against {LOOKUP}"], 1.5)
    guessed = legs["emad: accuracy on guessed"]
    if guessed.outcome == "measured":  # one time in twenty guesses pass for an answer
        assert "not solved" in guessed.reason


def lists_one_rival(verdict: Verdict) -> None:
    assert not any("self-spec" in leg.name for leg in verdict.legs)


def names_the_mixture(verdict: Verdict) -> None:
    names = [leg.name for leg in verdict.legs]
    assert names[0] == "emad on 40% of requests, full depth on the others against speculation, k = 4"
    assert names[1] == "emad on 40% of requests, full depth on the others against assisted generation"
    assert names[2] == "emad on 40% of requests, full depth on the others: accuracy on task"


def nothing_could_be_lost(verdict: Verdict) -> None:
    assert "no task counts at emad" in verdict.reason
    assert "not exercised: saves 0.0 %" in verdict.reason
    assert verdict.legs[0].name == "emad against speculation, k = 4"
    assert {leg.outcome for leg in verdict.legs} == {"measured"}


def has_no_point(verdict: Verdict) -> None:
    assert verdict.reason == "no usable point"
    assert {leg.outcome for leg in verdict.legs} == {"measured"}


CASES = [
    Case("faster, and loses nothing", "holds", emad(1.5, 0.0005), draws=10, check=lists_the_rivals),
    Case("it cannot draft for itself", "holds", emad(1.5, 0.0005, WITHOUT_ITSELF), draws=5, check=lists_one_rival),
    Case("faster than our speculation, slower than transformers'", "fails",
         emad(1.5, 0.0005, assisted=0.5, pairs=60), draws=10),
    Case("faster, and loses five points", "fails", emad(1.5, 0.05), draws=10),
    Case("slower, and loses nothing", "fails", emad(0.8, 0.0005, pairs=60), draws=10),
    Case("at equal FLOPs faster, and loses little", "holds", at_equal_flops(1.5, 0.001), 10, check=names_the_mixture),
    Case("at equal FLOPs slower", "fails", at_equal_flops(0.8, 0.001), draws=10),
    *celled("as fast, and loses nothing", "edge", lambda n, _: emad(1.0, 0.0005, pairs=n), icc=(0.0,), draws=10),
    *celled("faster, and loses exactly a point", "edge", lambda n, _: emad(1.5, 0.01, pairs=n), icc=(0.0,), draws=10),
    *celled("at equal FLOPs as fast", "edge", lambda n, _: at_equal_flops(1.0, 0.001, n), icc=(0.0,), draws=10),
    *celled("at equal FLOPs loses exactly a point", "edge", lambda n, _: at_equal_flops(1.5, 0.01, n),
            icc=(0.0,), draws=10),
    *celled("faster, and loses two points", "power", lambda n, _: emad(1.5, 0.02, pairs=n), icc=(0.0,)),
    Case("speculation under another name", "tied", itself, draws=10),
    Case("a rule that never fires", "premise", never_fires, draws=3, check=nothing_could_be_lost),
    Case("no point that F1 lets stand", "premise", emad(1.5, 0.0005, unusable="no usable point"), check=has_no_point),
]  # fmt: skip
