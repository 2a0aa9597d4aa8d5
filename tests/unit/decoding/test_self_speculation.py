"""Self-speculation in its parts: the depth of each fed token, the record, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.decoding.partner import Partner
from emad_ref.decoding.self_speculation import drafting_point, self_speculate
from emad_ref.decoding.speculation import ACCEPTED, GATED, REFUSED, UNREACHED
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Unsupported
from emad_ref.record import DECODE, DRAFT, PROMPT, VERIFY
from emad_ref.signals import NotFinite
from tests.decoders.markov_decoder import DRAFTING, SUCCESSOR, MarkovDecoder, V, prompt, wrong_after


def model(shallow=SUCCESSOR, deep=SUCCESSOR, **options):
    return Partner(MarkovDecoder(np.asarray(deep, dtype=float), shallow, **options), DRAFTING)


def test_a_perfect_exit_gives_k_plus_one_tokens_a_round():
    done = self_speculate(model(), 1, [prompt(0)], 11, k=4)
    assert done.record.emitted[0].tolist() == [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert done.rounds.tolist() == [2]  # 1 token of the prompt's own logits, then 5 + 5
    assert done.acceptance_rate == 1.0
    assert done.count_drafts_by_sequence().tolist() == done.count_drafts_by_sequence(ACCEPTED).tolist() == [8]


def test_the_first_mismatch_ends_a_round_with_the_deep_layers_token():
    done = self_speculate(model(wrong_after(3)), 1, [prompt(0)], 6, k=4)
    assert done.record.emitted[0].tolist() == [1, 2, 3, 4, 5, 0]
    assert done.drafts.token.tolist() == [2, 3, 3, 3, 5]
    assert done.drafts.verdict.tolist() == [ACCEPTED, ACCEPTED, REFUSED, UNREACHED, ACCEPTED]
    assert done.acceptance_rate == 3 / 4


def test_the_gate_keeps_mismatching_drafts_the_exit_is_sure_of():
    done = self_speculate(model(wrong_after(2)), 1, [prompt(0)], 5, k=2, gate_bits=1.0)
    assert done.record.emitted[0].tolist() == [1, 2, 2, 3, 4]
    assert done.drafts.verdict.tolist()[:2] == [ACCEPTED, GATED]


def test_the_record_shows_each_token_of_a_round_twice_and_keeps_what_stands():
    done = self_speculate(model(wrong_after(2)), 1, [prompt(3, 4, 0)], 5, k=3)
    assert done.record.emitted[0].tolist() == [1, 2, 3, 4, 5]
    tokens = done.record.tokens
    # 0 is followed by 1: (1, 2, 2, 2) is drafted and verified, 3 replaces the second 2; then (3, 4), of which the
    # last needs no draft
    assert tokens.token.tolist() == [3, 4, 0, *[1, 2, 2, 2] * 2, *[3, 4] * 2]
    assert tokens.position.tolist() == [0, 1, 2, *[3, 4, 5, 6] * 2, *[5, 6] * 2]
    assert tokens.phase.tolist() == [PROMPT] * 2 + [DECODE] + [DRAFT] * 4 + [VERIFY] * 4 + [DRAFT] * 2 + [VERIFY] * 2
    assert tokens.depth.tolist() == [2] * 3 + [1] * 4 + [2] * 4 + [1] * 2 + [2] * 2
    assert set(tokens.cap.tolist()) == {2}
    assert set(tokens.model.tolist()) == {0}
    assert tokens.token[tokens.kept].tolist() == [3, 4, 0, 1, 2, 3, 4], "the prompt and all emitted but the last"
    assert not tokens.kept[tokens.phase == DRAFT].any()


@pytest.mark.parametrize("k", [1, 3, 4])
def test_work_of_one_model_is_what_was_fed_and_deepened(k):
    one = model(wrong_after(2, 5))
    prompts = [prompt(0), prompt(1, 2, 3), prompt(4, 4)]
    done = self_speculate(one, 1, prompts, 17, k=k, stop=frozenset({0}))
    tokens, (session,) = done.record.tokens, one.decoder.sessions
    assert done.record.work.keys() == done.opening_work.keys() == {0}
    drafted, verified = ((tokens.phase == phase).sum() for phase in (DRAFT, VERIFY))
    assert drafted == verified
    assert done.record.work[0].tokens.tolist() == [6 + drafted, 6 + verified]
    assert done.record.work[0].readout_rows[0].tolist() == [drafted - done.rounds.sum(), 3 + verified]
    assert done.opening_work[0].tokens.tolist() == [6, 6]
    assert session.closed
    assert len({*done.rounds.tolist()}) > 1, "rows accept unevenly"


def test_a_single_new_token_needs_no_draft():
    done = self_speculate(model(), 1, [prompt(0), prompt(2)], 1)
    assert [emitted.tolist() for emitted in done.record.emitted] == [[1], [3]]
    assert done.rounds.tolist() == [0, 0]


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("max_new", [2, 3, 7])
def test_never_more_tokens_than_asked_for_and_one_row_needs_no_room_beyond(k, max_new):
    done = self_speculate(model(), 1, [prompt(0, 1)], max_new, k=k)
    assert len(done.record.emitted[0]) == max_new
    assert done.record.tokens.position.max() <= 2 + max_new - 2, "the last new token is never fed"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_is_the_same_beside_others_as_alone(temperature):
    rng = np.random.default_rng(0)
    one = model(rng.normal(size=(V, V)) * 2, rng.normal(size=(V, V)) * 2)
    prompts = [prompt(0), prompt(1, 2, 3), prompt(4, 4), prompt(2)]
    options = {"k": 3, "stop": frozenset({5}), "temperature": temperature}
    together = self_speculate(one, 1, prompts, 14, **options)
    pair = self_speculate(one, 1, prompts[:2], 14, **options)
    assert together.record.emitted[0].tolist() == pair.record.emitted[0].tolist()
    assert together.record.emitted[1].tolist() == pair.record.emitted[1].tolist()
    assert len({*together.rounds.tolist()}) > 1, "rows differ"


def test_a_decoder_that_does_not_count_leaves_no_sum():
    done = self_speculate(model(counted=False), 1, [prompt(0)], 4)
    assert done.record.work is None
    assert done.opening_work is None


def test_the_drafting_point_stops_nothing_by_itself():
    point = drafting_point(12)
    assert (point.layers, point.ceiling, point.schedule, point.has_adaptive_depth, point.has_fixed_depth) == (
        12, 12, "free_deferred", False, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new": 0}, "max_new=0, but expected at least one new token"),
        ({"k": 0}, "k=0, but expected at least one drafted token"),
        ({"temperature": -1.0}, "temperature=-1.0, but expected a finite number ≥ 0"),
        ({"gate_bits": -0.5}, "gate_bits=-0.5, but expected bits ≥ 0, or None"),
        ({"prompts": []}, r"prompts=\[\], but expected at least one prompt"),
        ({"exit_layer": 0}, "exit_layer=0, but expected a layer in 1–1; at the ceiling nothing is left to verify"),
        ({"exit_layer": 2}, "exit_layer=2, but expected a layer in 1–1"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(options, message):
    with pytest.raises(BadArgument, match=message):
        self_speculate(model(), **{"exit_layer": 1, "prompts": [prompt(0)], "max_new": 3, **options})


def test_a_decoder_that_cannot_deepen_is_not_asked_to():
    one = model(deepens=False)
    with pytest.raises(Unsupported, match="schedule='free_deferred', but the decoder's capabilities do not say"):
        self_speculate(one, 1, [prompt(0)], 3)
    assert one.decoder.sessions == []


def test_a_point_that_decides_depth_itself_is_refused():
    deciding = OperatingPoint("decides", "emad", 2, 2, (1,), ((0.5,),), schedule="free_deferred")
    with pytest.raises(BadArgument, match=r"model\.point='decides', but expected a point under which no token leaves"):
        self_speculate(replace(model(), point=deciding), 1, [prompt(0)], 3)


@pytest.mark.parametrize("which", ["shallow", "deep"])
def test_logits_that_are_not_numbers_are_refused(which):
    table = SUCCESSOR.copy()
    table[2, 3] = np.nan
    one = model(**{which: table})
    with pytest.raises(NotFinite):
        self_speculate(one, 1, [prompt(0)], 8)
    assert one.decoder.sessions[0].closed
