"""What ablation tables are made of: ingredients, rows against plain loops, decoded openings, estimators, refusals."""

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

from emad_ref.calibration.trace import TokenSequence, Trace, lens_logits, take_trace
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from emad_ref.models.stepper import Stepper
from emad_ref.point import Estimator, OperatingPoint
from emad_ref.policy.thresholds import default_probes, fixed_entropy
from emad_ref.protocol import Unsupported
from emad_ref.readout.lowrank import factors
from pytest_emad import ablated, estimates
from pytest_emad.ablated import (
    BEFORE,
    DECODED,
    DECODED_TOKENS,
    UNTIMED,
    Estimated,
    Openings,
    Recalls,
    Table,
    fallback_note,
    margins,
    not_applicable,
    points,
    speeds,
    strided,
    usable,
)
from pytest_emad.options import BUDGETS, Settings
from pytest_emad.session import Evidence
from tests.small import LAYERS, VOCABULARY, small_config, small_model

PROBES = (2, 4)
DOCUMENTS = 34  # two windows of some of them: what resampling must keep together
NEVER = fixed_entropy(LAYERS, PROBES, -1.0)  # a threshold that no entropy passes
LOW_RANK = Estimator("lowrank", k=8, rank=12)


@pytest.fixture(scope="module")
def stepper() -> Stepper:
    return CausalStepper(small_model("gpt_neox"))


@pytest.fixture(scope="module")
def run(stepper: Stepper) -> Evidence:
    """Evidence of a random model that passes for trained, on random documents, with probes of its own."""
    options = dict.fromkeys(Settings.__dataclass_fields__)
    budget = replace(BUDGETS["smoke"], calibrate=24, validate=20, evaluate=60)
    settings = Settings(**{**options, "budget": budget, "seed": 0, "corpus": "self", "device": "cpu"})
    loaded = SimpleNamespace(
        name="small", stepper=stepper, geometry=geometry_of(small_config("gpt_neox")), trained=True, opening=0,
        tokenizer=None, bundled=False, fingerprint="f",
    )  # fmt: skip
    made = Evidence(loaded, settings, lambda request: WalkedDecoder(stepper, request.point, max_rows=request.max_rows))
    made.__dict__ |= {"documents": documents, "window": 24}
    made.__dict__["profile"] = made.calibrated(PROBES)
    return made


def documents(split: str) -> list[np.ndarray]:
    """Half of them fit into one window of 24, half fill two; tokens of the splits differ."""
    rng = np.random.default_rng(["calibrate", "validate", "evaluate"].index(split))
    return [rng.integers(0, VOCABULARY, 46 if number % 2 else 9 + number % 7) for number in range(DOCUMENTS)]


def held(**facts: Any) -> SimpleNamespace:
    """What ``not_applicable`` asks of evidence."""
    return SimpleNamespace(**{"without_quality": "", "bridge": SimpleNamespace(passed=True, detail=""), **facts})


# ---------------------------------------------------------------- ingredients


def test_a_table_about_quality_needs_quality_and_a_replay_that_speaks_for_the_decoder() -> None:
    assert not_applicable(held()) == ""
    assert not_applicable(held(bridge=SimpleNamespace(passed=None, detail="no power"))) == "", "not refuted"
    assert not_applicable(held(without_quality="random weights")) == "not applicable (random weights)"
    refuted = not_applicable(held(bridge=SimpleNamespace(passed=False, detail="depth 3, not 2")))
    assert refuted.startswith("not applicable (replay does not speak")
    assert "depth 3, not 2" in refuted


@pytest.mark.parametrize(
    ("layers", "stride", "probes"),
    [(12, 4, (4, 8)), (12, 5, (5, 10)), (12, 1, tuple(range(1, 12))), (12, 6, (6,)), (12, 12, ()), (4, 8, ())],
)
def test_strided_probes_leave_the_last_layer_out(layers: int, stride: int, probes: tuple[int, ...]) -> None:
    assert strided(layers, stride) == probes


def test_a_profile_is_the_mean_entropy_of_the_calibration_text(run: Evidence) -> None:
    profile = run.calibrated()
    assert profile.probes == default_probes(LAYERS)
    assert (profile.model, profile.fingerprint, profile.corpus, profile.dtype) == ("small", "f", "self", "float64")
    assert profile.tokens == len(run.calibration)
    assert profile.mean_nats == pytest.approx(run.calibration.entropy_nats.mean(axis=0), rel=1e-6)  # float32 sums
    assert run.calibrated((1, 5)).probes == (1, 5) != profile.probes


def test_thresholds_by_position_are_means_of_the_tokens_there(run: Evidence) -> None:
    profile = replace(run.calibrated((3,), ("position",)), minimum_tokens=0)
    position = run.calibration.position + 1
    inside = [position <= 32, (position > 32) & (position <= 128), position > 128]
    assert profile.statistics.tokens.tolist() == [int(these.sum()) for these in inside]
    means = profile.statistics.mean_nats()[:, 2]
    assert means[0] == pytest.approx(run.calibration.entropy_nats[inside[0], 2].mean(), rel=1e-6)


def test_frequency_is_that_of_tokens_to_be_predicted_in_the_calibration_text(run: Evidence) -> None:
    buckets = np.frombuffer(run.calibrated(PROBES, ("frequency",)).bins.frequency, dtype=np.uint8)
    counts = Counter(run.calibration.target.tolist())
    by_rank = sorted(range(VOCABULARY), key=lambda token: (-counts[token], token))
    assert [buckets[token] for token in by_rank] == [0] * 5 + [1] * 17 + [2] * (VOCABULARY - 22)  # 101^(1/3), 101^(2/3)


@pytest.mark.parametrize("budget", list(BUDGETS))
def test_margins_divide_what_can_be_given_up_as_the_budget_allows(budget: str) -> None:
    run = SimpleNamespace(profile=SimpleNamespace(targets_nats=(3.0, 4.0, 2.0)), budget=BUDGETS[budget])
    count = {"smoke": 2, "standard": 4, "full": 8}[budget]
    assert margins(run) == pytest.approx([4.0 * i / count for i in range(count)])


def test_a_margin_under_which_no_bin_can_exit_makes_no_point(run: Evidence) -> None:
    low, high = sorted(run.profile.targets_nats)
    assert high > low, "equal targets would test nothing"
    made = points(run.profile, [0.0, low, high, high + 0.01])
    assert [point.margin_nats for point in made] == [0.0, low, high]
    assert made[1].thresholds[0] == pytest.approx([target - low for target in run.profile.targets_nats])
    rows = ((1.0, 1.0), (high + 1, 1.0), (1.0, 1.0))
    binned = replace(run.calibrated(PROBES, ("position",)), bin_targets_nats=rows)
    assert len(points(binned, [high + 0.5, high + 1.5])) == 1, "one bin suffices"


def test_a_note_names_the_bins_that_took_their_parents_thresholds(run: Evidence) -> None:
    assert fallback_note(run.profile) == ""
    note = fallback_note(run.calibrated(PROBES, ("position",)))
    assert note.startswith("position: fewer than 500 calibration tokens in ")
    assert "position 129+: thresholds of the parent bin" in note
    whole = replace(run.calibrated(PROBES, ("position",)), fallbacks=(0, 0, 0))
    assert fallback_note(whole) == ""


# ---------------------------------------------------------------- rows


def plain_depths(trace: Trace, point: OperatingPoint) -> list[list[int]]:
    """Monotone depth of every token, sequence by sequence, token by token."""
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


def test_a_row_says_what_a_plain_loop_over_the_trace_says(run: Evidence) -> None:
    trace, geometry = run.evaluation, run.loaded.geometry
    point = run.profile.point(0.05)
    (row,) = Table(run, np.random.default_rng(0)).rows([point], margin=0.05)
    by_sequence = plain_depths(trace, point)
    depth = np.concatenate(by_sequence)
    assert len(set(depth.tolist())) == 3, "a depth that nothing reaches would go unread"
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


def test_the_row_of_full_depth_loses_and_saves_nothing(run: Evidence) -> None:
    row = Table(run, np.random.default_rng(0)).full(probes="none")
    assert (row["probes"], row["point"], row["mean depth"]) == ("none", "full depth", LAYERS)
    assert (row["rise %"], row["gross reduction %"], row["net reduction %"]) == (0.0, 0.0, 0.0)
    assert row["rise interval %"] == (0.0, 0.0)
    assert row[BEFORE] is None, "no probe to be before"


def test_where_most_sequences_never_get_down_there_is_no_median(run: Evidence) -> None:
    (row,) = Table(run, np.random.default_rng(0)).rows([NEVER])
    assert row[BEFORE] is None
    assert row["net reduction %"] < row["gross reduction %"] == 0, "probes that never fire cost"


def test_intervals_resample_documents_and_all_rows_on_the_same_draws(
    run: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def seen(mine: Any, full: Any, tokens: Any, **options: Any) -> Any:
        asked.append((len(mine), len(full), int(np.sum(tokens)), id(options["draws"])))
        return rise(mine, full, tokens, **options)

    rise = ablated.perplexity_rise
    monkeypatch.setattr(ablated, "perplexity_rise", seen)
    table = Table(run, np.random.default_rng(0))
    first, again = table.rows([run.profile.point(0.0)] * 2)
    assert run.evaluation.sequences > DOCUMENTS, "no document has two windows: nothing was tested"
    assert len(set(asked)) == 1
    assert asked[0][:3] == (DOCUMENTS, DOCUMENTS, len(run.evaluation))
    assert first == again


def test_rows_may_be_read_off_another_trace_of_the_same_windows(run: Evidence) -> None:
    """An estimator's point needs the trace that holds its estimates."""
    estimator = Estimator("topk", k=VOCABULARY)
    trace = run.estimates.read("evaluate", run.budget.evaluate, [estimator])
    point = replace(run.profile.point(0.05), estimator=estimator)
    table = Table(run, np.random.default_rng(0))
    (full,), (whole,) = table.rows([run.profile.point(0.05)]), table.rows([point], trace)
    assert whole["mean depth"] == pytest.approx(full["mean depth"], rel=1e-3)  # K = V: the same entropy, but rounding
    with pytest.raises(ValueError, match="trace it too"):
        table.rows([point])


# ---------------------------------------------------------------- time


def clocked(refused: set[str], seconds: dict[str, np.ndarray]) -> SimpleNamespace:
    """Evidence whose decoder declines points of these names, and whose stopwatch has measured ``seconds`` by point."""
    asked: list[str] = []

    def opened(point: OperatingPoint) -> Any:
        if point.name in refused:
            raise Unsupported("no such schedule")
        return nullcontext()

    def against_full(arms: dict[str, OperatingPoint]) -> SimpleNamespace:
        asked.extend(arms)
        timed = {arm: seconds[point.name] for arm, point in arms.items()}
        return SimpleNamespace(seconds={"full": seconds["full depth"], **timed})

    return SimpleNamespace(open=opened, stopwatch=SimpleNamespace(against_full=against_full), asked=asked)


def test_speed_is_the_mean_log_ratio_against_full_depth_of_what_the_decoder_takes() -> None:
    rng = np.random.default_rng(0)
    full, fast = rng.uniform(1.0, 1.2, 30), rng.uniform(0.5, 0.6, 30)
    run = clocked({"copying"}, {"full depth": full, "fast": fast})
    tried = {"full": replace(NEVER, name="fast"), "state copying": replace(NEVER, name="copying")}
    found = speeds(run, tried)
    assert list(found) == list(tried)
    assert found["full"]["speed ×"] == pytest.approx(math.exp(np.log(full / fast).mean()))
    assert found["full"]["speed interval"][0] < found["full"]["speed ×"] < found["full"]["speed interval"][1]
    assert found["state copying"] == UNTIMED == {"speed ×": None, "speed interval": None}
    assert run.asked == ["point full"], "an arm of this name would take full depth's place"


def test_nothing_is_timed_where_every_point_is_declined() -> None:
    run = clocked({"copying"}, {})
    assert speeds(run, {"state copying": replace(NEVER, name="copying")}) == {"state copying": UNTIMED}
    assert run.asked == []


# ---------------------------------------------------------------- openings


@pytest.fixture(scope="module")
def openings(run: Evidence) -> Openings:
    return Openings(run)


def test_openings_are_first_tokens_of_the_evaluated_documents(
    run: Evidence, openings: Openings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run.sequences("evaluate", DECODED)
    assert len(openings.texts) == min(DECODED, len(whole))
    assert [text.tokens.tolist() for text in openings.texts] == [w.tokens[:DECODED_TOKENS].tolist() for w in whole]
    monkeypatch.setattr(ablated, "DECODED", 3)
    monkeypatch.setattr(ablated, "DECODED_TOKENS", 7)
    assert [len(text.tokens) for text in Openings(run).texts] == [7, 7, 7]


@pytest.mark.parametrize("schedule", ["monotone", "free_eager"])
def test_what_can_be_replayed_is_decoded_to_the_same_row(run: Evidence, openings: Openings, schedule: str) -> None:
    point = run.profile.point(0.05, schedule)
    replayed, decoded = openings.replayed(point), openings.decoded(point)
    assert 2 < replayed["mean depth"] < LAYERS, "one depth for all would test nothing"
    assert decoded[BEFORE] is None
    for name in ("point", "mean depth", "gross reduction %", "net reduction %"):
        assert decoded[name] == pytest.approx(replayed[name]), name
    for name in ("perplexity", "rise %"):
        assert decoded[name] == pytest.approx(replayed[name], rel=1e-5), name  # a trace keeps float32


def test_copies_are_decoded_and_cost_less_than_backfill(run: Evidence, openings: Openings) -> None:
    copied = openings.decoded(run.profile.point(0.05, "copying"))
    eager = openings.decoded(run.profile.point(0.05, "free_eager"))
    assert copied["gross reduction %"] > eager["gross reduction %"]
    assert copied["rise %"] != pytest.approx(eager["rise %"], abs=1e-4), "copies changed nothing"
    with pytest.raises(ValueError, match="copied states are decoded, not replayed"):
        openings.replayed(run.profile.point(0.05, "copying"))


def test_a_decoder_that_does_not_count_saves_an_unknown_share(run: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    blind = Openings(run)
    texts = blind.texts[:2]
    blind.texts, blind.trace = texts, take_trace(run.stepper, texts)
    forced = ablated.teacher_forced
    monkeypatch.setattr(ablated, "teacher_forced", lambda *given: replace(forced(*given), work=None))
    row = blind.decoded(run.profile.point(0.05))
    assert (row["gross reduction %"], row["net reduction %"]) == (None, None)
    assert row["mean depth"] >= PROBES[0]


def test_a_point_that_the_decoder_declines_is_not_a_row(run: Evidence, openings: Openings) -> None:
    def declines(request: Any) -> Any:
        raise Unsupported("no copies here")

    refusing = Evidence(run.loaded, run.settings, declines)
    openings = Openings.__new__(Openings)
    openings.evidence, openings.texts = refusing, [TokenSequence(np.arange(5))]
    openings.trace = take_trace(run.stepper, openings.texts)
    with pytest.raises(Unsupported, match="no copies here"):
        openings.decoded(run.profile.point(0.05, "copying"))


# ---------------------------------------------------------------- estimators


@pytest.fixture(scope="module")
def estimated(run: Evidence) -> Estimated:
    return Estimated(run, [Estimator("topk", k=4), LOW_RANK, run.estimates.linear])


def named(estimated: Estimated, name: str) -> Estimator:
    return next(estimator for estimator in estimated.fitted if estimator.name.startswith(name))


def raw_columns(run: Evidence, estimator: Estimator) -> np.ndarray:
    """[tokens, probes] of an estimator that was never corrected."""
    trace = run.estimates.read("evaluate", run.budget.evaluate, [replace(estimator, correction=())])
    return run.estimates.columns(trace.estimates[replace(estimator, correction=())])


@pytest.mark.parametrize("name", ["topk-4", "lowrank-12", "linear"])
def test_a_fit_is_the_worst_probe_of_an_estimator_before_and_after_its_line(
    run: Evidence, estimated: Estimated, name: str
) -> None:
    estimator, tried = named(estimated, name), [0.0, 0.1]
    fit = estimated.fit(estimator, tried)
    raw, full = raw_columns(run, estimator), run.estimates.columns(run.evaluation.entropy_nats)
    slope, intercept = np.array(estimator.correction).T
    mended = slope * raw + intercept
    targets = np.array(run.profile.targets_nats)
    # raw values went through a float32 trace after their line, and back through slopes of 0.05 and more
    assert fit.bias_nats == pytest.approx((raw - full).mean(axis=0), abs=1e-4)
    assert fit.rmse_nats == pytest.approx(np.sqrt(((mended - full) ** 2).mean(axis=0)).max(), abs=1e-4)
    orders = [spearmanr(raw[:, i], full[:, i]).statistic for i in range(len(PROBES))]
    assert fit.spearman == pytest.approx(min(orders), abs=1e-4)
    for margin in tried:
        moved = (mended <= targets - margin) != (full <= targets - margin)
        assert fit.changed[margin] == pytest.approx(moved.mean(axis=0).max(), abs=2 / len(full))  # a tie on either side


def test_top_k_bounds_entropy_and_exact_search_misses_nothing(run: Evidence, estimated: Estimated) -> None:
    fit = estimated.fit(named(estimated, "topk-4"), [0.0])
    assert fit.recall == 1
    assert min(fit.bias_nats) > 0
    assert estimated.fit(named(estimated, "linear"), [0.0]).recall is None, "it retrieves nothing"


def test_recall_counts_the_true_largest_logits_among_those_retrieved(run: Evidence, estimated: Estimated) -> None:
    """Against logits of every layer by a pass of their own; low-rank ones from the factors' product."""
    fit = estimated.fit(named(estimated, "lowrank-12"), [0.0])
    parts = factors(run.stepper.unembedding.detach(), LOW_RANK.rank)
    approximation = (parts.inner @ parts.outer).numpy()
    unembedding = run.stepper.unembedding.detach().double().numpy()
    shares = {probe: [] for probe in PROBES}
    for sequence in run.sequences("evaluate", estimates.READ):
        logits = lens_logits(run.stepper, sequence.tokens)[:-1]
        for probe in PROBES:
            true = logits[:, probe - 1]
            states = np.linalg.lstsq(unembedding, true.T, rcond=None)[0].T  # V > E: logits determine the head's input
            best, found = (np.argsort(-z, axis=1)[:, : LOW_RANK.k] for z in (true, states @ approximation))
            shares[probe] += [len({*a} & {*b}) / LOW_RANK.k for a, b in zip(best, found, strict=True)]
    assert fit.recall == pytest.approx(min(np.mean(found) for found in shares.values()), abs=1e-9)
    assert 0.1 < fit.recall < 0.99, "a search that misses nothing, or everything, would test nothing"


def test_recall_is_asked_at_probes_only(run: Evidence) -> None:
    counted = Recalls(run.stepper, [Estimator("topk", k=4), LOW_RANK, Estimator("topk", k=4, search="ivf")], PROBES)
    take_trace(run.stepper, run.sequences("evaluate", 3), observe=counted)
    assert set(counted.shares) == {(name, probe) for name in ("topk-4", LOW_RANK.name) for probe in PROBES}


@pytest.mark.parametrize("slope", [2.0, -0.5])
def test_the_line_of_an_estimator_can_be_undone(run: Evidence, slope: float) -> None:
    """Also one that turns the order round."""
    corrected = replace(Estimator("topk", k=4), correction=((slope, 0.3), (0.25, -1.0)))
    trace = run.estimates.read("evaluate", 5, [corrected])
    plain = run.estimates.read("evaluate", 5, [Estimator("topk", k=4)])
    expected = run.estimates.columns(plain.estimates[Estimator("topk", k=4)])
    found = run.estimates.uncorrected(trace, corrected)
    assert found.shape == (len(trace), len(PROBES))
    np.testing.assert_allclose(found, expected, atol=1e-5)  # float32 columns of a few nats, slopes of a quarter


PROBE_COSTS: dict[str, Callable[[Evidence], float]] = {
    "full": lambda run: len(PROBES) * run.loaded.geometry.head_flops(),
    "topk-4": lambda run: len(PROBES) * 2 * VOCABULARY * run.loaded.geometry.hidden,  # exact search reads every row
    "linear": lambda run: len(PROBES) * 2 * run.loaded.geometry.hidden,
}


@pytest.mark.parametrize("name", list(PROBE_COSTS))
def test_probes_cost_their_readings_beyond_the_head_that_emits(run: Evidence, estimated: Estimated, name: str) -> None:
    """At thresholds that never fire every token reads every probe, and the last layer's head emits."""
    estimator = Estimator() if name == "full" else named(estimated, name)
    found = estimated.probe_flops(replace(NEVER, estimator=estimator))
    assert found == pytest.approx(PROBE_COSTS[name](run))


def test_full_depth_has_no_probe_to_pay_for(run: Evidence, estimated: Estimated) -> None:
    assert estimated.probe_flops(run.full) == 0


def test_estimators_larger_than_the_unembedding_are_left_out(run: Evidence) -> None:
    width = run.stepper.unembedding.shape[1]
    fit = [Estimator("topk", k=VOCABULARY), Estimator("lowrank", k=8, rank=width), Estimator()]
    large = [Estimator("topk", k=VOCABULARY + 1), Estimator("lowrank", k=8, rank=width + 1)]
    assert usable(run, [*large, *fit]) == fit
