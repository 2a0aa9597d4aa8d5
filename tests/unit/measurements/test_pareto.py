"""EMAD and its baselines: sweeps, fronts chosen on one split and judged on another, tables, flatness."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.calibration.profile import Profile, profile_of
from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from emad_ref.models.stepper import Stepper
from emad_ref.point import full_depth
from emad_ref.replay import losses
from emad_ref.replay.grids import EMAD_FAMILY, SETTINGS_PER_FAMILY, NetSavingFunction
from emad_ref.replay.losses import Losses, replay_losses
from pytest_emad.measurements import pareto
from pytest_emad.measurements.pareto import (
    SPLITS,
    WINDOWS,
    BaselineComparison,
    EntropySlopeAndMarginGain,
    FamilyComparison,
    correlate_entropy_slope_with_gain,
    make_confidence_comparison,
    measure_best_margin_gain,
    measure_entropy_slope_and_gain,
    sort_by_saving_and_rise,
)
from pytest_emad.measurements.study import BUDGETS
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.rates import estimate_entropy_slope
from pytest_emad.sweep.front import mark_lower_hull_corners
from tests.handmade_losses import handmade_losses
from tests.handmade_traces import window_trace
from tests.small_measurements import small_evidence
from tests.small_models import LAYERS, small_config, small_model

PROBES, SEQUENCES, LENGTH = (2, 4), 12, 20
VOCABULARY, SMALLEST = 300, 50  # at least 2 of 300 tokens are kept; 50 would leave fewer
FIRST = {"validate": 2, "evaluate": 3}  # traced windows of confidence rules


def trace_of(seed: int) -> Trace:
    """Return entropy and loss that fall with depth and from the first half of a text to the second.

    Two windows of every document.
    """
    rng, rows = np.random.default_rng(seed), SEQUENCES * LENGTH
    place = np.tile(np.arange(LENGTH), SEQUENCES)
    level = np.where(place < LENGTH // 2, 2.0, 0.5)[:, None] * np.linspace(1.5, 1.0, LAYERS)
    noisy = (level * rng.uniform(0.5, 1.5, (rows, LAYERS))).astype(np.float32)
    nll_nats = (level * rng.uniform(0.8, 1.2, (rows, LAYERS))).astype(np.float32)
    return replace(window_trace(noisy, nll_nats, np.exp(-noisy), LENGTH), documents=np.arange(SEQUENCES) // 2)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of(trace_of(0), PROBES, model="m", fingerprint="f", corpus="c", dtype="float32")


def text(split: str, count: int) -> list[TokenSequence]:
    """Return two windows of every document."""
    rng = np.random.default_rng(["validate", "evaluate"].index(split))
    return [TokenSequence(rng.integers(0, SMALLEST, LENGTH), document=number // 2) for number in range(count)]


def model(vocabulary: int = VOCABULARY) -> Stepper:
    config = small_config("gpt_neox")
    config.vocab_size = vocabulary
    return CausalStepper(small_model("gpt_neox", config=config))


def traces(profile: Profile, stepper: Stepper) -> SimpleNamespace:
    """Return traces of random text."""
    subject = SimpleNamespace(
        name="small",
        stepper=stepper,
        loaded=SimpleNamespace(geometry=geometry_of(small_config("gpt_neox"))),
        corpus="random",
        seed=0,
        reductions_note="",
        budget=SimpleNamespace(name="smoke", validate=SEQUENCES, evaluate=SEQUENCES),
        cut_windows=text,
        take_lens_trace=lambda sequences, what, rules: take_trace(stepper, sequences, rules=rules),
    )
    splits = {"calibration": trace_of(0), "validation": trace_of(1), "evaluation": trace_of(2)}
    return SimpleNamespace(profile=profile, subject=subject, **splits)


@pytest.fixture(autouse=True, scope="module")
def few_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WINDOWS, "smoke", FIRST)
        yield


@pytest.fixture(scope="module")
def run(profile: Profile) -> SimpleNamespace:
    return traces(profile, model())


@pytest.fixture(scope="module")
def sweeps(run: SimpleNamespace) -> BaselineComparison:
    return BaselineComparison(run)


def test_emad_comes_first_and_every_rival_of_the_paper_has_a_sweep(sweeps: BaselineComparison) -> None:
    assert next(iter(sweeps.points_by_family)) == EMAD_FAMILY
    assert set(sweeps.points_by_family) >= {
        "fixed truncation",
        "fixed entropy",
        "softmax response",
        "chunked",
        "positional",
    }
    names = [point.name for points in sweeps.points_by_family.values() for point in points]
    assert len(set(names)) == len(names)


def test_dials_have_equally_many_points_spaced_evenly_in_what_they_save_on_validation(
    run: SimpleNamespace, sweeps: BaselineComparison
) -> None:
    """240 tokens leave jumps, which few targets hit."""
    saved = NetSavingFunction(run.validation, run.subject.loaded.geometry)
    for name in (EMAD_FAMILY, "fixed entropy", "softmax response"):
        points = sweeps.points_by_family[name]
        assert SETTINGS_PER_FAMILY - 9 <= len(points) <= SETTINGS_PER_FAMILY, name
        savings = np.sort([saved(point) for point in points])
        assert np.diff(savings).max() < 4 * savings[-1] / SETTINGS_PER_FAMILY, name
        assert savings[0] < 4 * savings[-1] / SETTINGS_PER_FAMILY, "down to full depth"


def test_the_gap_of_the_two_best_logits_comes_last_with_thresholds_of_the_calibration_text(
    sweeps: BaselineComparison,
) -> None:
    *_, (name, points) = sweeps.points_by_family.items()
    assert name == "top-2 gap, quantile"
    column = trace_of(0).signal_at_every_layer("top2_gap")[:, np.array(PROBES) - 1].astype(np.float64)
    assert points[-1].thresholds[0] == tuple(column.min(axis=0)), "at the last point every token exits"


def test_quantiles_need_a_profile_that_kept_its_statistics(profile: Profile) -> None:
    bare = replace(profile, statistics=None)
    assert "EMAD, quantile" in BaselineComparison(traces(profile, model())).points_by_family
    assert "EMAD, quantile" not in BaselineComparison(traces(bare, model())).points_by_family


def test_a_family_is_by_document_and_starts_at_full_depth(run: SimpleNamespace, sweeps: BaselineComparison) -> None:
    emad, geometry = sweeps.replay_point_family_by_document(EMAD_FAMILY), run.subject.loaded.geometry
    assert emad.evaluation.points == (full_depth(LAYERS), *sweeps.points_by_family[EMAD_FAMILY])
    for split, trace in ((emad.validation, run.validation), (emad.evaluation, run.evaluation)):
        assert len(split.tokens) == SEQUENCES // 2
        assert set(split.tokens) == {2 * LENGTH}
        windows = replay_losses(replace(trace, documents=None), geometry, sweeps.points_by_family[EMAD_FAMILY])
        assert split.nats == pytest.approx(windows.nats.reshape(len(split), -1, 2).sum(axis=2))
        assert split.savings == pytest.approx(windows.savings)


def test_points_are_chosen_on_validation_and_judged_on_evaluation(
    run: SimpleNamespace, sweeps: BaselineComparison
) -> None:
    point = run.profile.point(0.0)
    geometry = run.subject.loaded.geometry
    found = {
        split: [row for row in sweeps.losses(EMAD_FAMILY, split) if row.point.thresholds == point.thresholds]
        for split in SPLITS
    }
    (chosen,), (judged,) = found.values()
    assert chosen.perplexity == replay_losses(run.validation, geometry, [point])[1].perplexity
    assert judged.perplexity == replay_losses(run.evaluation, geometry, [point])[1].perplexity != chosen.perplexity
    emad = sweeps.replay_point_family_by_document(EMAD_FAMILY)
    assert emad.front.judged is emad.evaluation
    savings, losses = emad.validation.savings, emad.validation.means("nats")
    assert emad.front.corners.tolist() == mark_lower_hull_corners(savings[None], losses[None])[0].tolist()


def test_a_family_is_replayed_once_on_each_split(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(trace, geometry, points):
        asked.append(list(points))
        return losses.replay_losses(trace, geometry, asked[-1])

    monkeypatch.setattr(pareto, "replay_losses", counted)
    fresh = BaselineComparison(traces(profile, model()))
    for split in SPLITS:
        assert fresh.losses(EMAD_FAMILY, split) is fresh.losses(EMAD_FAMILY, split)
    assert asked == [fresh.points_by_family[EMAD_FAMILY]] * 2
    assert fresh.confidence_rule_comparison.losses(EMAD_FAMILY, "evaluate").tokens.sum() > 0
    assert len(asked) == 3, "the loss differs on other text"


def test_points_of_no_table_are_a_family_too(run: SimpleNamespace, sweeps: BaselineComparison) -> None:
    point = run.profile.point(0.0)
    mine = sweeps.make_family_of_points([point])
    assert mine.evaluation.points == (full_depth(LAYERS), point)
    at = list(sweeps.points_by_family[EMAD_FAMILY]).index(
        next(p for p in sweeps.points_by_family[EMAD_FAMILY] if p.thresholds == point.thresholds)
    )
    whole = sweeps.replay_point_family_by_document(EMAD_FAMILY).evaluation
    assert mine.evaluation.nats[1].tolist() == whole.nats[1 + at].tolist()
    assert mine.evaluation.flops[1].tolist() == whole.flops[1 + at].tolist()


# ---------------------------------------------------------------- the table


def test_at_each_level_every_family_saves_exactly_the_same(sweeps: BaselineComparison) -> None:
    rows = sweeps.make_pareto_rows(0)
    by_saving: dict[float, list[str]] = {}
    for row in rows:
        by_saving.setdefault(row["net reduction %"], []).append(row["family"])
    reached = {
        name: sweeps.replay_point_family_by_document(name).largest_validation_saving for name in sweeps.points_by_family
    }
    assert len(by_saving) == 4
    for level, (saving, named) in zip((0.15, 0.30, 0.45, 0.60), sorted(by_saving.items()), strict=True):
        assert saving <= level
        assert sorted(named) == sorted(name for name, most in reached.items() if most >= level)


def test_where_a_family_falls_short_on_evaluation_all_save_what_it_reaches(sweeps: BaselineComparison) -> None:
    promised = {name: sweeps.replay_point_family_by_document(name) for name in sweeps.points_by_family}
    short = {
        name: family
        for name, family in promised.items()
        if family.front.largest_saving < family.largest_validation_saving
    }
    assert short
    level = max(family.largest_validation_saving for family in short.values())
    able = [family.front.largest_saving for family in promised.values() if family.largest_validation_saving >= level]
    rows = sweeps.make_pareto_rows(0, (level,))
    assert {row["net reduction %"] for row in rows} == {min(able)}
    assert min(able) < level
    assert len(rows) == len(able)


def test_rows_say_which_mixture_of_points_and_what_it_does_on_evaluation(sweeps: BaselineComparison) -> None:
    (row,) = [row for row in sweeps.make_pareto_rows(0, (0.30,)) if row["family"] == "fixed truncation"]
    front = sweeps.replay_point_family_by_document("fixed truncation").front
    found = sweeps.losses("fixed truncation", "evaluate")
    mixed = front.mix_corners_to_saving(row["net reduction %"])
    assert row["point"] == front.describe_mixture(mixed)
    assert (row["documents"], row["windows"], row["chosen by"]) == (SEQUENCES // 2, SEQUENCES, "perplexity")
    nll, depth = (
        mixed.expectation_of_point_values(values.sum(axis=1))[0] / (SEQUENCES * LENGTH)
        for values in (found.nats, found.depth)
    )
    assert (row["perplexity"], row["mean depth"]) == (pytest.approx(np.exp(nll)), pytest.approx(depth))


def test_emad_has_no_interval_against_itself_and_others_have_one_around_their_difference(
    sweeps: BaselineComparison,
) -> None:
    rows = sweeps.make_pareto_rows(0, (0.30,))
    emad, *others = sorted(rows, key=lambda row: row["family"] != EMAD_FAMILY)
    assert emad["family"] == EMAD_FAMILY
    assert emad["over EMAD %"] is emad["over EMAD interval %"] is None
    for row in others:
        low, high = row["over EMAD interval %"]
        assert low < row["over EMAD %"] < high
        assert row["over EMAD %"] == pytest.approx(row["perplexity"] / emad["perplexity"] - 1)
        assert "wrong over EMAD %" not in row, "no row of this table needs it"


def test_the_table_is_a_matter_of_its_seed(sweeps: BaselineComparison) -> None:
    assert (
        sweeps.make_pareto_rows(1, (0.30,))
        == sweeps.make_pareto_rows(1, (0.30,))
        != sweeps.make_pareto_rows(2, (0.30,))
    )


def test_a_family_that_never_saves_so_much_has_no_row(sweeps: BaselineComparison) -> None:
    assert sweeps.make_pareto_rows(0, (0.99,)) == []


def test_rows_rank_by_saving_then_rise_and_without_one_by_accuracy() -> None:
    plain = {"net reduction %": 0.3, "accuracy lost %": 0.0}
    wanted = [
        plain | {"rise %": 0.01},
        plain | {"rise %": 0.02},
        plain | {"rise %": None, "accuracy lost %": 0.01},
        plain | {"rise %": None, "accuracy lost %": 0.02},
        plain | {"rise %": 0.0, "net reduction %": 0.6},
    ]
    assert sort_by_saving_and_rise(wanted[::-1]) == wanted


# ---------------------------------------------------------------- confidence rules of early exits


def test_early_exits_stand_with_emad_on_the_same_windows_and_not_beside_more_text(sweeps: BaselineComparison) -> None:
    rules = sweeps.confidence_rule_comparison
    rows = rules.make_pareto_rows(0, (0.15, 0.30))
    assert set(rules.points_by_family) == {EMAD_FAMILY, *(f"early exit: {name}" for name in pareto.CONFIDENCES)}
    assert {row["family"] for row in rows} >= {"early exit: softmax", "early exit: saturation"}
    assert {row["windows"] for row in rows} == {FIRST["evaluate"]}
    assert not any(row["family"].startswith("early exit") for row in sweeps.make_pareto_rows(0, (0.15, 0.30)))
    lost = [row for row in rows if row["perplexity"] is None]
    assert lost
    for row in lost:
        assert row["chosen by"] == "accuracy"
        assert row["over EMAD %"] is None
        assert 0 <= row["accuracy %"] <= 1


def test_rules_that_lose_next_tokens_are_held_against_emad_by_tokens_told_wrong(profile: Profile) -> None:
    """With targets so high that this random model exits at its first probe, EMAD saves as much as any rival."""
    loose = replace(profile, targets_nats=(9.0, 9.0))
    found = make_confidence_comparison(traces(loose, model()))
    rows = found.make_pareto_rows(0, (0.15,))
    (emad,) = [row for row in rows if row["family"] == EMAD_FAMILY]
    lost = [row for row in rows if row["chosen by"] == "accuracy"]
    assert lost
    for row in lost:
        assert row["net reduction %"] == emad["net reduction %"]
        assert row["over EMAD %"] is None
        low, high = row["wrong over EMAD interval %"]
        assert low <= row["wrong over EMAD %"] <= high
    kept = [row for row in rows if row["chosen by"] == "perplexity" and row["family"] != EMAD_FAMILY]
    assert all(row["wrong over EMAD %"] is None and row["over EMAD %"] is not None for row in kept)


def test_a_family_of_which_any_point_loses_a_next_token_is_chosen_by_accuracy(sweeps: BaselineComparison) -> None:
    rules = sweeps.confidence_rule_comparison
    assert rules.choose_quality_metric("early exit: softmax") == rules.choose_quality_metric(EMAD_FAMILY) == "nats"
    pruned = "early exit: softmax, fixed"
    assert rules.choose_quality_metric(pruned) == "wrong"
    front = rules.replay_point_family_by_document(pruned, "wrong").front
    chosen_on = rules.losses(pruned, "validate")
    expected = mark_lower_hull_corners(chosen_on.savings[None], chosen_on.means("wrong")[None])[0]
    assert front.corners.tolist() == expected.tolist()
    assert np.isfinite(chosen_on.nats[0]).all(), "full depth prunes nothing"


def test_early_exits_are_chosen_on_the_first_validation_windows_and_judged_on_the_first_evaluated(
    run: SimpleNamespace, sweeps: BaselineComparison
) -> None:
    rules = sweeps.confidence_rule_comparison
    points = rules.points_by_family["early exit: JSD"]
    for split, found in (("validate", rules.validation_trace), ("evaluate", rules.evaluation_trace)):
        first = text(split, SEQUENCES)[: FIRST[split]]
        assert found.token.tolist() == np.concatenate([one.tokens[:-1] for one in first]).tolist()
    mine = take_trace(run.subject.stepper, text("evaluate", SEQUENCES)[:3], rules=points[:1])
    expected = replay_losses(mine, run.subject.loaded.geometry, [points[-1]])
    found = rules.losses("early exit: JSD", "evaluate")
    assert found.nats[-1].tolist() == expected.nats[1].tolist()
    assert (found[0].point, found[0].perplexity_rise) == (full_depth(LAYERS), 0.0)
    assert rules.validation_trace.n_sequences == 2


def test_a_rule_without_room_is_left_out_and_says_why(profile: Profile) -> None:
    found = make_confidence_comparison(traces(profile, model(SMALLEST)))
    assert set(found.absent) == {"softmax, fixed", "softmax, decaying", "JSD, fixed", "JSD, decaying"}
    assert all("do not prune it" in absent.reason for absent in found.absent.values())
    assert "early exit: JSD, adaptive" in found.points_by_family
    assert len(found.losses("early exit: softmax", "validate")) > 1


def test_every_budget_says_how_many_windows_rules_are_traced_on() -> None:
    for name, budget in BUDGETS.items():
        assert 0 < WINDOWS[name]["validate"] <= budget.validate
        assert 0 < WINDOWS[name]["evaluate"] <= budget.evaluate


# ---------------------------------------------------------------- shown rows


def test_tables_are_shown_with_their_figures_and_say_why_a_perplexity_is_missing(sweeps: BaselineComparison) -> None:
    shown = sweeps.make_pareto_tables()
    assert [(table.title, table.figure) for table in shown.tables] == [
        ("best perplexity at equal net FLOPs on random", "pareto"),
        ("early exits at equal net FLOPs on the first 3 windows of random", "pareto"),
    ]
    assert [table.rows for table in shown.tables] == [
        sweeps.make_pareto_rows(0),
        sweeps.confidence_rule_comparison.make_pareto_rows(0),
    ]
    assert shown.notes == ("small: no perplexity: a pruned vocabulary lost a next token, and it is infinite",)


def test_rules_without_room_are_named_in_notes(profile: Profile) -> None:
    small = BaselineComparison(traces(profile, model(SMALLEST)))
    notes = small.make_pareto_tables().notes
    assert [note.split(" is not on the Pareto table: ")[0] for note in notes[:4]] == [
        f"small: early exit: {name}" for name in small.confidence_rule_comparison.absent
    ]


def test_where_nothing_saves_enough_a_note_takes_the_tables_place(
    sweeps: BaselineComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FamilyComparison, "make_pareto_rows", lambda self, seed: [])
    shown = sweeps.make_pareto_tables()
    assert shown.tables == ()
    assert shown.notes == ("small: no point of any sweep saves 15 % of FLOPs net",)


def dot(slope: float, gain: float) -> EntropySlopeAndMarginGain:
    estimate = Estimate(slope, slope, slope, 30, 0.0, 0.0, "nats per layer", "", "documents")
    return EntropySlopeAndMarginGain("model", "corpus", estimate, "m=0.00", gain)


def test_steeper_profiles_that_gain_more_rise_together() -> None:
    rho, p = correlate_entropy_slope_with_gain([dot(-0.1 * n, 0.05 * n) for n in range(1, 7)])
    assert rho == pytest.approx(1.0)
    assert p == pytest.approx(2 / math.factorial(6))  # the one order and its reverse, of 720


def test_flatter_profiles_that_gain_more_contradict_the_paper() -> None:
    assert correlate_entropy_slope_with_gain([dot(-0.1 * n, -0.05 * n) for n in range(1, 6)])[0] == pytest.approx(-1.0)


def test_equal_gains_have_no_order() -> None:
    rho, p = correlate_entropy_slope_with_gain([dot(-0.1 * n, 0.0) for n in range(1, 7)])
    assert math.isnan(rho)
    assert p == 1.0


def test_three_profiles_are_no_trend() -> None:
    with pytest.raises(BadArgument, match="at least 4"):
        correlate_entropy_slope_with_gain([dot(-0.1, 0.1), dot(-0.2, 0.2), dot(-0.3, 0.3)])


def margins(*rows: tuple[str, float, float, float]) -> SimpleNamespace:
    """Return points with margins of (name, mean depth, rise, net reduction) on validation; evaluation saves 0.1 less.

    There perplexity rises by a half. Full depth's perplexity is 4.
    """
    names, depths, rises, saved = zip(*rows, strict=True)
    tokens = np.full(10, 100)

    def losses(rise: Sequence[float], saving: Sequence[float]) -> Losses:
        nats = np.log(4) + np.log1p([0.0, *rise])
        flops = 1 - np.array([0.0, *saving])
        found = handmade_losses(np.outer(tokens, nats), np.outer(tokens, flops), tokens, ["full depth", *names])
        return replace(found, depth=np.outer([8, *depths], tokens).astype(np.int64))

    of = {"validate": losses(rises, saved), "evaluate": losses([0.5] * len(rows), [each - 0.1 for each in saved])}
    return SimpleNamespace(losses=lambda family, split: {EMAD_FAMILY: of}[family][split])


def test_the_gain_is_what_the_cheapest_margin_within_bounds_on_validation_saves_on_evaluation() -> None:
    deep, right, shallow = ("m=0.9", 5.0, 0.0, 0.1), ("m=0.5", 4.0, 0.005, 0.3), ("m=0.1", 3.0, 0.05, 0.5)
    gained = measure_best_margin_gain(margins(deep, right, shallow))
    assert gained == ("m=0.5", pytest.approx(0.2), pytest.approx(0.5))
    assert measure_best_margin_gain(margins(shallow)) == ("no margin", 0.0, 0.0)
    assert measure_best_margin_gain(margins(("m=0.9", 5.0, 0.0, -0.02))) == ("no margin", 0.0, 0.0), (
        "probes that never fire cost"
    )


def test_a_dot_has_the_slope_of_the_profile_by_document() -> None:
    evidence = small_evidence()
    found = measure_entropy_slope_and_gain(evidence.traces, evidence.baseline_comparison, np.random.default_rng(3))
    traces = evidence.traces
    expected = estimate_entropy_slope(*traces.entropy_sums, threshold=0.0, rng=np.random.default_rng(3))
    assert found.slope == expected
    assert (found.model, found.corpus) == ("small", "self")
    gained = measure_best_margin_gain(evidence.baseline_comparison)
    assert (found.point, found.gain) == gained[:2]
