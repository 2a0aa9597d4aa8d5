"""Ingredients of ablation tables: rows against plain loops, decoded openings, estimators, refusals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from emad_ref.absent import Absent
from emad_ref.calibration.trace import Trace, compute_layer_logits, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.exit_rules import default_probes, fixed_entropy_point
from emad_ref.models.causal import CausalStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import EntropyEstimator, OperatingPoint
from emad_ref.probes.estimators import low_rank_factors
from emad_ref.protocol import Unsupported
from pytest_emad.measurements import ablations, traces
from pytest_emad.measurements.ablations import (
    BEFORE,
    DECODED,
    DECODED_TOKENS,
    NO_SPEED,
    TRIED_MARGINS,
    AblationRows,
    FittedEstimators,
    RecallCounter,
    TeacherForcedOpenings,
    WorstEstimatorAgreement,
    make_margin_grid,
    make_shared_margin_grid,
    measure_speed_columns,
    parent_bin_note,
    points_at_margins_with_exits,
    probes_at_stride,
    require_available_quality_and_replay,
    require_entropy_bounds,
    usable_estimators,
)
from pytest_emad.measurements.attachments import Attachments
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import BUDGETS
from pytest_emad.statistics.accuracy import TaskAccuracy
from pytest_emad.statistics.units import ByItem
from tests.small_measurements import DOCUMENTS, PROBES, refuted, small_evidence
from tests.small_models import LAYERS, VOCABULARY, small_model

NEVER = fixed_entropy_point(LAYERS, PROBES, -1.0)  # a threshold below every entropy
LOW_RANK = EntropyEstimator("lowrank", k=8, rank=12)


@pytest.fixture(scope="module")
def stepper() -> Stepper:
    return CausalStepper(small_model("gpt_neox"))


@pytest.fixture(scope="module")
def run(stepper: Stepper) -> ModelMeasurements:
    return small_evidence(stepper)


# ---------------------------------------------------------------- building blocks


Ablation = Callable[[ModelMeasurements, np.random.Generator], Attachments]
ABLATIONS: list[Ablation] = [
    ablations.ablate_calibration_corpus,
    ablations.ablate_threshold_bins,
    ablations.ablate_estimator,
    ablations.tabulate_profile_flatness,
    ablations.ablate_exit_interpolation,
    ablations.ablate_margin,
    ablations.ablate_schedule,
    ablations.ablate_stride,
]


def test_a_table_about_quality_needs_quality_and_a_replay_that_speaks_for_the_decoder() -> None:
    def made(without: str, refusal: str) -> Any:
        subject = SimpleNamespace(absent_quality=Absent(without) if without else None)
        validity = SimpleNamespace(absent_replay=Absent(refusal) if refusal else None)
        return SimpleNamespace(subject=subject, replay_validity=validity)

    require_available_quality_and_replay(made("", ""))
    for without, refusal in (("random weights", ""), ("", "replay does not predict: depth 3, not 2")):
        with pytest.raises(Unsupported, match=without or refusal):
            require_available_quality_and_replay(made(without, refusal))


@pytest.mark.parametrize("ablate", ABLATIONS)
def test_no_ablation_has_a_table_behind_a_bridge_that_failed(stepper: Stepper, ablate: Ablation) -> None:
    with pytest.raises(Unsupported, match="replay does not predict this decoder: depth 3, not 2"):
        ablate(refuted(small_evidence(stepper)), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("layers", "stride", "probes"),
    [(12, 4, (4, 8)), (12, 5, (5, 10)), (12, 1, tuple(range(1, 12))), (12, 6, (6,)), (12, 12, ()), (4, 8, ())],
)
def test_strided_probes_leave_the_last_layer_out(layers: int, stride: int, probes: tuple[int, ...]) -> None:
    assert probes_at_stride(layers, stride) == probes


def test_a_profile_is_the_mean_entropy_of_the_calibration_text(run: ModelMeasurements) -> None:
    profile = run.traces.calibrate_profile()
    assert profile.probes == default_probes(LAYERS)
    assert (profile.model, profile.fingerprint, profile.corpus, profile.dtype) == ("small", "f", "self", "float64")
    assert profile.tokens == len(run.traces.calibration)
    assert profile.mean_nats == pytest.approx(
        run.traces.calibration.entropy_nats.mean(axis=0), rel=1e-6
    )  # float32 sums
    assert run.traces.calibrate_profile((1, 5)).probes == (1, 5) != profile.probes


def test_thresholds_by_position_are_means_of_the_tokens_there(run: ModelMeasurements) -> None:
    profile = replace(run.traces.calibrate_profile((3,), ("position",)), minimum_tokens=0)
    position = run.traces.calibration.position + 1
    inside = [position <= 32, (position > 32) & (position <= 128), position > 128]
    assert profile.statistics.tokens.tolist() == [int(these.sum()) for these in inside]
    means = profile.statistics.mean_nats()[:, 2]
    assert means[0] == pytest.approx(run.traces.calibration.entropy_nats[inside[0], 2].mean(), rel=1e-6)


def test_frequency_is_that_of_tokens_to_be_predicted_in_the_calibration_text(run: ModelMeasurements) -> None:
    buckets = np.frombuffer(run.traces.calibrate_profile(PROBES, ("frequency",)).bins.frequency, dtype=np.uint8)
    counts = Counter(run.traces.calibration.target.tolist())
    by_rank = sorted(range(VOCABULARY), key=lambda token: (-counts[token], token))
    assert [buckets[token] for token in by_rank] == [0] * 5 + [1] * 17 + [2] * (VOCABULARY - 22)  # 101^(1/3), 101^(2/3)


@pytest.mark.parametrize("budget", list(BUDGETS))
def test_margins_divide_what_can_be_given_up_as_the_budget_allows(budget: str) -> None:
    count = TRIED_MARGINS[budget]
    made = make_margin_grid(SimpleNamespace(targets_nats=(3.0, 4.0, 2.0)), budget)
    assert made == pytest.approx([4.0 * i / count for i in range(count)])


def test_every_profile_is_tried_at_the_margins_of_the_runs_own(run: ModelMeasurements) -> None:
    assert make_shared_margin_grid(run) == make_margin_grid(run.traces.profile, "smoke")


def test_a_margin_under_which_no_bin_can_exit_makes_no_point(run: ModelMeasurements) -> None:
    low, high = sorted(run.traces.profile.targets_nats)
    assert high > low, "equal targets would test nothing"
    made = points_at_margins_with_exits(run.traces.profile, [0.0, low, high, high + 0.01])
    assert [point.margin_nats for point in made] == [0.0, low, high]
    assert made[1].thresholds[0] == pytest.approx([target - low for target in run.traces.profile.targets_nats])
    rows = ((1.0, 1.0), (high + 1, 1.0), (1.0, 1.0))
    binned = replace(run.traces.calibrate_profile(PROBES, ("position",)), bin_targets_nats=rows)
    assert len(points_at_margins_with_exits(binned, [high + 0.5, high + 1.5])) == 1, "one bin suffices"


def test_a_note_names_the_bins_that_took_their_parents_thresholds(run: ModelMeasurements) -> None:
    assert parent_bin_note(run.traces.profile) == ""
    note = parent_bin_note(run.traces.calibrate_profile(PROBES, ("position",)))
    assert note.startswith("position: fewer than 500 calibration tokens in ")
    assert "position 129+: thresholds of the parent bin" in note
    whole = replace(run.traces.calibrate_profile(PROBES, ("position",)), dropped_features=(0, 0, 0))
    assert parent_bin_note(whole) == ""


# ---------------------------------------------------------------- rows


def plain_depths(trace: Trace, point: OperatingPoint) -> list[list[int]]:
    """Return the monotone depth of every token, sequence by sequence, token by token."""
    found = []
    for first, end in zip(trace.starts[:-1], trace.starts[1:], strict=True):
        depth, row = point.layers, []
        for token in range(first, end):
            fired = [
                probe
                for probe, tau in zip(point.probes, point.thresholds[0], strict=True)
                if trace.entropy_nats[token, probe - 1] <= tau and probe <= depth
            ]
            depth = min([depth, *fired])
            row.append(depth)
        found.append(row)
    return found


def test_a_row_says_what_a_plain_loop_over_the_trace_says(run: ModelMeasurements) -> None:
    trace, geometry = run.traces.evaluation, run.loaded.geometry
    point = run.traces.profile.point(0.05)
    (row,) = AblationRows(run, np.random.default_rng(0)).make_point_rows([point], {"margin": 0.05})
    by_sequence = plain_depths(trace, point)
    depth = np.concatenate(by_sequence)
    assert len(set(depth.tolist())) == 3, "an unreached depth would not be tested"
    nll = trace.nll_nats[np.arange(len(trace)), depth - 1].astype(float)
    full = trace.nll_nats[:, -1].astype(float)
    block, key = geometry.block_flops(), geometry.attention_flops()
    blocks = sum(d * (block + (at + 1) * key) for d, at in zip(depth, trace.position, strict=True))
    every = sum(LAYERS * (block + (at + 1) * key) for at in trace.position)
    heads = sum(len({*(probe for probe in PROBES if probe <= d), d}) for d in depth) * geometry.head_flops()
    before = [next((i for i, d in enumerate(row) if d == PROBES[0]), math.inf) for row in by_sequence]
    assert next(iter(row)) == "margin"
    assert row["point"] == point.name
    assert row["mean depth"] == pytest.approx(depth.mean())
    assert row[BEFORE] == np.median(before)
    assert row["perplexity"] == pytest.approx(math.exp(nll.mean()))
    assert row["rise %"] == pytest.approx(math.exp((nll - full).mean()) - 1)
    assert row["gross reduction %"] == pytest.approx(1 - blocks / every)
    assert row["net reduction %"] == pytest.approx(1 - (blocks + heads) / (every + len(depth) * geometry.head_flops()))
    assert row["rise interval %"][0] < row["rise %"] < row["rise interval %"][1]


def test_the_row_of_full_depth_loses_and_saves_nothing(run: ModelMeasurements) -> None:
    row = AblationRows(run, np.random.default_rng(0)).make_full_depth_row({"probes": "none"})
    assert (row["probes"], row["point"], row["mean depth"]) == ("none", "full depth", LAYERS)
    assert (row["rise %"], row["gross reduction %"], row["net reduction %"]) == (0.0, 0.0, 0.0)
    assert row["rise interval %"] is None  # equal in every document: no spread to resample
    assert row[BEFORE] is None, "there is no earlier probe"


def test_where_most_sequences_never_get_down_there_is_no_median(run: ModelMeasurements) -> None:
    (row,) = AblationRows(run, np.random.default_rng(0)).make_point_rows([NEVER], {})
    assert row[BEFORE] is None
    assert row["net reduction %"] < row["gross reduction %"] == 0, "probes that never fire cost"


def test_intervals_resample_documents_and_all_rows_on_the_same_draws(
    run: ModelMeasurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def seen(loss: Any, **options: Any) -> Any:
        asked.append((len(loss.nats), int(loss.table.tokens.sum()), id(options["draws"])))
        return rise(loss, **options)

    rise = ablations.estimate_point_rise
    monkeypatch.setattr(ablations, "estimate_point_rise", seen)
    table = AblationRows(run, np.random.default_rng(0))
    first, again = table.make_point_rows([run.traces.profile.point(0.0)] * 2, {})
    assert run.traces.evaluation.n_sequences > DOCUMENTS, "no document has two windows: nothing was tested"
    assert len(set(asked)) == 1
    assert asked[0][:2] == (DOCUMENTS, len(run.traces.evaluation))
    assert first == again


def test_rows_may_be_read_off_another_trace_of_the_same_windows(run: ModelMeasurements) -> None:
    """An estimator's point needs the trace with its estimates."""
    estimator = EntropyEstimator("topk", k=VOCABULARY)
    trace = run.entropy_estimators.take_trace_with_estimates("evaluate", run.study.budget.evaluate, [estimator])
    point = replace(run.traces.profile.point(0.05), estimator=estimator)
    table = AblationRows(run, np.random.default_rng(0))
    (full,) = table.make_point_rows([run.traces.profile.point(0.05)], {})
    (whole,) = table.make_point_rows([point], {}, trace)
    assert whole["mean depth"] == pytest.approx(full["mean depth"], rel=1e-3)  # K = V: the same entropy up to rounding
    with pytest.raises(ValueError, match="trace it too"):
        table.make_point_rows([point], {})


# ---------------------------------------------------------------- time


def clocked(refused: set[str], seconds: dict[str, np.ndarray]) -> SimpleNamespace:
    """Make measurements whose decoder declines points of these names, with timed ``seconds`` by point."""
    asked: list[str] = []

    def opened(point: OperatingPoint) -> Any:
        if point.name in refused:
            raise Unsupported("no such schedule")
        return nullcontext()

    def against_full(arms: dict[str, OperatingPoint]) -> SimpleNamespace:
        asked.extend(arms)
        timed = {arm: seconds[point.name] for arm, point in arms.items()}
        return SimpleNamespace(seconds={"full": seconds["full depth"], **timed})

    return SimpleNamespace(
        subject=SimpleNamespace(open_decoder=opened),
        latency=SimpleNamespace(time_against_full_depth=against_full),
        asked=asked,
    )


def test_speed_is_the_ratio_of_total_times_against_full_depth_of_what_the_decoder_takes() -> None:
    rng = np.random.default_rng(0)
    full, fast = rng.uniform(1.0, 1.2, 30), rng.uniform(0.5, 0.6, 30)
    run = clocked({"copying"}, {"full depth": full, "fast": fast})
    points = {"full": replace(NEVER, name="fast"), "state copying": replace(NEVER, name="copying")}
    found = measure_speed_columns(run, points)
    assert list(found) == list(points)
    assert found["full"]["speed ×"] == pytest.approx(full.sum() / fast.sum())
    assert found["full"]["speed interval"][0] < found["full"]["speed ×"] < found["full"]["speed interval"][1]
    assert found["state copying"] == NO_SPEED == {"speed ×": None, "speed interval": None}
    assert run.asked == ["point full"], "an arm of this name would replace full depth"


def test_nothing_is_timed_where_every_point_is_declined() -> None:
    run = clocked({"copying"}, {})
    declined = {"state copying": replace(NEVER, name="copying")}
    assert measure_speed_columns(run, declined) == {"state copying": NO_SPEED}
    assert run.asked == []


# ---------------------------------------------------------------- openings


@pytest.fixture(scope="module")
def openings(run: ModelMeasurements) -> TeacherForcedOpenings:
    return TeacherForcedOpenings(run.subject)


def test_openings_are_first_tokens_of_the_evaluated_documents(
    run: ModelMeasurements, openings: TeacherForcedOpenings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run.subject.cut_windows("evaluate", DECODED)
    assert len(openings.texts) == min(DECODED, len(whole))
    assert [text.tokens.tolist() for text in openings.texts] == [w.tokens[:DECODED_TOKENS].tolist() for w in whole]
    monkeypatch.setattr(ablations, "DECODED", 3)
    monkeypatch.setattr(ablations, "DECODED_TOKENS", 7)
    assert [len(text.tokens) for text in TeacherForcedOpenings(run.subject).texts] == [7, 7, 7]


@pytest.mark.parametrize("schedule", ["monotone", "free_eager"])
def test_what_can_be_replayed_is_decoded_to_the_same_row(
    run: ModelMeasurements, openings: TeacherForcedOpenings, schedule: str
) -> None:
    point = run.traces.profile.point(0.05, schedule)
    replayed, decoded = openings.replay_row(point), openings.decode_row(point)
    assert 2 < replayed["mean depth"] < LAYERS, "one depth for all would test nothing"
    assert decoded[BEFORE] is None
    for name in ("point", "mean depth", "gross reduction %", "net reduction %"):
        assert decoded[name] == pytest.approx(replayed[name]), name
    for name in ("perplexity", "rise %"):
        assert decoded[name] == pytest.approx(replayed[name], rel=1e-5), name  # a trace keeps float32


def test_copies_are_decoded_and_cost_less_than_backfill(
    run: ModelMeasurements, openings: TeacherForcedOpenings
) -> None:
    copied = openings.decode_row(run.traces.profile.point(0.05, "copying"))
    eager = openings.decode_row(run.traces.profile.point(0.05, "free_eager"))
    assert copied["gross reduction %"] > eager["gross reduction %"]
    assert copied["rise %"] != pytest.approx(eager["rise %"], abs=1e-4), "copies changed nothing"
    with pytest.raises(ValueError, match="copied states are decoded, not replayed"):
        openings.replay_row(run.traces.profile.point(0.05, "copying"))


def test_a_decoder_that_does_not_count_saves_an_unknown_share(
    run: ModelMeasurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = TeacherForcedOpenings(run.subject)
    texts = blind.texts[:2]
    blind.texts, blind.trace = texts, take_trace(run.subject.stepper, texts)
    forced = ablations.teacher_force
    monkeypatch.setattr(ablations, "teacher_force", lambda *given: replace(forced(*given), work=None))
    row = blind.decode_row(run.traces.profile.point(0.05))
    assert (row["gross reduction %"], row["net reduction %"]) == (None, None)
    assert row["mean depth"] >= PROBES[0]


def test_a_point_that_the_decoder_declines_is_not_a_row(
    run: ModelMeasurements, openings: TeacherForcedOpenings
) -> None:
    def declines(request: Any) -> Any:
        raise Unsupported("no copies here")

    refusing = ModelMeasurements(run.loaded, run.study, RunResources(declines))
    openings = TeacherForcedOpenings.__new__(TeacherForcedOpenings)
    openings.subject, openings.texts = refusing.subject, [TokenSequence(np.arange(5))]
    openings.trace = take_trace(run.subject.stepper, openings.texts)
    with pytest.raises(Unsupported, match="no copies here"):
        openings.decode_row(run.traces.profile.point(0.05, "copying"))


# ---------------------------------------------------------------- estimators


@pytest.fixture(scope="module")
def estimated(run: ModelMeasurements) -> FittedEstimators:
    return FittedEstimators(run, [EntropyEstimator("topk", k=4), LOW_RANK, run.entropy_estimators.linear_estimator])


def named(estimated: FittedEstimators, name: str) -> EntropyEstimator:
    return next(estimator for estimator in estimated.fitted if estimator.name.startswith(name))


def raw_columns(run: ModelMeasurements, estimator: EntropyEstimator) -> np.ndarray:
    """Return [tokens, probes] of an estimator before correction."""
    trace = run.entropy_estimators.take_trace_with_estimates(
        "evaluate", run.study.budget.evaluate, [replace(estimator, correction=())]
    )
    return run.entropy_estimators.take_probe_columns(trace.estimates[replace(estimator, correction=())])


@pytest.mark.parametrize("name", ["topk-4", "lowrank-12", "linear"])
def test_a_fit_is_the_worst_probe_of_an_estimator_before_and_after_its_line(
    run: ModelMeasurements, estimated: FittedEstimators, name: str
) -> None:
    estimator, at = named(estimated, name), [0.0, 0.1]
    fit = estimated.measure_agreement(estimator, at)
    raw = raw_columns(run, estimator)
    full = run.entropy_estimators.take_probe_columns(run.traces.evaluation.entropy_nats)
    slope, intercept = np.array(estimator.correction).T
    mended = slope * raw + intercept
    targets = np.array(run.traces.profile.targets_nats)
    # float32 traces of corrected values, divided by slopes of 0.05 and more
    assert fit.bias_nats == pytest.approx((raw - full).mean(axis=0), abs=1e-4)
    assert fit.rmse_nats == pytest.approx(np.sqrt(((mended - full) ** 2).mean(axis=0)).max(), abs=1e-4)
    orders = [spearmanr(raw[:, i], full[:, i]).statistic for i in range(len(PROBES))]
    assert fit.spearman == pytest.approx(min(orders), abs=1e-4)
    for given in at:
        moved = (mended <= targets - given) != (full <= targets - given)
        assert fit.changed[given] == pytest.approx(moved.mean(axis=0).max(), abs=2 / len(full))  # a tie on either side


def test_top_k_bounds_entropy_and_exact_search_misses_nothing(
    run: ModelMeasurements, estimated: FittedEstimators
) -> None:
    fit = estimated.measure_agreement(named(estimated, "topk-4"), [0.0])
    assert fit.recall == 1
    assert min(fit.bias_nats) > 0
    assert estimated.measure_agreement(named(estimated, "linear"), [0.0]).recall is None, "it retrieves nothing"


def test_recall_counts_the_true_largest_logits_among_those_retrieved(
    run: ModelMeasurements, estimated: FittedEstimators
) -> None:
    """Compared with logits of every layer from a separate pass; low-rank ones come from the factors' product."""
    fit = estimated.measure_agreement(named(estimated, "lowrank-12"), [0.0])
    parts = low_rank_factors(run.subject.stepper.unembedding.detach(), LOW_RANK.rank)
    approximation = (parts.a @ parts.b).numpy()
    unembedding = run.subject.stepper.unembedding.detach().double().numpy()
    shares = {probe: [] for probe in PROBES}
    for sequence in run.subject.cut_windows("evaluate", traces.READ):
        logits = compute_layer_logits(run.subject.stepper, sequence.tokens)[:-1]
        for probe in PROBES:
            true = logits[:, probe - 1]
            states = np.linalg.lstsq(unembedding, true.T, rcond=None)[0].T  # V > E: logits determine the head's input
            best, found = (np.argsort(-z, axis=1)[:, : LOW_RANK.k] for z in (true, states @ approximation))
            shares[probe] += [len({*a} & {*b}) / LOW_RANK.k for a, b in zip(best, found, strict=True)]
    assert fit.recall == pytest.approx(min(np.mean(found) for found in shares.values()), abs=1e-9)
    assert 0.1 < fit.recall < 0.99, "a search that misses nothing, or everything, would test nothing"


def test_recall_is_asked_at_probes_only(run: ModelMeasurements) -> None:
    counted = RecallCounter(
        run.subject.stepper,
        [EntropyEstimator("topk", k=4), LOW_RANK, EntropyEstimator("topk", k=4, search="faiss")],
        PROBES,
    )
    take_trace(run.subject.stepper, run.subject.cut_windows("evaluate", 3), observe=counted)
    assert set(counted.recall_by_estimator_and_probe) == {
        (name, probe) for name in ("topk-4", LOW_RANK.name) for probe in PROBES
    }


@pytest.mark.parametrize("slope", [2.0, -0.5])
def test_the_line_of_an_estimator_can_be_undone(run: ModelMeasurements, slope: float) -> None:
    """Also a line that reverses the order."""
    corrected = replace(EntropyEstimator("topk", k=4), correction=((slope, 0.3), (0.25, -1.0)))
    trace = run.entropy_estimators.take_trace_with_estimates("evaluate", 5, [corrected])
    plain = run.entropy_estimators.take_trace_with_estimates("evaluate", 5, [EntropyEstimator("topk", k=4)])
    expected = run.entropy_estimators.take_probe_columns(plain.estimates[EntropyEstimator("topk", k=4)])
    found = run.entropy_estimators.compute_uncorrected_estimates(trace, corrected)
    assert found.shape == (len(trace), len(PROBES))
    np.testing.assert_allclose(found, expected, atol=1e-5)  # float32 columns of a few nats, slopes of a quarter


PROBE_COSTS: dict[str, Callable[[ModelMeasurements], float]] = {
    "full": lambda run: len(PROBES) * run.loaded.geometry.head_flops(),
    "topk-4": lambda run: len(PROBES) * 2 * VOCABULARY * run.loaded.geometry.hidden,  # exact search reads every row
    "linear": lambda run: len(PROBES) * 2 * run.loaded.geometry.hidden,
}


@pytest.mark.parametrize("name", list(PROBE_COSTS))
def test_probes_cost_their_readings_beyond_the_head_that_emits(
    run: ModelMeasurements, estimated: FittedEstimators, name: str
) -> None:
    """At thresholds that never fire every token reads every probe, and the last layer's head emits."""
    estimator = EntropyEstimator() if name == "full" else named(estimated, name)
    found = estimated.compute_probe_flops_per_token(replace(NEVER, estimator=estimator))
    assert found == pytest.approx(PROBE_COSTS[name](run))


def test_full_depth_has_no_probe_to_pay_for(run: ModelMeasurements, estimated: FittedEstimators) -> None:
    assert estimated.compute_probe_flops_per_token(run.subject.full_depth_point) == 0


def test_estimators_larger_than_the_unembedding_are_left_out(run: ModelMeasurements) -> None:
    width = run.subject.stepper.unembedding.shape[1]
    fit = [EntropyEstimator("topk", k=VOCABULARY), EntropyEstimator("lowrank", k=8, rank=width), EntropyEstimator()]
    large = [EntropyEstimator("topk", k=VOCABULARY + 1), EntropyEstimator("lowrank", k=8, rank=width + 1)]
    assert usable_estimators(run.subject.stepper, [*large, *fit]) == fit


def fitted(*bias_nats: float, recall: float = 1.0) -> WorstEstimatorAgreement:
    return WorstEstimatorAgreement(0.9, bias_nats, 0.1, recall, {0.0: 0.0})


def test_estimators_that_break_their_own_laws_are_no_row() -> None:
    near, far = fitted(0.1, 0.2), fitted(0.4, 0.5)
    require_entropy_bounds({"topk-32": far, "topk-64": near, "linear": fitted(-3.0, recall=0.0)})
    for fits, said in (
        ({"topk-32": near, "topk-64": far}, "rises with K"),
        ({"topk-32": fitted(-0.1, 0.2)}, "no upper bound"),
        ({"topk-32": fitted(0.1, 0.2, recall=0.9)}, "missed a row"),
    ):
        with pytest.raises(AssertionError, match=said):
            require_entropy_bounds(fits)


# ---------------------------------------------------------------- tables


def shown(run: ModelMeasurements, ablate: Ablation) -> list[dict[str, Any]]:
    """Return the rows of an ablation's only table, which share their columns."""
    (table,) = ablate(run, np.random.default_rng(0)).tables
    assert len({tuple(row) for row in table.rows}) == 1
    return list(table.rows)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decline speeds: the clock has its own tests."""
    monkeypatch.setattr(ablations, "measure_speed_columns", lambda evidence, points: dict.fromkeys(points, NO_SPEED))


def test_every_stride_has_a_profile_of_its_own_and_the_default_is_among_them(run: ModelMeasurements) -> None:
    assert ablations.make_probes_by_stride(12) == {
        "every 2": (2, 4, 6, 8, 10),
        "every 4 (default)": (4, 8),
        "every 6": (6,),
        "every 8": (8,),
    }
    found = shown(run, ablations.ablate_stride)
    assert found[0]["probes"] == "none"
    expected = run.traces.calibrate_profile((4,)).point(0.0)
    (mine,) = [row for row in found if row["layers"] == "4" and row["point"] == expected.name]
    assert (
        mine["mean depth"]
        == AblationRows(run, np.random.default_rng(0)).make_point_rows([expected], {})[0]["mean depth"]
    )
    (note,) = ablations.ablate_stride(run, np.random.default_rng(0)).notes
    assert note.startswith("small: top-1 tokens that are already the last layer's: ")


def test_conditioning_counts_bins_that_fell_back_and_names_them(run: ModelMeasurements) -> None:
    found = shown(run, ablations.ablate_threshold_bins)
    notes = ablations.ablate_threshold_bins(run, np.random.default_rng(0)).notes
    by_name = {row["features"]: row for row in found}
    assert len(by_name) == 1 + len(ablations.CONDITIONINGS)
    profile = run.traces.calibrate_profile(features=("position",))
    assert by_name["position"]["bins"] == profile.bins.bin_count == 3
    assert (
        by_name["position"]["with parent's thresholds"] == sum(dropped > 0 for dropped in profile.dropped_features) > 0
    )
    assert any(note.startswith("small: position: fewer than") for note in notes)


def test_a_bin_that_keeps_thresholds_of_too_few_tokens_is_refused(run: ModelMeasurements) -> None:
    profile = run.traces.calibrate_profile(features=("position",))
    ablations.assert_bin_counts_and_dropped_features(profile, len(run.traces.calibration))
    with pytest.raises(AssertionError, match="keeps its own"):
        ablations.assert_bin_counts_and_dropped_features(
            replace(profile, dropped_features=(0, 0, 0)), len(run.traces.calibration)
        )
    with pytest.raises(AssertionError, match="in no bin"):
        ablations.assert_bin_counts_and_dropped_features(profile, len(run.traces.calibration) + 1)


def test_the_curve_of_margins_grows_deeper_from_the_calibrated_default(run: ModelMeasurements) -> None:
    full, *found = shown(run, ablations.ablate_margin)
    assert (full["margin, nats"], found[0]["margin, nats"]) == (None, 0.0)
    assert [row["margin, nats"] for row in found] == sorted(row["margin, nats"] for row in found)
    assert found[0]["mean depth"] < found[-1]["mean depth"]


def test_the_curve_of_margins_names_the_tasks_that_count(run: ModelMeasurements) -> None:
    held = {"solved": (np.arange(100) < 90, 0.2), "idle": (np.arange(100) < 80, 0.01)}
    full = run.subject.full_depth_point

    def at(task: str, point: OperatingPoint) -> TaskAccuracy:
        right, saving = held[task]
        return TaskAccuracy(
            ByItem.from_independent_items(right),
            ByItem.from_independent_items(right),
            0.0,
            0.0 if point == full else saving,
        )

    evidence = SimpleNamespace(
        subject=run.subject,
        task_scores=SimpleNamespace(replayed_task_names=list(held), measure_accuracy_against_full_depth=at),
    )
    shares = {"solved %": 0.9, "idle %": 0.8}
    assert ablations.accuracy_columns(evidence, NEVER) == shares | {"tasks that count": "solved"}
    assert ablations.accuracy_columns(evidence, full) == shares | {"tasks that count": None}
    assert ablations.accuracy_columns(run, NEVER) == {}, "a corpus without tasks has no such column"


@pytest.mark.usefixtures("untimed")
def test_interpolation_needs_a_layer_between_probes(run: ModelMeasurements) -> None:
    assert ablations.find_interpolated_exit_layers((2, 4)) == []
    assert ablations.find_interpolated_exit_layers((3, 6, 9)) == [7, 8]
    notes = ablations.ablate_exit_interpolation(run, np.random.default_rng(0)).notes
    assert [note.split(" leaves ")[0] for note in notes] == ["small: stride 3", "small: stride 4"]
    off, on = shown(run, ablations.ablate_exit_interpolation)[:2]
    assert (off["interpolation"], on["interpolation"], off["layers between"]) == ("off", "on", 0)
    assert off["mean depth"] == on["mean depth"]


def test_exits_to_layers_made_up_and_exits_that_go_deeper_are_refused(run: ModelMeasurements) -> None:
    trace, fewer, more = (
        run.traces.evaluation,
        *(run.traces.calibrate_profile(probes).point(0.0) for probes in ((4,), (2, 4))),
    )
    ablations.require_interpolation_adds_no_depth(trace, fewer, more, [2])
    for off, on in ((fewer, more), (more, fewer)):
        with pytest.raises(AssertionError):
            ablations.require_interpolation_adds_no_depth(trace, off, on, [])


@pytest.mark.usefixtures("untimed")
def test_schedules_stand_beside_copies_that_were_decoded(run: ModelMeasurements) -> None:
    found = shown(run, ablations.ablate_schedule)
    names = {row["schedule"] for row in found if row["text"] == ablations.REPLAYED}
    assert names >= {"monotone", "eager backfill", "deferred fill", "chunks of 8"}
    opened = [row["schedule"] for row in found if row["text"] == ablations.OPENED]
    assert opened == ["monotone", "eager backfill", "state copying"]


@pytest.mark.usefixtures("untimed")
def test_copies_that_the_decoder_declines_leave_a_note(stepper: Stepper) -> None:
    def declines(request: Any) -> WalkedDecoder:
        if request.point.schedule == "copying":
            raise Unsupported("no copies here")
        return WalkedDecoder(stepper, request.point, max_rows=request.max_rows)

    found = ablations.ablate_schedule(small_evidence(stepper, RunResources(declines)), np.random.default_rng(0))
    assert found.notes == ("small: state copying: not applicable (no copies here)",)
    assert "state copying" not in {row["schedule"] for row in found.tables[0].rows}


@pytest.mark.usefixtures("untimed")
def test_the_full_softmax_comes_first_and_is_its_own_reference(run: ModelMeasurements) -> None:
    found = shown(run, ablations.ablate_estimator)
    assert found[0]["estimator"] == "full"
    assert (found[0]["ρ"], found[0]["RMSE, nats"], found[0]["recall@K"]) == (1.0, 0.0, None)
    assert {row["estimator"] for row in found} >= {"topk-32", "topk-64", "lowrank-16 top-64", "linear"}
    assert "topk-128" not in {row["estimator"] for row in found}, "the vocabulary holds 101"


def test_without_a_second_corpus_none_can_be_foreign(run: ModelMeasurements) -> None:
    with pytest.raises(Unsupported, match="no second corpus beside self"):
        ablations.ablate_calibration_corpus(run, np.random.default_rng(0))


def test_every_profile_is_tried_on_both_corpora(stepper: Stepper) -> None:
    one = small_evidence(stepper)
    other = small_evidence(
        stepper, texts=lambda split: [document % 3 for document in one.subject.iterate_documents(split)]
    )
    other.subject.corpus = "other"
    one.on_shifted_corpus = other
    found = shown(one, ablations.ablate_calibration_corpus)
    assert [row["text"] for row in found if row["profile"] == "none"] == ["self", "other"]
    own, foreign = (
        [row["mean depth"] for row in found if (row["text"], row["profile"]) == ("self", profile)]
        for profile in ("self", "other")
    )
    tried = points_at_margins_with_exits(other.traces.calibrate_profile(), ablations.MARGINS_NATS)
    assert foreign == [
        row["mean depth"] for row in AblationRows(one, np.random.default_rng(0)).make_point_rows(tried, {})
    ]
    assert foreign != own, "profiles that decide alike would test nothing"


def test_the_trend_over_profiles_needs_enough_of_them(run: ModelMeasurements) -> None:
    (row,) = shown(run, ablations.tabulate_profile_flatness)
    assert (row["model"], row["corpus"]) == ("small", "self")
    (note,) = ablations.tabulate_profile_flatness(run, np.random.default_rng(0)).notes
    assert note == "small: 1 profiles are no trend: EMAD-E11 needs 4"
    dots = [ablations.measure_entropy_slope_and_gain(run.traces, run.baseline_comparison, np.random.default_rng(0))] * 4
    assert "EMAD-E11 over 4 profiles" in ablations.flatness_gain_correlation_note("small", dots)
