"""The decision rules: which measurements become which verdicts."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from emad_ref.verdict.claims import OUTCOMES, Leg, Verdict, load_register
from emad_ref.verdict.judge import PointEvidence, judge_e1, judge_e3, judge_e13, judge_exact, judge_f1, judge_f2
from emad_ref.verdict.legs import combine, not_applicable, unmeasured

REGISTER = load_register()
F1, F2 = REGISTER["EMAD-F1"], REGISTER["EMAD-F2"]


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def corpus(rise: float, n: int = 40, spread: float = 0.002, seed: int = 1):
    """Documents whose perplexity rises by ``rise`` on average."""
    source = np.random.default_rng(seed)
    tokens = source.integers(100, 300, n)
    reference = 2.0 * tokens
    return reference + tokens * (math.log1p(rise) + spread * source.standard_normal(n)), reference, tokens


def task(lost: int, n: int = 1000):
    reference, candidate = np.ones(n, bool), np.ones(n, bool)
    candidate[:lost] = False
    return reference, candidate


def point(rise=0.001, lost=(0, 0, 0), saves=0.3, name="p", n=40, spread=0.002, items=1000) -> PointEvidence:
    tasks = {f"task{i}": task(k, items) for i, k in enumerate(lost)}
    return PointEvidence(name, saves, {"world": corpus(rise, n, spread)}, tasks)


def f1(*points: PointEvidence, claim=F1, **options) -> Verdict:
    verdict = judge_f1(points, claim, "m", rng(), **options)
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict
    return verdict


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {leg.name: leg.outcome for leg in verdict.legs}


# --- the leg rule -------------------------------------------------------------------------------------------------


def leg(outcome: str, name: str = "a", p: float | None = None) -> Leg:
    return Leg(name, outcome, 0.0, None, 50, 0.01, "", p_falsify=p, p_survive=p)


@given(st.lists(st.sampled_from(OUTCOMES), min_size=1, max_size=6))
def test_falsified_if_a_leg_is_survived_only_if_all_are(kinds):
    row, _ = combine([leg(kind) for kind in kinds])
    part = [kind for kind in kinds if kind not in ("measured", "not applicable")]
    if "falsified" in part:
        assert row == "falsified"
    elif part and set(part) == {"survived"}:
        assert row == "survived"
    elif part:
        assert row == ("unmeasured" if set(part) == {"unmeasured"} else "inconclusive")
    else:
        assert row == ("not applicable" if "not applicable" in kinds else "measured")


def test_the_deciding_leg_is_the_surest_of_the_falsified_and_the_least_sure_of_the_survivors():
    assert (
        combine([leg("falsified", "a", 0.04), leg("falsified", "b", 0.001), leg("survived", "c", 0.0)])[1].name == "b"
    )
    assert combine([leg("survived", "a", 0.001), leg("survived", "b", 0.04)])[1].name == "b"
    assert (
        combine([leg("survived", "a", 0.9), leg("inconclusive", "b", 0.2), leg("inconclusive", "c", 0.3)])[1].name
        == "c"
    )


def test_no_legs_are_refused():
    with pytest.raises(BadArgument, match="legs"):
        combine([])


# --- EMAD-F1 ------------------------------------------------------------------------------------------------------


def test_f1_survives_where_every_leg_is_shown_to_hold():
    verdict = f1(point())
    assert verdict.verdict == "survived"
    assert verdict.gate
    assert verdict.model == "m"
    assert outcomes(verdict)["p: perplexity on world"] == "survived"
    assert outcomes(verdict)["p: accuracy on two or more tasks"] == "survived"
    assert outcomes(verdict)["p: task0"] == "measured"


def test_f1_is_falsified_by_perplexity_alone():
    verdict = f1(point(rise=0.03))
    assert verdict.verdict == "falsified"
    assert verdict.threshold == 0.01
    assert verdict.unit == "relative rise"
    assert verdict.estimate == pytest.approx(0.03, abs=0.002)
    assert verdict.interval[0] > 0.01


def test_f1_is_falsified_by_two_tasks_but_not_by_one():
    two = f1(point(lost=(60, 60, 0)))
    assert two.verdict == "falsified"
    assert two.unit == "accuracy drop"
    assert two.estimate == pytest.approx(0.06)
    assert f1(point(lost=(60, 0, 0))).verdict == "survived"


def test_f1_a_bad_task_leaves_the_row_open_while_another_is_unproven():
    """One task may fall; the second is neither shown to fall nor to hold."""
    verdict = f1(point(lost=(60, 10, 0)))
    assert verdict.verdict == "inconclusive"
    reasons = {leg.name: leg.reason for leg in verdict.legs}
    assert "task1, the second-worst" in reasons["p: accuracy on two or more tasks"]


def test_f1_any_falsified_point_falsifies():
    verdict = f1(point(name="good"), point(rise=0.05, name="bad"))
    assert verdict.verdict == "falsified"
    assert "bad" in verdict.reason
    assert "1 of 4 legs" in verdict.reason


def test_f1_points_below_fifteen_per_cent_are_listed_but_not_judged():
    verdict = f1(point(name="good"), point(rise=0.5, saves=0.149, name="idle"))
    assert verdict.verdict == "survived"
    assert outcomes(verdict)["idle: reduction"] == "not applicable"
    assert f1(point(rise=0.5, saves=0.15)).verdict == "falsified"


@pytest.mark.parametrize("points", [[], [point(saves=0.1)], [point(saves=-0.2), point(saves=0.149)]])
def test_f1_without_a_point_that_saves_enough_is_not_applicable_never_survived(points):
    verdict = f1(*points)
    assert verdict.verdict == "not applicable"
    assert verdict.reason
    assert verdict.estimate is None
    assert verdict.n == 0


def test_f1_point_estimate_inside_with_a_crossing_interval_is_inconclusive():
    verdict = f1(point(rise=0.008, spread=0.02))
    assert verdict.verdict == "inconclusive"
    assert verdict.estimate < 0.01 < verdict.interval[1]
    assert "documents would decide it" in verdict.reason


@pytest.mark.parametrize("rise", [0.0, 0.05])
def test_f1_below_the_minimum_of_documents_names_the_number_needed(rise):
    verdict = f1(point(rise=rise, n=29))
    assert verdict.verdict == "inconclusive"
    assert "29 documents, at least 30 are needed" in verdict.reason
    assert f1(point(rise=rise, n=30)).verdict == ("falsified" if rise else "survived")


def test_f1_a_task_below_the_minimum_of_items_shows_nothing():
    """99 items, 90 of them lost: below the minimum even that is no evidence."""
    verdict = f1(point(lost=(90, 90), items=99))
    assert verdict.verdict == "inconclusive"
    assert "99 items, at least 100 are needed" in verdict.reason
    assert f1(point(lost=(90, 90), items=100)).verdict == "falsified"


@pytest.mark.parametrize("lost", [(), (0,), (500,)])
def test_f1_with_fewer_than_two_tasks_cannot_survive_on_perplexity_alone(lost):
    verdict = f1(point(lost=lost))
    assert verdict.verdict == "inconclusive"
    assert outcomes(verdict)["p: accuracy on two or more tasks"] == "unmeasured"
    assert f1(point(rise=0.05, lost=lost)).verdict == "falsified"


def test_f1_tasks_that_full_depth_does_not_solve_prove_nothing():
    good = point()
    wrong, coin = np.zeros(1000, dtype=bool), np.arange(1000) % 2 == 0
    poor = replace(good, tasks=good.tasks | dict.fromkeys(list(good.tasks)[1:], (wrong, wrong)))
    verdict = f1(poor)
    assert verdict.verdict == "inconclusive"
    assert "solves 1 of 3 tasks" in " ".join(leg.reason for leg in verdict.legs)
    guessed = {"a": (coin, coin), "b": (coin, coin)}
    assert f1(replace(good, tasks=guessed)).verdict == "survived"
    assert f1(replace(good, tasks=guessed, chance={"a": 0.5})).verdict == "inconclusive"


def test_f1_without_a_corpus_cannot_survive():
    bare = replace(point(), perplexity={})
    verdict = f1(bare)
    assert verdict.verdict == "inconclusive"
    assert outcomes(verdict)["p: perplexity"] == "unmeasured"


def test_f1_lossless_exits_survive_exactly():
    tokens = np.full(40, 100)
    lossless = PointEvidence("p", 0.5, {"world": (2.0 * tokens, 2.0 * tokens, tokens)}, point().tasks)
    verdict = f1(lossless)
    assert verdict.verdict == "survived"
    assert verdict.legs[0].interval == (0.0, 0.0)


def test_holm_makes_a_marginal_leg_inconclusive_among_many():
    marginal = next(
        candidate
        for seed in range(200)
        if 0.01
        < (
            leg := f1(candidate := replace(point(), perplexity={"world": corpus(0.016, 40, 0.02, seed)})).legs[0]
        ).p_falsify
        < 0.025
        and leg.outcome == "falsified"
    )
    verdict = f1(marginal, other_legs=20)
    assert verdict.legs[0].outcome == "inconclusive"
    assert "Holm over 22 legs" in verdict.legs[0].reason


def test_f1_literal_does_not_gate_and_lists_only_the_worst():
    sweep = [point(rise=0.0, name=f"p{i}") for i in range(12)] + [point(rise=0.05, name="worst")]
    verdict = f1(*sweep, claim=REGISTER["EMAD-F1-literal"], shown=20)
    assert not verdict.gate
    assert verdict.verdict == "falsified"
    assert len(verdict.legs) == 20
    assert verdict.legs[0].name == "worst: perplexity on world"
    assert verdict.n == 26
    assert "worst 20 of 65 legs" in verdict.reason


def test_f1_can_falsify_even_where_holm_asks_for_very_small_p_values():
    """Thousands of legs ask for p below 1/10,000: the number of bootstrap samples must follow."""
    assert f1(point(rise=0.05), other_legs=3000).verdict == "falsified"


def test_f1_follows_the_registers_thresholds():
    strict = replace(F1, thresholds=F1.thresholds | {"perplexity_rise": 0.0001})
    assert f1(point(rise=0.005)).verdict == "survived"
    assert f1(point(rise=0.005), claim=strict).verdict == "falsified"
    eager = replace(F1, thresholds=F1.thresholds | {"flop_reduction": 0.5})
    assert f1(point(rise=0.5), claim=eager).verdict == "not applicable"


@pytest.mark.parametrize("saves", [math.nan, 1.5, math.inf])
def test_f1_a_reduction_that_is_no_share_is_refused(saves):
    with pytest.raises(BadArgument, match="net_reduction"):
        f1(point(saves=saves))


# --- EMAD-F2 ------------------------------------------------------------------------------------------------------


def times(ratio: float, n: int = 30, spread: float = 0.03, seed: int = 1):
    source = np.random.default_rng(seed)
    candidate = 0.2 * np.exp(0.1 * source.standard_normal(n))
    return candidate * ratio * np.exp(spread * source.standard_normal(n)), candidate


def f2(ratios: dict[int, float], own: float = 0.98, **options) -> Verdict:
    n = options.pop("n", 30)
    pairs = {batch: times(ratio, n, seed=batch) for batch, ratio in ratios.items()}
    return judge_f2(pairs, {batch: times(own, 30, seed=99 + batch) for batch in ratios}, F2, "m", **options)


@pytest.mark.parametrize(("ratio", "outcome"), [(1.3, "survived"), (1.05, "falsified"), (1.10, "inconclusive")])
def test_f2_asks_for_ten_per_cent(ratio, outcome):
    verdict = f2({1: ratio})
    assert verdict.verdict == outcome
    assert verdict.n == 30
    assert verdict.threshold == 1.10
    assert verdict.estimate == pytest.approx(ratio, rel=0.02)


def test_f2_every_batch_size_is_a_leg():
    verdict = f2({1: 1.3, 8: 1.02})
    assert verdict.verdict == "falsified"
    assert outcomes(verdict) == {"batch 1": "survived", "batch 8": "falsified"}
    assert f2({1: 1.3, 8: 1.2}).verdict == "survived"


@pytest.mark.parametrize("ratio", [1.3, 1.02])
def test_f2_a_sleeping_baseline_is_inconclusive(ratio):
    verdict = f2({1: ratio}, own=1.2)
    assert verdict.verdict == "inconclusive"
    assert "sleeping baseline" in verdict.reason
    assert verdict.estimate == pytest.approx(ratio, rel=0.02)


def test_f2_without_the_check_against_generate_is_inconclusive():
    verdict = judge_f2({1: times(1.3)}, {}, F2, "m")
    assert verdict.verdict == "inconclusive"
    assert "generate" in verdict.reason


def test_f2_compares_with_generate_where_that_is_the_faster_though_not_surely():
    full, adaptive = times(1.16)
    generate = full / np.exp(0.02 + 0.2 * np.random.default_rng(3).standard_normal(30))
    generate *= np.exp(np.log(full / generate).mean() - 0.02)  # 2 % faster on average, far from surely
    verdict = judge_f2({1: (full, adaptive)}, {1: (full, generate)}, F2, "m")
    assert list(outcomes(verdict)) == ["batch 1, against generate"]
    assert verdict.estimate == pytest.approx(1.16 / np.exp(0.02), rel=0.02)
    assert judge_f2({1: (full, adaptive)}, {1: (full, full * 1.01)}, F2, "m").verdict == "survived"


@pytest.mark.parametrize("claimed", ["F1", "F2"])
def test_gating_legs_decided_elsewhere_make_a_marginal_leg_inconclusive(claimed):
    def judged(others):
        return f2({1: 1.112}, other_legs=others) if claimed == "F2" else f1(point(0.0089), other_legs=others)

    assert judged(0).verdict == "survived"
    assert judged(60).verdict == "inconclusive"
    assert "after Holm over 6" in " ".join(leg.reason for leg in judged(60).legs)


@pytest.mark.parametrize("ratio", [1.5, 0.9])
def test_f2_below_thirty_pairs_is_inconclusive(ratio):
    verdict = f2({1: ratio}, n=29)
    assert verdict.verdict == "inconclusive"
    assert "29 pairs, at least 30 are needed" in verdict.reason


def test_f2_untimed_is_unmeasured():
    assert judge_f2({}, {}, F2, "m").verdict == "unmeasured"


# --- the other rows -----------------------------------------------------------------------------------------------


def profile(steps: list[float], n: int = 40, spread: float = 0.02):
    source = np.random.default_rng(2)
    tokens = source.integers(50, 200, n)
    means = 5 + np.concatenate([[0], np.cumsum(steps)])
    return tokens[:, None] * (means + spread * source.standard_normal((n, len(means)))), tokens


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [([-1.0, -0.5, -0.2], "survived"), ([-1.0, 0.3, -0.9], "falsified"), ([-1.0, 0.0, -0.5], "inconclusive")],
)
def test_e1_wants_entropy_to_fall_at_every_step(steps, outcome):
    verdict = judge_e1(*profile(steps), REGISTER["EMAD-E1"], "m", rng())
    assert verdict.verdict == outcome
    assert not verdict.gate
    assert verdict.legs[-1].name == "slope over all layers"
    assert verdict.legs[-1].outcome == "measured"
    if outcome == "falsified":
        assert "layer 2 → 3" in verdict.reason
        assert verdict.estimate == pytest.approx(0.3, abs=0.02)


def test_e1_below_thirty_documents_is_inconclusive():
    assert judge_e1(*profile([-1.0, 1.0], n=29), REGISTER["EMAD-E1"], "m", rng()).verdict == "inconclusive"


@pytest.mark.parametrize("worst", [1e-6, 0.0])
def test_an_identity_survives_up_to_and_including_its_tolerance(worst):
    verdict = judge_exact(REGISTER["EMAD-E2"], "m", {"cached": np.array([0.0, worst])}, tolerance=1e-6)
    assert verdict.verdict == "survived"
    assert verdict.estimate == worst
    assert verdict.n == 2
    assert verdict.threshold == 1e-6


@pytest.mark.parametrize("worst", [1.1e-6, math.nan, math.inf])
def test_an_identity_is_falsified_by_one_difference_or_one_nan(worst):
    errors = {"good": np.zeros(5), "bad": np.array([[0.0, worst]])}
    verdict = judge_exact(REGISTER["EMAD-E2"], "m", errors, tolerance=1e-6)
    assert verdict.verdict == "falsified"
    assert "1 of 2" in verdict.legs[1].reason
    assert outcomes(verdict) == {"good": "survived", "bad": "falsified"}


def test_an_identity_nobody_checked_is_unmeasured():
    assert judge_exact(REGISTER["EMAD-E5"], "m", {}, 0.0).verdict == "unmeasured"
    assert judge_exact(REGISTER["EMAD-E5"], "m", {"a": np.zeros(0)}, 0.0).verdict == "unmeasured"
    assert judge_exact(REGISTER["EMAD-E5"], "m", {"a": np.zeros(0), "b": np.zeros(1)}, 0.0).verdict == "inconclusive"


@pytest.mark.parametrize(("errors", "tolerance", "named"), [([0.0], -1.0, "tolerance"), ([-1e-9], 0.0, "errors")])
def test_differences_and_tolerances_are_not_negative(errors, tolerance, named):
    with pytest.raises(BadArgument, match=named):
        judge_exact(REGISTER["EMAD-E5"], "m", {"a": np.array(errors)}, tolerance)


def test_e3_each_geometry_and_estimator_is_a_leg():
    shares = {"pythia-410m": {"full": 0.73, "low-rank": 0.049}, "llama-7b": {"full": 0.05}}
    verdict = judge_e3(shares, REGISTER["EMAD-E3"], "geometries")
    assert verdict.verdict == "falsified"
    assert verdict.estimate == 0.73
    assert list(outcomes(verdict).values()) == ["falsified", "survived", "falsified"]
    assert judge_e3({}, REGISTER["EMAD-E3"], "geometries").verdict == "unmeasured"


@pytest.mark.parametrize(("tied", "outcome"), [(True, "survived"), (False, "falsified")])
def test_e13_reports_the_premise(tied, outcome):
    verdict = judge_e13(tied, REGISTER["EMAD-E13"], "m")
    assert verdict.verdict == outcome
    assert not verdict.gate
    assert "premise" in verdict.reason


def test_absent_premises_and_instruments_are_values_with_reasons():
    for make, outcome in ((not_applicable, "not applicable"), (unmeasured, "unmeasured")):
        verdict = make(F2, "m", "no clock")
        assert (verdict.verdict, verdict.estimate, verdict.reason) == (outcome, None, "no clock")
