"""Simulated requests of a pair with known times, FLOPs and scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.models.generation import LOOKUP
from pytest_emad.claims.speculation import (
    EMAD_ARMS,
    NONE,
    SWITCHING_ARMS,
    ComposedSpeculation,
    SpeculationEvidence,
    SwitchingScore,
    SwitchingVsSpeculationEvidence,
)
from pytest_emad.measurements.pair_timing import TRANSFORMERS_NAMES
from pytest_emad.screening.drafts import ASSISTED
from pytest_emad.statistics.accuracy import TaskAccuracy
from pytest_emad.statistics.units import ByItem, ByPair
from pytest_emad.statistics.verdicts import Verdict
from tests.claims.pair_items import covers, raced, right
from tests.claims.simulation import Case, celled

# ---------------------------------------------------------------- EAD-F2
#
# Requests with known ratios of time and work between switching and speculation, and items of which switching keeps
# a known share of the large model's right answers.

KEPT, WANTED = 0.967, 0.415  # the paper's values: share of the score, at this saving
SAVED = 0.45


def against_speculation(
    time: float,
    work: float,
    kept: float = 1.0,
    *,
    items: int = 400,
    saving: float = SAVED,
    pairs: int = 40,
    assisted: float | None = None,
):
    """Speculation takes ``time`` and ``work`` times those of switching, which keeps ``kept`` of the score. The
    speculation of transformers takes ``assisted`` times as long; None: as long as ours."""

    def found(rng: np.random.Generator) -> SwitchingVsSpeculationEvidence:
        own = dict.fromkeys(SWITCHING_ARMS, 1.0)
        times = own | {"speculative": time, ASSISTED: time if assisted is None else assisted}
        counted = {arm: 1.0 for arm in SWITCHING_ARMS if arm not in TRANSFORMERS_NAMES}
        arms = raced(rng, times, counted | {"speculative": work}, pairs=pairs)
        alone, switched = right(rng, items, 0.8, 1 - kept, 0.0)
        return SwitchingVsSpeculationEvidence(
            arms, 8, SwitchingScore("task", "rule", switched, alone, saving, KEPT, WANTED)
        )

    return found


def uncounted(rng: np.random.Generator) -> SwitchingVsSpeculationEvidence:
    found = against_speculation(1.3, 1.3)(rng)
    return replace(found, arms={arm: replace(one, spent=None) for arm, one in found.arms.items()})


def the_same_twice(rng: np.random.Generator) -> SwitchingVsSpeculationEvidence:
    """Switching and speculation, by either implementation, are one arm under three names."""
    found = against_speculation(1.0, 1.0)(rng)
    arms, same = dict(found.arms), found.arms["speculative"]
    return replace(found, arms=arms | {"EAD": same, ASSISTED: replace(same, spent=None)})


def unassisted(time: float, work: float):
    """Transformers refuses assisted generation."""

    def found(rng: np.random.Generator) -> SwitchingVsSpeculationEvidence:
        made = against_speculation(time, work, pairs=60)(rng)
        arms = {arm: one for arm, one in made.arms.items() if arm != ASSISTED}
        return replace(made, arms=arms, absent={ASSISTED: Absent("ValueError: no cache")})

    return found


def names_the_score(verdict: Verdict) -> None:
    assert len(verdict.legs) == 3 + 1 + 1 + len(SWITCHING_ARMS)
    assert verdict.legs[3].name == "score kept on task by rule; speculation loses none"
    assert verdict.legs[3].threshold == KEPT
    (lookup,) = [leg for leg in verdict.legs if leg.name == "wall-clock, against prompt lookup"]
    assert lookup.outcome == "measured", "no speculation of the pair"


def names_assisted(verdict: Verdict) -> None:
    outcomes = {leg.name: leg.outcome for leg in verdict.legs}
    assert outcomes["wall-clock, against assisted generation"] == "falsified"
    assert outcomes["wall-clock"] == "survived"


def says_what_did_not_run(verdict: Verdict) -> None:
    (absent,) = [leg for leg in verdict.legs if leg.outcome == "not applicable"]
    assert (absent.name, absent.reason) == ("assisted", "assisted not run: ValueError: no cache")
    assert "wall-clock, against assisted generation" not in {leg.name for leg in verdict.legs}


def lists_ratios_as_numbers(verdict: Verdict) -> None:
    assert "the score does not hold: rule keeps 7" in verdict.reason
    numbers = {leg.name: leg for leg in verdict.legs}
    assert {leg.outcome for leg in verdict.legs} == {"measured"}
    assert abs(numbers["wall-clock"].estimate - 1.3) < 0.2
    assert abs(numbers["FLOPs"].estimate - 1.5) < 0.2


def lacks_items(verdict: Verdict) -> None:
    assert verdict.verdict == "inconclusive"
    assert "99 items, at least 100 are needed" in verdict.reason


def saves_too_little(verdict: Verdict) -> None:
    assert verdict.verdict == "inconclusive"
    assert "saves only 40.0%, not 41.5%" in verdict.reason


EAD_F2 = [
    Case("faster and cheaper, and keeps the score", "holds", against_speculation(1.3, 1.5, pairs=60), 20,
         check=names_the_score),
    Case("slower and dearer", "fails", against_speculation(0.8, 0.7), draws=20),
    Case("faster than our speculation, slower than transformers'", "fails",
         against_speculation(1.3, 1.5, assisted=0.8, pairs=60), draws=20, check=names_assisted),
    Case("faster and cheaper than ours, where transformers refuses", "holds", unassisted(1.3, 1.5), draws=10,
         check=says_what_did_not_run),
    Case("faster, but dearer", "fails", against_speculation(1.3, 0.7), draws=20),
    Case("faster and cheaper, and loses a quarter of the score", "premise",
         against_speculation(1.3, 1.5, 0.75, items=800), draws=20, check=lists_ratios_as_numbers),
    Case("too few items to show a score", "tied", against_speculation(1.3, 1.5, items=99), draws=5, check=lacks_items),
    Case("keeps the score where it saves less than the paper", "tied",
         against_speculation(1.3, 1.5, saving=0.40), draws=5, check=saves_too_little),
    Case("one arm under three names", "tied", the_same_twice, draws=10),
    *celled("cheaper, and as fast", "edge", lambda n, _: against_speculation(1.0, 2.0, pairs=n), icc=(0.0,), draws=10),
    *celled("faster and cheaper, keeps the paper's share", "edge",
            lambda n, _: against_speculation(1.3, 1.5, KEPT, items=5 * n), icc=(0.0,), draws=10),
    *celled("by nearly a fifth", "power", lambda n, _: against_speculation(1.18, 1.18, pairs=n),
            icc=(0.0,), wanted="survived"),
    *celled("as much slower", "power", lambda n, _: against_speculation(1 / 1.18, 1.5, pairs=n), icc=(0.0,)),
    Case("nobody counts FLOPs", "premise", uncounted),
]  # fmt: skip


# ---------------------------------------------------------------- EMAD-R5
#
# Requests with known ratios of time and work between EMAD and speculation; items of which EMAD loses some.

WORK = {"large": 2.0, "EMAD": 1.0, "speculative": 2.6, "self-speculative": 1.8}
ACCEPTED = {"speculative": 0.7, "self-speculative": 0.8}
GUESS, EMAD_SAVED = 0.25, 0.4
WITHOUT_ITSELF = tuple(arm for arm in EMAD_ARMS if arm != "self-speculative")


UNUSABLE = Absent("no usable point", "premise")


def emad(
    faster: float,
    drop: float,
    arms: tuple[str, ...] = EMAD_ARMS,
    *,
    items: int = 2000,
    pairs: int = 40,
    saving: float = EMAD_SAVED,
    unusable: Absent | None = None,
    assisted: float = 1.0,
):
    """``faster``: than our speculation; transformers' takes ``assisted`` times as long. ``drop``: loss of accuracy
    on one task of two, nothing gained; full depth is always right. Either arm guesses a third task independently.
    """

    def found(rng: np.random.Generator) -> SpeculationEvidence:
        times = dict.fromkeys(arms, 1.0) | {"EMAD": 1 / faster, ASSISTED: assisted}
        drafting = {arm: rate for arm, rate in ACCEPTED.items() if arm in arms}
        made = raced(rng, times, {arm: WORK[arm] for arm in arms if arm in WORK}, drafting, pairs=pairs)
        tasks = {
            "task": TaskAccuracy(*right(rng, items, 1.0, drop, 0.0), GUESS, saving),
            "other": TaskAccuracy(*right(rng, items, 1.0, 0.0, 0.0), GUESS, saving),
            "guessed": TaskAccuracy(
                *(ByItem.from_independent_items(rng.random(items) < GUESS) for _ in range(2)), GUESS, EMAD_SAVED
            ),
        }
        return SpeculationEvidence(made, 8, "emad", 4 if "self-speculative" in arms else None, tasks, unusable)

    return found


def at_equal_flops(faster: float, drop: float, pairs: int = 40, items: int = 2000):
    """Speculation saves 20 %, the point 50 %: 40 % of requests at the point spend as much. Speculation loses 2.5 times
    as much as the mixture, which is ``faster`` than speculation."""
    share, point = 0.4, 0.6  # the point's time; full depth's is 1

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
    """EMAD is full depth under another name: no task counts."""
    return emad(1.5, 0.0, saving=0.0)(rng)


def itself(rng: np.random.Generator) -> SpeculationEvidence:
    """EMAD is timed as speculation, by either implementation."""
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
    if guessed.outcome == "measured":  # 5 % of guessed tasks count as solved
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


EMAD_R5 = [
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
    Case("no point that F1 lets stand", "premise", emad(1.5, 0.0005, unusable=UNUSABLE), check=has_no_point),
]  # fmt: skip


# ---------------------------------------------------------------- EMAD-E8
#
# Speculation with and without EMAD with a known ratio of times.

VERIFIER, BOTH = "EMAD in the verifier", "EMAD in draft and verifier"
COMPOSED_ACCEPTED = {NONE: 0.8, VERIFIER: 0.7, BOTH: 0.6}


def as_fast(verifier: float, both: float):
    """Speed of each relative to speculation without EMAD."""

    def found(rng: np.random.Generator) -> ComposedSpeculation:
        return raced(rng, {NONE: 1.0, VERIFIER: 1 / verifier, BOTH: 1 / both}, {}, COMPOSED_ACCEPTED), 8, 4

    return found


def says(verifier: float, both: float):
    def check(verdict) -> None:
        legs = {leg.name: leg for leg in verdict.legs}
        covers(legs[f"{VERIFIER}: speed against none"], verifier)
        covers(legs[f"{BOTH}: speed against none"], both)
        assert legs[f"{NONE}: speed against none"].estimate == 1.0
        assert verdict.legs[0].name.startswith(BOTH), "adaptive depth first: the row quotes it"
        for name, rate in COMPOSED_ACCEPTED.items():
            assert legs[f"{name}: acceptance"].estimate == pytest.approx(rate, abs=0.04)  # 40 runs, each within 0.1
            assert legs[f"{name}: rows whose output is the verifier's own"].estimate == 4

    return check


EMAD_E8 = [
    Case("EMAD helps, most in both", "value", as_fast(1.2, 1.5), draws=5, check=says(1.2, 1.5)),
    Case("EMAD in the draft hurts", "value", as_fast(1.1, 0.8), draws=5, check=says(1.1, 0.8)),
]


CASES = {
    "EAD-F2": EAD_F2,
    "EMAD-R5": EMAD_R5,
    "EMAD-E8": EMAD_E8,
}
