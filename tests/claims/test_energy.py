"""EMAD-N1 turns readings of an energy counter into a verdict: the device that it reads, and reasons for no reading."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from emad_ref.absent import Absent
from emad_ref.models.loading import load
from emad_ref.point import truncated
from emad_ref.protocol import Prompt, Request, Unsupported
from pytest_emad.benchmark.energy import EnergyResult
from pytest_emad.claims import energy
from pytest_emad.claims.base import Answer, ClaimContext, answer_question, find_question_of_claim
from pytest_emad.claims.energy import (
    decide_energy,
    find_device_uuid,
    make_energy_evidence_from_results,
    measure_energy_by_batch_size,
    open_energy_counter,
)
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import RunResources, make_decoder_on_judge_model
from pytest_emad.measurements.study import BUDGETS, Study
from pytest_emad.remote.token_decoder import Completion, TokenDecoder
from pytest_emad.statistics.verdicts import load_register
from tests.unit.test_energy import Board

CLAIM = load_register()["EMAD-N1"]


def asked(other_legs: int = 0) -> ClaimContext:
    return ClaimContext(CLAIM, "m", np.random.default_rng(0), other_legs)


def energies(ratio: float, pairs: int = 30, **told) -> EnergyResult:
    """Make joules as a device reports them, ``ratio`` times as many under the point as at full depth."""
    noise = np.exp(0.02 * np.random.default_rng(1).standard_normal(pairs))
    joules = {"full": np.full(pairs, 300.0), "adaptive": 300.0 * ratio * noise}
    tokens = {arm: np.full(pairs, 100) for arm in joules}
    said = {"source": "energy counter", "device": "Board", "spoiled": (), "caveats": ()} | told
    seconds = {arm: np.full(pairs, 5.0) for arm in joules}
    return EnergyResult(joules, seconds, tokens, ("full",) * pairs, **said)


def test_replayed_readings_drive_the_verdict():
    verdict = decide_energy(make_energy_evidence_from_results({1: energies(0.8), 4: energies(0.9)}), asked())
    assert verdict.verdict == "survived"
    assert [leg.name for leg in verdict.legs] == ["batch 1", "batch 4"]
    assert verdict.legs[0].estimate == pytest.approx(0.8, rel=0.02)
    assert (verdict.unit, verdict.threshold, verdict.n) == (CLAIM.unit, 1.0, 30)
    assert decide_energy(make_energy_evidence_from_results({1: energies(1.2)}), asked()).verdict == "falsified"


def test_as_many_pairs_as_a_smoke_run_has_decide_nothing_and_say_so():
    verdict = decide_energy(make_energy_evidence_from_results({1: energies(0.5, pairs=energy.SMOKE_PAIRS)}), asked())
    assert verdict.verdict == "inconclusive"
    assert "6 pairs, at least 30 are needed" in verdict.reason


def test_one_batch_size_that_cannot_be_read_leaves_no_number():
    verdict = decide_energy(
        make_energy_evidence_from_results({1: energies(0.8), 4: Absent("the device was lost")}), asked()
    )
    assert (verdict.verdict, verdict.reason, verdict.estimate) == ("unmeasured", "the device was lost", None)


def test_what_the_counter_may_be_off_by_widens_the_interval_at_its_worst():
    """A saving of 3 % in every pair is not shown if each end of a window may be off by 2 %."""
    sure, steps = (
        decide_energy(make_energy_evidence_from_results({1: energies(0.97, refresh_s=rest)}), asked()).legs[0]
        for rest in (0.0, 0.1)
    )
    assert (sure.outcome, steps.outcome) == ("survived", "inconclusive")
    assert steps.estimate == sure.estimate
    worst = (1 + 0.02) / (1 - 0.02)
    assert steps.interval == pytest.approx((sure.interval[0] / worst, sure.interval[1] * worst))


def test_on_a_processor_its_packages_are_read_where_there_is_time_for_it(monkeypatch: pytest.MonkeyPatch):
    on_cpu = SimpleNamespace(device=torch.device("cpu"), devices=[])
    board = Board(source="CPU package energy")
    monkeypatch.setattr(energy, "open_rapl", lambda: board)
    with open_energy_counter(on_cpu, packages=True) as counter:
        assert counter is board
    with open_energy_counter(on_cpu) as counter:
        assert counter == Absent("no NVML device: the decoder runs on no GPU")


def test_the_instrument_and_its_self_check_are_told():
    told = energy.format_energy_note(energy.add_counter_checks_to_result(energies(0.8), 0.1, 1.02))
    where = "in this process alone (another on the device spoils a window)"
    absent = "; no prefill: not measured; no idle: not measured; no temperature: not measured"
    checked = "moves every 100 ms; counted over integrated power: 1.02"
    assert told == f"energy counter; {where}; {checked}{absent}; 0 windows spoiled"
    alone = energy.add_counter_checks_to_result(energies(0.8), 0.1, Absent("not offered by this driver"))
    assert alone.caveats == ("no self-check: not offered by this driver",)


def test_the_note_says_which_instrument_and_what_was_spoiled():
    said = energy.format_energy_note(energies(0.8, spoiled=("throttled",), caveats=("sharing cannot be ruled out",)))
    assert "; sharing cannot be ruled out; no prefill" in said
    assert said.endswith("; 1 windows spoiled")


def test_without_a_gpu_it_is_unmeasured_and_nothing_is_timed(monkeypatch: pytest.MonkeyPatch):
    evidence = ModelMeasurements(load("emad-nano"), Study(corpus="self"), RunResources())
    monkeypatch.setattr(ModelMeasurements, "latency", property(lambda self: pytest.fail("timed")))
    answer = answer_question(find_question_of_claim("EMAD-N1"), evidence, asked())
    assert answer.verdict.verdict == "unmeasured"
    assert answer.verdict.reason == "no NVML device: the decoder runs on no GPU"
    assert answer.attachments.notes == ()


def test_a_model_on_two_devices_has_no_counter():
    places = [torch.device("cpu"), torch.device("meta")]
    with open_energy_counter(SimpleNamespace(device=places[0], devices=places)) as counter:
        assert counter == Absent("the model lies on 2 devices, and a counter sees one of them")
    assert find_device_uuid(places[0]) is None


def replay_board(monkeypatch: pytest.MonkeyPatch, board: Board) -> None:
    """Let the claim read ``board``, whose device takes 60 W while it idles, by the clock of the board."""
    real, idle = energy.measure_energy_pairs, energy.measure_idle_watts
    monkeypatch.setattr(energy, "measure_energy_pairs", lambda *a, **k: real(*a, **k, clock=board.clock))
    resting = {"clock": board.clock, "sleep": lambda seconds: board.spend(seconds, 60.0)}
    monkeypatch.setattr(energy, "measure_idle_watts", lambda counter: idle(counter, **resting))
    monkeypatch.setattr(energy, "measure_refresh_seconds", lambda counter: 0.02)
    monkeypatch.setattr(energy, "counter_to_power_ratio", lambda *a, **k: 1.0)


class CountsItself(TokenDecoder):
    """A decoder at full depth that counts the joules of its own ``board``, which its requests spend."""

    def __init__(self, request: Request, board: Board):
        super().__init__(request)
        self.board, self.decoder = board, make_decoder_on_judge_model(request)

    def complete(self, prompts, max_new, stop):
        record = self.decoder.generate([Prompt(prompt) for prompt in prompts], max_new, stop)
        self.board.spend(2.0 + max_new, 300.0)
        rows = zip(record.emitted, record.stop, strict=True)
        return [Completion(tokens, reason == "stop token") for tokens, reason in rows]

    def energy_j(self):
        return self.board.energy_mj() / 1000


def answered(monkeypatch: pytest.MonkeyPatch, made: type[CountsItself]) -> Answer:
    """The answer of EMAD-N1 for a decoder that counts its own joules and declines exits."""
    board = Board()
    evidence = ModelMeasurements(
        load("emad-nano"), Study(corpus="self"), RunResources(make_decoder=lambda request: made(request, board))
    )
    evidence.latency.request_shape, evidence.latency.most_saving_point = (8, 4), truncated(4, 2)
    replay_board(monkeypatch, board)
    return answer_question(find_question_of_claim("EMAD-N1"), evidence, asked())


def test_a_decoder_that_counts_its_own_joules_shows_full_depth_where_it_declines_exits(monkeypatch):
    answer = answered(monkeypatch, CountsItself)
    assert (answer.verdict.verdict, answer.verdict.estimate) == ("not applicable", None)
    assert answer.refused is not None
    (table,) = answer.attachments.tables
    assert [(row["batch"], row["arm"]) for row in table.rows] == [(1, "full"), (4, "full")]
    assert table.rows[0]["decode, J per output token"] == pytest.approx(300)
    assert table.rows[0]["idle, W"] == pytest.approx(60)
    note = answer.attachments.notes[0]
    assert "the decoder's energy counter; all work of its device counts" in note
    assert "no temperature: the decoder shows no temperature" in note


class Resets(CountsItself):
    """Its counter begins anew now and then."""

    def energy_j(self):
        return super().energy_j() % 1000


class Gone(CountsItself):
    """Its counter is gone after some requests."""

    def energy_j(self):
        if self.board.now > 120:
            raise Unsupported("the server counts no energy: /energy_metrics has status 503")
        return super().energy_j()


class Stands(CountsItself):
    def energy_j(self):
        return 7.0


class Negative(CountsItself):
    def energy_j(self):
        return -1.0


class NoNumber(CountsItself):
    def energy_j(self):
        return "12 J"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (Resets, "the energy counter went back from"),
        (Gone, "/energy_metrics has status 503"),
        (Stands, "the energy counter stood still"),
        (Negative, "energy_j() is -1.0, but expected a finite number of joules"),
        (NoNumber, "energy_j() is '12 J', but expected a finite number of joules"),
    ],
)
def test_a_broken_counter_of_a_decoder_is_a_reason_and_no_number(made, reason, monkeypatch):
    answer = answered(monkeypatch, made)
    assert answer.attachments.tables == ()
    assert reason in " ".join([answer.verdict.reason, *answer.attachments.notes])
    assert answer.verdict.estimate is None


def test_windows_are_requests_of_the_timed_shape_on_fresh_prompts(monkeypatch: pytest.MonkeyPatch):
    """A board whose clock advances with every generated token: the decoders decode, the counter is replayed."""
    evidence = ModelMeasurements(load("emad-nano"), Study(corpus="self"), RunResources())
    evidence.latency.request_shape, evidence.latency.most_saving_point = (8, 4), evidence.subject.full_depth_point
    board = Board()
    asked_of: list[tuple[int, int]] = []

    class Counted:
        """Wrap the decoder: its tokens spend the board's energy."""

        def __init__(self, decoder):
            self._decoder = decoder

        def __getattr__(self, name):
            return getattr(self._decoder, name)

        def generate(self, prompts, new, stop):
            asked_of.append((len(prompts), new))
            board.spend(2.0 + new, 300.0)  # a prefill of two seconds, and one for each token
            return self._decoder.generate(prompts, new, stop)

    make = evidence.resources.make_decoder
    counted = ModelMeasurements(
        evidence.loaded, evidence.study, RunResources(make_decoder=lambda request: Counted(make(request)))
    )
    counted.latency.request_shape, counted.latency.most_saving_point = (8, 4), evidence.subject.full_depth_point
    replay_board(monkeypatch, board)
    found = measure_energy_by_batch_size(counted, board)
    assert list(found) == [1, 4]
    for rows, each in found.items():
        assert isinstance(each, EnergyResult)
        assert each.tokens["full"].tolist() == [4 * rows] * energy.SMOKE_PAIRS
        assert each.joules["adaptive"].tolist() == [1800.0] * energy.SMOKE_PAIRS
        row = energy.make_energy_row(rows, "adaptive", each)
        assert row == {
            "batch": rows,
            "arm": "adaptive",
            "J per output token": pytest.approx(1800 / (4 * rows)),
            "J per input or output token": pytest.approx(1800 / (12 * rows)),
            "prefill, J per input token": pytest.approx(900 / (8 * rows)),
            "decode, J per output token": pytest.approx(300 / rows),
            "idle, W": pytest.approx(60.0),
            "above idle, J per output token": pytest.approx(6.0 * (300 - 60) / (4 * rows)),
            "before, °C": {1: 40.0, 4: 44.0}[rows],
            "after, °C": {1: 41.0, 4: 45.0}[rows],
        }
        assert ": not measured" not in energy.format_energy_note(each)
    assert set(asked_of) == {(1, 4), (4, 4), (1, 1), (4, 1)}


@pytest.mark.parametrize(
    ("budget", "pairs"), [("smoke", 6), ("standard", 60), pytest.param("full", 100, marks=pytest.mark.slow)]
)
def test_pairs_of_windows_are_half_of_those_of_requests(budget: str, pairs: int, monkeypatch: pytest.MonkeyPatch):
    evidence = ModelMeasurements(load("emad-nano"), Study(corpus="self", budget=BUDGETS[budget]), RunResources())
    evidence.latency.request_shape, evidence.latency.most_saving_point = (8, 4), evidence.subject.full_depth_point
    wanted: list[int] = []
    none = Absent("no clean window")
    monkeypatch.setattr(energy, "measure_energy_pairs", lambda arms, count, *a, **k: wanted.append(count) or none)
    monkeypatch.setattr(energy, "measure_refresh_seconds", lambda counter: 0.02)
    monkeypatch.setattr(energy, "counter_to_power_ratio", lambda *a, **k: 1.0)
    monkeypatch.setattr(energy, "measure_idle_watts", lambda counter: 60.0)
    assert energy.measure_energy_of_arms(evidence, Board(), 1) == none
    assert wanted == [pairs, energy.SMOKE_PAIRS]


def test_nothing_is_tried_after_the_first_batch_size_that_cannot_be_measured():
    evidence = SimpleNamespace(study=Study())
    assert measure_energy_by_batch_size(evidence, Absent("no driver")) == {1: Absent("no driver")}
