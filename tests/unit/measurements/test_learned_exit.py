"""The learned exit: its model, the decoded loss of its points, savings of oracles and components, its latency."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.calibration.lens_files import FittedLens
from emad_ref.decoding.self_speculation import Drafting
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.generation import LOOKUP
from emad_ref.point import EntropyEstimator, OperatingPoint, ScheduleName, full_depth
from emad_ref.probes.tuned_lens import get_attached_lens
from emad_ref.protocol import Request, Unsupported
from emad_ref.replay.losses import decode_losses, replay_losses
from emad_ref.signals import signals_in_sweep
from pytest_emad.claims.base import Answer, RunPlan, answer_question, find_question_of_claim
from pytest_emad.measurements import learned_exit
from pytest_emad.measurements.latency import ADAPTIVE, FULL, GENERATE
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import ModelIsolation, RunResources, make_reference_decoder
from pytest_emad.measurements.study import BUDGETS
from pytest_emad.report.figures import render_figure_svg
from pytest_emad.screening.drafts import COPIES_ALONE, LENS_DRAFTS, OWN_HEAD_DRAFTS
from pytest_emad.screening.exit import Exit, save_exit
from pytest_emad.screening.guarantee import excess_loss
from pytest_emad.screening.settings import ScreeningSettings
from pytest_emad.screening.traces import TooLittleText
from pytest_emad.statistics.units import ByDocument
from pytest_emad.statistics.verdicts import load_register
from pytest_emad.sweep.oracle_savings import RISE_LEVELS
from tests.random_lenses import drawn_lens
from tests.small_measurements import small_evidence
from tests.small_models import LAYERS, small_model

PROBES = (2, 4)
ONLY_REFERENCE = "under the schedule copying replay predicts only the reference decoder"


def found_exit(schedule: ScheduleName = "copying", fingerprint: str = "f", copied: int = 0) -> Exit:
    """Return a random lens and gate, and a point at which half of all tokens exit."""
    stepper = CausalStepper(small_model("gpt_neox"))
    lens = replace(drawn_lens(stepper, range(1, LAYERS), scale=0.05), fingerprint=fingerprint)
    rng = np.random.default_rng(0)
    weights = tuple(tuple(rng.normal(0, 0.1, stepper.geometry.hidden + 1)) for _ in lens.translators)
    nats = dict.fromkeys(lens.translators, 0.1)
    gate = EntropyEstimator("linear", weights=weights)
    asked = replace(gate, weights=tuple(weights[probe - 1] for probe in PROBES))
    point = OperatingPoint(
        "gate ≤ 0", "gate", LAYERS, LAYERS, PROBES, ((0.0, 0.0),), schedule, asked, "divergence", lens=lens.digest
    )
    drafting = Drafting(2, 3, 0.0, lens.digest, replace(gate, weights=weights[1:2]), copied=copied)
    return Exit(FittedLens(lens, {}, nats, nats, 1, gate), point, drafting=drafting, screened={"window": 1000})


def evidence_with(tmp_path: Path, found: Exit, host: RunResources | None = None) -> ModelMeasurements:
    path = tmp_path / "some.exit"
    save_exit(path, found)
    evidence = small_evidence(host=host, exit=path)
    evidence.subject.isolation = ModelIsolation(evidence.loaded, copied)
    return evidence


def copied(loaded: SimpleNamespace) -> SimpleNamespace:
    model = deepcopy(loaded.model)
    return SimpleNamespace(**{**vars(loaded), "model": model, "stepper": CausalStepper(model)})


def answered(evidence: ModelMeasurements, claim: str) -> Answer:
    docket = RunPlan(load_register(), evidence.study)
    return answer_question(find_question_of_claim(claim), evidence, docket.make_context(claim, evidence.name, LAYERS))


def test_the_exit_of_another_model_is_refused_by_the_option_that_brought_it(tmp_path: Path) -> None:
    evidence = evidence_with(tmp_path, found_exit(fingerprint="another"))
    with pytest.raises(
        BadArgument, match=r"--emad-exit=.*some\.exit.*an exit of small.*of a model another.*emad screen"
    ):
        evidence.require_prerequisites_of_all_claims()


def test_where_none_is_brought_one_is_found_on_the_runs_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ScreeningSettings] = []

    def screened(model: object, settings: ScreeningSettings, run: object) -> Exit:
        asked.append(settings)
        return found_exit()

    monkeypatch.setattr(learned_exit, "screen", screened)
    evidence = small_evidence(seed=3)
    assert evidence.exit_evaluation.exit_if_any is evidence.exit_evaluation.exit
    assert evidence.exit_evaluation.exit is evidence.exit_evaluation.exit
    assert asked == [ScreeningSettings(corpus="self", documents=240, seed=3)]
    assert get_attached_lens(evidence.subject.stepper, evidence.exit_evaluation.exit.fitted.lens.digest) is not None


def test_without_an_exit_nothing_is_claimed_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_little(*args: object, **options: object) -> Exit:
        raise TooLittleText("one document")

    monkeypatch.setattr(learned_exit, "screen", too_little)
    for claim in ("EMAD-X1", "EMAD-X2", "EMAD-X3", "EMAD-X4", "EMAD-X5", "EMAD-X6"):
        answer = answered(small_evidence(), claim)
        assert (answer.verdict.verdict, answer.refused) == ("unmeasured", None), claim
        assert "--emad-exit FILE" in answer.verdict.reason
        assert "one document" in answer.verdict.reason


def test_losses_of_the_point_are_replays_where_replay_is_exact(tmp_path: Path) -> None:
    evidence = evidence_with(tmp_path, found_exit("free_eager"))
    trace = evidence.exit_evaluation.evaluation_traces.trace_for_point(evidence.exit_evaluation.exit.point)
    replayed = replay_losses(trace, evidence.loaded.geometry, [evidence.exit_evaluation.exit.point])
    chosen = evidence.exit_evaluation.recommended_point_loss
    assert not isinstance(chosen, Absent)
    np.testing.assert_allclose(chosen.table.nats, replayed.nats, rtol=1e-5)
    np.testing.assert_array_equal(chosen.table.flops, replayed.flops)
    assert replayed.saved_shares("depth")[1] > 0.05, "some tokens exit early"
    assert evidence.exit_evaluation.exact_kv_point is evidence.exit_evaluation.recommended_point


@pytest.mark.parametrize("window", [8, 1000])
def test_a_guarantee_is_judged_on_as_many_tokens_of_a_window_as_certified_it(tmp_path: Path, window: int) -> None:
    evidence = evidence_with(tmp_path, replace(found_exit(), screened={"window": window}))
    point, whole = evidence.exit_evaluation.exit.point, evidence.traces.evaluation_windows
    assert point is not None
    assert min(len(text.tokens) for text in whole) > 8
    short = [replace(text, tokens=text.tokens[:window]) for text in whole]
    loss = decode_losses(evidence.subject.stepper, evidence.loaded.geometry, short, [full_depth(LAYERS), point])
    nats, full, tokens = (ByDocument(each, loss.cluster) for each in (loss.nats[[1]].T, loss.nats[0], loss.tokens))
    expected = excess_loss(nats, full, tokens)
    found = evidence.exit_evaluation.excess_nll_by_document
    assert found.values == pytest.approx(expected.values[:, 0], abs=1e-6)
    assert found.values.max() > 1e-4


@pytest.mark.parametrize("schedule", ["copying", "free_eager"])
def test_what_tasks_lose_at_the_exits_point_stands_beside_its_verdict(tmp_path: Path, schedule: ScheduleName) -> None:
    """Continuation choice, which random weights do not solve, decoded through the lens; it decides nothing."""
    evidence = evidence_with(tmp_path, found_exit(schedule))
    evidence.subject.window_size = 64
    tokens = np.random.default_rng(1).integers(1, 101, (34, 60))
    evidence.subject.iterate_documents = lambda split: list(tokens)
    verdict = answered(evidence, "EMAD-X1").verdict
    (leg,) = (
        leg for leg in verdict.legs if leg.name == f"{evidence.exit_evaluation.exit.point.name}: continuation choice"
    )
    full, adaptive = evidence.task_scores.decode_full_and_adaptive_correctness(
        "continuation choice", evidence.exit_evaluation.exit.point
    )
    assert (leg.outcome, leg.n, leg.p_falsify) == ("measured", 34, None)
    assert leg.estimate == full.values.mean() - adaptive.values.mean()
    assert leg.reason.startswith("not solved: ")
    assert leg.reason.endswith("% right, 25.0 % by guessing"), "a chosen point counts as exercised"


def test_a_point_that_copies_has_a_twin_with_exact_states(tmp_path: Path) -> None:
    held = evidence_with(tmp_path, found_exit()).exit_evaluation
    exact = held.exact_kv_point
    assert exact is not None
    assert (exact.schedule, exact.thresholds, exact.lens) == (
        "free_eager",
        held.exit.point.thresholds,
        held.exit.point.lens,
    )
    assert exact.name != held.exit.point.name


def test_full_depth_is_what_is_held_against(tmp_path: Path) -> None:
    """The documents, tokens and FLOPs of the operating-point table."""
    evidence = evidence_with(tmp_path, found_exit())
    full, expected = evidence.exit_evaluation.full_depth_loss.table, evidence.points.full_loss.table
    np.testing.assert_allclose(full.nats[0], expected.nats[0], rtol=1e-6)
    for name in ("flops", "depth"):
        np.testing.assert_array_equal(getattr(full, name)[0], getattr(expected, name)[0])
    np.testing.assert_array_equal(full.tokens, evidence.traces.document_lengths.values)
    np.testing.assert_array_equal(full.depth[0], LAYERS * full.tokens)


def test_an_oracle_stays_within_its_loss_and_more_of_it_saves_more(tmp_path: Path) -> None:
    held = evidence_with(tmp_path, found_exit()).exit_evaluation
    assert held.perplexity_rise_levels[0] == 0.01
    for losses in held.oracle_losses.values():
        chosen = [held.choose_oracle_setting(losses, level, "depth") for level in sorted(held.perplexity_rise_levels)]
        for loss, level in zip(chosen, sorted(held.perplexity_rise_levels), strict=True):
            assert loss.perplexity_rise <= level
        depths = [loss.mean_depth for loss in chosen]
        assert depths == sorted(depths, reverse=True)
    assert [name.partition(",")[0] for name in held.oracle_losses] == ["tuned lens"] * 2 + ["own head"] * 2


def test_every_row_but_time_is_answered(tmp_path: Path) -> None:
    """With copied K/V, too: rows about early exits do not depend on drafting."""
    evidence = evidence_with(tmp_path, found_exit(copied=3))
    drafting = evidence.exit_evaluation.exit.drafting
    assert drafting is not None
    assert drafting.copied == 3
    x1, x2, x5, x6 = (answered(evidence, f"EMAD-X{number}").verdict for number in (1, 2, 5, 6))
    assert x1.verdict in ("inconclusive", "falsified", "not applicable")
    assert (x2.verdict, x2.reason) == ("unmeasured", "the exit carries no guarantee")
    assert x5.verdict == x6.verdict == "measured"
    evaluation = evidence.exit_evaluation
    assert len(x5.legs) == len(evaluation.perplexity_rise_levels) * len(evaluation.oracle_losses)
    parts = {leg.name.partition(":")[0] for leg in x6.legs}
    assert {"readout alone", "criterion, by an oracle alone", "monotone rule alone", "K/V"} <= parts
    assert {f"{part}, all others exchanged" for part in ("readout", "criterion", "monotone rule")} <= parts


def test_without_an_exit_nothing_is_promised(tmp_path: Path) -> None:
    """As for time: the premise is absent, and so is the instrument."""
    none = replace(found_exit(), lossy=Absent("no rule saves anything"))
    x2 = answered(evidence_with(tmp_path, none), "EMAD-X2").verdict
    expected = "no exit that a guarantee is given for: no rule saves anything"
    assert (x2.verdict, x2.reason) == ("not applicable", expected)


def test_savings_stand_against_losses_beside_the_ceilings(tmp_path: Path) -> None:
    """Every criterion through the lens, and the oracles of either readout, as a figure and at the same losses."""
    figure, table = answered(evidence_with(tmp_path, found_exit()), "EMAD-X5").attachments.tables
    assert figure.figure == "saving against loss"
    told = {row["family"]: row["kind"] for row in figure.rows}
    ceilings = {family for family, kind in told.items() if kind == "ceiling"}
    rules = {family.removesuffix(", tuned lens") for family in set(told) - ceilings}
    assert rules == {signal.label for signal in signals_in_sweep("criterion") if not signal.needs_confidence_parameters}
    assert {family.rpartition(", ")[2] for family in ceilings} == {"tuned lens", "own head"}
    assert any("monotone" in family for family in ceilings)
    assert {(row["family"], row["rise %"]) for row in table.rows} == {
        (family, level) for family in told for level in RISE_LEVELS
    }
    assert render_figure_svg(figure.figure, figure.rows, "t").endswith("</svg>\n")


# ------------------------------------------------------------ foreign decoders


def declining(request: Request) -> object:
    """Like a remote decoder, whose points cannot name a lens."""
    if request.point.lens is not None:
        raise Unsupported("no lens of that name is held here")
    return make_reference_decoder(request)


def test_a_decoder_that_holds_no_lens_leaves_the_rows_undecided_by_name(tmp_path: Path) -> None:
    evidence = evidence_with(tmp_path, found_exit(), RunResources(declining))
    for claim in ("EMAD-X1", "EMAD-X2", "EMAD-X3"):
        answer = answered(evidence, claim)
        assert answer.verdict.verdict == "not applicable"
        assert "no lens of that name" in answer.refused.reason
    assert answered(evidence, "EMAD-X5").verdict.verdict == "measured", (
        "an oracle depends on the model, not on the decoder"
    )


def test_a_decoder_of_somebody_else_is_judged_at_an_exit_where_replay_speaks_for_it(tmp_path: Path) -> None:
    """On a copy of the model with its lens attached."""
    copying = evidence_with(tmp_path, found_exit(), RunResources(make_reference_decoder))
    assert copying.exit_evaluation.absent_for_decoder.reason.startswith(ONLY_REFERENCE)
    assert answered(copying, "EMAD-X1").refused == copying.exit_evaluation.absent_for_decoder
    assert (
        evidence_with(
            tmp_path, found_exit("free_eager"), RunResources(make_reference_decoder)
        ).exit_evaluation.absent_for_decoder
        is None
    )


BRIEF = replace(BUDGETS["smoke"], pairs=3, batch_sizes=(1, 2), prompt_tokens=8, new_tokens=6)


def test_every_arm_emits_the_models_own_tokens_and_a_changed_one_is_named(tmp_path: Path) -> None:
    evidence = evidence_with(tmp_path, found_exit())
    evidence.subject.budget = BRIEF
    drafted = evidence.self_speculation
    assert list(drafted.timings_by_batch_size) == [1, 2]
    assert set(drafted.timings_by_batch_size[1].seconds) == {FULL, ADAPTIVE, GENERATE, LOOKUP}
    assert set(drafted.timings_by_batch_size[2].seconds) == {FULL, ADAPTIVE, GENERATE}
    assert set(drafted.lossless_arm_timings.seconds) == {ADAPTIVE, OWN_HEAD_DRAFTS}
    for rows in (1, 2):
        assert drafted.check_outputs(rows).passed, drafted.check_outputs(rows).detail
        assert 0 < drafted.compute_accepted_share(rows) <= 1
    (audited, *_) = drafted.timings_by_batch_size[2].audited
    record = drafted.timings_by_batch_size[2].outputs[ADAPTIVE][audited]
    record.emitted[0] = (record.emitted[0] + 1) % 101
    finding = drafted.check_outputs(2)
    assert finding.passed is False
    assert finding.detail.startswith("adaptive, row 0")
    answer = answered(evidence, "EMAD-X4")
    verdict, (note,) = answer.verdict, answer.attachments.notes
    assert "timed drafts of the exit, 8 prompt + 6 new tokens, 3 pairs in this process alone (the budget" in note
    assert verdict.verdict == "falsified"
    assert any(leg.outcome == "falsified" and leg.name == "batch 2: timed requests" for leg in verdict.legs)
    assert {f"batch 1, against {way}" for way in ("generate with prompt lookup", OWN_HEAD_DRAFTS)} <= {
        leg.name for leg in verdict.legs
    }


def test_of_a_way_that_copies_and_drafts_either_half_stands_beside(tmp_path: Path) -> None:
    """The outputs of both are checked, too."""
    found = found_exit()
    assert found.drafting is not None
    evidence = evidence_with(tmp_path, replace(found, drafting=replace(found.drafting, copied=3)))
    evidence.subject.budget = replace(BRIEF, batch_sizes=(1,), new_tokens=12)
    beside = evidence.self_speculation.lossless_arm_timings
    assert set(beside.seconds) == {ADAPTIVE, OWN_HEAD_DRAFTS, LENS_DRAFTS, COPIES_ALONE}
    assert evidence.self_speculation.check_outputs(1).passed
    (audited, *_) = beside.audited
    beside.outputs[COPIES_ALONE][audited][0, 2] += 1  # type: ignore[index]
    finding = evidence.self_speculation.check_outputs(1)
    assert finding.passed is False
    assert finding.detail.startswith(f"{COPIES_ALONE}, row 0")


def test_an_exit_that_holds_no_way_to_draft_leaves_the_row_without_object(tmp_path: Path) -> None:
    found = replace(found_exit(), drafting=None)
    verdict = answered(evidence_with(tmp_path, found), "EMAD-X4").verdict
    assert (verdict.verdict, verdict.reason) == (
        "not applicable", "the exit holds no way to draft: none was found to pay"
    )  # fmt: skip


def test_what_a_point_with_copies_emitted_while_the_clock_ran_is_decoded_again(tmp_path: Path) -> None:
    evidence = evidence_with(tmp_path, found_exit())
    evidence.subject.budget = replace(BRIEF, batch_sizes=(2,))
    point, stopwatch = evidence.exit_evaluation.recommended_point, evidence.latency
    assert stopwatch.check_point_outputs(stopwatch.time_point_by_batch_size(point)[2], point).passed
    (audited, *_) = stopwatch.time_point_by_batch_size(point)[2].audited
    record = stopwatch.time_point_by_batch_size(point)[2].outputs[ADAPTIVE][audited]
    record.emitted[1] = (record.emitted[1] + 1) % 101
    finding = stopwatch.check_point_outputs(stopwatch.time_point_by_batch_size(point)[2], point)
    assert finding.passed is False
    assert "adaptive, row 1" in finding.detail
    assert "but our own decoder" in finding.detail
