"""Latency: length of timed requests, arms, answers kept for later checks, batch sizes that decide nothing."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import StaticCache

from emad_ref.absent import Absent
from emad_ref.models.causal import CausalStepper
from emad_ref.models.generation import LOOKUP, count_traced_graphs
from emad_ref.models.loading import load
from emad_ref.record import Record
from pytest_emad.benchmark.clock import PairedTimings
from pytest_emad.benchmark.machine import peak_memory
from pytest_emad.claims import speedup
from pytest_emad.measurements import latency
from pytest_emad.measurements.latency import (
    AUDITED_ROWS,
    FEWEST_NEW,
    FEWEST_PROMPT,
    INDICATIVE_PAIRS,
    TIMING_SECONDS,
    LatencyBenchmark,
    TimingResult,
    compute_detectable_speedups,
    is_compiled_baseline_tried,
    shorten_requests_to_fit_seconds,
    split_latency,
)
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import BUDGETS, Study
from pytest_emad.statistics.speedup import estimate_total_speedup
from pytest_emad.statistics.units import ByPair
from tests.claims.simulation import asked
from tests.small_measurements import FEW, small_evidence
from tests.small_models import LAYERS, small_model

PAIRS, BATCHES, ARMS = 30, (1, 4), 3
SHAPE = (8, 6)


def seconds(prompt: int, new: int, prefill_per_token: float, step: float) -> float:
    return PAIRS * ARMS * (sum(BATCHES) * prompt * prefill_per_token + len(BATCHES) * new * step)


def shortened(prompt: int, new: int, prefill: float, step: float, arms: int = ARMS) -> tuple[int, int]:
    return shorten_requests_to_fit_seconds(
        prompt, new, prefill=prefill, step=step, pairs=PAIRS, batch_sizes=BATCHES, arms=arms
    )


def test_a_fast_model_keeps_the_budgets_request():
    assert shortened(64, 32, prefill=0.002, step=0.001) == (64, 32)


@pytest.mark.parametrize(("per_token", "step"), [(0.004, 0.02), (0.02, 0.001), (0.0001, 0.08)])
def test_a_slow_models_prompts_are_paid_for_too(per_token, step):
    prompt, new = shortened(64, 32, prefill=64 * per_token, step=step)
    assert seconds(64, 32, per_token, step) > TIMING_SECONDS
    assert seconds(prompt, new, per_token, step) <= TIMING_SECONDS or (prompt, new) == (FEWEST_PROMPT, FEWEST_NEW)
    assert sum(shortened(64, 32, 64 * per_token, step, arms=4)) <= prompt + new, "a fourth arm is paid for too"


def test_no_request_is_shorter_than_decoding_needs_nor_longer_than_asked():
    assert shortened(64, 32, prefill=1e3, step=1e3) == (FEWEST_PROMPT, FEWEST_NEW)
    assert shortened(5, 3, prefill=1e3, step=1e3) == (5, 3)


@pytest.mark.parametrize(
    ("trained", "ours", "budget", "decisive", "indicative"),
    [
        (True, True, "smoke", PAIRS, INDICATIVE_PAIRS),
        (True, False, "smoke", PAIRS, PAIRS),
        (False, False, "smoke", INDICATIVE_PAIRS, INDICATIVE_PAIRS),
        (True, True, "standard", BUDGETS["standard"].pairs, BUDGETS["standard"].pairs),
    ],
)
def test_ratios_that_decide_nothing_take_fewer_pairs_under_smoke(trained, ours, budget, decisive, indicative):
    subject = SimpleNamespace(
        budget=BUDGETS[budget], loaded=SimpleNamespace(trained=trained), has_reference_decoder=ours, seed=0
    )
    watch = LatencyBenchmark(SimpleNamespace(subject=subject))
    assert (watch.n_pairs, watch.n_indicative_pairs) == (decisive, indicative)


def test_timings_become_pairs_for_intervals():
    taken = {"full": np.array([2.0, 4.0, 3.0]), "adaptive": np.array([1.0, 2.0, 1.0])}
    arms = TimingResult(PairedTimings(taken, taken, ("full", "adaptive", "full")), [], {}, ()).paired_seconds_by_arm()
    assert list(arms) == ["full", "adaptive"]
    ratio = estimate_total_speedup(arms["full"], arms["adaptive"])
    assert (ratio.n, ratio.noun) == (3, "pairs")
    assert ratio.value == pytest.approx(9 / 4)


# ------------------------------------------------------------ budgets


def drawn(speedup: float, rng: np.random.Generator, spread: float = 0.05) -> dict[str, np.ndarray]:
    full, adaptive = np.exp(spread * rng.standard_normal((2, PAIRS)))
    return {"full": full * speedup, "adaptive": adaptive}


def test_speedups_that_the_preflight_names_are_decided_about_as_often_as_it_promises():
    """400 simulated runs on either side, 4 standard errors of a share of 80 %: 8 points."""
    rng, legs = np.random.default_rng(0), 8
    above, below = np.mean([compute_detectable_speedups(drawn(1.1, rng), 1.1, legs) for _ in range(50)], axis=0)
    assert below < 1.1 < above
    shown = {"above": 0, "below": 0}
    for _ in range(400):
        for side, truth in (("above", above), ("below", below)):
            made = drawn(truth, rng)
            ratio = estimate_total_speedup(ByPair(made["full"]), ByPair(made["adaptive"]), threshold=1.1)
            shown[side] += ratio.p_above <= 0.05 if side == "above" else ratio.p_below <= 0.05 / legs
    assert all(0.72 < found / 400 < 0.88 for found in shown.values()), shown


def test_correction_costs_power_where_it_falsifies_and_none_where_it_survives():
    made = drawn(1.1, np.random.default_rng(1))
    (up, alone), (still_up, crowded) = (compute_detectable_speedups(made, 1.1, legs) for legs in (1, 60))
    assert up == still_up
    assert crowded < alone < 1.1
    assert alone == pytest.approx(1.1**2 / up), "one leg: the same on either side"


def test_the_noisiest_baseline_sets_what_is_decided():
    quiet = drawn(1.1, np.random.default_rng(1))
    noisy = quiet | {"generate": np.exp(0.5 * np.random.default_rng(2).standard_normal(PAIRS))}
    assert compute_detectable_speedups(noisy, 1.1, 4)[0] > compute_detectable_speedups(quiet, 1.1, 4)[0]


# ------------------------------------------------------------ arms and their stored outputs


@pytest.fixture(scope="module")
def timed_evidence() -> ModelMeasurements:
    return timing(RunResources())


def timing(host: RunResources) -> ModelMeasurements:
    """Return the latency benchmark of a small model: few short requests in batches of one, two and eight."""
    budget = replace(FEW, pairs=3, batch_sizes=(1, 2, 8), prompt_tokens=SHAPE[0], new_tokens=SHAPE[1])
    made = small_evidence(CausalStepper(small_model("gpt_neox")), host, budget=budget)
    made.loaded.model = made.subject.stepper.model
    made.latency.request_shape = SHAPE
    return made


def test_the_work_that_explains_a_speed_is_that_of_decoded_tokens(timed_evidence: ModelMeasurements):
    """A prompt of any length runs at full depth at once in either arm: it must not hide the smaller work per step."""
    watch = timed_evidence.latency
    for rows, timed in watch.time_point_by_batch_size(watch.most_saving_point).items():
        assert (timed.executed["full"][:, 0] == rows * SHAPE[1] * LAYERS).all()


def point_of(evidence: ModelMeasurements):
    return evidence.traces.profile.point(0.0)


def test_every_batch_size_is_timed_once_and_keeps_what_was_emitted(timed_evidence):
    watch, point = timed_evidence.latency, point_of(timed_evidence)
    timed = watch.time_point_by_batch_size(point)
    assert timed is watch.time_point_by_batch_size(point)
    assert list(timed) == [1, 2, 8]
    for rows, found in timed.items():
        assert list(found.seconds) == list(found.outputs) == ["full", "adaptive", "generate", LOOKUP][: 4 - (rows > 1)]
        assert {len(column) for column in found.seconds.values()} == {3}
        assert [len(prompts) for prompts in found.prompts] == [rows] * 3
        assert len(found.audited) == min(3, max(1, AUDITED_ROWS // rows))
        for arm in ("full", "adaptive"):
            whole = [pair for pair, done in enumerate(found.outputs[arm]) if isinstance(done, Record)]
            assert whole == sorted(found.audited)


def test_the_same_prompts_go_to_every_arm(timed_evidence):
    found = timed_evidence.latency.time_point_by_batch_size(point_of(timed_evidence))[2]
    for pair in found.audited:
        full, generate = found.outputs["full"][pair], found.outputs["generate"][pair]
        assert [row.tolist() for row in full.emitted] == generate.tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_no_arm_gets_a_prompt_twice_counting_the_warm_up(timed_evidence, rows):
    """A decoder that keeps prompts would run a pair faster whose prompts it has read in the warm-up."""
    requests, read = timed_evidence.latency.make_requests(rows), {"full": [], "adaptive": []}

    def arm(name):
        def run(prompts):
            read[name] += [tuple(prompt.tokens.tolist()) for prompt in prompts]
            return np.zeros((len(prompts), 1), dtype=np.int64)

        return run

    timed = latency.time_arms({name: arm(name) for name in read}, requests, lambda: None)
    assert [len(prompts) for prompts in timed.prompts] == [rows] * 3
    for prompts in read.values():
        assert len(set(prompts)) == len(prompts) == rows * (latency.WARM_UP + 3)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_an_honest_decoder_is_what_it_says(timed_evidence, rows):
    timed = timed_evidence.latency.time_point_by_batch_size(point_of(timed_evidence))[rows]
    finding = timed_evidence.latency.check_point_outputs(timed, point_of(timed_evidence))
    assert finding.passed is True, finding.detail
    looked_at = min(rows, AUDITED_ROWS) * len(timed.audited)
    assert finding.n == len(timed.seconds) * looked_at * SHAPE[1]


def lying(change):
    """Return the reference decoder with false records of ``generate`` at an adaptive point."""

    def make(request):
        decoder = RunResources().make_decoder(request)
        honest = decoder.generate
        if request.point.probes:
            decoder.generate = lambda *asked: change(honest(*asked))
        return decoder

    return RunResources(make_decoder=make)


def one_token_short(record: Record) -> Record:
    return replace(record, emitted=[row[:-1] for row in record.emitted])


def another_token(record: Record) -> Record:
    emitted = [row.copy() for row in record.emitted]
    for row in emitted:
        row[-1] = (row[-1] + 1) % 50
    return replace(record, emitted=emitted)


def half_the_work(record: Record) -> Record:
    return replace(record, work={0: replace(record.work[0], tokens=record.work[0].tokens // 2)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (one_token_short, "adaptive, request 0: [5] new tokens, but 6"),
        (another_token, "the argmax at that depth"),
        (half_the_work, "work.tokens"),
    ],
)
def test_requests_that_are_not_what_they_say_are_found(change, said):
    evidence = timing(lying(change))
    evidence.subject.budget = replace(evidence.subject.budget, batch_sizes=(1,))
    (timed,) = evidence.latency.time_point_by_batch_size(point_of(evidence)).values()
    finding = evidence.latency.check_point_outputs(timed, point_of(evidence))
    assert finding.passed is False
    assert said in finding.detail


def test_the_note_tells_what_ran_and_what_did_not(timed_evidence):
    note = timed_evidence.latency.format_timing_note(point_of(timed_evidence), 1.1, 4)
    assert "8 prompt + 6 new tokens, 3 pairs" in note
    assert note.count("survives from") == note.count("falsified up to") == 3
    assert "(after correction over 4 legs); compiled baseline not run: not tried on a CPU" in note


def test_prefill_and_decoding_are_told_apart(timed_evidence):
    """Of a 10 ms request with a first token of 4 ms, five further tokens take 1.2 ms each; the rest is counted."""
    watch, point = timed_evidence.latency, point_of(timed_evidence)
    for found in watch.time_point_by_batch_size(point).values():
        assert set(found.prefill_s) == {"full", "adaptive"}
        assert all((seconds > 0).all() and len(seconds) == 3 for seconds in found.prefill_s.values())
    whole, first = {"full": np.full(3, 0.010)}, {"full": np.full(2, 0.004)}
    assert split_latency(first, whole, new=6)["full"] == pytest.approx((0.004, 0.0012))
    geometry = timed_evidence.loaded.geometry
    held = 2 * LAYERS * geometry.kv_heads * geometry.head_dim * 8  # float64
    said = watch.format_prefill_note(point)
    skipped = watch.time_point_by_batch_size(point)[1].compute_skipped_share("adaptive", LAYERS)
    assert f"K/V at full depth: {held:,} bytes a token, {100 * skipped:.1f} % of it may be freed" in said
    assert said.count("batch ") == 3
    assert re.search(r"; peak memory [\d,]+ MB \(resident, this process\); K/V at", said)
    eager = replace(point, schedule="free_eager")
    watch._timed[eager] = watch.time_point_by_batch_size(point)
    assert "none may be freed under the free_eager schedule" in watch.format_prefill_note(eager)


def test_peak_memory_is_the_most_that_this_process_held():
    before = peak_memory(torch.device("cpu"))
    held = torch.ones(before.bytes, dtype=torch.uint8)
    after = peak_memory(torch.device("cpu"))
    assert after.bytes > held.nbytes
    assert after.of == "resident, this process"
    del held
    assert peak_memory(torch.device("cpu")).bytes >= after.bytes
    assert peak_memory(torch.device("cpu"), in_children=True).of == "resident, the largest timed process"
    assert "memory of a device 'meta' is not read" in peak_memory(torch.device("meta")).reason


def test_blocks_left_out_are_counted_off_records(timed_evidence):
    watch, point = timed_evidence.latency, point_of(timed_evidence)
    timed_evidence.subject.budget = replace(timed_evidence.subject.budget, batch_sizes=(1, 2, 8))
    found = watch.time_against_full_depth({"eager": replace(point, schedule="free_eager")})
    depth = np.concatenate([
        record.tokens.depth[record.tokens.phase != 0] for record in found.outputs["eager"]
    ])  # fmt: skip
    assert found.compute_skipped_share("full", LAYERS) == 0
    assert found.compute_skipped_share("eager", LAYERS) == pytest.approx(1 - depth.mean() / LAYERS)


# ------------------------------------------------------------ the compiled baseline


@pytest.mark.parametrize(
    ("study", "tried"),
    [
        (Study(), False),
        (Study(budget=BUDGETS["standard"]), False),
        (Study(budget=BUDGETS["full"]), True),
        (Study(device="cuda"), True),
        (Study(device="auto"), True),
    ],
)
def test_compiling_is_tried_on_an_accelerator_or_where_all_is_asked_for(study, tried):
    assert is_compiled_baseline_tried(study) is tried


def test_a_compiled_twin_is_one_more_arm_and_one_more_baseline(monkeypatch):
    """Compilation takes minutes on a CPU, so the twin's step is the plain one here."""
    evidence = timing(RunResources())
    evidence.subject.budget = replace(evidence.subject.budget, batch_sizes=(1,))
    evidence.latency.absent_compiled = None
    asked, own = [], evidence.subject.generate_greedy

    def greedy(prompts, new, compiled=False):
        asked.append(compiled)
        return own(prompts, new)

    monkeypatch.setattr(evidence.subject, "generate_greedy", greedy)
    watch, point = evidence.latency, point_of(evidence)
    assert watch.n_arms == 5
    assert list(watch.time_point_by_batch_size(point)[1].seconds) == [
        "full",
        "adaptive",
        "generate",
        "compiled",
        LOOKUP,
    ]
    assert asked.count(True) == asked.count(False) == 3 + latency.WARM_UP
    assert watch.check_point_outputs(watch.time_point_by_batch_size(point)[1], point).passed is True
    watch._compiled_in = 36.29
    assert watch.format_timing_note(point, 1.1, 1).endswith("; compiled in 36.3 s, outside the clock")


@pytest.mark.parametrize(
    ("greedy", "reason"),
    [
        (
            RuntimeError("Failed to find C compiler.\nSet CXX"),
            "torch.compile: RuntimeError: Failed to find C compiler.",
        ),
        (None, "transformers does not compile this model's steps"),
    ],
)
def test_why_a_compiled_baseline_cannot_run_is_said(monkeypatch, greedy, reason):
    evidence = timing(RunResources())

    def refuse(prompts, new, compiled):
        assert compiled
        if greedy is not None:
            raise greedy

    monkeypatch.setattr(evidence.subject, "generate_greedy", refuse)
    assert evidence.subject.absent_compiled_generate() == Absent(reason)


def test_a_model_whose_steps_were_compiled_has_the_baseline(monkeypatch):
    evidence = timing(RunResources())
    monkeypatch.setattr(evidence.subject, "generate_greedy", lambda *asked, **options: None)
    evidence.loaded.model = SimpleNamespace(_compiled_call=None)
    assert evidence.subject.absent_compiled_generate() is None


def test_compiled_steps_run_over_a_static_cache_and_emit_what_plain_ones_do(monkeypatch):
    """Without ``torch.compile``, which takes seconds: the function passed to it runs as it is."""
    evidence, handed, steps = timing(RunResources()), [], []

    def as_it_is(step, **options):
        handed.append(options)

        def run(*given, **named):
            steps.append((named["input_ids"].shape, type(named["past_key_values"])))
            assert torch._dynamo.config.fail_on_recompile_limit_hit, "it raises where it would not be compiled"
            return step(*given, **named)

        return run

    monkeypatch.setattr(torch, "compile", as_it_is)
    prompts = evidence.subject.make_equal_prompts(2, 8)
    found = evidence.subject.generate_greedy(prompts, 5, compiled=True)
    assert found.tolist() == evidence.subject.generate_greedy(prompts, 5).tolist()
    assert len(handed) == 1, "the plain one compiles nothing"
    assert steps == [((2, 1), StaticCache)] * 4, "the first of five tokens is the uncompiled prefill's"
    assert evidence.loaded.model.generation_config.cache_implementation is None
    assert evidence.subject.absent_compiled_generate() is None


def test_every_batch_size_is_tried_before_the_race(monkeypatch):
    evidence, tried = timing(RunResources()), []

    def greedy(prompts, new, compiled):
        tried.append((len(prompts), len(prompts[0].tokens)))
        if len(prompts) == 8:
            raise RuntimeError("more shapes than TorchDynamo compiles a step for")

    monkeypatch.setattr(evidence.subject, "generate_greedy", greedy)
    absent = evidence.subject.absent_compiled_generate(evidence.subject.budget.batch_sizes)
    assert "RuntimeError: more shapes" in absent.reason
    assert [rows for rows, _ in tried] == [1, 2, 8]
    assert len({length for _, length in tried}) == 3, "lengths differ, so that one graph serves any"


def test_steps_of_which_nothing_was_traced_are_not_called_compiled(monkeypatch):
    evidence = timing(RunResources())

    def untraced(prompts, new, compiled):
        evidence.loaded.model._compiled_call = evidence.loaded.model.__call__  # only transformers'

    monkeypatch.setattr(evidence.subject, "generate_greedy", untraced)
    assert evidence.subject.absent_compiled_generate() == Absent("TorchDynamo traces no graph of this model's steps")


@pytest.mark.slow  # it compiles: half a minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_bundled_models_steps_compile_for_every_batch_size_and_emit_its_tokens():
    subject = ModelUnderTest(load("emad-nano"), Study(), RunResources())
    assert subject.absent_compiled_generate((1, 2)) is None
    before = count_traced_graphs()
    for rows in (1, 2, 4):
        prompts = subject.make_equal_prompts(rows, 12)
        assert (
            subject.generate_greedy(prompts, 4, compiled=True).tolist() == subject.generate_greedy(prompts, 4).tolist()
        )
    assert count_traced_graphs() - before <= 1, "one graph for one row of any length; the one for more rows exists"


FEW_PAIRS, DECIDING = 2, 3


@pytest.mark.parametrize(
    ("name", "batches"), [("smoke", ()), ("standard", (2, 8)), ("full", (2, 4, 16))]
)  # fmt: skip
def test_batch_sizes_that_decide_are_not_timed_again_and_smoke_sweeps_none(name, batches):
    assert latency.extra_batch_sizes(BUDGETS[name]) == batches
    assert set(batches) | set(BUDGETS[name].batch_sizes) >= set(latency.SWEEP_BATCH_SIZES) or name == "smoke"


def sweeping(monkeypatch: pytest.MonkeyPatch, host: RunResources | None = None) -> ModelMeasurements:
    """Return the sweep of a small model: 1 and 4 rows decide, 2, 8 and 16 are reported, from fewer pairs."""
    monkeypatch.setattr(latency, "SWEEP_PAIRS", FEW_PAIRS)
    budget = replace(FEW, name="standard", pairs=DECIDING, batch_sizes=(1, 4), prompt_tokens=8, new_tokens=4)
    evidence = small_evidence(CausalStepper(small_model("gpt_neox")), host, budget=budget)
    evidence.loaded.model = evidence.subject.stepper.model
    evidence.latency.request_shape = (8, 4)
    return evidence


def test_a_sweep_is_timed_once_from_few_pairs_looked_at_and_named(monkeypatch):
    evidence = sweeping(monkeypatch)
    point = evidence.traces.profile.point(0.0)
    timed = evidence.latency.time_extra_batch_sizes(point)
    assert timed is evidence.latency.time_extra_batch_sizes(point)
    assert list(timed) == [2, 8, 16]
    for rows, requests in timed.items():
        assert {arm: len(seconds) for arm, seconds in requests.seconds.items()} == dict.fromkeys(
            ("full", "adaptive", "generate"), FEW_PAIRS
        )
        assert {len(prompts) for prompts in requests.prompts} == {rows}
        assert evidence.latency.check_point_outputs(requests, point).passed is True
    assert list(evidence.latency.time_point_by_batch_size(point)) == [1, 4], "the deciding batch sizes are unchanged"
    found = speedup.measure_speedup(evidence, point, "", evidence.latency.time_point_by_batch_size(point))
    assert list(found.all_batches) == [1, 2, 4, 8, 16]
    question = asked("EMAD-F2", np.random.default_rng(0))
    verdict = speedup.decide_speedup(found, question)
    legs = {leg.name: leg for leg in verdict.legs}
    assert (legs["batch 8, against generate"].outcome, legs["batch 8, against generate"].n) == ("measured", FEW_PAIRS)
    assert legs["batch 8: timed requests"].n > 0
    attachments = speedup.make_speedup_attachments(found, evidence, point, question)
    said = speedup.estimate_batch_size_limit(found.all_batches).description
    assert legs[speedup.ENDS].reason == said
    assert verdict.reason.endswith(said)
    assert any(note.endswith(said) for note in attachments.notes)
    (table,) = attachments.tables
    assert [row["batch"] for row in table.rows] == [1, 2, 4, 8, 16]
    assert [row["decides"] for row in table.rows] == [True, False, True, False, False]
    assert [row["pairs"] for row in table.rows] == [DECIDING, FEW_PAIRS, DECIDING, FEW_PAIRS, FEW_PAIRS]
    assert all(row[f"{arm}, ms"] > 0 for row in table.rows for arm in ("the point", "full depth", "generate"))
    assert all(row["least sure against"] in speedup.BASELINES.values() for row in table.rows)


def test_what_is_not_what_it_says_at_a_batch_size_of_the_sweep_falsifies(monkeypatch):
    """No limit of the speedup is reported from such times."""
    evidence = sweeping(monkeypatch, lying(another_token))
    point = evidence.traces.profile.point(0.0)
    found = speedup.measure_speedup(evidence, point, "", evidence.latency.time_point_by_batch_size(point))
    honest = {rows: replace(timed, check=None) for rows, timed in found.batches.items()}
    verdict = speedup.decide_speedup(replace(found, batches=honest), asked("EMAD-F2", np.random.default_rng(0)))
    assert verdict.verdict == "falsified"
    assert "batch 2: timed requests" in {leg.name for leg in verdict.legs if leg.outcome == "falsified"}
    assert "vanishes" not in verdict.reason
    assert speedup.ENDS not in {leg.name for leg in verdict.legs}


# ------------------------------------------------------------ the baseline of prompt lookup


def test_prompt_lookup_emits_the_models_tokens_and_drafts_them():
    subject = ModelUnderTest(load("emad-nano"), Study(), RunResources())
    (prompt,) = subject.make_equal_prompts(1, 24)
    repeated = replace(prompt, tokens=np.tile(prompt.tokens, 2))
    steps, model = [], subject.loaded.model
    handle = model.register_forward_hook(lambda *called: steps.append(called[-1].logits.shape[1]))
    plain = subject.generate_greedy([repeated], 8)
    alone = len(steps)
    drafted = latency.make_prompt_lookup_generate(subject.loaded.model, subject.stepper.device)(repeated, 8)[None]
    handle.remove()
    assert drafted.tolist() == plain.tolist()
    assert max(steps[alone + 1 :]) > 1, "several tokens per pass: some were looked up"


def test_why_prompt_lookup_does_not_run_is_said(monkeypatch):
    evidence = timing(RunResources())
    assert evidence.latency.absent_lookup is None

    def refuse(model, device):
        raise ValueError("assisted generation is not supported with stateful models")

    monkeypatch.setattr(latency, "make_prompt_lookup_generate", refuse)
    assert LatencyBenchmark(evidence.points).absent_lookup.reason.startswith(
        "prompt lookup: assisted generation is not supported"
    )
    monkeypatch.setattr(latency, "absent_drafting", lambda model: Absent("a sliding window, and so on"))
    assert LatencyBenchmark(evidence.points).absent_lookup.reason == "prompt lookup: a sliding window, and so on"
    evidence.subject.budget = replace(evidence.subject.budget, batch_sizes=(2,))
    assert "no request of one row" in LatencyBenchmark(evidence.points).absent_lookup.reason
