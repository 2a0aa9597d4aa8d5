"""Requests drafted and verified in known time, beside EMAD-F2's baselines and other lossless ways."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.claims.emad_x4 import SelfSpeculationEvidence
from emad_ref.measurements.latency import ADAPTIVE
from emad_ref.statistics.verdicts import Verdict
from tests.questions.cases.emad_f2 import COMPILED, checked, timed
from tests.questions.cases.emad_x1 import says
from tests.questions.simulation import Case, celled


def drafted(
    raced: Callable, beside: float | None = None, kept: float = 0.6
) -> Callable[[np.random.Generator], SelfSpeculationEvidence]:
    """``beside``: how many times faster than full depth prompt lookup is."""

    def found(rng: np.random.Generator) -> SelfSpeculationEvidence:
        made = raced(rng)
        ways = {}
        if beside is not None:
            alone = made.batches[min(made.batches)]
            full = alone.baselines["full depth"]
            ways = {ADAPTIVE: alone.adaptive, "prompt lookup": full.like(full.values / beside)}
        return SelfSpeculationEvidence(made, ways, dict.fromkeys(made.batches, kept))

    return found


def lists_what_stands_beside(verdict: Verdict) -> None:
    """Prompt lookup is twice as fast as full depth, drafting 1.33 times: it stands there, and decides nothing."""
    legs = {leg.name: leg for leg in verdict.legs if leg.outcome == "measured"}
    assert 0.6 < legs["batch 1, against prompt lookup"].estimate < 0.73
    assert legs["batch 1: verified tokens that stand"].estimate == 0.6


def says_where_the_gain_ends(verdict: Verdict) -> None:
    """The larger batch is slower: it stands beside, and decides nothing."""
    (leg,) = [leg for leg in verdict.legs if leg.name.endswith("against full depth") and leg.outcome == "measured"]
    assert not leg.name.startswith("batch 1,")
    assert 0.75 < leg.estimate < 0.85


UNTRAINED = "random weights: perplexity and accuracy of noise say nothing"

CASES = [
    Case("a third faster, and prompt lookup faster still", "holds", drafted(timed(1.33, 1.3), beside=2.0), draws=10,
         check=lists_what_stands_beside),
    Case("a third faster, several at once slower", "holds", drafted(timed(1.33, 0.8)), draws=10,
         check=says_where_the_gain_ends),
    Case("as fast", "fails", drafted(timed(1.0, pairs=60)), draws=10),
    Case("slower than compiled steps", "fails", drafted(timed(0.9, speeds=COMPILED)), draws=10),
    Case("another token than the model's own", "fails", drafted(checked(timed(1.5), False, "drafting, row 0: token 7")),
         draws=5, check=says("drafting, row 0: token 7")),
    *celled("faster by the threshold", "edge", lambda n, _: drafted(timed(1.1, pairs=n)), icc=(0.0,), draws=20),
    *celled("twice the threshold's gain", "power", lambda n, _: drafted(timed(1.2, pairs=n)), icc=(0.0,),
            wanted="survived"),
    *celled("as fast, two batch sizes", "power", lambda n, _: drafted(timed(1.0, 1.0, pairs=n)), icc=(0.0,)),
    Case("random weights", "premise", drafted(timed(1.33, unusable=UNTRAINED)), draws=5, check=says(UNTRAINED)),
    Case("nothing was timed", "premise", drafted(timed())),
]  # fmt: skip
