"""Draft rounds simulated on columns and the choice of drafts; a lens for drafts; the race of decoding loops."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import Drafting, DraftingDecoder, DraftLengths
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.generation import (
    LOOKUP,
    make_prompt_lookup_generate,
    make_transformers_generate,
)
from emad_ref.models.loading import load
from emad_ref.point import EntropyEstimator, full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import VERIFY
from pytest_emad.screening import drafts
from pytest_emad.screening.drafts import (
    ASSISTED,
    COPIED,
    OWN_HEAD_DRAFTS,
    DraftColumns,
    DraftingRoundShares,
    candidate_draft_layers,
    candidate_lengths,
    compute_draft_columns,
    drafting_weight_flops_per_token,
    find_assistant_model,
    fit_draft_lens,
    generate_continuations,
    make_drafting_generate,
    measure_lengths_by_rows,
    most_frequent_tokens,
    rank_drafting_settings,
    restrict_gate_to_layer,
    simulate_drafting_rounds,
)
from pytest_emad.screening.timing import CandidateTime
from tests.random_lenses import attached
from tests.small_models import LAYERS, VOCABULARY, small_model

PROMPT, NEW, WIDTH = 4, 12, 32


@cache
def stepper_of():
    return CausalStepper(small_model("gpt_neox", seed=1))


@cache
def texts():
    rng = np.random.default_rng(0)
    windows = [TokenSequence(rng.integers(0, VOCABULARY, PROMPT + 3), document=i) for i in range(5)]
    return generate_continuations(stepper_of(), windows, PROMPT, NEW, rows=3)


def drawn_gate(probes=1, seed=0):
    drawn = np.random.default_rng(seed).normal(size=(probes, WIDTH + 1)) / WIDTH**0.5
    return EntropyEstimator("linear", weights=tuple(map(tuple, drawn.tolist())))


def columns_of(right, expected=None, starts=None, gate=None, stands=None):
    starts = [0, len(right)] if starts is None else starts
    way, stands = Drafting(1, 1, gate=gate), [-1] * len(right) if stands is None else stands
    return DraftColumns(way, np.array(right, dtype=bool), expected, np.array(starts), np.array(stands))


# ------------------------------------------------------------ text


def test_own_texts_are_what_the_model_says_after_each_prompt():
    for number, text in enumerate(texts()):
        assert (text.document, text.first_decided, len(text.tokens)) == (number, PROMPT - 1, PROMPT + NEW)
        alone = WalkedDecoder(stepper_of(), full_depth(LAYERS)).generate([Prompt(text.tokens[:PROMPT])], NEW)
        assert text.tokens[PROMPT:].tolist() == alone.emitted[0].tolist()


def test_windows_shorter_than_the_prompt_are_left_out_and_none_is_too_few():
    with pytest.raises(BadArgument, match="windows=0, but expected some of at least 9 tokens"):
        generate_continuations(stepper_of(), [TokenSequence(np.arange(8))], 9, 2)


def test_the_most_frequent_ids_stand_in_order():
    said = [TokenSequence(np.array([9, 9, 9, 4, 4, 2]), 2), TokenSequence(np.array([9, 7, 4, 7]), 0)]
    assert most_frequent_tokens(said, 2).tolist() == [4, 7]  # prompts do not count: 4 three times, 7 twice
    assert most_frequent_tokens(said, 9).tolist() == [2, 4, 7]


# ------------------------------------------------------------ columns and rounds


def test_columns_are_what_both_readouts_say():
    (column,) = compute_draft_columns(stepper_of(), texts(), (3,), None, {})
    with torch.inference_mode():
        for number, text in enumerate(texts()):
            cache_ = stepper_of().new_cache(1)
            inputs = stepper_of().prepare_forward(np.arange(len(text.tokens) - 1)[None], cache_)
            hidden = stepper_of().embed(torch.from_numpy(text.tokens[None, :-1]), inputs)
            low = stepper_of().run_layers(hidden, 0, 3, inputs)
            said = stepper_of().logits(low)[0].argmax(dim=-1).numpy()[PROMPT - 1 :]
            mine = column.agrees[column.starts[number] : column.starts[number + 1]]
            assert mine.tolist() == (said == text.tokens[PROMPT:]).tolist()


def test_rounds_are_counted_by_hand():
    right = [True, *[True, True, False, True, True, True, True]]  # the first position is the prompt's last
    rounds = simulate_drafting_rounds(columns_of(right), math.inf, 3)
    # from 1: three drafts, two right, 3 tokens; from 4: three drafts at most for the 4 tokens left: 3 right
    assert rounds.drafts.tolist() == [0, 0, 0, 1]
    assert rounds.tokens == 3.5
    assert simulate_drafting_rounds(columns_of(right), math.inf, 1).drafts.tolist() == [0, 1]
    assert simulate_drafting_rounds(columns_of([False] * 8), math.inf, 2).tokens == 1.0


def test_copies_take_the_place_of_drafts_where_there_are_any():
    right, stands = [True, *[True, False, True, True, True, True, True]], [-1, -1, -1, 2, -1, -1, 0, 4]
    rounds = simulate_drafting_rounds(columns_of(right, stands=stands), math.inf, 2, 4)
    # from 1: two drafts, one right; from 3: four copies, two accepted; from 6: room for one copy, rejected; from 7:
    # the last token, nothing to draft
    assert (rounds.drafts * 4).tolist() == [1, 0, 1]
    assert (rounds.copies * 4).tolist() == [0, 1, 0, 0, 1]
    assert rounds.tokens == 7 / 4
    assert simulate_drafting_rounds(columns_of(right, stands=stands), math.inf, 2).copies.tolist() == [0]


def test_a_gate_ends_a_round():
    right, expected = [True] * 7, np.array([0, 0, 1, 0, 0, 1, 0.0])
    rounds = simulate_drafting_rounds(columns_of(right, expected, gate=drawn_gate()), 0.5, 4)
    # from 1: one draft; from 3: two; from 6: none, because it is the last
    assert (rounds.drafts * 3).round().tolist() == [1, 1, 1, 0, 0]
    assert rounds.tokens == 2.0


@pytest.mark.parametrize("threshold", [0.0, math.inf])
@pytest.mark.parametrize(("longest", "copied"), [(1, 0), (3, 0), (2, 4), (0, 8)])
def test_simulated_rounds_are_the_decoders(threshold, longest, copied):
    lens = attached(stepper_of(), (LAYERS - 1,), scale=0.05)
    (column,) = compute_draft_columns(stepper_of(), texts(), (LAYERS - 1,), lens, {LAYERS - 1: drawn_gate()})
    rounds = simulate_drafting_rounds(column, threshold, longest, copied)
    way = replace(column.drafting, threshold=threshold, longest=longest, copied=copied)
    ran, emitted, drafts = 0, 0, np.zeros(max(longest, copied) + 1)
    for text in texts():
        tokens = DraftingDecoder(stepper_of(), way).generate([Prompt(text.tokens[:PROMPT])], NEW).tokens
        verified = tokens.phase == VERIFY
        starts = np.flatnonzero(verified & ~np.r_[False, verified[:-1]])
        widths = [int(np.flatnonzero(~np.r_[verified[at:], False])[0]) for at in starts]
        ran, emitted = ran + len(starts), emitted + NEW - 1
        drafts += np.bincount(np.array(widths) - 1, minlength=len(drafts))
    assert rounds.tokens == pytest.approx(emitted / ran)
    assert rounds.tokens > 1.0
    if math.isinf(threshold):  # after a wrong draft, the gate's later drafts belong to another text
        both = np.zeros(len(drafts))
        both[: longest + 1] += rounds.drafts
        both[: copied + 1] += rounds.copies
        assert both.tolist() == pytest.approx((drafts / ran).tolist())
        assert (rounds.copies.sum() > 0) == (copied > 0)


# ------------------------------------------------------------ choices


def test_a_dear_head_chooses_the_pruned_one():
    gate, lens = drawn_gate(2), attached(stepper_of(), (2, LAYERS - 1), scale=0.05)
    gates = {layer: restrict_gate_to_layer(gate, (2, LAYERS - 1), layer) for layer in (2, LAYERS - 1)}
    assert gates[2].weights == gate.weights[:1]
    among = [None, most_frequent_tokens(texts(), 20)]
    columns = compute_draft_columns(stepper_of(), texts(), (2, LAYERS - 1), lens, gates, among)
    assert [(each.drafting.layer, each.drafting.vocabulary is None) for each in columns] == [
        (2, True), (2, False), (LAYERS - 1, True), (LAYERS - 1, False),
    ]  # fmt: skip

    def cost(way, rounds):
        heads = float(rounds.drafts @ np.arange(len(rounds.drafts))) * (5.0 if way.vocabulary is None else 0.01)
        return (1.0 + heads) / rounds.tokens

    found = rank_drafting_settings(columns, cost)
    assert {way.copied for way in found} == set(COPIED)
    assert sum(way.longest == 0 for way in found) == len(COPIED) - 1, "copies alone, of each length, once"
    found = [way for way in found if not way.copied]
    assert found[0].vocabulary is not None
    assert {way.uses_gate for way in found} == {True, False}


def test_a_pass_reads_weights_once_however_many_tokens_pass():
    """Two drafts a round after layer 1 of 4, by the whole head: 4 + 2·1 blocks and 1 + 2 heads, for 2.5 tokens."""
    geometry = replace(load("emad-nano").geometry, layers=4)
    block, head = geometry.block_flops(), geometry.head_flops()
    rounds = DraftingRoundShares(np.array([0.0, 0.0, 1.0]), 2.5, np.zeros(1))
    assert drafting_weight_flops_per_token(geometry, Drafting(1, 2), rounds) == pytest.approx(
        (6 * block + 3 * head) / 2.5
    )
    copies = DraftingRoundShares(np.zeros(1), 2.5, np.array([0.0, 0.0, 1.0]))
    assert drafting_weight_flops_per_token(geometry, Drafting(1, 0, copied=2), copies) == pytest.approx(
        (4 * block + head) / 2.5
    )


def test_lengths_to_try_with_more_rows_are_those_of_fewer_or_shorter():
    assert [each[1:] for each in candidate_lengths(DraftLengths(2, 4, 8), 4)] == [(4, 8), (2, 4), (4, 0), (0, 8)]
    assert candidate_lengths(DraftLengths(1, 1, 0), 2) == [DraftLengths(2, 1, 0)]
    assert candidate_lengths(DraftLengths(1, 0, 4), 2) == [DraftLengths(2, 0, 4), DraftLengths(2, 0, 2)]


def test_lengths_by_rows_end_where_no_length_pays(monkeypatch):
    """The speed-up falls with the rows and with long drafts; the second race is the one that counts."""
    asked = []

    def race(model, decoders, text, settings, *, rows, pairs):
        ways = [decoder.drafting for decoder in decoders.values()]
        asked.append((rows, pairs, [(way.longest, way.copied, way.by_rows) for way in ways]))
        assert all(decoder.max_rows == rows for decoder in decoders.values())
        lucky = 0.3 if pairs is not None and rows == 8 else 0.0
        times = [CandidateTime(name, 0.0, lucky + 2 - rows / 8 - way.longest / 10 - way.copied, 0.0, 9.0)
                 for name, way in zip(decoders, ways, strict=True)]  # fmt: skip
        return [CandidateTime("full depth", 0.0, 1.0, 1.0, 1.0), *times]

    monkeypatch.setattr(drafts, "time_candidates", race)
    model, way = SimpleNamespace(stepper=stepper_of()), Drafting(2, 4, copied=1)
    found = measure_lengths_by_rows(model, way, None, None)
    assert found == (DraftLengths(2, 4, 0), DraftLengths(4, 2, 0))
    assert asked[0] == (2, 3, [(4, 1, None), (2, 1, None), (4, 0, None), (0, 1, None)])
    assert [rows for rows, _, _ in asked] == [2, 2, 4, 4, 8, 8]
    assert asked[-1] == (8, None, [(1, 0, None)])
    assert replace(way, by_rows=found).lengths_at(8) == (0, 0, 0)


# ------------------------------------------------------------ a lens for drafts and the race, on a bundled model


@cache
def nano():
    return load("emad-nano")


@cache
def spoken():
    rng = np.random.default_rng(2)
    return [TokenSequence(rng.integers(5, 200, 8), document=i) for i in range(24)]


@cache
def drafts_lens():
    return fit_draft_lens(nano(), generate_continuations(nano().stepper, spoken(), 8, 24), (1,), corpus="ids", steps=30)


def test_a_lens_for_drafts_agrees_more_often_than_the_models_own_head():
    fitted, stepper = drafts_lens(), nano().stepper
    held = generate_continuations(
        stepper, [TokenSequence(w.tokens[::-1].copy(), 0, w.document) for w in spoken()], 8, 24
    )
    (own,) = compute_draft_columns(stepper, held, (1,), None, {})
    (through,) = compute_draft_columns(stepper, held, (1,), fitted.lens.digest, {})
    assert through.agrees.mean() > own.agrees.mean()
    assert simulate_drafting_rounds(through, math.inf, 2).tokens > 1.2


def test_candidates_are_shallow():
    assert candidate_draft_layers(12) == (1, 2, 3, 4)
    assert candidate_draft_layers(5) == (1,)
    assert candidate_draft_layers(2) == (1,)


def test_an_assistant_is_a_smaller_model_that_reads_the_same_ids():
    found = find_assistant_model(load("emad-tiny"))
    assert found is not None
    assert found.name == "emad-nano"
    assert find_assistant_model(nano()) is None


def test_every_lossless_way_emits_what_full_depth_does():
    ways = {
        "generate": make_transformers_generate(nano().model, nano().stepper.device),
        LOOKUP: make_prompt_lookup_generate(nano().model, nano().stepper.device),
        ASSISTED: make_transformers_generate(nano().model, nano().stepper.device, assistant=nano().model),
        OWN_HEAD_DRAFTS: make_drafting_generate(nano(), Drafting(1, 2, lens=drafts_lens().lens.digest)),
    }
    full = WalkedDecoder(nano().stepper, full_depth(nano().stepper.layers))
    for prompt in (Prompt(window.tokens) for window in spoken()[:3]):
        (own,) = full.generate([prompt], 6).emitted
        for name, way in ways.items():
            assert way(prompt, 6).tolist() == own.tolist(), name
