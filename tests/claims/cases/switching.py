"""Simulated items of a pair on which switching loses or gains a known amount."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from pytest_emad.claims.switching import (
    ConstantEvidence,
    GatedSpeculationEvidence,
    HighEntropyErrorEvidence,
    SwitchingScoreEvidence,
)
from pytest_emad.measurements.pair_routing import RuleMixtureScores
from pytest_emad.statistics.accuracy import estimate_accuracy_drop
from pytest_emad.statistics.units import ByItem
from pytest_emad.sweep.front import RoutedTaskItems, mix_runs_to_large_share
from tests.claims.pair_items import covers, right
from tests.claims.simulation import SCORED, Case, celled, clustered

# ---------------------------------------------------------------- EAD-F1
#
# Items that a large model answers at a known rate, and two switching rules that keep a known share of it.

ACCURACY = 0.8
KEPT = {"llama": 0.967, "qwen": 0.929}
SAVED = (0.4, 0.5)  # by the two neighbours
SHARE, ABOVE, BELOW = 0.45, 0.6, 0.25  # of the large model: requested, and under either rule
PROBABILITY = (SHARE - BELOW) / (ABOVE - BELOW)
GAINED = 0.2  # share of the large model's wrong items that either rule answers right


def kept(shares: dict[str, float], items: int = 300, lost: float = 0.02):
    """One task; ``shares``: result → expected Σ candidate / Σ reference; ``lost`` or more is lost, some gained."""

    def found(rng: np.random.Generator) -> SwitchingScoreEvidence:
        routed = {}
        for result, share in shares.items():
            gained = max(0.0, share - 1 + lost) * ACCURACY / (1 - ACCURACY)
            alone, switched = right(rng, items, ACCURACY, max(lost, 1 - share), gained)
            routed["task", result] = RuleMixtureScores("rules", switched, switched, 0.41, SAVED), alone
        return SwitchingScoreEvidence(routed)

    return found


def mixture(share: float, gained: float = GAINED):
    """One task, one result: two rules mixed on the judged items to exactly the requested share, as a run does.

    The three items of a cluster have one difficulty: hard ones are missed more often and cost more tokens. In
    expectation the mixture keeps ``share`` of the large model's score; of its wrong items, ``gained`` become right.
    """

    def made(items: int, icc: float):
        def found(rng: np.random.Generator) -> SwitchingScoreEvidence:
            each = 3 if icc else 1
            hard, cluster = clustered(rng, items, each, icc)
            hard = norm.cdf(hard)
            alone = rng.random(len(hard)) < ACCURACY + 0.2 * (0.5 - hard)
            emitted = rng.integers(30, 90, len(hard))
            runs = []
            for part, off in ((ABOVE, 0.03), (BELOW, -0.03 * PROBABILITY / (1 - PROBABILITY))):
                # kept share of right answers; with the gained share of wrong ones Σ is (share + off) · Σ alone
                hold = share + off - gained * (1 - ACCURACY) / ACCURACY
                chance = np.where(alone, hold, gained)
                by_large = rng.binomial(emitted, part + 0.2 * (hard - 0.5))
                runs.append(RoutedTaskItems((rng.random(len(hard)) < chance).astype(float), emitted, by_large))
            found = mix_runs_to_large_share(runs, SHARE, rng)
            score, dealt = ByItem(found.score, cluster), ByItem(found.dealt == 1, cluster)
            judged = RuleMixtureScores("rules", score, dealt, 0.41, SAVED), ByItem(alone, cluster)
            return SwitchingScoreEvidence({("task", "llama"): judged})

        return found

    return made


def always_large(items: int, icc: float):
    """A rule that always uses the large model keeps all of its score."""

    def found(rng: np.random.Generator) -> SwitchingScoreEvidence:
        hard, cluster = clustered(rng, items, 3 if icc else 1, icc)
        alone = ByItem(norm.cdf(hard) < ACCURACY, cluster)
        own = alone.with_values(alone.values.astype(float))
        judged = RuleMixtureScores("rules", own, alone, 0.0, (0.0, 0.0)), alone
        return SwitchingScoreEvidence({("task", result): judged for result in KEPT})

    return found


def nothing_saves(rng: np.random.Generator) -> SwitchingScoreEvidence:
    return SwitchingScoreEvidence({("task", result): None for result in KEPT})


def one_task_is_alike(rng: np.random.Generator) -> SwitchingScoreEvidence:
    """One task on which everything is kept, and one on which both models are equal."""
    large, small = right(rng, 120, ACCURACY, 0.0, 0.0)
    gap = estimate_accuracy_drop(large, small, threshold=0.1)
    return SwitchingScoreEvidence(
        kept({"llama": 1.05, "qwen": 1.05})(rng).routed, (("other", gap, "0.800 against 0.800"),)
    )


def nobody_is_right(rng: np.random.Generator) -> SwitchingScoreEvidence:
    none = ByItem.from_independent_items(np.zeros(120, dtype=bool))
    return SwitchingScoreEvidence({("task", "llama"): (RuleMixtureScores("rules", none, none, 0.41, SAVED), none)})


def says_what_is_saved(verdict) -> None:
    saved = [leg for leg in verdict.legs if leg.name.endswith("saving")]
    assert [(leg.estimate, leg.threshold) for leg in saved] == [(0.41, 0.415), (0.41, 0.67)]
    assert "no rule comes within" not in saved[0].reason
    assert "no rule comes within 5 points: one saves 40.0%, the other 50.0%" in saved[1].reason


def never_falsified(verdict) -> None:
    assert verdict.verdict != "falsified"


def names_the_task(verdict) -> None:
    (leg,) = [leg for leg in verdict.legs if leg.name.startswith("other")]
    assert (leg.outcome, leg.estimate, leg.n) == ("not applicable", 0.0, 120)
    assert leg.interval is not None
    assert leg.reason == "0.800 against 0.800"


# With 1,000 items a Wald test finds twice the paper's loss, 6.6 %, nine times in ten
EAD_F1 = [
    Case("more than all of the score", "holds", kept({"llama": 1.05, "qwen": 1.05}), 10, check=says_what_is_saved),
    Case("a task that cannot tell the models apart is named", "holds", one_task_is_alike, check=names_the_task),
    Case("a quarter is lost", "fails", kept({"llama": 0.75, "qwen": 0.75}, 100), draws=20),
    Case("lost at the larger saving only", "fails", kept({"llama": 1.05, "qwen": 0.75}), draws=10),
    *celled("exactly the paper's share", "edge", mixture(KEPT["llama"]), n=SCORED),
    *celled("exactly the paper's share, few items differ", "edge", mixture(KEPT["llama"], gained=0.0), n=SCORED),
    *celled("twice the paper's loss", "power", mixture(1 - 2 * (1 - KEPT["llama"])), n=(1000,)),
    *celled("a rule that always asks the large model", "holds", always_large, n=(200,), check=never_falsified),
    Case("not even the small model saves as much", "premise", nothing_saves),
    Case("the large model is never right", "premise", nobody_is_right),
]


# ---------------------------------------------------------------- building blocks
#
# Rules that differ in one constant: each loses a known share of items against the default value.

CONSTANT_ACCURACY = 0.5
REFERENCE, SAVING = 4, 0.415


def loses(symbol: str, losses: Mapping[int, float], items: int = 200):
    """``losses``: value → drop of the expected score; the large model writes a share 1 / value of the tokens."""

    def found(rng: np.random.Generator) -> ConstantEvidence:
        own = rng.random(items) < CONSTANT_ACCURACY
        varied = {}
        for value, loss in losses.items():
            change = rng.random(items) < abs(loss) / (CONSTANT_ACCURACY if loss > 0 else 1 - CONSTANT_ACCURACY)
            score = own & ~change if loss > 0 else own | change
            varied[value] = ByItem.from_independent_items(score.astype(float)), 1 / value
        reference = ByItem.from_independent_items(own.astype(float)), 0.25
        return ConstantEvidence("task", symbol, SAVING, REFERENCE, reference, varied)

    return found


def says_constant(symbol: str, losses: Mapping[int, float]):
    def check(verdict) -> None:
        legs = iter(verdict.legs)
        for value, loss in losses.items():
            lost, share = next(legs), next(legs)
            assert lost.name == f"task, {symbol} = {value} for {REFERENCE}: score lost at a saving of 41.5%"
            covers(lost, loss)
            assert (share.estimate, share.interval) == (1 / value, None)
            assert share.name.endswith("at the same τ, 25.0% before")
        assert next(legs, None) is None

    return check


# ---------------------------------------------------------------- EAD-A1
#
# Values of w that lose or gain a known share of the items.

WINDOW_LOSSES = {1: 0.3, 5: 0.0, 20: -0.1}
EAD_A1 = [
    Case(
        "a loss, none, and a gain",
        "value",
        loses("w", WINDOW_LOSSES),
        draws=20,
        check=says_constant("w", WINDOW_LOSSES),
    )
]


# ---------------------------------------------------------------- EAD-A2
#
# Values of d_min that lose or gain a known share of the items.

DURATION_LOSSES = {1: 0.3, 5: 0.0, 20: -0.1}
EAD_A2 = [
    Case(
        "a loss, none, and a gain",
        "value",
        loses("d_min", DURATION_LOSSES),
        draws=20,
        check=says_constant("d_min", DURATION_LOSSES),
    )
]


# ---------------------------------------------------------------- EAD-A3
#
# Tokens that are decisive, written by the small model, or wrong, each with a known probability that varies by item.


def tokens(decisive: float, small: float, wrong: float, calm_wrong: float, items: int = 100):
    """Items of 20 to 60 tokens; an item's error probability is up to twice the mean, or 0."""

    def found(rng: np.random.Generator) -> HighEntropyErrorEvidence:
        length, difficulty = rng.integers(20, 60, items), rng.uniform(0, 2, items)
        high = rng.binomial(length, decisive)
        high_small, calm = rng.binomial(high, small), rng.binomial(length - high, small)
        return HighEntropyErrorEvidence(
            "task, rule",
            *map(ByItem.from_independent_items, (high, high_small, rng.binomial(high_small, wrong * difficulty))),
            ByItem.from_independent_items(calm),
            ByItem.from_independent_items(rng.binomial(calm, calm_wrong * difficulty)),
        )

    return found


def says_shares(*shares: float):
    def check(verdict) -> None:
        for leg, share in zip(verdict.legs, shares, strict=True):
            covers(leg, share)

    return check


def none_and_all_alike(verdict) -> None:
    """No decisive token, and no other token is wrong in any item."""
    first, second, third = verdict.legs
    assert (first.estimate, first.n, first.reason) == (None, 0, "there is no such token")
    assert second.estimate is None
    assert (third.estimate, third.interval) == (0.0, None)
    assert "no spread" in third.reason


EAD_A3 = [
    Case(
        "half of the decisive tokens, often wrong",
        "value",
        tokens(0.3, 0.5, 0.4, 0.1),
        5,
        check=says_shares(0.5, 0.4, 0.1),
    ),
    Case("few of them, seldom wrong", "value", tokens(0.5, 0.2, 0.1, 0.3), 5, check=says_shares(0.2, 0.1, 0.3)),
    Case("no decisive token", "value", tokens(0.0, 1.0, 0.0, 0.0), check=none_and_all_alike),
]


# ---------------------------------------------------------------- EAD-A4
#
# Switching and gated speculation with scores that differ by a known share of the items.

GATED_ACCURACY = 0.5
WAYS = ("rules", "speculative, k = 2")


def gating(lost: float, gained: float):
    def found(rng: np.random.Generator) -> GatedSpeculationEvidence:
        switched, gated = (
            column.with_values(column.values.astype(float)) for column in right(rng, 200, GATED_ACCURACY, lost, gained)
        )
        return GatedSpeculationEvidence("task", 0.25, switched, gated, WAYS)

    return found


def none_is_cheap_enough(rng: np.random.Generator) -> GatedSpeculationEvidence:
    return replace(gating(0.0, 0.0)(rng), gated=None)


def says_gating(drop: float):
    def check(verdict) -> None:
        lost, switched, gated = verdict.legs
        assert lost.name == "task: score lost at a large-model share of 25.0%"
        assert lost.reason == "speculation (speculative, k = 2) for EAD (rules)"
        covers(lost, drop)
        assert switched.estimate - gated.estimate == pytest.approx(lost.estimate, abs=1e-12)

    return check


def says_none(verdict) -> None:
    assert (verdict.estimate, verdict.n) == (0.25, 200)
    assert "no gate leaves the large model as little" in verdict.reason


EAD_A4 = [
    Case("gating loses a fifth", "value", gating(0.4, 0.0), draws=20, check=says_gating(0.2)),
    Case("gating gains a fifth", "value", gating(0.0, 0.4), draws=20, check=says_gating(-0.2)),
    Case("no gate is cheap enough", "value", none_is_cheap_enough, check=says_none),
]


CASES = {
    "EAD-F1": EAD_F1,
    "EAD-A1": EAD_A1,
    "EAD-A2": EAD_A2,
    "EAD-A3": EAD_A3,
    "EAD-A4": EAD_A4,
}
