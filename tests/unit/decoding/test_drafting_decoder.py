"""Drafting through the decoder protocol: the gate's decisions, the draft vocabulary, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.decoding.partner import Partner
from emad_ref.decoding.self_speculation import Drafting, DraftLengths, draft, drafting_point, self_speculate
from emad_ref.decoding.speculation import ACCEPTED, REFUSED
from emad_ref.errors import BadArgument
from emad_ref.point import EntropyEstimator
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import DECODE, DRAFT, PROMPT, VERIFY
from tests.decoders.markov_decoder import SUCCESSOR, MarkovDecoder, V, chance, prompt, wrong_after

GATE = EntropyEstimator("linear", weights=((0.0, 0.0),))
SURE_BUT_AFTER_3 = np.where(np.arange(V) == 3, 1.0, 0.1)


def drafting(**options):
    return Drafting(**{"layer": 1, "longest": 4, "threshold": 0.5, "gate": GATE, **options})


def model(way, shallow=SUCCESSOR, deep=SUCCESSOR, gate=SURE_BUT_AFTER_3, **options):
    table = gate if way.uses_gate else None
    return Partner(MarkovDecoder(np.asarray(deep, dtype=float), shallow, gate=table, **options), drafting_point(2, way))


def test_a_round_ends_where_the_gate_is_not_sure():
    way = drafting()
    done = draft(model(way), way, [prompt(0)], 8)
    assert done.record.emitted[0].tolist() == [1, 2, 3, 4, 5, 0, 1, 2]
    # 1 comes from the prompt; 2 and 3 are drafted, then the gate stops and the verification gives 4
    assert done.drafts.token.tolist() == [2, 3, 5, 0, 1]
    assert done.rounds.tolist() == [2]


def test_the_record_shows_where_the_gate_was_read_and_the_prompts_last_position_twice():
    way = drafting(longest=2)
    record = draft(model(way), way, [prompt(5, 0)], 4).record
    tokens = record.tokens
    assert tokens.token.tolist() == [5, 0, 0, *[1, 2, 3] * 2]
    assert tokens.phase.tolist() == [PROMPT, DRAFT, DECODE, *[DRAFT] * 3, *[VERIFY] * 3]
    assert tokens.depth.tolist() == [2, 1, 2, *[1] * 3, *[2] * 3]
    assert tokens.kept.tolist() == [True, False, True, *[False] * 3, *[True] * 3]
    read = [math.nan, 0.1, math.nan, 0.1, 0.1, *[math.nan] * 4]  # the last token of a round has a forced depth
    assert np.array_equal(record.signal[:, 0], read, equal_nan=True)


def test_heads_and_blocks_are_those_of_what_was_fed():
    way = drafting()
    done = draft(model(way), way, [prompt(0), prompt(2, 5)], 9)
    tokens = done.record.tokens
    rows = {phase: int((tokens.phase == phase).sum()) for phase in (PROMPT, DRAFT, DECODE, VERIFY)}
    work = done.record.work[0]
    assert work.tokens.tolist() == [rows[PROMPT] + rows[DRAFT], rows[PROMPT] + rows[DECODE] + rows[VERIFY]]
    assert work.readout_rows[0, 1] == rows[DECODE] + rows[VERIFY]
    assert done.opening_work[0].tokens.tolist() == [3, 3]


def test_a_gate_that_lets_everything_through_drafts_as_without_one():
    way, tables = drafting(threshold=9.0, longest=3), (wrong_after(2, 4), SUCCESSOR)
    asked = draft(model(way, *tables), way, [prompt(0), prompt(3)], 11)
    always = self_speculate(
        Partner(MarkovDecoder(tables[1], tables[0]), drafting_point(2)), 1, [prompt(0), prompt(3)], 11, k=3
    )
    assert asked.drafts.token.tolist() == always.drafts.token.tolist()
    assert asked.drafts.verdict.tolist() == always.drafts.verdict.tolist()
    assert asked.rounds.tolist() == always.rounds.tolist()


def test_inf_asks_no_gate():
    way = drafting(threshold=math.inf, longest=3)
    assert not way.uses_gate
    assert drafting_point(2, way).probes == ()
    assert draft(model(way), way, [prompt(0)], 9).rounds.tolist() == [2]


def test_a_gate_that_lets_nothing_through_is_plain_decoding():
    way = drafting(threshold=-1.0)
    done = draft(model(way), way, [prompt(0)], 6)
    assert done.record.emitted[0].tolist() == [1, 2, 3, 4, 5, 0]
    assert done.count_drafts_by_sequence().tolist() == [0]
    assert done.rounds.tolist() == [5]


def test_a_token_outside_the_vocabulary_is_never_drafted_and_emitted_all_the_same():
    way = drafting(threshold=math.inf, gate=None, vocabulary=np.array([0, 1, 3, 5]))
    done = draft(model(way), way, [prompt(0)], 12)
    assert done.record.emitted[0].tolist() == [1, 2, 3, 4, 5, 0] * 2
    assert set(done.drafts.token.tolist()) <= {0, 1, 3, 5}
    assert {ACCEPTED, REFUSED} <= set(done.drafts.verdict.tolist())


def test_rows_draft_as_long_as_each_would_alone():
    way, rng = drafting(), np.random.default_rng(0)
    tables = rng.normal(size=(V, V)) * 2, rng.normal(size=(V, V)) * 2
    prompts = [prompt(0), prompt(1, 2, 3), prompt(4, 4)]
    together = draft(model(way, *tables), way, prompts, 14, temperature=1.0, seed=2)
    alone = draft(model(way, *tables), way, prompts[:1], 14, temperature=1.0, seed=2)
    assert together.record.emitted[0].tolist() == alone.record.emitted[0].tolist()
    assert together.rounds[0] == alone.rounds[0]
    assert len(set(together.rounds.tolist())) > 1


def test_what_followed_the_last_three_tokens_is_copied_and_a_period_goes_on():
    """The draft layer would predict another token, and is not run."""
    way = drafting(longest=1, threshold=math.inf, gate=None, copied=8)
    asked = prompt(0, 1, 2, 3, 4, 5, 0, 1)
    done = draft(model(way, shallow=wrong_after(*range(V))), way, [asked], 9)
    assert done.record.emitted[0].tolist() == [2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert done.drafts.token.tolist() == [3, 4, 5, 0, 1, 2, 3]
    assert set(done.drafts.verdict.tolist()) == {ACCEPTED}
    assert done.rounds.tolist() == [1]
    assert done.record.work[0].tokens.tolist() == [len(asked.tokens) + 8] * 2
    assert done.record.work[0].readout_rows[0].tolist() == [0, 9]


# ------------------------------------------------------------ the distribution

SAMPLES, LENGTH = 2000, 3


@pytest.mark.parametrize(
    ("ids", "threshold", "longest", "copied"),
    [(None, 0.5, 2, 0), ([1, 2], 0.5, 2, 0), ([0, 3], math.inf, 2, 0), (None, 0.5, 2, 2), (None, math.inf, 0, 2)],
)
def test_sampled_output_has_the_models_distribution(ids, threshold, longest, copied):
    """Tables of four tokens: a gate that is sure after two of them, drafts that lack two, and copies of a period."""
    rng = np.random.default_rng(3)
    shallow, deep = rng.normal(size=(4, 4)) * 1.2, rng.normal(size=(4, 4)) * 1.2
    vocabulary = None if ids is None else np.array(ids)
    way = drafting(longest=longest, threshold=threshold, vocabulary=vocabulary, copied=copied)
    stood_before = [token for said in range(4) for token in (2, 0, said, int(deep[said].argmax()))]
    asked = np.array([*stood_before, 2, 0] if copied else [0])
    one = model(way, shallow, deep, gate=np.array([0.1, 1.0, 0.1, 1.0]))
    done = draft(one, way, [Prompt(asked)] * SAMPLES, LENGTH, temperature=1.0, seed=1)
    assert done.count_drafts_by_sequence(ACCEPTED).sum() > 200 < done.count_drafts_by_sequence(REFUSED).sum(), (
        "both branches must be taken often"
    )
    assert chance(np.array(done.record.emitted), deep, 1.0) > 0.01  # the seed is fixed


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 0}, r"drafting\.layer=0, but expected a layer ≥ 1"),
        ({"longest": 0}, r"drafting\.longest=0, but expected at least one"),
        ({"longest": -1, "copied": 2}, r"drafting\.longest=-1"),
        ({"copied": -1}, r"drafting\.copied=-1, but expected 0 or more"),
        ({"threshold": math.nan}, r"drafting\.threshold=nan"),
        ({"lens": ""}, r"drafting\.lens='', but expected the digest"),
        ({"gate": None}, r"drafting\.gate=None, but expected a gate for threshold 0\.5"),
        ({"gate": EntropyEstimator()}, r"drafting\.gate='full with 0 probes', but expected linear with one probe"),
        ({"gate": EntropyEstimator("linear", weights=((0.0,), (0.0,)))}, "linear with 2 probes"),
        ({"vocabulary": np.array([], dtype=np.int64)}, r"drafting\.vocabulary="),
        ({"vocabulary": np.array([3, 1])}, r"drafting\.vocabulary=.*ascending ids"),
        ({"vocabulary": np.array([-1, 1])}, r"drafting\.vocabulary="),
        ({"vocabulary": np.array([0.0, 1.0])}, r"drafting\.vocabulary="),
        ({"vocabulary": [0, 1]}, r"drafting\.vocabulary="),
        ({"by_rows": (DraftLengths(4, 0, 0),)}, r"drafting\.by_rows=\(4, 0, 0\), but expected whole numbers"),
        ({"by_rows": (DraftLengths(4, -1, 2),)}, r"drafting\.by_rows=\(4, -1, 2\)"),
        ({"by_rows": (DraftLengths(1, 2, 0),)}, r"drafting\.by_rows=\[1\], but expected ascending .* above 1"),
        ({"by_rows": (DraftLengths(4, 2, 0), DraftLengths(4, 1, 0))}, r"drafting\.by_rows=\[4, 4\]"),
    ],
)
def test_what_drafts_nothing_is_refused(options, message):
    with pytest.raises(BadArgument, match=message):
        drafting(**options)


def test_lengths_go_by_the_rows_and_end_with_the_last_that_is_named():
    way = drafting(longest=4, copied=8, by_rows=(DraftLengths(2, 3, 8), DraftLengths(8, 0, 4)))
    found = {rows: way.lengths_at(rows)[1:] for rows in (1, 2, 3, 8, 9)}
    assert found == {1: (4, 8), 2: (3, 8), 3: (0, 4), 8: (0, 4), 9: (0, 0)}
    assert drafting(longest=4, copied=8).lengths_at(64)[1:] == (4, 8)
    assert drafting(by_rows=()).lengths_at(2)[1:] == (0, 0)


def test_rows_without_drafts_decode_through_the_protocol_too():
    way = drafting(threshold=math.inf, gate=None, by_rows=())
    together, alone = (draft(model(way), way, prompts, 6) for prompts in ([prompt(0), prompt(3)], [prompt(0)]))
    assert together.record.emitted[0].tolist() == alone.record.emitted[0].tolist() == [1, 2, 3, 4, 5, 0]
    assert together.count_drafts_by_sequence().tolist() == [0, 0]
    assert alone.count_drafts_by_sequence()[0] > 0


def test_a_model_without_the_layer_or_an_id_is_refused():
    with pytest.raises(BadArgument, match=r"drafting\.layer=2, but expected a layer in 1–1"):
        drafting_point(2, drafting(layer=2))
    way = drafting(vocabulary=np.array([1, V]))
    with pytest.raises(BadArgument, match=rf"drafting\.vocabulary={V}, but expected ids in 0–{V - 1}"):
        draft(model(way), way, [prompt(0)], 3)


def test_a_decoder_at_another_point_is_refused():
    way = drafting()
    other = replace(model(way), point=drafting_point(2, drafting(lens="f00d")))
    with pytest.raises(BadArgument, match=r"model\.point='self-drafting', but expected the point of this drafting"):
        draft(other, way, [prompt(0)], 3)


def test_a_decoder_that_does_not_show_the_gate_is_told_so():
    way = drafting()
    with pytest.raises(Unsupported, match="with a gate after layer 1, but the decoder's steps show no signal"):
        draft(model(way, gate=np.full(V, np.nan)), way, [prompt(0)], 3)
