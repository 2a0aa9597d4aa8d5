"""Requests whose true ratio of total times is known; a pair shares its prompts and the mood of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from emad_ref.audit.finding import Finding
from emad_ref.claims.emad_f2 import SpeedupEvidence, TimedBatch
from emad_ref.statistics.units import ByPair
from emad_ref.statistics.verdicts import Verdict
from tests.questions.simulation import Case, celled

PAIRS, NOISE = 30, 0.05
SLOWER = {"full depth": 1.0, "generate": 0.9}  # speeds of baselines, full depth's being 1
COMPILED = {"full depth": 0.8, "generate": 0.7, "compiled generate": 1.0}


def timed(
    *ratios: float,
    speeds: Mapping[str, float] = SLOWER,
    pairs: int = PAIRS,
    unusable: str = "",
    noise: float = NOISE,
):
    """Per batch size, the point ``ratio`` times as fast as a baseline of speed 1."""

    def found(rng: np.random.Generator) -> SpeedupEvidence:
        batches = {}
        for batch, ratio in enumerate(ratios, start=1):
            mood = 0.2 * np.exp(0.3 * rng.standard_normal(pairs))

            def seconds(speed: float, mood: np.ndarray = mood) -> ByPair:
                return ByPair(mood * np.exp(noise * rng.standard_normal(pairs)) / speed)

            baselines = {name: seconds(speed) for name, speed in speeds.items()}
            batches[batch] = TimedBatch(seconds(ratio), baselines)
        return SpeedupEvidence(batches, unusable, "not tried" if "compiled generate" not in speeds else "")

    return found


def mixed(total: float, pairs: int = 60):
    """Half of the requests short and twice as fast, half long and hardly: ``total`` times as fast together. The mean of
    each one's own ratio would say 1.45."""

    def found(rng: np.random.Generator) -> SpeedupEvidence:
        long = rng.permutation(pairs) % 2 == 0
        full = np.where(long, 9.0, 1.0)
        point = np.where(long, 10 / total - 0.5, 0.5)
        full, point = (arm * np.exp(NOISE * rng.standard_normal(pairs)) for arm in (full, point))
        return SpeedupEvidence({1: TimedBatch(ByPair(point), {"full depth": ByPair(full)})})

    return found


def the_same_twice(rng: np.random.Generator) -> SpeedupEvidence:
    """One arm under two names."""
    found = timed(1.0)(rng)
    return replace(found, batches={1: replace(found.batches[1], baselines={"full depth": found.batches[1].adaptive})})


def checked(found, passed: bool, detail: str):
    """What was emitted while the clock ran has been looked at."""

    def looked_at(rng: np.random.Generator) -> SpeedupEvidence:
        made, check = found(rng), Finding("timed", passed, detail, 96, 0)
        return replace(made, batches={rows: replace(each, check=check) for rows, each in made.batches.items()})

    return looked_at


def names_the_difference(verdict: Verdict) -> None:
    assert "adaptive, row 0: 3 tokens" in verdict.reason
    (broken,) = [leg for leg in verdict.legs if leg.outcome == "falsified"]
    assert broken.name == "batch 1: timed requests"


def lists_what_was_compared(verdict: Verdict) -> None:
    (leg,) = [leg for leg in verdict.legs if leg.name == "batch 1: timed requests"]
    assert (leg.outcome, leg.n, leg.unit) == ("measured", 96, "tokens compared")


def lists_the_ratio(verdict: Verdict) -> None:
    assert verdict.reason == "no usable point: random weights"
    numbers = {leg.name: leg for leg in verdict.legs if leg.outcome == "measured"}
    assert set(numbers) == {"batch 1, against full depth", "batch 1, against generate"}
    assert abs(numbers["batch 1, against full depth"].estimate - 1.33) < 0.1


UNUSABLE = "no usable point: random weights"
CASES = [
    Case("a third faster", "holds", timed(1.33, 1.3), draws=30),
    Case("as fast as all baselines ask, the compiled one too", "holds", timed(1.3, speeds=COMPILED), draws=30),
    Case("faster than generate, which is as fast as full depth", "holds",
         timed(1.3, speeds={"full depth": 1.0, "generate": 1.0}), draws=30, least=0.8),
    Case("as fast", "fails", timed(1.0, pairs=60), draws=30),
    Case("half the threshold's gain, 200 pairs", "fails", timed(1.05, pairs=200), draws=30, least=0.8),
    Case("the same arm twice", "fails", the_same_twice, draws=30),
    Case("slower than generate", "fails", timed(1.3, speeds={"full depth": 1.0, "generate": 1.5}), draws=30),
    Case("slower than generate, on a machine that does something else besides", "fails",
         timed(1.3, speeds={"full depth": 1.0, "generate": 1.9}, noise=0.3), draws=30, least=0.8),
    Case("faster than generate, by less than a tenth", "fails",
         timed(1.3, speeds={"full depth": 1.0, "generate": 1.26}, pairs=120), draws=30, least=0.8),
    Case("slower than compiled steps alone", "fails", timed(0.9, speeds=COMPILED), draws=30),
    Case("faster in batches of one alone", "fails", timed(1.33, 1.0, pairs=60), draws=30, least=0.9),
    *celled("faster by the threshold", "edge", lambda n, _: timed(1.1, pairs=n), icc=(0.0,), draws=20),
    *celled("by the threshold, at two batch sizes and against each of three", "edge",
            lambda n, _: timed(1.1, 1.1, speeds=dict.fromkeys(COMPILED, 1.0), pairs=n), icc=(0.0,), draws=20),
    *celled("by the threshold, on a machine that does something else besides", "edge",
            lambda n, _: timed(1.1, speeds=dict.fromkeys(COMPILED, 1.0), pairs=n, noise=0.4), icc=(0.0,), draws=20),
    *celled("a mix of requests by the threshold", "edge", lambda n, _: mixed(1.1, n), icc=(0.0,), draws=20),
    *celled("twice the threshold's gain, two batch sizes", "power", lambda n, _: timed(1.2, 1.2, pairs=n),
            icc=(0.0,), wanted="survived"),
    *celled("as fast, two batch sizes", "power", lambda n, _: timed(1.0, 1.0, pairs=n), icc=(0.0,)),
    Case("a mix of requests, faster", "holds", mixed(1.25, 120), draws=20, least=0.9),
    Case("what was timed has been looked at", "holds", checked(timed(1.33), True, "96 positions compared, 0 ties"),
         draws=5, check=lists_what_was_compared),
    Case("what was timed is not what was asked", "fails",
         checked(timed(1.33), False, "adaptive, row 0: 3 tokens"), draws=5, check=names_the_difference),
    Case("nor is it so on random weights", "fails",
         checked(timed(1.33, unusable=UNUSABLE), False, "adaptive, row 0: 3 tokens"), draws=5,
         check=names_the_difference),
    Case("no point that F1 lets stand", "premise", timed(1.33, unusable=UNUSABLE), draws=5, check=lists_the_ratio),
    Case("nothing was timed", "premise", timed()),
]  # fmt: skip
