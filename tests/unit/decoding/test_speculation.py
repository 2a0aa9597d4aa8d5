"""Speculative decoding: the acceptance rule, and the record of drafted, kept, rejected and counted tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from emad_ref.decoding.partner import Partner, entropy_bits
from emad_ref.decoding.speculation import (
    ACCEPTED,
    DRAFTER,
    GATED,
    REFUSED,
    UNREACHED,
    VERIFIER,
    draw_token,
    is_accepted,
    residual_distribution,
    speculate,
    token_distribution,
)
from emad_ref.errors import BadArgument
from emad_ref.record import CATCH_UP, DECODE, DRAFT, PROMPT, VERIFY
from emad_ref.signals import NotFinite
from tests.decoders.markov_decoder import POINT, SUCCESSOR, MarkovDecoder, V, prompt, wrong_after

ROUNDING = 1e-12  # sums of a handful of float64 probabilities


def partner(logits=SUCCESSOR, **options):
    return Partner(MarkovDecoder(np.asarray(logits, dtype=float), **options), POINT)


# ---------------------------------------------------------------- the parts


weights = arrays(np.float64, 5, elements=st.one_of(st.just(0.0), st.floats(1e-3, 1.0)))


@given(weights, weights)
def test_accepting_a_draft_or_drawing_the_residual_is_the_verifiers_distribution(p, q):
    """Σ over drafts: q·min(1, p/q) + P(refusal)·residual = p, the identity behind exactness."""
    if p.sum() == 0 or q.sum() == 0:
        return
    p, q = p / p.sum(), q / q.sum()
    kept = np.minimum(p, q)
    assert np.abs(kept + (1 - kept.sum()) * residual_distribution(p, q) - p).max() < ROUNDING


@pytest.mark.parametrize(("p", "q", "share"), [(0.2, 0.5, 0.4), (0.5, 0.2, 1.0), (0.0, 0.5, 0.0)])
def test_a_draft_is_accepted_with_probability_p_over_q(p, q, share):
    rng = np.random.default_rng(0)
    accepted = [is_accepted(np.array([p, 1 - p]), np.array([q, 1 - q]), 0, rng) for _ in range(4000)]
    assert abs(np.mean(accepted) - share) < 0.04  # five standard deviations of 4000 draws


def test_equal_distributions_leave_a_residual_that_is_one():
    p = np.array([0.25, 0.75])
    assert residual_distribution(p, p).tolist() == p.tolist()


def test_draws_follow_the_distribution_and_never_hit_zero():
    p, rng = np.array([0.0, 0.3, 0.0, 0.7, 0.0]), np.random.default_rng(1)
    counts = np.bincount([draw_token(p, rng) for _ in range(4000)], minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert abs(counts[1] / 4000 - 0.3) < 0.04


def test_temperature_zero_puts_everything_on_the_first_largest_logit():
    assert token_distribution(np.array([[1.0, 3.0, 3.0]]), 0).tolist() == [[0.0, 1.0, 0.0]]
    warm = token_distribution(np.array([1.0, 3.0, 3.0]), 2.0)
    assert warm == pytest.approx(np.exp([0.5, 1.5, 1.5]) / np.exp([0.5, 1.5, 1.5]).sum())


# ---------------------------------------------------------------- runs


def test_a_perfect_draft_gives_k_plus_one_tokens_a_round():
    done = speculate(partner(), partner(), [prompt(0)], 11, k=4)
    assert done.record.emitted[0].tolist() == [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert done.rounds.tolist() == [2]  # 1 token from the prompt's own logits, then 5 + 5
    assert done.acceptance_rate == 1.0
    assert done.count_drafts_by_sequence().tolist() == done.count_drafts_by_sequence(ACCEPTED).tolist() == [8]


def test_the_first_mismatch_ends_a_round_with_the_verifiers_own_token():
    done = speculate(partner(wrong_after(3)), partner(), [prompt(0)], 6, k=4)
    assert done.record.emitted[0].tolist() == [1, 2, 3, 4, 5, 0]
    drafts = done.drafts
    assert drafts.token.tolist() == [2, 3, 3, 3, 5]  # after 3 the draft repeats itself
    assert drafts.position.tolist() == [2, 3, 4, 5, 5]
    assert drafts.verdict.tolist() == [ACCEPTED, ACCEPTED, REFUSED, UNREACHED, ACCEPTED]
    assert done.acceptance_rate == 3 / 4
    assert done.rounds.tolist() == [2]


def test_a_draft_always_wrong_is_plain_decoding_one_token_a_round():
    done = speculate(partner(np.eye(V)), partner(), [prompt(0)], 5, k=3)
    assert done.record.emitted[0].tolist() == [1, 2, 3, 4, 5]
    assert done.rounds.tolist() == [4]
    assert done.acceptance_rate == 0.0


def test_a_stop_token_among_accepted_drafts_ends_the_row_there():
    done = speculate(partner(), partner(), [prompt(0)], 20, k=5, stop=frozenset({4}))
    assert done.record.emitted[0].tolist() == [1, 2, 3, 4]
    assert done.record.stop == ["stop token"]
    assert done.drafts.verdict.tolist() == [ACCEPTED] * 3 + [UNREACHED] * 2
    held = done.record.tokens
    kept = held.token[(held.model == VERIFIER) & held.kept]
    assert kept.tolist() == [0, 1, 2, 3], "as in plain decoding the last token emitted is not fed"


def test_a_single_new_token_needs_no_draft():
    done = speculate(partner(), partner(), [prompt(0), prompt(2)], 1)
    assert [emitted.tolist() for emitted in done.record.emitted] == [[1], [3]]
    assert done.acceptance_rate is None
    assert done.rounds.tolist() == [0, 0]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("max_new", [2, 3, 7])
def test_never_more_tokens_than_asked_for_and_one_row_needs_no_room_beyond(k, max_new):
    draft, verifier = partner(max_feed=3), partner(max_feed=4)
    done = speculate(draft, verifier, [prompt(0, 1)], max_new, k=k)
    assert len(done.record.emitted[0]) == max_new
    assert done.record.stop == ["length"]
    assert done.record.tokens.position.max() <= 2 + max_new - 2, "the last new token is never fed"


def test_chunks_keep_to_what_each_decoder_takes():
    draft, verifier = partner(wrong_after(2), max_feed=1), partner(max_feed=3)
    done = speculate(draft, verifier, [prompt(0)], 12, k=6)
    assert done.record.emitted[0].tolist() == [(1 + i) % V for i in range(12)]
    assert max(verifier.decoder.widths) == 3
    assert max(draft.decoder.widths) == 1


def test_phases_say_what_each_token_was_processed_for():
    done = speculate(partner(), partner(), [prompt(3, 4, 0)], 8, k=3)
    tokens = done.record.tokens
    verifier, draft = tokens.model == VERIFIER, tokens.model == DRAFTER
    assert tokens.phase[verifier].tolist() == [PROMPT] * 2 + [DECODE] + [VERIFY] * 7
    # the second round reads the last accepted draft, which the draft model has not read, before the next token
    assert tokens.phase[draft].tolist() == [PROMPT] * 2 + [DRAFT] + [DRAFT] * 3 + [CATCH_UP] + [DRAFT] * 2
    assert tokens.position[draft].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("k", [1, 3, 4])
def test_work_is_what_was_fed_and_kept_is_what_is_held(k):
    draft, verifier = partner(wrong_after(2, 5)), partner()
    prompts = [prompt(0), prompt(1, 2, 3), prompt(4, 4)]
    done = speculate(draft, verifier, prompts, 17, k=k, stop=frozenset({0}))
    tokens = done.record.tokens
    assert done.opening_work is not None
    for model, one in enumerate((draft, verifier)):
        assert done.record.work[model].tokens.tolist() == [one.decoder.sessions[0].fed] == [sum(tokens.model == model)]
        assert done.opening_work[model].tokens.tolist() == [6]
    for row, opening in enumerate(prompts):
        history = [*opening.tokens, *done.record.emitted[row]]
        held = tokens.select_sequence(row)
        kept = held.token[(held.model == VERIFIER) & held.kept]
        assert kept.tolist() == history[:-1]
        position = held.position[(held.model == DRAFTER) & held.kept]
        assert position.tolist() == list(range(len(position)))
        assert held.token[(held.model == DRAFTER) & held.kept].tolist() == history[: len(position)]
    assert draft.decoder.sessions[0].closed
    assert verifier.decoder.sessions[0].closed


def test_a_decoder_that_does_not_count_leaves_no_half_sum():
    done = speculate(partner(counted=False), partner(), [prompt(0)], 4)
    assert done.record.work is None
    assert done.opening_work is None


def test_the_gate_keeps_mismatching_drafts_the_draft_is_sure_of():
    table = wrong_after(2, 4)
    table[4] *= 0.1  # as wrong after 4 as after 2, but uncertain
    sure, unsure = (float(entropy_bits(table[token])) for token in (2, 4))
    assert sure < 1.0 < unsure
    done = speculate(partner(table), partner(), [prompt(0)], 5, k=2, gate_bits=1.0)
    assert done.record.emitted[0].tolist() == [1, 2, 2, 3, 4]  # the draft model gives the second 2, the verifier 3
    assert done.drafts.verdict.tolist()[:2] == [ACCEPTED, GATED]
    after_four = speculate(partner(table), partner(), [prompt(3)], 3, k=2, gate_bits=1.0)
    assert after_four.record.emitted[0].tolist() == [4, 5, 0]
    assert after_four.drafts.verdict.tolist()[0] == REFUSED
    assert after_four.drafts.entropy_bits[0] == pytest.approx(unsure)


def test_a_gate_of_zero_keeps_nothing_and_one_above_all_entropies_everything():
    draft = wrong_after(1, 2, 3)
    plain, shut, open_ = (
        speculate(partner(draft), partner(), [prompt(0), prompt(3)], 15, k=3, gate_bits=gate)
        for gate in (None, 0.0, 99.0)
    )
    for a, b in zip(plain.record.emitted, shut.record.emitted, strict=True):
        assert a.tolist() == b.tolist()
    assert shut.count_drafts_by_sequence(GATED).sum() == 0 < plain.count_drafts_by_sequence(REFUSED).sum()
    assert open_.count_drafts_by_sequence(REFUSED).sum() == 0 < open_.count_drafts_by_sequence(GATED).sum()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gate_bits", [None, 1.2])
def test_a_row_is_the_same_beside_others_as_alone(temperature, gate_bits):
    rng = np.random.default_rng(0)
    draft, verifier = partner(rng.normal(size=(V, V)) * 2), partner(rng.normal(size=(V, V)) * 2)
    prompts = [prompt(0), prompt(1, 2, 3), prompt(4, 4), prompt(2)]
    options = {"k": 3, "stop": frozenset({5}), "temperature": temperature, "gate_bits": gate_bits}
    together = speculate(draft, verifier, prompts, 14, **options)
    shorter = speculate(draft, verifier, prompts[:1], 14, **options)
    pair = speculate(draft, verifier, prompts[:2], 14, **options)
    assert together.record.emitted[0].tolist() == shorter.record.emitted[0].tolist()
    assert together.record.emitted[1].tolist() == pair.record.emitted[1].tolist()
    assert together.count_drafts_by_sequence().tolist()[:2] == pair.count_drafts_by_sequence().tolist()
    assert len({*together.rounds.tolist()}) > 1 < len({len(one) for one in together.record.emitted}), "rows differ"


def test_a_row_near_its_end_drafts_no_more_for_its_neighbours():
    """0→1→2→0 is drafted correctly, 3→4→5→3 never: the first row needs one token more while the second needs many."""
    verifier, draft = np.zeros((V, V)), np.eye(V) * 5
    verifier[range(V), [1, 2, 0, 4, 5, 3]] = 5.0
    draft[:3] = verifier[:3]
    together = speculate(partner(draft), partner(verifier), [prompt(0), prompt(3)], 6, k=3)
    assert [emitted.tolist() for emitted in together.record.emitted] == [[1, 2, 0, 1, 2, 0], [4, 5, 3, 4, 5, 3]]
    assert together.rounds.tolist() == [2, 5]
    assert together.count_drafts_by_sequence().tolist() == [3, 3 + 3 + 2 + 1]
    assert together.count_drafts_by_sequence(ACCEPTED).tolist() == [3, 0]


def test_seeds_decide_the_draws():
    rng = np.random.default_rng(7)
    draft, verifier = partner(rng.normal(size=(V, V))), partner(rng.normal(size=(V, V)))
    runs = [speculate(draft, verifier, [prompt(0)], 20, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (run.record.emitted[0].tolist() for run in runs)
    assert first == again != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new": 0}, "max_new=0, but expected at least one new token"),
        ({"k": 0}, "k=0, but expected at least one drafted token"),
        ({"temperature": -1.0}, "temperature=-1.0, but expected a finite number ≥ 0"),
        ({"temperature": np.inf}, "temperature=inf"),
        ({"gate_bits": -0.5}, "gate_bits=-0.5, but expected bits ≥ 0, or None"),
        ({"gate_bits": np.nan}, "gate_bits=nan"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(options, message):
    with pytest.raises(BadArgument, match=message):
        speculate(partner(), partner(), [prompt(0)], **{"max_new": 3, **options})


def test_no_prompt_is_refused():
    with pytest.raises(BadArgument, match=r"prompts=\[\], but expected at least one prompt"):
        speculate(partner(), partner(), [], 3)


def test_models_over_different_vocabularies_are_refused_and_their_sessions_closed():
    small, large = partner(np.eye(4)), partner()
    with pytest.raises(BadArgument, match=r"vocabularies=\(4, 6\), but expected two models over the same ids"):
        speculate(small, large, [prompt(0)], 3)
    assert small.decoder.sessions[0].closed
    assert large.decoder.sessions[0].closed


@pytest.mark.parametrize("which", [0, 1])
def test_logits_that_are_not_numbers_are_refused(which):
    table = SUCCESSOR.copy()
    table[2, 3] = np.nan
    pair = [partner(), partner()]
    pair[which] = partner(table)
    with pytest.raises(NotFinite):
        speculate(*pair, [prompt(0)], 8)
