"""Requests whose time and work stand in a known ratio between switching and speculation, and items of which it is known
what share of the large model's right answers switching keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from emad_ref.claims.ead_f2 import ARMS, SwitchingScore, SwitchingSpeedEvidence
from emad_ref.measurements.pair_timing import TRANSFORMERS_NAMES
from emad_ref.screening.drafts import ASSISTED
from emad_ref.statistics.verdicts import Verdict
from tests.questions.cases.answered import raced, right
from tests.questions.simulation import Case, celled

KEPT, WANTED = 0.967, 0.415  # the paper's: of the score, at this saving
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
    """Speculation takes ``time`` and ``work`` times what switching does, which keeps ``kept`` of the score. By
    transformers it takes ``assisted`` times as long, None for as long as ours."""

    def found(rng: np.random.Generator) -> SwitchingSpeedEvidence:
        own = dict.fromkeys(ARMS, 1.0)
        times = own | {"speculative": time, ASSISTED: time if assisted is None else assisted}
        counted = {arm: 1.0 for arm in ARMS if arm not in TRANSFORMERS_NAMES}
        arms = raced(rng, times, counted | {"speculative": work}, pairs=pairs)
        alone, switched = right(rng, items, 0.8, 1 - kept, 0.0)
        return SwitchingSpeedEvidence(arms, 8, SwitchingScore("task", "rule", switched, alone, saving, KEPT, WANTED))

    return found


def uncounted(rng: np.random.Generator) -> SwitchingSpeedEvidence:
    found = against_speculation(1.3, 1.3)(rng)
    return replace(found, arms={arm: replace(one, spent=None) for arm, one in found.arms.items()})


def the_same_twice(rng: np.random.Generator) -> SwitchingSpeedEvidence:
    """Switching and speculation, by either implementation, are one arm under three names."""
    found = against_speculation(1.0, 1.0)(rng)
    arms, same = dict(found.arms), found.arms["speculative"]
    return replace(found, arms=arms | {"EAD": same, ASSISTED: replace(same, spent=None)})


def unassisted(time: float, work: float):
    """Transformers refuses to assist."""

    def found(rng: np.random.Generator) -> SwitchingSpeedEvidence:
        made = against_speculation(time, work, pairs=60)(rng)
        arms = {arm: one for arm, one in made.arms.items() if arm != ASSISTED}
        return replace(made, arms=arms, absent={ASSISTED: "ValueError: no cache"})

    return found


def names_the_score(verdict: Verdict) -> None:
    assert len(verdict.legs) == 3 + 1 + 1 + len(ARMS)
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


CASES = [
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
