"""Lossless drafting answers every batch that fits the model's positions, and feeds no row beyond its end."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emad_ref.calibration.trace import compute_layer_logits
from emad_ref.decoding.partner import Partner
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import Drafting, DraftingDecoder, draft, drafting_point, self_speculate
from emad_ref.decoding.speculation import speculate
from emad_ref.decoding.switching import LARGE, SMALL, SwitchingRule, switch
from emad_ref.models.causal import CausalStepper
from emad_ref.models.seq2seq import Seq2SeqStepper
from emad_ref.point import EntropyEstimator, OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from tests.decoders.foreign_decoder import ForeignDecoder
from tests.small_models import LAYERS, VOCABULARY, small_config, small_model
from tests.unit.models.test_seq2seq import START, small_t5, some_sources

END, MOST_ROWS = 24, 4
LEARNED = ("gpt2", "opt", "opt_350m", "gptj")  # their positions end with a table
FAMILIES = (*LEARNED, "llama", "gpt_neox", "mistral_window")
LENGTHS = st.sampled_from([1, 2, 3, 5, 8, 30])  # of drafts: up to more than there are positions


@cache
def stepper_of(family, seed=0):
    config = small_config(family)
    config.max_position_embeddings = END
    made = CausalStepper(small_model(family, seed=seed, config=config))
    assert made.max_positions == END
    return made


def gate_of(family):
    width = stepper_of(family).unembedding.shape[1]
    drawn = np.random.default_rng(0).normal(size=width + 1) / width**0.5
    return EntropyEstimator("linear", weights=(tuple(drawn.tolist()),))


@st.composite
def batches(draw):
    """Return prompts and the number of new tokens: one row fills its positions, others are of any length."""
    new = draw(st.sampled_from([1, 2, 4, 9]))
    fits = st.integers(1, END - new + 1)
    lengths = draw(st.permutations([END - new + 1, *draw(st.lists(fits, max_size=MOST_ROWS - 1))]))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    repeats = draw(st.booleans())  # copies need a text that repeats itself
    return [Prompt(np.resize(rng.integers(0, VOCABULARY, 2 if repeats else END), n)) for n in lengths], new


@st.composite
def ways(draw, family):
    copied, threshold = draw(st.just(0) | LENGTHS), draw(st.sampled_from([0.3, math.inf]))
    return Drafting(
        layer=draw(st.sampled_from([1, 3, LAYERS - 1])),
        longest=draw((st.just(0) | LENGTHS) if copied else LENGTHS),
        threshold=threshold,
        gate=gate_of(family) if threshold < math.inf else None,
        copied=copied,
    )


def partner(stepper, point):
    return Partner(WalkedDecoder(stepper, point, max_rows=MOST_ROWS), point)


def tokens_of(record):
    return [row.tolist() for row in record.emitted]


def plain(family, prompts, new):
    return tokens_of(WalkedDecoder(stepper_of(family), full_depth(LAYERS), max_rows=MOST_ROWS).generate(prompts, new))


ENDING = [Prompt(np.arange(n) % 7) for n in (END - 8, 3, 11)], 9  # the others draft on while the first row ends


@pytest.mark.values("llama", "opt", "mistral_window")
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data(), batch=batches())
@example(data=None, batch=ENDING)
def test_self_speculation_emits_the_models_own_tokens_up_to_the_last_position(family, data, batch):
    (prompts, new), way = batch, Drafting(LAYERS - 1, 30) if data is None else data.draw(ways(family))
    own = plain(family, prompts, new)
    timed = DraftingDecoder(stepper_of(family), way, max_rows=MOST_ROWS)
    assert tokens_of(timed.generate(prompts, new)) == own
    assert tokens_of(draft(partner(stepper_of(family), drafting_point(LAYERS, way)), way, prompts, new).record) == own


@cache
def adaptive(family, quantile=0.1):
    """Return an entropy rule under which a row falls probe by probe."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, END)
    logits = torch.from_numpy(compute_layer_logits(stepper_of(family), tokens))
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).numpy()
    limits = tuple(float(np.quantile(entropy[:, probe - 1], quantile)) for probe in (2, 4))
    return OperatingPoint("adaptive", "quantile", LAYERS, LAYERS, (2, 4), (limits,))


@pytest.mark.values("llama", "opt", "mistral_window")
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(batch=batches(), k=LENGTHS, emad=st.booleans(), same=st.booleans())
@example(batch=ENDING, k=30, emad=False, same=True)
@example(batch=ENDING, k=30, emad=True, same=False)
def test_two_models_emit_the_verifiers_tokens_up_to_the_last_position(family, batch, k, emad, same):
    """The verifier runs at full depth or by EMAD, whose depths are those without drafts."""
    prompts, new = batch
    point = adaptive(family) if emad else full_depth(LAYERS)
    verifier = partner(stepper_of(family), point)
    own = verifier.decoder.generate(prompts, new)
    small = partner(stepper_of(family, 0 if same else 1), full_depth(LAYERS))
    done = speculate(small, verifier, prompts, new, k=k)
    assert tokens_of(done.record) == tokens_of(own)
    assert depths(done.record, 1, prompts) == depths(own, 0, prompts)


def depths(record, model, prompts):
    """Return the depths of each row's kept tokens, from the prompt's last one on."""
    kept = record.tokens.kept & (record.tokens.model == model)
    rows = [kept & (record.tokens.sequence == row) for row in range(len(prompts))]
    return [
        [d for _, d in sorted(zip(record.tokens.position[of].tolist(), record.tokens.depth[of].tolist(), strict=True))][
            len(prompt.tokens) - 1 : len(prompt.tokens) + len(record.emitted[row]) - 1
        ]
        for row, (of, prompt) in enumerate(zip(rows, prompts, strict=True))
    ]


def test_the_rule_of_these_tests_lets_some_tokens_exit():
    prompts, new = ENDING
    for family in FAMILIES:
        found = WalkedDecoder(stepper_of(family), adaptive(family), max_rows=MOST_ROWS).generate(prompts, new)
        assert len({depth for row in depths(found, 0, prompts) for depth in row}) > 1, family


@pytest.mark.parametrize("start", [SMALL, LARGE])
@pytest.mark.parametrize("family", LEARNED)
def test_switching_catches_up_to_the_last_position(family, start):
    prompts, new = ENDING
    decoders = partner(stepper_of(family, 1), full_depth(LAYERS)), partner(stepper_of(family), full_depth(LAYERS))
    rule = SwitchingRule(math.log2(VOCABULARY) - 0.8, window=1, least_run=1, start=start)
    together = switch(*decoders, rule, prompts, new)
    assert [len(row) for row in together.record.emitted] == [new] * len(prompts)
    for row, prompt in enumerate(prompts):
        alone = switch(*decoders, rule, [prompt], new)
        assert tokens_of(alone.record) == tokens_of(together.record)[row : row + 1]


@pytest.mark.parametrize("way", [Drafting(2, 30), Drafting(3, 0, copied=30), Drafting(1, 3, copied=5)], ids=repr)
def test_an_encoder_decoder_drafts_as_far_as_its_request(way):
    """T5 has no last position: distances beyond the last bucket share it."""
    stepper = Seq2SeqStepper(small_t5())
    prompts = [Prompt(np.array([START]), source) for source in some_sources(15, 6, 9)]
    own = tokens_of(WalkedDecoder(stepper, full_depth(stepper.layers), max_rows=3).generate(prompts, 12))
    point = drafting_point(stepper.layers, way)
    assert tokens_of(DraftingDecoder(stepper, way, max_rows=3).generate(prompts, 12)) == own
    assert tokens_of(draft(partner(stepper, point), way, prompts, 12).record) == own


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 4, 30])
def test_a_row_at_its_end_changes_no_token_of_its_neighbours(k, temperature):
    prompts, new = ENDING
    options = {"k": k, "temperature": temperature, "seed": 3}
    stepper, other = stepper_of("gpt2"), stepper_of("gpt2", 1)
    self_speculating, pair = partner(stepper, drafting_point(LAYERS)), (full_depth(LAYERS),) * 2
    decoders = partner(other, pair[0]), partner(stepper, pair[1])
    for decode in (
        lambda rows: speculate(*decoders, rows, new, **options),
        lambda rows: self_speculate(self_speculating, 3, rows, new, **options),
    ):
        together, beside = decode(prompts[::-1]), decode(prompts[:0:-1])
        assert tokens_of(together.record)[:2] == tokens_of(beside.record)
        assert together.rounds[:2].tolist() == beside.rounds.tolist()


class WatchedDecoder(ForeignDecoder):
    """A decoder that states no positions and refuses those that the request does not need."""

    def __init__(self, model, point, ends):
        super().__init__(model, point)
        self.capabilities, self.ends = replace(self.capabilities, max_positions=None), ends

    def start(self, prompts):
        session, step = super().start(prompts)
        feed, drop, ends = session.feed, session.drop, list(self.ends)

        def watched(tokens, *args, **kwargs):
            assert (session.length + tokens.shape[1] <= np.array(ends)).all(), "a row beyond its request"
            return feed(tokens, *args, **kwargs)

        def dropped(rows):
            ends[:] = [end for row, end in enumerate(ends) if row not in set(np.atleast_1d(rows).tolist())]
            drop(rows)

        session.feed, session.drop = watched, dropped
        return session, step


@pytest.mark.parametrize("k", [2, 30])
def test_a_decoder_that_states_no_positions_is_fed_nothing_beyond_a_request(k):
    model = small_model("llama")
    prompts, new = [Prompt(np.arange(n) % 7) for n in (9, 3, 5)], 7
    ends = [len(prompt.tokens) + new - 1 for prompt in prompts]
    point, stepper = drafting_point(LAYERS), CausalStepper(model)
    own = tokens_of(WalkedDecoder(stepper, full_depth(LAYERS), max_rows=3).generate(prompts, new))
    alone = Partner(WatchedDecoder(model, point, ends), point)
    way = Drafting(3, k, copied=k)
    assert tokens_of(self_speculate(alone, LAYERS - 1, prompts, new, k=k).record) == own
    assert tokens_of(draft(alone, way, prompts, new).record) == own
    pair = [Partner(WatchedDecoder(model, full_depth(LAYERS), ends), full_depth(LAYERS)) for _ in range(2)]
    assert tokens_of(speculate(*pair, prompts, new, k=k).record) == own
