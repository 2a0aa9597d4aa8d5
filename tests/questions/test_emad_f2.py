"""EMAD-F2 beyond right and wrong: baselines, minimum n, Holm."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.questions.asking import Asked
from emad_ref.questions.emad_f2 import Found, Timed, decide
from emad_ref.verdict.claims import Verdict, load_register
from emad_ref.verdict.units import ByPair

F2 = load_register()["EMAD-F2"]


def times(ratio: float, n: int = 30, spread: float = 0.03, seed: int = 1):
    """Seconds of two arms, the second ``ratio`` times as fast."""
    source = np.random.default_rng(seed)
    candidate = 0.2 * np.exp(0.1 * source.standard_normal(n))
    return candidate * ratio * np.exp(spread * source.standard_normal(n)), candidate


def timed(ratio: float, own: float | None = 0.98, n: int = 30, seed: int = 1) -> Timed:
    """``generate`` is ``own`` times as fast as full depth; None: it was not timed."""
    full, adaptive = times(ratio, n, seed=seed)
    slower, faster = times(own or 1.0, n, seed=99 + seed)
    return Timed(ByPair(full), ByPair(adaptive), None if own is None else ByPair(full * faster / slower))


def judged(batches: dict[int, Timed], other_legs: int = 0) -> Verdict:
    return decide(Found(batches), Asked(F2, "m", np.random.default_rng(0), other_legs))


def f2(ratios: dict[int, float], other_legs: int = 0, **options) -> Verdict:
    return judged({batch: timed(ratio, seed=batch, **options) for batch, ratio in ratios.items()}, other_legs)


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {leg.name: leg.outcome for leg in verdict.legs}


@pytest.mark.parametrize(("ratio", "outcome"), [(1.3, "survived"), (1.05, "falsified"), (1.10, "inconclusive")])
def test_it_asks_for_ten_per_cent(ratio, outcome):
    verdict = f2({1: ratio})
    assert verdict.verdict == outcome
    assert verdict.n == 30
    assert verdict.threshold == 1.10
    assert verdict.estimate == pytest.approx(ratio, rel=0.02)


def test_every_batch_size_is_a_leg():
    verdict = f2({1: 1.3, 8: 1.02})
    assert verdict.verdict == "falsified"
    assert outcomes(verdict) == {"batch 1": "survived", "batch 8": "falsified"}
    assert f2({1: 1.3, 8: 1.2}).verdict == "survived"


@pytest.mark.parametrize("ratio", [1.3, 1.02])
def test_a_sleeping_baseline_is_inconclusive(ratio):
    verdict = f2({1: ratio}, own=1.2)
    assert verdict.verdict == "inconclusive"
    assert "sleeping baseline: generate is 1.2" in verdict.reason
    assert list(outcomes(verdict)) == ["batch 1"]
    assert verdict.estimate == pytest.approx(ratio, rel=0.02)


def test_without_the_check_against_generate_it_is_inconclusive():
    verdict = f2({1: 1.3}, own=None)
    assert verdict.verdict == "inconclusive"
    assert "generate" in verdict.reason


def test_generate_is_the_baseline_where_it_is_the_faster_though_not_surely():
    full, adaptive = times(1.16)
    generate = full / np.exp(0.02 + 0.2 * np.random.default_rng(3).standard_normal(30))
    generate *= np.exp(np.log(full / generate).mean() - 0.02)  # 2 % faster on average, far from surely
    verdict = judged({1: Timed(ByPair(full), ByPair(adaptive), ByPair(generate))})
    assert list(outcomes(verdict)) == ["batch 1, against generate"]
    assert verdict.estimate == pytest.approx(1.16 / np.exp(0.02), rel=0.02)
    slower = Timed(ByPair(full), ByPair(adaptive), ByPair(full * 1.01))
    assert judged({1: slower}).verdict == "survived"


def test_gating_legs_decided_elsewhere_make_a_marginal_leg_inconclusive():
    assert f2({1: 1.088}).verdict == "falsified"
    crowded = f2({1: 1.088}, other_legs=60)
    assert crowded.verdict == "inconclusive"
    assert "after Holm over 61" in crowded.reason
    assert f2({1: 1.112}).verdict == f2({1: 1.112}, other_legs=60).verdict == "survived"


@pytest.mark.parametrize("ratio", [1.5, 0.9])
def test_below_thirty_pairs_it_is_inconclusive(ratio):
    verdict = f2({1: ratio}, n=29)
    assert verdict.verdict == "inconclusive"
    assert "29 pairs, at least 30 are needed" in verdict.reason


def test_untimed_is_unmeasured():
    assert judged({}).verdict == "unmeasured"
