"""Rivals: which sweeps there are, that they are chosen on one split and judged on another, and their table."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.calibration.profile import Profile, profile_of
from emad_ref.calibration.trace import TokenSequence, Trace, take_trace
from emad_ref.evidence import rivals
from emad_ref.evidence.rivals import EMAD, EMAD_BESIDE, WINDOWS, Confident, Rivals
from emad_ref.evidence.study import BUDGETS
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from emad_ref.models.stepper import Stepper
from emad_ref.point import full_depth
from emad_ref.sweep import losses
from emad_ref.sweep.families import SETTINGS
from emad_ref.sweep.losses import loss_table
from tests.small import LAYERS, small_config, small_model
from tests.traces import layerwise

PROBES, SEQUENCES, LENGTH = (2, 4), 12, 20
VOCABULARY, SMALLEST = 300, 50  # 2 of 300 tokens are kept at the least; of 50 there would be fewer
FIRST = {"validate": 2, "evaluate": 3}  # windows that confidence rules are traced on


def trace_of(seed: int) -> Trace:
    """Entropy and loss that fall with depth and from the first half of a text to the second."""
    rng, rows = np.random.default_rng(seed), SEQUENCES * LENGTH
    place = np.tile(np.arange(LENGTH), SEQUENCES)
    level = np.where(place < LENGTH // 2, 2.0, 0.5)[:, None] * np.linspace(1.5, 1.0, LAYERS)
    noisy = (level * rng.uniform(0.5, 1.5, (rows, LAYERS))).astype(np.float32)
    return Trace(
        signals=layerwise(noisy, np.exp(-noisy)),
        nll_nats=(level * rng.uniform(0.8, 1.2, (rows, LAYERS))).astype(np.float32),
        top1=np.zeros((rows, LAYERS), dtype=np.int32),
        top1_probability=np.exp(-noisy),
        token=place,
        target=place,
        position=place,
        starts=np.arange(0, rows + 1, LENGTH),
        prompts=np.zeros(SEQUENCES, dtype=np.int64),
    )


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of(trace_of(0), PROBES, model="m", fingerprint="f", corpus="c", dtype="float32")


def text(split: str, count: int) -> list[TokenSequence]:
    rng = np.random.default_rng(["validate", "evaluate"].index(split))
    return [TokenSequence(rng.integers(0, SMALLEST, LENGTH)) for _ in range(count)]


def model(vocabulary: int = VOCABULARY) -> Stepper:
    config = small_config("gpt_neox")
    config.vocab_size = vocabulary
    return CausalStepper(small_model("gpt_neox", config=config))


def traces(profile: Profile, stepper: Stepper) -> SimpleNamespace:
    """Traces of random text."""
    subject = SimpleNamespace(
        name="small",
        stepper=stepper,
        loaded=SimpleNamespace(geometry=geometry_of(small_config("gpt_neox"))),
        corpus="random",
        budget=SimpleNamespace(name="smoke", validate=SEQUENCES, evaluate=SEQUENCES),
        sequences=text,
        trace=lambda sequences, what, rules: take_trace(stepper, sequences, rules=rules),
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
def sweeps(run: SimpleNamespace) -> Rivals:
    return Rivals(run)


def test_emad_comes_first_and_every_rival_of_the_paper_has_a_sweep(sweeps: Rivals) -> None:
    assert next(iter(sweeps.families)) == EMAD
    assert set(sweeps.families) >= {"fixed truncation", "fixed entropy", "softmax response", "chunked", "positional"}
    assert [len(sweeps.families[name]) for name in (EMAD, "fixed entropy", "softmax response")] == [SETTINGS] * 3
    names = [point.name for points in sweeps.families.values() for point in points]
    assert len(set(names)) == len(names)


def test_the_gap_of_the_two_best_logits_comes_last_with_thresholds_of_the_calibration_text(sweeps: Rivals) -> None:
    *_, (name, points) = sweeps.families.items()
    assert (name, len(points)) == ("top-2 gap, quantile", SETTINGS)
    column = trace_of(0).column("top2_gap")[:, np.array(PROBES) - 1].astype(np.float64)
    assert points[-1].thresholds[0] == tuple(column.min(axis=0)), "at the last every token leaves"
    assert all((column >= point.thresholds[0]).any(axis=0).all() for point in points[1:]), "some token always may"


def test_quantiles_need_a_profile_that_kept_its_statistics(profile: Profile) -> None:
    bare = Profile("m", "f", "c", "float32", LAYERS, PROBES, profile.mean_nats, profile.targets_nats, 100, 10, {})
    assert "EMAD, quantile" in Rivals(traces(profile, model())).families
    assert "EMAD, quantile" not in Rivals(traces(bare, model())).families


def test_points_are_chosen_on_validation_and_judged_on_evaluation(run: SimpleNamespace, sweeps: Rivals) -> None:
    point = run.profile.point(0.0)
    (chosen,) = [row for row in sweeps.validated[EMAD] if row.point == point]
    (judged,) = loss_table(run.evaluation, run.subject.loaded.geometry, [point])
    assert chosen.perplexity == loss_table(run.validation, run.subject.loaded.geometry, [point])[0].perplexity
    assert sweeps.evaluated(point).perplexity == judged.perplexity != chosen.perplexity


def test_a_point_is_judged_once(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(trace, geometry, points):
        asked.append(list(points))
        return losses.loss_table(trace, geometry, asked[-1])

    monkeypatch.setattr(rivals, "loss_table", counted)
    fresh, point = Rivals(traces(profile, model())), profile.point(0.0)
    assert fresh.evaluated(point) is fresh.evaluated(point)
    assert asked == [[point]]
    assert fresh.confident.evaluated(point) is fresh.confident.evaluated(point)
    assert asked == [[point]] * 2, "on other text it is another loss"


def test_both_sides_of_a_duel_save_enough_on_validation(sweeps: Rivals) -> None:
    saved = {row.point: row.net_reduction for table in sweeps.validated.values() for row in table}
    duels = sweeps.duels("fixed truncation")
    assert duels
    for duel in duels:
        assert saved[duel.ours] >= duel.reduction
        assert saved[duel.rival] >= duel.reduction
        assert (duel.ours.family, duel.rival.family) == ("emad", "truncation")


def test_the_table_has_the_best_of_each_family_that_saves_enough_by_level_and_quality(sweeps: Rivals) -> None:
    rows = sweeps.table((0.15, 0.30))
    finite = [row for row in rows if row["rise %"] is not None]
    assert [(row["net reduction ≥ %"], row["rise %"]) for row in finite] == sorted(
        (row["net reduction ≥ %"], row["rise %"]) for row in finite
    )
    assert len({(row["net reduction ≥ %"], row["family"]) for row in rows}) == len(rows)
    for row in rows:
        if row["family"] not in sweeps.families:
            continue
        table = sweeps.validated[row["family"]]
        enough = [loss for loss in table if loss.net_reduction >= row["net reduction ≥ %"]]
        best = min(enough, key=lambda loss: loss.perplexity).point
        judged = sweeps.evaluated(best)
        assert row["point"] == best.name
        assert (row["perplexity"], row["net reduction %"]) == (judged.perplexity, judged.net_reduction)


def test_a_family_that_never_saves_so_much_has_no_row(sweeps: Rivals) -> None:
    assert sweeps.table((0.99,)) == []
    assert {row["net reduction ≥ %"] for row in sweeps.table()} == {0.15, 0.30, 0.45, 0.60}


# ---------------------------------------------------------------- confidence rules of early exits


def test_early_exits_stand_on_the_table_with_emad_on_the_same_windows(sweeps: Rivals) -> None:
    rows, own = sweeps.table((0.15, 0.30)), set(sweeps.confident.families)
    early = [row for row in rows if row["family"] in own]
    assert own == {EMAD_BESIDE, *(f"early exit: {name}" for name in rivals.CONFIDENCES)}
    assert {row["family"] for row in early} >= {
        "early exit: softmax",
        "early exit: JSD, fixed",
        "early exit: saturation",
    }
    assert {row["windows"] for row in early} == {FIRST["evaluate"]}
    assert {row["windows"] for row in rows if row["family"] not in own} == {SEQUENCES}
    lost = [row for row in early if row["perplexity"] is None]
    assert lost
    assert all(row["chosen by"] == "accuracy" and 0 <= row["accuracy %"] <= 1 for row in lost)


def test_early_exits_are_chosen_on_the_first_validation_windows_and_judged_on_the_first_evaluated(
    run: SimpleNamespace, sweeps: Rivals
) -> None:
    rules = sweeps.confident
    points = rules.families["early exit: JSD"]
    for split, found in (("validate", rules.validation), ("evaluate", rules.evaluation)):
        first = text(split, SEQUENCES)[: FIRST[split]]
        assert found.token.tolist() == np.concatenate([one.tokens[:-1] for one in first]).tolist()
    mine = take_trace(run.subject.stepper, text("evaluate", SEQUENCES)[:3], rules=points[:1])
    (expected,) = loss_table(mine, run.subject.loaded.geometry, [points[8]])
    assert rules.evaluated(points[8]).nll_nats.tolist() == expected.nll_nats.tolist()
    assert rules.evaluated(full_depth(LAYERS)).perplexity_rise == 0.0
    assert rules.validated["early exit: JSD"][8].nll_nats.shape == (2,)


def test_a_rule_without_room_is_left_out_and_says_why(profile: Profile) -> None:
    found = Confident(traces(profile, model(SMALLEST)))
    assert set(found.refused) == {"softmax, fixed", "softmax, decaying", "JSD, fixed", "JSD, decaying"}
    assert all("do not prune it" in reason for reason in found.refused.values())
    assert "early exit: JSD, adaptive" in found.families
    assert found.validated["early exit: softmax"]


def test_every_budget_says_how_many_windows_rules_are_traced_on() -> None:
    for name, budget in BUDGETS.items():
        assert 0 < WINDOWS[name]["validate"] <= budget.validate
        assert 0 < WINDOWS[name]["evaluate"] <= budget.evaluate


# ---------------------------------------------------------------- what is shown


def test_the_table_is_shown_with_its_figure_and_says_why_a_perplexity_is_missing(sweeps: Rivals) -> None:
    shown = sweeps.exhibits()
    (table,) = shown.tables
    assert (table.title, table.figure) == ("best perplexity at equal net FLOPs on random", "pareto")
    assert table.rows == sweeps.table()
    assert shown.notes == ("small: no perplexity: a pruned vocabulary lost a next token, and it is infinite",)


def test_rules_without_room_are_named_in_notes(profile: Profile) -> None:
    small = Rivals(traces(profile, model(SMALLEST)))
    notes = small.exhibits().notes
    assert [note.split(" is not on the Pareto table: ")[0] for note in notes[:4]] == [
        f"small: early exit: {name}" for name in small.confident.refused
    ]


def test_where_nothing_saves_enough_a_note_takes_the_tables_place(
    sweeps: Rivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emad_ref.sweep.families.equal_flops", lambda table, level: None)
    shown = sweeps.exhibits()
    assert shown.tables == ()
    assert shown.notes == ("small: no point of any sweep saves 15 % of FLOPs net",)
