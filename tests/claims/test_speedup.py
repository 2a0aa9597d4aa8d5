"""EMAD-F2: baselines, minimum n, Holm correction, the choice of the timed point, and the preflight message."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.models.generation import LOOKUP
from pytest_emad.audit.finding import Finding
from pytest_emad.claims import speedup
from pytest_emad.claims.base import ClaimContext, is_point_quality_unfalsified
from pytest_emad.claims.speedup import (
    SpeedupEvidence,
    TimedBatch,
    choose_point_to_time,
    decide_speedup,
    make_timed_batch,
    time_chosen_point,
)
from pytest_emad.measurements.latency import COMPILED, TimingResult
from pytest_emad.measurements.study import BUDGETS, Study
from pytest_emad.statistics.units import ByPair
from pytest_emad.statistics.verdicts import Leg, Verdict, load_register
from tests.claims.simulation import asked

F2 = load_register()["EMAD-F2"]


def timed(ratio: float, n: int = 30, spread: float = 0.02, seed: int = 1, **more: float) -> TimedBatch:
    """Make the point take a second on average, full depth ``ratio``, and other baselines the given seconds."""
    source = np.random.default_rng(seed)
    mood = 1 + 0.2 * source.random(n)

    def arm(seconds: float) -> ByPair:
        return ByPair(mood * seconds * np.exp(spread * source.standard_normal(n)))

    return TimedBatch(arm(1.0), {"full depth": arm(ratio)} | {name: arm(seconds) for name, seconds in more.items()})


UNUSABLE = Absent("no usable point", "premise")


def judged(batches: dict[int, TimedBatch], other_legs: int = 0, **found: Any) -> Verdict:
    return decide_speedup(
        SpeedupEvidence(batches, **found), ClaimContext(F2, "m", np.random.default_rng(0), other_legs)
    )


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


def test_every_batch_size_and_baseline_is_a_leg():
    verdict = judged({1: timed(1.3, generate=1.4), 8: timed(1.3, seed=2, generate=1.02)})
    assert verdict.verdict == "falsified"
    assert outcomes(verdict) == {
        "batch 1, against full depth": "survived",
        "batch 1, against generate": "survived",
        "batch 8, against full depth": "survived",
        "batch 8, against generate": "falsified",
    }
    assert "batch 8, against generate" in verdict.reason


@pytest.mark.parametrize("own", [0.8, 1.0, 1.05])
def test_what_sleeps_beside_generate_is_falsified_however_slow_full_depth_is(own):
    assert judged({1: timed(2.0, generate=own)}).verdict == "falsified"


NOISY = {"spread": 0.4, "seed": 2}  # a machine with other load
CROWD = 120  # legs of the run's other rows


def test_slower_than_a_baseline_is_falsified_where_holm_alone_would_leave_it_open():
    verdict = judged({1: timed(1.3, **NOISY, generate=0.75)}, other_legs=CROWD)
    found = {leg.name: leg for leg in verdict.legs}
    slower = found["batch 1, against generate"]
    assert slower.interval[1] < 1
    assert slower.p_falsify * CROWD > 0.05
    assert (verdict.verdict, slower.outcome) == ("falsified", "falsified")
    assert "slower than this baseline" in slower.reason
    assert found["batch 1, against full depth"].outcome == "inconclusive"


def test_what_may_still_be_as_fast_as_the_baseline_is_not_called_slower():
    verdict = judged({1: timed(1.3, **NOISY, generate=0.95)}, other_legs=CROWD)
    assert verdict.verdict == "inconclusive"


def test_too_few_pairs_say_nothing_of_slowness_either():
    assert judged({1: timed(0.5, n=29)}).verdict == "inconclusive"


def test_the_fastest_baseline_is_not_chosen_by_the_noise_that_favoured_it():
    """Two baselines of equal speed, each at the threshold: the one that looks slower by chance does not help."""
    survived = sum(
        judged({1: timed(1.1, spread=0.1, seed=seed, generate=1.1)}).verdict == "survived" for seed in range(200)
    )
    assert survived <= 10, "5 % is the level against a single baseline"


def test_a_baseline_that_did_not_run_is_named_with_the_reason():
    verdict = judged(
        {1: timed(1.3)}, not_run={COMPILED: Absent("no C++ compiler"), LOOKUP: Absent("its cache takes nothing back")}
    )
    assert verdict.verdict == "survived"
    assert [(leg.name, leg.reason) for leg in verdict.legs if leg.outcome == "not applicable"] == [
        ("compiled baseline", "compiled baseline not run: no C++ compiler"),
        ("prompt lookup baseline", "prompt lookup baseline not run: its cache takes nothing back"),
    ]


def test_gating_legs_decided_elsewhere_make_a_marginal_failure_inconclusive_and_leave_survival_alone():
    assert f2({1: 1.05}).verdict == "falsified"
    crowded = f2({1: 1.05}, other_legs=600)
    assert crowded.verdict == "inconclusive"
    assert "after Holm over 601" in crowded.reason
    assert f2({1: 1.15}).verdict == f2({1: 1.15}, other_legs=600).verdict == "survived"


@pytest.mark.parametrize("ratio", [1.5, 0.9])
def test_below_thirty_pairs_it_is_inconclusive(ratio):
    verdict = f2({1: ratio}, n=29)
    assert verdict.verdict == "inconclusive"
    assert "29 pairs, at least 30 are needed" in verdict.reason


def test_untimed_is_unmeasured():
    assert judged({}).verdict == "unmeasured"


def test_without_a_usable_point_the_ratios_are_numbers_only():
    verdict = judged(
        {1: timed(1.5, generate=1.4)}, unusable=Absent("no usable point: EMAD-F1 is falsified (all)", "premise")
    )
    assert (verdict.verdict, verdict.reason) == ("not applicable", "no usable point: EMAD-F1 is falsified (all)")
    assert set(outcomes(verdict).values()) == {"measured"}
    assert verdict.legs[0].estimate == pytest.approx(1.5, rel=0.02)


def test_times_of_something_else_are_falsified_though_no_point_was_usable():
    broken = replace(timed(1.5), check=Finding("timed", False, "adaptive, row 0: 3 tokens", 0, 0))
    for unusable in (None, UNUSABLE):
        verdict = judged({1: broken}, unusable=unusable)
        assert verdict.verdict == "falsified"
        assert "adaptive, row 0: 3 tokens" in verdict.reason


# ------------------------------------------------------------ the limit of the speedup


def sweep(**more: float) -> dict[int, TimedBatch]:
    """Return a sweep of 2 and 8 rows, from twelve pairs."""
    return {2: timed(1.3, n=12, seed=2, **more), 8: timed(0.9, n=12, seed=8, **more)}


def test_a_sweep_changes_no_leg_that_decides_and_names_where_the_gain_ends():
    batches = {1: timed(1.3), 4: timed(1.25, seed=4), 16: timed(1.12, seed=16)}
    alone, beside = judged(batches), judged(batches, swept=sweep())
    assert alone.verdict == beside.verdict == "survived"
    assert [leg for leg in beside.legs if leg.outcome != "measured"] == list(alone.legs)
    assert outcomes(beside)["batch 8, against full depth"] == "measured"
    (ends,) = [leg for leg in beside.legs if leg.name == speedup.ENDS]
    assert (ends.outcome, ends.estimate, ends.n, ends.unit) == ("measured", 8.0, 12, "rows")
    assert beside.reason == f"{alone.reason}; {ends.reason}"
    assert ends.reason.startswith("gain vanishes at batch 8: 0.89× [")
    assert ends.reason.endswith("against full depth, 12 pairs (shown at batch 16 all the same)")


def test_holm_s_family_does_not_grow_with_the_sweep():
    crowd = {"other_legs": 60}
    assert judged({1: timed(1.088)}, swept=sweep(), **crowd).legs[0] == judged({1: timed(1.088)}, **crowd).legs[0]
    assert speedup.count_speedup_legs(Study(budget=BUDGETS["standard"])) == 3 * 2 + 1, "prompt lookup takes one row"


def test_a_gain_that_does_not_end_has_no_number():
    verdict = judged({1: timed(1.3), 4: timed(1.3, seed=4)}, swept={2: timed(1.3, n=12, seed=2)})
    (ends,) = [leg for leg in verdict.legs if leg.name == speedup.ENDS]
    assert ends.estimate is None
    assert verdict.reason.split("; ")[-1].startswith("still faster at batch 4: 1.3")


def test_a_baseline_of_the_sweep_ends_a_gain_that_full_depth_would_leave():
    verdict = judged({1: timed(1.3, generate=1.4)}, swept={2: timed(1.3, n=12, seed=2, generate=0.95)})
    assert verdict.verdict == "survived", "the sweep decides nothing"
    assert "gain vanishes at batch 2: 0.9" in verdict.reason
    assert "against generate, 12 pairs" in verdict.reason


def test_without_a_usable_point_the_end_of_its_gain_is_a_number_too():
    verdict = judged({1: timed(1.5)}, unusable=UNUSABLE, swept=sweep())
    assert (verdict.verdict, verdict.reason) == ("not applicable", "no usable point")
    assert set(outcomes(verdict).values()) == {"measured"}
    assert speedup.ENDS in outcomes(verdict)


def test_without_a_sweep_nothing_ends():
    verdict = judged({1: timed(1.3), 4: timed(0.9, seed=4)})
    assert speedup.ENDS not in outcomes(verdict)
    assert "vanishes" not in verdict.reason


def test_a_table_has_every_arm_in_milliseconds_and_the_least_sure_ratio():
    found = SpeedupEvidence(
        {1: timed(1.3, generate=1.4, compiled=1.2)}, swept={2: timed(1.3, n=12, generate=0.9, compiled=1.2)}
    )
    first, second = speedup.make_time_rows(found)
    assert (first["batch"], first["decides"], first["pairs"]) == (1, True, 30)
    assert (second["batch"], second["decides"], second["pairs"]) == (2, False, 12)
    assert first["compiled, ms"] == pytest.approx(1.2 * first["the point, ms"], rel=0.05)
    assert (first["least sure against"], second["least sure against"]) == ("compiled", "generate")
    assert second["low"] < second["× as fast"] < second["high"] < 1


def test_arms_become_baselines_by_name():
    seconds = {arm: np.full(3, 1.0 + at) for at, arm in enumerate(("full", "adaptive", "generate", "compiled", LOOKUP))}
    check = Finding("timed", True, "", 1, 0)
    made = make_timed_batch(TimingResult(SimpleNamespace(seconds=seconds), [], {}, ()), check)
    assert made.adaptive.values.tolist() == [2.0] * 3
    assert {name: column.values[0] for name, column in made.baselines.items()} == {
        "full depth": 1.0,
        "generate": 3.0,
        "compiled generate": 4.0,
        "generate with prompt lookup": 5.0,
    }


# ------------------------------------------------------------ the timed point


def leg(point: str, outcome: str, kind: str = "perplexity") -> Leg:
    return Leg("any words", outcome, 0.0, None, 200, None, "", point=point, kind=kind)


def f1(*legs: Leg) -> Verdict:
    return Verdict("EMAD-F1", "m", "falsified", None, None, 0, None, "", "one leg", legs)


@pytest.mark.parametrize(
    ("outcomes", "usable"),
    [
        (("survived", "survived"), True),
        (("survived", "inconclusive"), True),
        (("survived", "falsified"), False),
        (("survived", "unmeasured"), True),
        (("unmeasured", "measured"), False),
        (("not applicable",), False),
    ],
)
def test_a_point_stands_that_was_judged_and_not_refuted(outcomes, usable):
    legs = [leg("p", outcome, kind) for kind, outcome in zip(("perplexity", "accuracy"), outcomes, strict=False)]
    verdict = f1(*legs, leg("p: more", "survived"), leg("q", "falsified"))
    assert is_point_quality_unfalsified(verdict, "p") is usable


def evidence(trained: bool = True):
    points = [SimpleNamespace(point=SimpleNamespace(name=name, digest=name), net_reduction=saved)
              for name, saved in (("deep", 0.2), ("middle", 0.3), ("shallow", 0.5))]  # fmt: skip

    def choose_most_saving(accept):
        taken = [point for point in points if accept(point)]
        return max(taken, key=lambda point: point.net_reduction, default=Absent("none"))

    return SimpleNamespace(
        loaded=SimpleNamespace(trained=trained),
        subject=SimpleNamespace(absent_quality=None if trained else Absent("random weights: noise", "premise")),
        points=SimpleNamespace(choose_most_saving=choose_most_saving),
        latency=SimpleNamespace(most_saving_point=points[2].point),
    )


def heard(verdict: Verdict) -> ClaimContext:
    """Return F2's context in a run whose F1 verdict is ``verdict``."""
    return replace(asked("EMAD-F2", np.random.default_rng(0)), verdict_of=lambda claim, evidence: verdict,
                   row_of=load_register().__getitem__)  # fmt: skip


def test_of_the_points_that_f1_lets_stand_the_one_that_saves_most_is_timed():
    said = f1(leg("deep", "survived"), leg("middle", "inconclusive"), leg("shallow", "falsified"))
    point, refusal = choose_point_to_time(evidence(), heard(said))
    assert (point.name, refusal) == ("middle", None)


def test_where_f1_lets_none_stand_the_ratio_is_of_the_one_that_saves_most():
    said = f1(*(leg(name, "falsified") for name in ("deep", "middle", "shallow")))
    point, refusal = choose_point_to_time(evidence(), heard(said))
    assert (point.name, refusal) == (
        "shallow",
        Absent('no usable point: "Saving 15 % of FLOPs leaves quality as it was" (EMAD-F1) is falsified', "premise"),
    )


@pytest.mark.parametrize(("outcome", "pairs"), [("survived", None), ("falsified", 10)])
def test_a_point_whose_speed_up_does_not_count_is_timed_with_fewer_pairs(outcome, pairs):
    timed, found = [], evidence()
    found.latency.time_point_by_batch_size = lambda point, pairs: timed.append((point.name, pairs)) or {1: "times"}
    found.latency.n_indicative_pairs = 10
    said = f1(*(leg(name, outcome) for name in ("deep", "middle", "shallow")))
    point, _, times = time_chosen_point(found, heard(said))
    assert timed == [(point.name, pairs)] == [("shallow", pairs)]
    assert times == {1: "times"}


def test_random_weights_have_no_usable_point_and_f1_is_not_asked():
    """Without a run there is no F1 to ask, and the question would raise."""
    point, refusal = choose_point_to_time(evidence(trained=False), asked("EMAD-F2", np.random.default_rng(0)))
    assert point.name == "shallow"
    assert "random weights" in refusal.reason
    assert "--emad-require speed" in refusal.reason


@pytest.mark.parametrize(("unusable", "outcome"), [(None, "survived"), (UNUSABLE, "not applicable")])
def test_a_race_decides_only_where_its_point_is_usable(unusable, outcome):
    """The note of the race counts every leg of the run."""
    seconds = {arm: np.full(30, took) + np.arange(30) / 300 for arm, took in (("full", 1.3), ("adaptive", 1.0))}
    stopwatch = SimpleNamespace(
        check_point_outputs=lambda timed, point: Finding("timed", True, "", 1, 0),
        absent_compiled=None,
        absent_lookup=None,
        format_timing_note=lambda *given: given,
        format_prefill_note=lambda point: f"{point}, apart",
        time_extra_batch_sizes=lambda point: {},
    )
    known = SimpleNamespace(latency=stopwatch)
    timed = {1: TimingResult(SimpleNamespace(seconds=seconds), [], {}, ())}
    question = ClaimContext(F2, "m", np.random.default_rng(0), other_legs=4)
    found = speedup.measure_speedup(known, "the point", unusable, timed)
    assert speedup.decide_speedup(found, question).verdict == outcome
    assert speedup.make_speedup_attachments(found, known, "the point", question).notes == (
        ("the point", 1.10, 5),
        "the point, apart",
    )


def test_an_encoder_decoder_is_not_timed():
    reads = SimpleNamespace(is_seq2seq=True, absent_quality=Absent("reads a source", "premise"))
    answer = speedup.answer_speedup(
        SimpleNamespace(subject=reads, corpus="c", fingerprint="f"), asked("EMAD-F2", np.random.default_rng(0))
    )
    assert (answer.verdict.verdict, answer.verdict.reason) == ("not applicable", "reads a source")
