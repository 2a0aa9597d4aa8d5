"""``emad screen`` on one model: every choice is shown on another split, and every phase runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.calibration.trace import take_trace
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.teacher_forcing import TeacherForcedText
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import early_exit_point
from emad_ref.files import BadFile
from emad_ref.models.geometry import geometry_of
from emad_ref.models.loading import load
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from emad_ref.replay.grids import ThresholdSweep
from emad_ref.replay.losses import bound_rises, replay_losses
from emad_ref.text import world
from pytest_emad import cli
from pytest_emad.benchmark.clock import WARM_UP
from pytest_emad.screening import drafts, result, selection, traces
from pytest_emad.screening import screen as screen_module
from pytest_emad.screening.drafts import predict_drafting_seconds
from pytest_emad.screening.exit import load_exit
from pytest_emad.screening.exit_families import OWN_HEAD, TUNED_LENS, ExitFamily, candidate_probe_sets
from pytest_emad.screening.guarantee import Guarantee, ThresholdTest
from pytest_emad.screening.own_text import OwnText, judge_own_text
from pytest_emad.screening.phases import PHASES, PhaseRunner, digest_of_screening
from pytest_emad.screening.result import recommend
from pytest_emad.screening.screen import screen
from pytest_emad.screening.selection import (
    Certification,
    FamilyWithoutPoint,
    OracleHeadroom,
    SelectedPoint,
    certify_points,
    loosest_point,
)
from pytest_emad.screening.settings import (
    RISE_LEVELS,
    ScreeningSettings,
    compute_traced_token_flops,
    default_document_count,
    default_window_size,
)
from pytest_emad.screening.task_losses import ScreenedTask, judge_tasks
from pytest_emad.screening.timing import (
    CandidateTime,
    UnitCosts,
    format_predicted_duration,
    measure_unit_costs,
    predict_phase_seconds,
)
from pytest_emad.screening.traces import (
    TooLittleText,
    absent_text,
    choose_held_out_token_count,
    layers_to_read,
    read_text_splits,
)
from pytest_emad.statistics.accuracy import AT_STAKE, TaskAccuracy, estimate_accuracy_drop
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.units import ByItem
from tests.small_models import small_config

DOCUMENTS = 12
FAST = ("--documents", str(DOCUMENTS))


@pytest.fixture(scope="module")
def nano():
    return load("emad-nano")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the output and the file of the command, for a bundled model on very little text."""
    out = tmp_path_factory.mktemp("screen") / "exit.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMAD_CACHE", str(out.parent))  # another worker's run of this fixture would be resumed
        said: list[str] = []
        patch.setattr("builtins.print", lambda *parts, **how: said.append(" ".join(map(str, parts))))
        assert cli.main(["screen", "emad-nano", str(out), *FAST]) == 0
    return load_exit(out), "\n".join(said)


def test_the_duration_is_predicted_before_the_start(found):
    record, printed = found[0].screened, found[1]
    predicted = record["predicted"]
    assert set(predicted) <= set(record["seconds"])
    assert all(seconds > 0 for seconds in predicted.values())
    first = next(line for line in printed.splitlines() if line.startswith("emad: "))
    phases = ", ".join(rf"{phase} \d+" for phase in predicted)
    assert re.match(rf"emad: emad-nano: about \d+ (?:seconds|minutes) \({phases}\)", first)


def test_a_prediction_follows_from_unit_costs_and_amounts(nano):
    few, more = (ScreeningSettings(documents=count) for count in (4, 8))
    costs, texts = UnitCosts(forward=1e-3, head=1e-4, step=1e-2, batch_step=1e-1), read_text_splits(nano, few)
    base = predict_phase_seconds(nano, texts, few, costs)
    shown = texts.choose.n_tokens + texts.evaluate.n_tokens
    profile = sum(window.n_decided for window in texts.calibrate.windows[: few.n_profile_windows])
    assert base["traces"] == pytest.approx((shown * (1 + 0.1 + 0.6) + profile * (1 + 0.1 + 0.3)) * 1e-3)
    assert base["timing"] == pytest.approx(4 * (WARM_UP + 3) * 64 * 1e-2)
    twice = predict_phase_seconds(nano, texts, few, UnitCosts(2e-3, 2e-4, 2e-2, 2e-1))
    assert all(twice[phase] == pytest.approx(2 * base[phase]) for phase in base)
    parts = UnitCosts(1e-3, 1e-4, 0, 0), UnitCosts(0, 0, 1e-2, 1e-1)
    reading, writing = (predict_drafting_seconds(nano, texts, few, each) for each in parts)
    assert min(reading, writing) > 0
    assert reading + writing == pytest.approx(predict_drafting_seconds(nano, texts, few, costs))
    larger = predict_phase_seconds(nano, read_text_splits(nano, more), more, costs)
    assert all(larger[phase] > base[phase] for phase in base if phase != "timing")


def test_unit_costs_are_of_this_model(nano):
    costs = measure_unit_costs(nano, read_text_splits(nano, ScreeningSettings(documents=4)).choose)
    assert min(vars(costs).values()) > 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ({"lens": 30.4, "traces": 60.0}, "about 90 seconds (lens 30, traces 60)"),
        ({"lens": 240.0, "traces": 660.0}, "about 15 minutes (lens 4, traces 11)"),
    ],
)
def test_a_duration_is_told_in_seconds_or_minutes(seconds, text):
    assert format_predicted_duration(seconds) == text


def test_every_phase_has_run_and_every_family_has_a_row_at_every_level(found):
    record = found[0].screened
    assert list(record["seconds"]) == list(PHASES)
    rows = {(row["readout"], row["family"], row["depth"]): set() for row in record["reached"]}
    for row in record["reached"]:
        rows[row["readout"], row["family"], row["depth"]].add(row["level"])
    assert all(levels == set(RISE_LEVELS) for levels in rows.values())
    assert (OWN_HEAD, "EMAD, mean − margin", "monotone") in rows
    assert {
        (TUNED_LENS, name, depth) for name in ("gate", "entropy", "softmax response") for depth in ("free", "monotone")
    } <= {*rows}
    kinds = {(row["oracle"], row["readout"], row["depth"]) for row in record["slack"]}
    assert len(kinds) == 2 * 2 * 2
    drafts = record["drafts"]
    assert drafts["fast"] > 0
    assert drafts["sentence"].startswith("lossless: ")
    json.dumps(record, allow_nan=False)  # plain JSON, without values that other readers reject


def smollm2_geometry():
    config = small_config("llama")
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    sizes |= {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152, "tie_word_embeddings": True}
    for name, value in sizes.items():
        setattr(config, name, value)
    return geometry_of(config)


def test_few_layers_are_read_where_a_head_costs_more_than_a_block(nano):
    geometry = smollm2_geometry()
    assert geometry.parameter_count() == 134_515_008
    large = SimpleNamespace(geometry=geometry)
    assert layers_to_read(large) == (5, 10, 15, 20, 25)
    assert choose_held_out_token_count(large, ScreeningSettings()) == 4_000
    assert default_document_count(compute_traced_token_flops(geometry)) == 220
    assert layers_to_read(nano) is None
    assert choose_held_out_token_count(nano, ScreeningSettings()) == 20_000
    assert default_document_count(compute_traced_token_flops(nano.geometry)) == 300
    assert [default_window_size(each) for each in (geometry, nano.geometry)] == [128, None]


def test_where_a_head_costs_more_than_a_block_half_as_many_documents_choose(nano, monkeypatch):
    settings = ScreeningSettings(documents=60, window=40)
    monkeypatch.setattr(traces, "layers_to_read", lambda model: (2, 3))
    texts = read_text_splits(nano, settings)
    assert [text.n_documents for text in vars(texts).values()] == [60, 30, 60, 60]
    assert not {each.tokens.tobytes() for each in texts.choose.windows} & {
        each.tokens.tobytes() for each in texts.certify.windows
    }
    assert max(len(each.tokens) for text in vars(texts).values() for each in text.windows) == 40
    few = read_text_splits(nano, replace(settings, documents=40))
    assert [text.n_documents for text in vars(few).values()] == [40, 40, 40, 40], "20 documents could choose nothing"
    monkeypatch.undo()
    assert [text.n_documents for text in vars(read_text_splits(nano, settings)).values()] == [120, 60, 60, 60]


def test_a_screening_of_few_layers_reads_compares_and_leaves_after_these_alone(nano, monkeypatch):
    for module in (traces, screen_module, drafts):
        monkeypatch.setattr(module, "layers_to_read", lambda model: (2, 3))
    record = screen(nano, ScreeningSettings(documents=DOCUMENTS)).screened
    assert list(record["lens"]["tuned_nats"]) == ["2", "3"]
    assert {probe for row in record["reached"] for probe in row.get("probes") or ()} <= {2, 3}
    assert "positional" not in {row["family"] for row in record["reached"] if row["probes"]}
    assert len(record["slack"]) == 2 * 2 * 2 * len(RISE_LEVELS)
    assert record["drafts"]["sentence"].startswith("lossless: ")


def test_few_documents_are_inconclusive_and_nothing_is_recommended(found):
    exit, said = found
    assert exit.lossy.reason.startswith("inconclusive: 12 documents to choose on")
    assert exit.lossy.reason in " ".join(said.split())
    assert "slack, an upper bound: saving of an oracle" in said
    assert "depend on this machine; everything else is the same on every machine with seed 0" in " ".join(said.split())
    assert "written to" in said.splitlines()[-1]


def test_an_oracle_saves_no_less_than_a_rule_that_has_to_guess(found):
    record = found[0].screened
    ceiling = {row["level"]: 0.0 for row in record["slack"]}
    for row in record["slack"]:
        ceiling[row["level"]] = max(ceiling[row["level"]], row["blocks"])
    replayed = [row for row in record["reached"] if row["depth"] == "free" and row["blocks"] is not None]
    within = [row for row in replayed if row["rise"][0] <= row["level"]]
    assert all(row["blocks"][0] <= ceiling[row["level"]] + 0.02 for row in within)


def test_another_run_finds_the_same_but_for_times(found, nano, capsys):
    usual, again = found[0], screen(nano, ScreeningSettings(documents=DOCUMENTS))
    assert capsys.readouterr().err == "", "no message was requested"
    timed = set(result.MACHINE_KEYS)
    assert timed < set(usual.screened)
    assert usual.screened["by_clock"] == list(result.MACHINE_KEYS)
    records = [{name: v for name, v in exit.screened.items() if name not in timed} for exit in (usual, again)]
    assert records[0] == records[1]
    assert (again.lossy, again.guarantee) == (usual.lossy, usual.guarantee)
    assert (again.fitted.lens.digest, again.fitted.gate) == (usual.fitted.lens.digest, usual.fitted.gate)


def test_what_is_within_reach_is_no_less_than_what_is_reached(found):
    record = found[0].screened
    reached = {
        (row["readout"], row["family"], row["depth"]): row["net"] for row in record["reached"] if row["level"] == 0.01
    }
    reach = {(row["readout"], row["family"], row["depth"]): row for row in record["within_reach"]}
    assert list(reach) == list(reached)
    assert any(row["net"] for row in reach.values()), "otherwise nothing is compared"
    for name, row in reach.items():
        assert reached[name] is None or row["net"][0] >= reached[name][0], name
        assert row["rise"] is None or row["rise"][1] <= 0.01, "it is not shown to lose more"


# ---------------------------------------------------------------- text


def test_no_document_is_in_two_parts(nano):
    texts = read_text_splits(nano, ScreeningSettings(documents=8))
    parts = [{window.tokens.tobytes() for window in text.windows} for text in vars(texts).values()]
    assert [len(part) for part in parts] == [16, 8, 8, 8]
    assert len(set().union(*parts)) == 40
    assert absent_text(texts).reason.startswith("inconclusive: 8 documents to choose on")


def test_a_corpus_of_one_document_is_too_little(nano, tmp_path):
    (tmp_path / "one.txt").write_text("Ben has 4 pens.\n", encoding="utf-8")
    with pytest.raises(TooLittleText, match="but expected at least 2; name a larger one"):
        read_text_splits(nano, ScreeningSettings(corpus=str(tmp_path / "one.txt")))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"documents": 1}, "at least 2"),
        ({"rise": 0.0}, "above 0 and below 0.22"),
        # the guarantee cannot hold δ = log(1 + rise) above the loss at which it clips
        ({"rise": 0.2215}, "above 0 and below 0.22"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong, said):
    with pytest.raises(BadArgument, match=said):
        ScreeningSettings(**wrong)


@pytest.mark.parametrize(
    ("name", "said"),
    [("random:emad-nano", "trained weights"), ("emad-t5-tiny", "a decoder-only model")],
)
def test_models_without_anything_to_screen_are_refused(name, said):
    with pytest.raises(BadArgument, match=said):
        screen(load(name), ScreeningSettings())


# ---------------------------------------------------------------- choosing


def losses(rng, documents, mean, spread):
    tokens = rng.integers(50, 150, documents).astype(float)
    excess = tokens * (mean + spread * rng.standard_normal(documents))
    return tokens, excess


def test_what_is_chosen_by_its_bound_is_confirmed_on_other_text():
    """At the bound itself, evaluation's one-sided 95 % bound lies below the level in about 95 of 100 draws."""
    rng, confirmed = np.random.default_rng(0), 0
    for _ in range(300):
        tokens, excess = losses(rng, 200, 0.005, 0.02)
        level = bound_rises(excess, tokens, confirmed_on=200)
        tokens, excess = losses(rng, 200, 0.005, 0.02)
        mean = excess.sum() / tokens.sum()
        away = excess - mean * tokens
        upper = mean + 1.6525 * np.sqrt(200 / 199 * (away @ away)) / tokens.sum()
        confirmed += np.expm1(upper) <= level
    assert 0.91 <= confirmed / 300 <= 0.99


def test_what_is_shown_to_lose_more_does_lose_more():
    """In about 95 of 100 draws the lower bound lies below the true rise; it is always below the mean and the bound."""
    rng, below = np.random.default_rng(2), 0
    for _ in range(300):
        tokens, excess = losses(rng, 200, 0.005, 0.02)
        lower, upper = bound_rises(excess, tokens, lower=True), bound_rises(excess, tokens)
        assert lower < np.expm1(excess.sum() / tokens.sum()) < upper < bound_rises(excess, tokens, confirmed_on=200)
        below += lower <= np.expm1(0.005)
    assert 0.91 <= below / 300 <= 0.99


def test_the_loosest_setting_within_a_level_is_found():
    dial = ThresholdSweep(
        lambda setting: replace(full_depth(4), name=f"{setting}"), lambda s, digits: f"{s:.{digits}g}", 0.0, 64.0
    )
    point = loosest_point(dial, 0.25, lambda point: float(point.name))
    assert float(point.name) == pytest.approx(0.25, rel=1e-3)
    assert loosest_point(dial, 100.0, lambda point: float(point.name)).name == "64"
    assert loosest_point(dial, 0.25, lambda point: 1.0) is None


def test_sets_of_probes_stay_within_what_the_lens_translates():
    assert candidate_probe_sets(12)[0] == tuple(range(1, 12))
    assert {*sum(candidate_probe_sets(12, (2, 5, 9)), ())} == {2, 5, 9}
    assert candidate_probe_sets(2) == [(1,)]


# ---------------------------------------------------------------- recommendations


def estimate(value, low, high, p_below=0.01, n=300):
    return Estimate(value, low, high, n, 1 - p_below, p_below, "", "", "documents")


def point():
    return replace(full_depth(12), name="gate ≤ 0.1")


def promised(name):
    return Guarantee(
        "excess",
        0.2,
        0.01,
        0.05,
        300,
        "text",
        (ThresholdTest("gate ≤ 0.1", 0.004, 0.01),),
        None if name is None else 0,
        0.0,
        0.9,
        210,
        None,
    )


def decide(
    oracle=0.4, net=(0.3, 0.28, 0.32), p_below=0.01, n=300, name="gate ≤ 0.1", proven=True, few=None, documents=None,
    reach=(0.35, 0.33, 0.37), looser=None, fast=(1.3, 1.2, 1.4), own=(0.005, 0.2), lost=(0, 0), right=60,
):  # fmt: skip
    """``fast``: the speed-up with its interval; ``own``: rise of the point's own text, and its p-value; None: none.

    ``lost``: answers of 60 that each task loses, of ``right`` at full depth.
    """
    family = ExitFamily("gate", TUNED_LENS, "free")
    saved, rise = estimate(*net, n=n), estimate(0.008, 0.007, 0.009, p_below, n)
    rows = [SelectedPoint(family, 0.01, point(), saved, rise, saved, how="decoded")]
    if looser is not None:
        saved = estimate(*looser, n=n)
        lucky = estimate(0.008, 0.007, 0.009, 0.01, n)
        rows.append(
            SelectedPoint(
                family, 0.01, replace(point(), name="gate ≤ 0.2", margin_nats=0.2), saved, lucky, saved, how="decoded"
            )
        )
    widest = FamilyWithoutPoint(family, 0.01)
    if reach is not None:
        saved = estimate(*reach, n=n)
        widest = SelectedPoint(family, 0.01, point(), saved, rise, saved)
    certified = Certification(family, (point(),), np.array([0.009]), np.array([0.3]), point(), promised(name), None)
    oracles = [OracleHeadroom("price", TUNED_LENS, "free", 0.01, oracle, oracle, oracle - 0.01, oracle + 0.01)]
    reached = [FamilyWithoutPoint(family, 0.01), widest]
    documents = n if documents is None else documents
    points = [row.point for row in rows]
    times = {each: CandidateTime(each.name, 0.01, *fast) for each in points if fast is not None}
    written = [OwnText(each, replace(estimate(own[0], -0.01, 0.2, n=30), p_above=own[1]), 12.4 if own[0] else 64.0, 64)
               for each in points if own is not None]  # fmt: skip
    tasks = lost if isinstance(lost, Absent) else [
        scored(each, f"task {number}", right, right - few_lost)
        for each in points for number, few_lost in enumerate(lost)
    ]  # fmt: skip
    decoded = rows if proven else []
    certified = certified if proven else None
    return recommend(oracles, certified, decoded, reached, 0.01, few, documents, times, written, tasks)


def scored(point, task, full, at_point, items=60):
    """Return a task with so many right answers at full depth and at the point."""
    scores = TaskAccuracy(
        *(ByItem.from_independent_items(np.arange(items) < right) for right in (full, at_point)), 0.25, 1.0
    )
    return ScreenedTask(point, task, scores, estimate_accuracy_drop(scores.full, scores.adaptive, threshold=AT_STAKE))


@pytest.mark.parametrize(
    ("lost_nats", "tried", "chosen"),
    [
        ((0.0, 0.05, 0.06), 2, "point 0"),
        ((0.05, 0.0), 1, None),
        ((0.0, 0.0001, 0.0002), 3, "point 2"),
    ],
)
def test_points_are_decoded_up_to_the_first_that_is_neither_within_the_rise_nor_certified(
    nano, monkeypatch, lost_nats, tried, chosen
):
    """``lost_nats``: per token, of points from strict to loose."""
    settings = ScreeningSettings(documents=100)
    text, layers = read_text_splits(nano, settings).certify, nano.stepper.layers
    points = [replace(full_depth(layers), name=f"point {number}") for number in range(len(lost_nats))]
    full = replay_losses(take_trace(nano.stepper, text.windows, layers=()), nano.geometry, [])
    decoded = []

    def feed(stepper, sequences, point, *, rows, progress):
        decoded.append(point.name)
        counts = [each.n_decided for each in sequences]
        return [
            TeacherForcedText(np.full(n, layers), np.zeros(n), np.zeros(n, bool), np.empty((n, 0)), None)
            for n in counts
        ]

    def lose(stepper, geometry, sequences, point, texts):
        lost = lost_nats[len(decoded) - 1] * full.tokens
        flops = np.rint(0.9 * full.flops).astype(np.int64)
        return replace(full, points=(point,), nats=full.nats + lost, flops=flops)

    monkeypatch.setattr(selection.losses, "teacher_force_at_point", feed)
    monkeypatch.setattr(selection.losses, "losses_of_texts", lose)
    proven = certify_points(nano, text, ExitFamily("gate", TUNED_LENS, "free"), points, settings, text.n_documents)
    assert decoded == [point.name for point in proven.tried] == [f"point {number}" for number in range(tried)]
    assert (None if proven.point_within_bound is None else proven.point_within_bound.name) == chosen
    assert proven.promise.chosen == chosen
    assert proven.saved == pytest.approx(0.1)
    assert (proven.signs is None) == (chosen is None)
    if proven.signs is not None:  # the documents of the guarantee, and none was fed again
        assert len(proven.signs) == proven.promise.documents


def test_a_confirmed_point_is_recommended_with_its_promise():
    said = decide()
    assert (said.lossy, said.guarantee) == (point(), promised("gate ≤ 0.1"))
    assert "saves 30.0% net [28.0%, 32.0%] of the FLOPs at +0.80% perplexity on given text" in said.sentence
    assert "With probability 95%" in said.sentence


def test_the_clock_and_its_own_text_decide_whether_to_leave_early():
    """The point stays in the exit: on another machine it may pay."""
    said = decide()
    assert said.leave_early
    assert said.sentence.startswith("leave early: tuned lens, gate, free depth, gate ≤ 0.1 after layers")
    assert "; 1.30× [1.20, 1.40] as fast as full depth on this machine; " in said.sentence
    assert (
        "holds (perplexity +0.5% [-1.0%, +20.0%] as full depth scores it; the first 12 of 64 tokens as full"
        in said.sentence
    )
    assert (
        "; tasks hold (task 0 100 → 100 %, task 1 100 → 100 % right; 60 items each of 2 tasks that full"
        in said.sentence
    )
    same = decide(own=(0.0, 1.0)).sentence
    assert "; after 30 prompts it writes all 64 tokens as full depth does; " in same, "no interval of nothing"
    slow = "it is not shown to save time ({} as fast as full depth on this machine)"
    cases = {
        slow.format("0.66× [0.60, 0.71]"): {"fast": (0.66, 0.6, 0.71)},
        slow.format("1.05× [0.98, 1.12]"): {"fast": (1.05, 0.98, 1.12)},
        "no text is long enough to time it": {"fast": None},
        "text that it writes itself is worse (perplexity +7.0% [-1.0%, +20.0%] as full": {"own": (0.07, 0.05)},
        "no text is long enough to let it write": {"own": None},
        "it loses answers (task 1 100 → 92 % right; 60 items each of 2 tasks that full depth solves)": {"lost": (0, 5)},
        "no task can be tried: too short": {"lost": Absent("too short")},
    }
    for against, case in cases.items():
        found = decide(**case)
        assert not found.leave_early
        assert found.sentence.startswith(f"do not leave early here: {against}")
        assert ". The point: tuned lens, gate, free depth, gate ≤ 0.1 after layers" in found.sentence
        assert (found.lossy, found.guarantee) == (said.lossy, said.guarantee)
    both = decide(fast=(0.66, 0.6, 0.71), own=(0.07, 0.05)).sentence
    assert "on this machine); text that it writes itself is worse (perplexity +7.0%" in both
    assert both.index("text that it writes") < both.index("The point: ") < both.index("tasks hold")


def test_losses_of_tasks_that_are_not_shown_are_named_and_unsolved_tasks_tell_nothing():
    unsure = decide(lost=(2, 0))
    assert unsure.leave_early
    assert "2 tasks that full depth solves, but task 0 may lose: too few items to tell)" in unsure.sentence
    assert not decide(lost=(6, 0, 0, 0, 0)).leave_early
    assert decide(lost=(5, 0, 0, 0, 0)).leave_early, "one of five tasks: p = 0.018 against 0.01"
    unsolved = decide(lost=(9, 0), right=15)
    assert unsolved.leave_early
    assert "no task tells: full depth solves none of task 0, task 1, 60 items each" in unsolved.sentence


def test_tasks_are_scored_as_emad_f1_does_on_the_same_items_at_both_depths(nano, tmp_path):
    """Full depth loses nothing against itself; a point after the first layer loses all that full depth solves."""
    settings, layers = ScreeningSettings(corpus="world:mixed", documents=12), nano.stepper.layers
    early = early_exit_point("softmax_response", layers, nano.stepper.vocabulary_size, 1, 0.3)
    text = read_text_splits(nano, settings).evaluate
    found = judge_tasks(nano, [full_depth(layers), early], text, settings)
    assert judge_tasks(nano, [], text, settings) == []
    assert {each.task for each in found} == {*world.TASKS}
    assert {len(each.scores.full) for each in found} == {30}
    for each in found:
        if each.point != early:
            assert (each.scores.full.values == each.scores.adaptive.values).all(), each.task
        elif each.scores.is_counted:
            assert each.scores.accuracies[1] < 0.1, each.task
    solved = {each.task for each in found if each.scores.is_counted}
    assert {"code", "inventory"} <= solved, "a program, and an answer"
    few = judge_tasks(nano, [early], text, replace(settings, corpus="self"))
    assert (
        few.reason.startswith("self: 12 of 12 documents read have 57 tokens, but continuation choice needs 30")
        or few.reason
    )


def test_text_that_a_point_writes_itself_is_scored_at_full_depth(nano):
    settings, layers = ScreeningSettings(corpus="world:mixed", documents=100), nano.stepper.layers
    text = read_text_splits(nano, settings).evaluate
    early = early_exit_point("softmax_response", layers, nano.stepper.vocabulary_size, 1, 0.3)
    same, derailed = judge_own_text(nano, [full_depth(layers), early], text, settings)
    assert (same.rise.value, same.same, same.rise.n) == (0.0, same.new, 10)
    assert same.rise.p_above == 1
    assert derailed.rise.value > 1
    assert derailed.rise.p_above < 0.05
    assert derailed.same < same.new / 4
    assert (
        judge_own_text(nano, [], text, settings) == judge_own_text(nano, [early], text.first_windows(1), settings) == []
    )


def test_without_a_promise_it_says_so():
    said = decide(name=None)
    assert (said.lossy, said.guarantee) == (point(), None)
    assert "Nothing is promised" in said.sentence


def test_a_promised_point_that_is_not_worth_it_gives_way_to_one_that_is_only_bounded():
    said = decide(net=(0.04, 0.035, 0.045), looser=(0.07, 0.068, 0.074))
    assert (said.lossy.name, said.guarantee) == ("gate ≤ 0.2", None)
    assert "saves 7.0% net [6.8%, 7.4%]" in said.sentence
    assert "Nothing is promised of it, but of another: With probability 95%" in said.sentence
    assert decide(looser=(0.4, 0.38, 0.42)).lossy == point(), "a guarantee outranks a larger saving"
    assert decide(net=(0.04, 0.035, 0.045), looser=(0.045, 0.04, 0.05)).lossy.reason.startswith(
        "not worth it: gate ≤ 0.1"
    )


def test_what_no_further_document_could_change_is_said_with_its_interval():
    low = (0.03, 0.02, 0.04)
    for case in ({"n": 40}, {"few": Absent("inconclusive: 12 documents to choose on")}, {"n": 40, "proven": False}):
        said = decide(**case, reach=low).lossy.reason
        assert said.startswith("not worth it: no rule of ours saves more than 3.0% net [2.0%, 4.0%] at 1.0% more")
        assert said.endswith("a rule that knew would save 40.0% net [39.0%, 41.0%] at 1.0% more perplexity")
    assert decide(n=40, reach=None).lossy.reason.startswith("not worth it: no rule of ours saves anything")
    open_ = decide(n=40, reach=(0.03, 0.02, 0.051)).lossy.reason
    assert open_.startswith("inconclusive: gate ≤ 0.1 saves")
    assert open_.endswith("at 1.0% more perplexity, ours at most 3.0% net [2.0%, 5.1%]")
    assert decide(reach=low).lossy == point(), "with enough documents, decoding decides"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"oracle": 0.047}, "no slack: leave this model alone"),
        ({"proven": False}, "no rule of ours is sure to stay below 1.0% more perplexity"),
        ({"p_below": 0.06}, "evaluation does not confirm gate ≤ 0.1"),
        ({"p_below": 0.06, "looser": (0.4, 0.38, 0.42)}, "evaluation does not confirm gate ≤ 0.1"),
        ({"net": (0.06, 0.04, 0.08)}, "not worth it"),
        ({"n": 199}, "inconclusive: gate ≤ 0.1 saves"),
        ({"few": Absent("inconclusive: 12 documents")}, "inconclusive: 12 documents"),
        ({"few": Absent("inconclusive: 12 documents"), "oracle": 0.04}, "no slack"),
        ({"few": Absent("inconclusive: 12 documents"), "oracle": 0.04, "documents": 29}, "inconclusive: 12 documents"),
    ],
)
def test_what_does_not_hold_is_not_recommended(case, said):
    found = decide(**case)
    assert found.guarantee is None
    assert found.lossy.reason.startswith(said)
    assert found.sentence == found.lossy.reason


# ---------------------------------------------------------------- after an interruption


def test_an_interrupted_screening_goes_on_and_a_changed_setting_starts_anew(found, nano, tmp_path, capsys, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    settings, calls = ScreeningSettings(documents=DOCUMENTS), []
    for name in ("fit_lens_and_gate", "take_text_traces_by_readout", "certify_points", "time_candidates"):
        for module in (screen_module, selection):
            if hasattr(module, name):
                run = getattr(module, name)
                monkeypatch.setattr(module, name, lambda *a, f=run, n=name, **k: calls.append(n) or f(*a, **k))
    with monkeypatch.context() as patch:
        patch.setattr(drafts, "fit_draft_lens", interrupt)
        with pytest.raises(KeyboardInterrupt):
            screen(nano, settings, PhaseRunner(kept_in=tmp_path))
    assert {"fit_lens_and_gate", "take_text_traces_by_readout"} <= {*calls}
    calls.clear()
    run = PhaseRunner(progress=True, kept_in=tmp_path)
    again = screen(load("emad-nano"), settings, run)
    assert calls == []
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "resumed" in line]
    kept = "lens, traces, slack, families, decoding, own text, tasks, timing, texts of the model"
    assert line.startswith(f"emad: resumed: not measured again: {kept} (kept in {tmp_path}")
    timed = set(result.MACHINE_KEYS)
    records = [{k: v for k, v in each.screened.items() if k not in timed} for each in (found[0], again)]
    assert records[0] == records[1]
    assert again.screened["seconds"]["lens"] > 0
    other = PhaseRunner(kept_in=tmp_path)
    for changed in (replace(settings, rise=0.02), replace(settings, documents=DOCUMENTS + 1)):
        other.resume(digest_of_screening(nano, changed, read_text_splits(nano, changed)))
        assert other.finished == []
        other.forget()
    run.forget()
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_keeps_nothing_and_says_so(tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    run = PhaseRunner(kept_in=tmp_path / "file")
    run.resume("abc")
    assert "emad: finished phases are not kept for an interrupted screening: kept phases=" in capsys.readouterr().err
    assert [run("slack", lambda _, value=value: value) for value in (7, 8)] == [7, 8]
    assert run.finished == []


def test_a_kept_phase_that_cannot_be_read_is_refused_by_its_folder(tmp_path):
    run = PhaseRunner(kept_in=tmp_path)
    run.resume("abc")
    assert run("slack", lambda _: 7) == run("slack", lambda _: 8) == 7
    (tmp_path / "abc" / "slack.pickle").write_bytes(b"cut")
    with pytest.raises(
        BadFile, match=r"kept phase=.*slack\.pickle.*but expected a phase that emad screen kept; remove"
    ):
        run("slack", lambda _: 8)


@pytest.mark.slow
def test_a_plainly_trained_model_leaves_early_and_drafts(tmp_path, capsys):
    out = tmp_path / "exit.safetensors"
    assert cli.main(["screen", "emad-tiny-plain", str(out), "--corpus", "world:mixed"]) == 0
    exit, model = load_exit(out), load("emad-tiny-plain")
    (best, *_) = sorted(exit.screened["decoded"], key=lambda row: -row["net"][0])
    assert best["net"][1] >= 0.25
    assert best["rise"][2] <= 0.01
    assert exit.guarantee is not None
    assert exit.screened["decoded"][0]["net"][1] >= result.WORTH_SAVING
    published = [row for row in exit.screened["reached"] if row["family"].startswith("EMAD") and row["level"] == 0.01]
    assert all(row["point"] is None for row in published)
    record = WalkedDecoder(model.stepper, exit.attach(model).point).generate([Prompt(np.array([1, 2, 3]))], 20)
    assert len(record.emitted[0]) == 20


def test_the_same_screening_elsewhere_may_end_first(tmp_path) -> None:
    one, other = (PhaseRunner(kept_in=tmp_path) for _ in range(2))
    for each in (one, other):
        each.resume("digest")
    assert one("slack", lambda _: 1) == 1
    one.forget()
    assert other("slack", lambda _: 2) == 2
    assert other.finished == ["slack"]
