"""Items that a large model answers at a known rate, and of which two rules that take turns keep a known share."""

from __future__ import annotations

import numpy as np
from scipy.stats import norm

from emad_ref.claims.ead_f1 import RoutedScores, SwitchingScoreEvidence, TaskAtSaving
from emad_ref.statistics.accuracy import accuracy_drop
from emad_ref.statistics.units import ByItem
from emad_ref.sweep.front import RoutedItems, mix_rules
from tests.questions.cases.answered import right
from tests.questions.simulation import Case, celled, clustered

ACCURACY = 0.8
KEPT = {"llama": 0.967, "qwen": 0.929}
SAVED = (0.4, 0.5)  # by the two neighbours
SHARE, ABOVE, BELOW = 0.45, 0.6, 0.25  # of the large model: wanted, and under either rule
PROBABILITY = (SHARE - BELOW) / (ABOVE - BELOW)
GAINED = 0.2  # of the items that the large model gets wrong, either rule gets right


def kept(shares: dict[str, float], items: int = 300, lost: float = 0.02):
    """One task; ``shares``: result → Σ candidate / Σ reference in expectation, ``lost`` of it or more, some gained."""

    def found(rng: np.random.Generator) -> SwitchingScoreEvidence:
        routed = []
        for result, share in shares.items():
            gained = max(0.0, share - 1 + lost) * ACCURACY / (1 - ACCURACY)
            alone, switched = right(rng, items, ACCURACY, max(lost, 1 - share), gained)
            routed.append(TaskAtSaving("task", result, RoutedScores("rules", switched, switched, alone, 0.41, SAVED)))
        return SwitchingScoreEvidence(tuple(routed))

    return found


def mixture(share: float, gained: float = GAINED):
    """One task, one result: two rules mixed on the judged items to exactly the wanted share, as a run does.

    Items of a cluster, three each, are alike in difficulty: hard ones are missed more often and cost more tokens. In
    expectation the mixture keeps ``share`` of the large model's score; of what that gets wrong, ``gained`` is right.
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
                # what is kept of right answers, so that with what is gained of wrong ones Σ is (share + off) · Σ alone
                hold = share + off - gained * (1 - ACCURACY) / ACCURACY
                chance = np.where(alone, hold, gained)
                by_large = rng.binomial(emitted, part + 0.2 * (hard - 0.5))
                runs.append(RoutedItems((rng.random(len(hard)) < chance).astype(float), emitted, by_large))
            found = mix_rules(runs, SHARE, rng)
            score, dealt = ByItem(found.score, cluster), ByItem(found.dealt == 1, cluster)
            judged = RoutedScores("rules", score, dealt, ByItem(alone, cluster), 0.41, SAVED)
            return SwitchingScoreEvidence((TaskAtSaving("task", "llama", judged),))

        return found

    return made


def always_large(items: int, icc: float):
    """A rule that never leaves the large model keeps all of its score."""

    def found(rng: np.random.Generator) -> SwitchingScoreEvidence:
        hard, cluster = clustered(rng, items, 3 if icc else 1, icc)
        alone = ByItem(norm.cdf(hard) < ACCURACY, cluster)
        own = alone.like(alone.values.astype(float))
        return SwitchingScoreEvidence(
            tuple(
                TaskAtSaving("task", result, RoutedScores("rules", own, alone, alone, 0.0, (0.0, 0.0)))
                for result in KEPT
            )
        )

    return found


def nothing_saves(rng: np.random.Generator) -> SwitchingScoreEvidence:
    return SwitchingScoreEvidence(tuple(TaskAtSaving("task", result, None) for result in KEPT))


def one_task_is_alike(rng: np.random.Generator) -> SwitchingScoreEvidence:
    """Beside a task on which all is kept, one on which both models are as good."""
    large, small = right(rng, 120, ACCURACY, 0.0, 0.0)
    gap = accuracy_drop(large, small, threshold=0.1)
    return SwitchingScoreEvidence(
        kept({"llama": 1.05, "qwen": 1.05})(rng).routed, (("other", gap, "0.800 against 0.800"),)
    )


def nobody_is_right(rng: np.random.Generator) -> SwitchingScoreEvidence:
    none = ByItem.distinct(np.zeros(120, dtype=bool))
    return SwitchingScoreEvidence(
        (TaskAtSaving("task", "llama", RoutedScores("rules", none, none, none, 0.41, SAVED)),)
    )


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


# Of 1,000 items a Wald test finds twice the paper's loss, 6.6 %, nine times in ten
CASES = [
    Case("more than all of the score", "holds", kept({"llama": 1.05, "qwen": 1.05}), 10, check=says_what_is_saved),
    Case("a task that cannot tell the models apart is named", "holds", one_task_is_alike, check=names_the_task),
    Case("a quarter is lost", "fails", kept({"llama": 0.75, "qwen": 0.75}, 100), draws=20),
    Case("lost at the larger saving only", "fails", kept({"llama": 1.05, "qwen": 0.75}), draws=10),
    *celled("exactly the paper's share", "edge", mixture(KEPT["llama"])),
    *celled("exactly the paper's share, few items differ", "edge", mixture(KEPT["llama"], gained=0.0), n=(100, 200)),
    *celled("twice the paper's loss", "power", mixture(1 - 2 * (1 - KEPT["llama"])), n=(1000,)),
    *celled("a rule that always asks the large model", "holds", always_large, n=(200,), check=never_falsified),
    Case("not even the small model saves as much", "premise", nothing_saves),
    Case("the large model is never right", "premise", nobody_is_right),
]
