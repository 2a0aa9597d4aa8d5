"""Self-speculation emits the model's own output for any layer, gate, lens and vocabulary; its work is exact."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emad_ref.decoding.partner import Partner
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import (
    Drafting,
    DraftingDecoder,
    DraftLengths,
    draft,
    drafting_point,
    self_speculate,
)
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator, full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import DECODE, DRAFT, PROMPT, READOUTS, VERIFY
from emad_ref.signals import NotFinite
from tests.random_lenses import attached
from tests.small_models import LAYERS, VOCABULARY, small_model

FAMILIES = ("gpt_neox", "llama", "opt_350m", "mistral_window")
ROWS, NEW, WIDTH = 3, 16, 32
LEVEL = [Prompt(np.arange(3) + 7 * row) for row in range(ROWS)]  # equal lengths, so no padding
PROMPTS = [Prompt(np.array(tokens)) for tokens in ([7], [5, 9, 2, 44], [3, 1, 4, 1, 5, 9, 2])]
FULL, SUBSET, LINEAR = (READOUTS.index(kind) for kind in ("full", "subset", "linear"))


@cache
def walked(family):
    return CausalStepper(small_model(family, seed=1))


def stepper_of(family="gpt_neox"):
    return walked(family)


@cache
def lens_of(family="gpt_neox", rank=None):
    return attached(stepper_of(family), tuple(range(1, LAYERS)), rank, scale=0.2)


def gate_of(family="gpt_neox", seed=0):
    width = stepper_of(family).unembedding.shape[1]
    drawn = np.random.default_rng(seed).normal(size=width + 1) / width**0.5
    return EntropyEstimator("linear", weights=(tuple(drawn.tolist()),))


@cache
def alone(family="gpt_neox", rows=ROWS, stop=frozenset()):
    stepper = stepper_of(family)
    return WalkedDecoder(stepper, full_depth(LAYERS), max_rows=ROWS).generate(PROMPTS[:rows], NEW, stop)


def by_protocol(way, rows=ROWS, family="gpt_neox", stop=frozenset(), prompts=PROMPTS):
    point = drafting_point(LAYERS, way)
    model = Partner(WalkedDecoder(stepper_of(family), point, max_rows=ROWS), point)
    return draft(model, way, prompts[:rows], NEW, stop=stop)


def timed(way, rows=ROWS, family="gpt_neox", stop=frozenset(), prompts=PROMPTS):
    return DraftingDecoder(stepper_of(family), way, max_rows=ROWS).generate(prompts[:rows], NEW, stop)


def of_rounds(way, rows=ROWS):
    """Return the work of rounds alone on the timed path, whose first pass over prompts differs from the protocol's."""
    decoder = DraftingDecoder(stepper_of(), way, max_rows=ROWS)
    whole, opening = (decoder.generate(LEVEL[:rows], new).work[0] for new in (NEW, 1))
    return whole - opening


def texts(record):
    return [row.tolist() for row in record.emitted]


@st.composite
def ways(draw, family):
    """Return any way of drafting: gates of random numbers, vocabularies of random ids."""
    ids = draw(st.none() | st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=VOCABULARY))
    threshold = draw(st.sampled_from([-1.0, -0.1, 0.0, 0.3, math.inf]))
    copied = draw(st.sampled_from([0, 0, 1, 3, 8]))
    return Drafting(
        layer=draw(st.integers(1, LAYERS - 1)),
        longest=draw(st.integers(0 if copied else 1, 6)),
        threshold=threshold,
        lens=draw(st.sampled_from([None, lens_of(family), lens_of(family, 5)])),
        gate=gate_of(family, draw(st.integers(0, 5))) if threshold < math.inf else None,
        vocabulary=None if ids is None else np.array(sorted(ids)),
        copied=copied,
    )


# ------------------------------------------------------------ output and number of drafts


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, derandomize=True)
@given(data=st.data())
def test_output_is_the_models_own_and_both_paths_draft_alike(family, data):
    """Greedy, through the protocol and on the timed path, which also reads the same gates."""
    way, rows = data.draw(ways(family)), data.draw(st.sampled_from([1, ROWS]))
    token = int(alone(family).emitted[1][4])
    stop = data.draw(st.sampled_from([frozenset(), frozenset({token})]))
    own, asked, fast = alone(family, rows, stop), by_protocol(way, rows, family, stop), timed(way, rows, family, stop)
    assert texts(asked.record) == texts(fast) == texts(own)
    assert asked.record.stop == fast.stop == own.stop
    mine, theirs = fast.tokens, asked.record.tokens
    rounds = np.isin(mine.phase, [DRAFT, VERIFY]), rounds_of(theirs)
    for column in ("sequence", "position", "token", "depth", "phase", "kept"):
        assert in_order(mine, rounds[0], column) == in_order(theirs, rounds[1], column)


def rounds_of(tokens):
    """Return rows of rounds: with a gate, each prompt's last position is a draft before its row is decided."""
    opened = {
        (int(s), int(p))
        for s, p, phase in zip(tokens.sequence, tokens.position, tokens.phase, strict=True)
        if phase == DECODE
    }
    places = zip(tokens.sequence.tolist(), tokens.position.tolist(), strict=True)
    return np.array([place not in opened for place in places]) & np.isin(tokens.phase, [DRAFT, VERIFY])


def in_order(tokens, chosen, column):
    """Return one column of the chosen rows, by sequence: the paths may order the rows of a batch differently."""
    order = np.argsort(tokens.sequence[chosen], kind="stable")
    return getattr(tokens, column)[chosen][order].tolist()


def test_a_row_that_its_gate_stops_waits_for_the_others():
    """The row is fed on without drafts, and its rounds equal those that it has alone."""
    way = Drafting(LAYERS - 1, 4, 0.0, None, gate_of())
    together, asked = timed(way).tokens, by_protocol(way).record.tokens
    assert in_order(together, together.phase == VERIFY, "token") == in_order(asked, asked.phase == VERIFY, "token")
    assert (together.phase == VERIFY).sum() > sum(
        (timed(way, 1, prompts=[prompt]).tokens.phase == VERIFY).sum() for prompt in PROMPTS
    ), "no row waited for the others"


def test_ways_draw_rounds_of_every_kind():
    """Otherwise the law above tests plain decoding only."""
    way = Drafting(LAYERS - 1, 4, 0.0, None, gate_of())
    record = timed(way)
    tokens = record.tokens
    drafts, kept = (tokens.phase == DRAFT).sum(), (tokens.kept & (tokens.phase == VERIFY)).sum()
    assert drafts > kept > 0
    assert np.isfinite(record.signal).sum() > 5
    assert (record.signal[np.isfinite(record.signal)] <= 0).any()
    assert (record.signal[np.isfinite(record.signal)] > 0).any()


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("longest", [0, 2])
def test_copies_stand_and_save_rounds(rows, longest):
    """Untrained models repeat themselves. While some rows copy and others draft, all rows go token by token."""
    way = Drafting(2, longest, copied=4)
    asked, without = by_protocol(way, rows), by_protocol(Drafting(2, max(longest, 1)), rows)
    assert texts(timed(way, rows)) == texts(alone("gpt_neox", rows)) == texts(asked.record)
    assert asked.rounds.sum() < without.rounds.sum()


def test_a_copied_run_is_fed_at_once_and_reads_nothing():
    """One row after a text of period two: each round runs one chunk, without gate or draft head."""
    prompt = [Prompt(np.array([7] * 8))]
    way = Drafting(2, 0, copied=6)
    record = timed(way, 1, prompts=prompt)
    asked = by_protocol(way, 1, prompts=prompt)
    assert (record.tokens.phase == VERIFY).sum() > NEW / 2
    assert record.work[0].readout_rows[:, 1].sum() == 0
    assert asked.record.work[0].readout_rows[:, 1].sum() == 0
    assert asked.acceptance_rate > 0.5
    assert (asked.drafts.entropy_bits == 0).all()


# ------------------------------------------------------------ the work


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("threshold", [0.0, math.inf])
@pytest.mark.parametrize("pruned", [False, True])
def test_work_is_what_the_record_says(rows, threshold, pruned):
    """Draft heads are pruned on the timed path alone."""
    ids = np.arange(0, VOCABULARY, 3) if pruned else None
    way = Drafting(3, 4, threshold, lens_of(), gate_of() if threshold < math.inf else None, ids)
    record = timed(way, rows, prompts=LEVEL)
    tokens, work = record.tokens, record.work[0]
    drafted, verified, opening = (np.isin(tokens.phase, phase) for phase in (DRAFT, VERIFY, (PROMPT, DECODE)))
    ran = [opening.sum() + (drafted if layer <= 3 else verified).sum() for layer in range(1, LAYERS + 1)]
    assert work.tokens.tolist() == ran
    assert work.readout_rows[FULL, LAYERS - 1] == verified.sum() + rows
    kind, other = (SUBSET, FULL) if pruned else (FULL, SUBSET)
    heads = work.readout_rows[kind, 2]
    assert 0 < heads < drafted.sum(), "the last of each round proposes nothing"
    assert work.readout_rows[other, 2] == 0
    assert work.readout_macs[SUBSET, 2] == (heads * len(ids) * WIDTH if pruned else 0)
    assert work.readout_macs[FULL, 2] == heads * WIDTH**2
    gates = int(np.isfinite(record.signal).sum())
    assert work.readout_rows[LINEAR, 2] == gates
    assert work.readout_macs[LINEAR, 2] == gates * WIDTH
    assert (gates > 0) == (threshold < math.inf)
    assert not work.fills.any()
    assert work.readout_rows.sum() == heads + gates + verified.sum() + rows


@pytest.mark.parametrize("rows", [1, ROWS])
def test_both_paths_execute_the_same(rows):
    """Without a gate and a vocabulary, which make the protocol run heads that the timed path skips."""
    way = Drafting(3, 4, lens=lens_of())
    asked = by_protocol(way, rows, prompts=LEVEL)
    assert of_rounds(way, rows) == asked.record.work[0] - asked.opening_work[0]


def test_drafting_always_by_the_models_own_head_is_self_speculation():
    way, point = Drafting(3, 4), drafting_point(LAYERS)
    model = Partner(WalkedDecoder(stepper_of(), point, max_rows=ROWS), point)
    known = self_speculate(model, 3, LEVEL, NEW, k=4)
    same = by_protocol(way, prompts=LEVEL)
    assert texts(same.record) == texts(known.record)
    assert same.drafts.verdict.tolist() == known.drafts.verdict.tolist()
    assert same.record.work[0] == known.record.work[0]
    assert of_rounds(way) == known.record.work[0] - known.opening_work[0]


# ------------------------------------------------------------ refusals, and detection of defects


def test_a_layer_without_a_translator_is_refused():
    name = attached(stepper_of(), (2, 4), seed=3)
    with pytest.raises(BadArgument, match=r"drafting\.layer=3, but expected a layer that the lens translates \(2, 4\)"):
        DraftingDecoder(stepper_of(), Drafting(3, 2, lens=name))


def test_a_gate_that_says_no_number_is_refused():
    gate = EntropyEstimator("linear", weights=((math.nan,) * (WIDTH + 1),))
    with pytest.raises(NotFinite, match="after layer 2"):
        timed(Drafting(2, 3, 0.1, None, gate), 1)


def test_emitting_what_the_draft_layer_says_is_seen(monkeypatch):
    way = Drafting(3, 3)
    assert texts(timed(way)) == texts(alone())

    def shallow(self, session, chunk, starts):
        return self.stepper.logits(chunk).argmax(dim=-1).tolist()

    monkeypatch.setattr(DraftingDecoder, "_verify", shallow)
    assert texts(timed(way)) != texts(alone())


# ------------------------------------------------------------ lengths by rows


def depths(record):
    """Return, for each sequence, whether any of its tokens was drafted."""
    tokens = record.tokens
    return [bool((tokens.phase[tokens.sequence == number] == DRAFT).any()) for number in range(len(record.emitted))]


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_that_change_with_the_rows_emit_the_same(family):
    """Three rows do not draft, two do, one does with other lengths; the rows end one after the other."""
    way = Drafting(2, 3, copied=4, by_rows=(DraftLengths(2, 1, 0),))
    record = timed(way, family=family)
    assert texts(record) == texts(by_protocol(way, family=family).record) == texts(alone(family))
    assert depths(record) == [False] * ROWS, "all rows end together, and three do not draft"
    stop = frozenset({int(alone(family).emitted[0][3])})
    ended = timed(way, family=family, stop=stop)
    assert texts(ended) == texts(alone(family, stop=stop))
    tokens, work = record.tokens, record.work[0]
    decided = tokens.kept & np.isin(tokens.phase, [DECODE, VERIFY])
    assert decided.sum() == len(PROMPTS) * NEW
    assert set(tokens.depth[decided]) == {LAYERS}
    assert work.readout_rows[0, LAYERS - 1] == (np.isin(tokens.phase, [DECODE, VERIFY])).sum()


def test_rows_that_are_left_over_draft_by_their_number():
    alone_tokens = alone().emitted
    stop = frozenset({int(alone_tokens[1][0])} - {int(token) for row in (0, 2) for token in alone_tokens[row][:4]})
    assert stop, "the second row ends at its first token"
    way = Drafting(2, 3, by_rows=(DraftLengths(2, 2, 0),))
    assert depths(timed(way, stop=stop)) == [True, False, True]
    off = Drafting(2, 3, by_rows=())
    assert texts(timed(off, stop=stop)) == texts(alone(stop=stop))
    assert timed(off, 1).tokens.phase.tolist().count(DRAFT) > 0, "one row drafts"


def test_equal_requests_have_equal_records():
    """No clock decides: depths, work and rounds are the same however long a round took."""
    way = Drafting(2, 3, copied=4, by_rows=(DraftLengths(4, 2, 2),))
    first, second = timed(way), timed(way)
    assert first.work == second.work
    for column in ("sequence", "position", "token", "depth", "phase", "kept"):
        np.testing.assert_array_equal(getattr(first.tokens, column), getattr(second.tokens, column))
