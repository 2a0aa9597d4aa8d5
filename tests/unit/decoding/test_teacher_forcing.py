"""Teacher forcing, token by token: it equals replay under exact schedules and measures what replay cannot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.teacher_forcing import sequence_nll_sums_and_counts, teacher_force
from emad_ref.models.causal import CausalStepper
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Step
from emad_ref.replay.replay import compute_decode_work, replay
from tests.small_models import LAYERS, VOCABULARY, small_model

FLOAT32 = 1e-5  # nats: the trace keeps float32 of losses up to 10
PROBES = (1, 3)


@pytest.fixture(scope="module")
def stepper():
    return CausalStepper(small_model("gpt_neox"))


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(4)
    return [TokenSequence(rng.integers(0, VOCABULARY, n), start) for n, start in ((12, 0), (9, 3), (14, 5))]


@pytest.fixture(scope="module")
def trace(stepper, texts):
    return take_trace(stepper, texts)


@pytest.fixture(scope="module")
def adaptive(trace):
    """Return thresholds under which some tokens exit at each probe."""
    thresholds = np.quantile(trace.entropy_nats[:, np.array(PROBES) - 1].astype(float), 0.15, axis=0)
    return OperatingPoint("p", "quantile", LAYERS, LAYERS, PROBES, (tuple(map(float, thresholds)),))


@pytest.mark.parametrize("schedule", ["monotone", "free_eager", "free_deferred"])
def test_depths_losses_and_work_are_replays_under_exact_schedules(stepper, texts, trace, adaptive, schedule):
    point = replace(adaptive, schedule=schedule)
    replayed = replay(trace, point)
    assert len(set(replayed.depth.tolist())) > 1, "nothing exits: the comparison has no power"
    decoder = WalkedDecoder(stepper, point)
    forced = [teacher_force(decoder, text) for text in texts]
    assert np.concatenate([each.depth for each in forced]).tolist() == replayed.depth.tolist()
    assert np.concatenate([each.nll_nats for each in forced]) == pytest.approx(replayed.nll_nats, abs=FLOAT32)


def test_only_positions_from_the_first_decided_one_are_scored(stepper, texts):
    for text in texts:
        forced = teacher_force(WalkedDecoder(stepper, full_depth(LAYERS)), text)
        assert len(forced.depth) == len(forced.nll_nats) == text.n_decided


def test_the_last_token_is_predicted_and_never_run(stepper, texts):
    text, decoder = texts[0], WalkedDecoder(stepper, full_depth(LAYERS))
    forced = teacher_force(decoder, text)
    assert forced.work.tokens.tolist() == [len(text.tokens) - 1] * LAYERS
    other = replace(text, tokens=np.append(text.tokens[:-1], (text.tokens[-1] + 1) % VOCABULARY))
    assert teacher_force(decoder, other).nll_nats[:-1].tolist() == forced.nll_nats[:-1].tolist()
    assert teacher_force(decoder, other).nll_nats[-1] != forced.nll_nats[-1]


def test_work_is_what_replay_derives_where_there_is_no_prompt(stepper, adaptive):
    text = TokenSequence(np.random.default_rng(5).integers(0, VOCABULARY, 16))
    trace = take_trace(stepper, [text])
    forced = teacher_force(WalkedDecoder(stepper, adaptive), text)
    assert forced.work.describe_difference(compute_decode_work(trace, replay(trace, adaptive).depth, adaptive)) == ""


def test_copies_change_later_losses(stepper, texts, adaptive):
    """No replay knows them: the same rule with exact backfill gives other numbers."""
    sums = [
        sequence_nll_sums_and_counts(WalkedDecoder(stepper, replace(adaptive, schedule=schedule)), texts)[0]
        for schedule in ("copying", "free_eager")
    ]
    assert np.abs(sums[0] - sums[1]).max() > 1e-3


def test_sums_and_counts_are_those_of_each_text(stepper, texts, trace):
    sums, tokens = sequence_nll_sums_and_counts(WalkedDecoder(stepper, full_depth(LAYERS)), texts)
    assert tokens.tolist() == trace.n_decided_by_sequence.tolist()
    assert sums == pytest.approx(np.add.reduceat(trace.nll_nats[:, -1].astype(float), trace.starts[:-1]), abs=1e-4)


class Unsure:
    """Logits so large that their exponentials overflow; it counts nothing and records its close."""

    def __init__(self):
        self.closed, self.work = False, None

    def start(self, prompts):
        return self, self.feed(prompts[0].tokens[None, -1:])

    def feed(self, tokens):
        return Step(np.array([[[1e4, 1e4 - 1.0]]]), np.ones((1, 1), dtype=np.int64), np.empty((1, 1, 0)))

    def close(self):
        self.closed = True


def test_large_logits_do_not_overflow_and_the_session_is_closed():
    decoder = Unsure()
    forced = teacher_force(decoder, TokenSequence(np.array([0, 1, 0])))
    assert forced.nll_nats == pytest.approx([np.log1p(np.e), np.log1p(np.exp(-1.0))])
    assert forced.work is None
    assert decoder.closed
