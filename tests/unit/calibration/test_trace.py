"""The lens trace: the positions that it decides, and columns equal to those computed from plain logits."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from emad_ref.calibration import trace as trace_module
from emad_ref.calibration.trace import (
    EmptyCorpus,
    compute_layer_logits,
    compute_sequence_states,
    concatenate_traces,
    stream_traces,
    take_own_and_lens_traces,
    take_trace,
    trace_batch,
    trace_stepwise,
)
from emad_ref.calibration.windows import (
    TokenSequence,
    cut_windows,
    deduplicate_inputs,
    iterate_batches,
    padded_tokens_and_lengths,
)
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import early_exit_point, fixed_entropy_point
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator, OperatingPoint, full_depth, truncated
from emad_ref.probes.tuned_lens import get_attached_lens
from emad_ref.replay.replay import replay
from emad_ref.signals import LAYERWISE, NotFinite
from tests.random_lenses import attached
from tests.small_models import LAYERS, VOCABULARY, small_model

ROUNDING = 1e-5  # traces hold float32


@pytest.fixture(scope="module")
def stepper():
    return CausalStepper(small_model("gpt_neox"))


def sequence(length, start=0, seed=0):
    return TokenSequence(np.random.default_rng(seed).integers(0, VOCABULARY, length), start)


# ---------------------------------------------------------------- the divergence


@torch.inference_mode()
@pytest.mark.parametrize("tuned", [False, True])
def test_the_divergence_is_that_of_plain_logits_and_none_at_the_end(stepper, tuned):
    lens = attached(stepper, range(1, LAYERS), 3) if tuned else None
    texts = [sequence(n, at, seed=n) for n, at in ((30, 0), (9, 5), (17, 3))]
    trace = take_trace(stepper, texts, lens=lens, divergence=True)
    found = trace.divergence()
    expected = []
    for text in texts:
        for layer, states in enumerate(compute_sequence_states(stepper, text.tokens[:-1], text.first_decided), start=1):
            read = states if lens is None else get_attached_lens(stepper, lens)(states, layer)
            expected.append(stepper.logits(read).double().log_softmax(dim=-1))
    rows = [torch.stack(expected[at : at + LAYERS]) for at in range(0, len(expected), LAYERS)]  # [L, n, V] each
    kl = [(log_p[-1].exp() * (log_p[-1] - log_p)).sum(dim=-1).T.numpy() for log_p in rows]
    assert np.abs(found - np.concatenate(kl)).max() < ROUNDING
    assert found.dtype == np.float32
    assert not found[:, -1].any()
    assert found[:, :-1].min() > 0


def test_a_divergence_is_held_only_where_it_was_asked_for(stepper):
    texts = [sequence(12), sequence(20, 3)]
    plain, asked = take_trace(stepper, texts), take_trace(stepper, texts, divergence=True)
    assert np.array_equal(plain.nll_nats, asked.nll_nats)
    assert np.array_equal(
        asked.reorder_sequences(np.array([1, 0])).divergence()[: asked.n_decided_by_sequence[1]],
        asked.divergence()[11:],
    )
    with pytest.raises(BadArgument, match=r"take_trace\(divergence=True\)"):
        plain.divergence()
    with pytest.raises(BadArgument, match="divergence_nats"):
        concatenate_traces([plain, asked])


@pytest.mark.parametrize("layers", [None, (2, 4)])
def test_a_pair_of_traces_is_each_of_the_two_and_reads_the_last_head_once(stepper, monkeypatch, layers):
    lens = attached(stepper, range(1, LAYERS), 3)
    texts, estimators, seen = [sequence(40), sequence(30, 3)], {EntropyEstimator("topk", k=4): (2, 4)}, []
    own = take_trace(stepper, texts, divergence=True, layers=layers)
    tuned = take_trace(stepper, texts, lens=lens, estimators=estimators, divergence=True, layers=layers)
    logits = CausalStepper.logits
    monkeypatch.setattr(CausalStepper, "logits", lambda self, hidden: seen.append(len(hidden)) or logits(self, hidden))
    pair = take_own_and_lens_traces(stepper, texts, lens, estimators=estimators, layers=layers)
    assert sum(seen) == len(own) * (2 * len(own.read_layers or range(LAYERS)) - 1)
    for one, expected in zip(pair, (own, tuned), strict=True):
        assert (one.lens, one.read_layers, one.macs_per_row) == (
            expected.lens,
            expected.read_layers,
            expected.macs_per_row,
        )
        assert set(one.estimates) == set(expected.estimates)
        for name in ("nll_nats", "top1", "target", "starts", "divergence_nats"):
            np.testing.assert_array_equal(getattr(one, name), getattr(expected, name))
        for name, column in [*expected.signals.items(), *expected.estimates.items()]:
            np.testing.assert_array_equal({**one.signals, **one.estimates}[name], column)


def test_a_pair_of_no_text_is_refused(stepper):
    with pytest.raises(EmptyCorpus, match="at least one document"):
        take_own_and_lens_traces(stepper, [], attached(stepper, range(1, LAYERS), 3))


@pytest.mark.parametrize("divergence", [False, True])
def test_heads_are_read_after_the_layers_asked_for_and_the_last(stepper, monkeypatch, divergence):
    """The numbers there are equal, the others absent; no other layer runs a head, and no block of rows is too large."""
    texts, seen = [sequence(40), sequence(30, 3)], []
    whole = take_trace(stepper, texts, divergence=divergence)
    monkeypatch.setattr(trace_module, "LOGITS_IN_CACHE", 33 * VOCABULARY)
    logits = CausalStepper.logits
    monkeypatch.setattr(CausalStepper, "logits", lambda self, hidden: seen.append(len(hidden)) or logits(self, hidden))
    some = take_trace(stepper, texts, divergence=divergence, layers=(4, 2))
    assert some.read_layers == (2, 4, LAYERS)
    rows = len(whole)
    assert sum(seen) == rows * 3, "the divergence runs no further head"
    assert max(seen) <= 33
    read = np.array(some.read_layers) - 1
    for name, column in {**some.signals, "nll_nats": some.nll_nats, "top1": some.top1}.items():
        full = whole.signals.get(name, getattr(whole, name, None))
        assert np.allclose(column[:, read], full[:, read], atol=ROUNDING), name
        unread = np.delete(column, read, axis=1)
        assert (unread == -1).all() if name == "top1" else np.isnan(unread).all(), name
    if divergence:
        assert np.allclose(some.divergence()[:, read], whole.divergence()[:, read], atol=ROUNDING)


def test_every_layer_is_read_at_a_sample_of_positions(stepper, monkeypatch):
    """The whole trace's columns at the sample, for documents of any length; replay uses the layers read everywhere."""
    texts = [replace(sequence(length, prompt), document=document)
             for document, (length, prompt) in enumerate([(40, 0), (30, 3), (5, 3)])]  # fmt: skip
    whole, seen = take_trace(stepper, texts), []
    logits = CausalStepper.logits
    monkeypatch.setattr(CausalStepper, "logits", lambda self, hidden: seen.append(len(hidden)) or logits(self, hidden))
    some = take_trace(stepper, texts, layers=(2, 4), sample_every=4)
    document = np.repeat(np.arange(3), whole.n_decided_by_sequence)
    sampled = (whole.position + document) % 4 == 0
    assert some.sampled.tolist() == sampled.tolist()
    assert 0 < sampled.sum() < len(whole) / 3
    assert sum(seen) == 3 * len(whole) + (LAYERS - 3) * sampled.sum()
    sample = some.fully_read_trace
    for name in ("nll_nats", "top1", "token", "position"):
        assert np.allclose(getattr(sample, name), getattr(whole, name)[sampled], atol=ROUNDING), name
    assert np.allclose(sample.entropy_nats, whole.entropy_nats[sampled], atol=ROUNDING)
    assert sample.n_decided_by_sequence.tolist() == np.bincount(document[sampled], minlength=3).tolist()
    sums = sample.token_positions.sum_by_sequence(sample.entropy_nats[:, 2])
    by_hand = [whole.entropy_nats[sampled & (document == number), 2].sum() for number in range(3)]
    assert np.allclose(sums, by_hand)
    assert sums[2] == 0
    assert not some.has_layers_for(truncated(LAYERS, 3))
    assert whole.fully_read_trace is whole
    with pytest.raises(BadArgument, match=r"take_trace\(sample_every"):
        assert take_trace(stepper, texts, layers=(2, 4)).fully_read_trace


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("file", "drawn"), [(Screen(), True), (io.StringIO(), False)])
def test_a_bar_is_drawn_on_a_terminal_and_in_no_captured_output(stepper, file, drawn):
    take_trace(stepper, [TokenSequence(np.arange(5), 0)], progress="reading", file=file)
    assert ("reading" in file.getvalue()) is drawn


def test_a_point_that_reads_an_unread_layer_is_refused_by_layer(stepper):
    some = take_trace(stepper, [sequence(40)], layers=(2, 4))
    for point in (fixed_entropy_point(LAYERS, (2, 4), 1.0), full_depth(LAYERS), truncated(LAYERS, 4)):
        assert np.isfinite(replay(some, point).nll_nats).all()
    interpolated = replace(fixed_entropy_point(LAYERS, (2, 4), 1.0), interpolate=True)
    positional = OperatingPoint("p", "positional", LAYERS, LAYERS, schedule="positional", period=8, floor=2)
    for point, lacking in (
        (fixed_entropy_point(LAYERS, (1, 2), 1.0), "1"), (truncated(LAYERS, 3), "3"),
        (positional, "3, 5"), (interpolated, "3, 5"),
    ):  # fmt: skip
        with pytest.raises(BadArgument, match=rf"reads layers \[{lacking}\].*take_trace\(layers"):
            replay(some, point)
    with pytest.raises(BadArgument, match="layers in 1–6 of this model"):
        take_trace(stepper, [sequence(40)], layers=(0,))
    rule = early_exit_point("saturation", LAYERS, VOCABULARY, 4, schedule="monotone")
    with pytest.raises(BadArgument, match=r"also layers \[3, 4\], which a rule reads"):
        take_trace(stepper, [sequence(40)], layers=(5,), rules=[rule])


# ---------------------------------------------------------------- windows


def cut(lengths, window, opening, limit=None):
    documents = [100 * i + np.arange(n) for i, n in enumerate(lengths)]
    return [s.tokens.tolist() for s in cut_windows(documents, window, opening, limit)]


def test_a_document_is_cut_into_windows_that_each_open_anew():
    assert cut([5], 3, 9) == [[9, 0, 1], [9, 2, 3], [9, 4]]
    assert cut([5], 3, None) == [[0, 1, 2], [3, 4]]


def test_documents_never_share_a_window():
    assert cut([2, 2], 10, 9) == [[9, 0, 1], [9, 100, 101]]


def test_a_piece_in_which_nothing_is_predicted_is_left_out():
    assert cut([4, 1, 0], 3, None) == [[0, 1, 2]]
    assert cut([1, 0], 3, 9) == [[9, 0]]


def test_the_limit_counts_windows_and_reads_no_further():
    assert cut([5, 5], 3, 9, limit=2) == [[9, 0, 1], [9, 2, 3]]
    endless = (np.arange(4) for _ in iter(int, 1))
    assert len(list(cut_windows(endless, 8, None, 3))) == 3
    assert cut([5], 3, 9, limit=0) == []


def test_windows_know_their_document_and_one_document_gives_no_more_than_its_share():
    documents = [np.arange(9), np.arange(1), np.arange(2), np.arange(7)]
    cut = list(cut_windows(documents, 3, None, per_document=2))
    assert [s.document for s in cut] == [0, 0, 2, 3, 3]
    assert [s.tokens.tolist() for s in cut] == [[0, 1, 2], [3, 4, 5], [0, 1], [0, 1, 2], [3, 4, 5]]
    with pytest.raises(BadArgument, match="per_document=0, but expected a count of windows ≥ 1"):
        cut_windows(documents, 3, None, per_document=0)


def test_windows_start_at_full_depth_and_decide_from_their_first_token():
    assert [s.first_decided for s in cut_windows([np.arange(6)], 3, 9)] == [0, 0, 0]


@pytest.mark.parametrize("window", [1, 0, -4])
def test_a_window_that_predicts_nothing_is_refused_at_once(window):
    with pytest.raises(BadArgument, match=f"window={window}, but expected at least 2 tokens"):
        cut_windows([np.arange(5)], window, 9)


def test_a_negative_limit_is_refused():
    with pytest.raises(BadArgument, match="limit=-1, but expected a count of windows ≥ 0"):
        cut_windows([np.arange(5)], 4, 9, -1)


# ---------------------------------------------------------------- batches


def test_batches_keep_the_order_and_stay_within_their_size_after_padding():
    sequences = [sequence(n) for n in (5, 9, 3, 20, 4, 4)]
    batches = list(iterate_batches(sequences, 20))
    assert [s for batch in batches for s in batch] == sequences
    assert [len(batch) for batch in batches] == [2, 1, 1, 2]
    assert all(padded_tokens_and_lengths(batch)[0].size <= 20 for batch in batches)


def test_a_sequence_longer_than_a_batch_goes_alone():
    assert [len(batch) for batch in iterate_batches([sequence(50), sequence(50)], 20)] == [1, 1]


def test_padding_stands_on_the_right():
    tokens, lengths = padded_tokens_and_lengths([TokenSequence(np.array([7, 8, 9])), TokenSequence(np.array([5, 6]))])
    assert tokens.tolist() == [[7, 8, 9], [5, 6, 0]]
    assert lengths.tolist() == [3, 2]


@pytest.mark.parametrize(
    ("length", "start", "message"),
    [
        (1, 0, "at least two tokens; nothing is predicted in it"),
        (0, 0, "at least two tokens"),
        (5, 4, "first_decided=4, but expected a position in 0–3; nothing is decided"),
        (5, -1, "first_decided=-1"),
    ],
)
def test_a_sequence_in_which_nothing_is_decided_is_refused(length, start, message):
    with pytest.raises(BadArgument, match=message):
        list(iterate_batches([sequence(length, start)]))


# ---------------------------------------------------------------- the trace itself


def test_every_column_is_what_the_logits_of_a_plain_pass_say(stepper):
    one = sequence(20, 6)
    trace = take_trace(stepper, [one])
    logits = torch.from_numpy(compute_layer_logits(stepper, one.tokens))[6:-1]
    log_p = logits.log_softmax(-1)
    target = torch.from_numpy(one.tokens[7:])
    assert np.abs(trace.entropy_nats - -(log_p.exp() * log_p).sum(-1).numpy()).max() < ROUNDING
    expected = -log_p.gather(-1, target[:, None, None].expand(-1, LAYERS, 1))[..., 0]
    assert np.abs(trace.nll_nats - expected.numpy()).max() < ROUNDING
    assert trace.top1.tolist() == logits.argmax(-1).tolist()
    assert np.abs(trace.top1_probability - log_p.exp().amax(-1).numpy()).max() < ROUNDING
    assert trace.token.tolist() == one.tokens[6:-1].tolist()
    assert trace.target.tolist() == target.tolist()
    assert trace.position.tolist() == list(range(6, 19))


@pytest.mark.parametrize("name", LAYERWISE)
def test_every_declared_signal_is_a_column_however_the_trace_was_taken(stepper, name):
    """For batched, joined, token-by-token and reordered traces."""
    texts = [sequence(20, 6), sequence(9, 2, seed=1)]
    trace = take_trace(stepper, texts)
    found = [trace.signal_at_every_layer(name)[trace.sequence_index == i] for i in (0, 1)]
    for text, column in zip(texts, found, strict=True):
        expected = LAYERWISE[name].from_lens(compute_layer_logits(stepper, text.tokens)[text.first_decided : -1])
        assert np.abs(column - expected).max() < ROUNDING
        assert np.abs(trace_stepwise(stepper, text).signal_at_every_layer(name) - expected).max() < ROUNDING
    assert column.dtype == np.float32
    turned = trace.reorder_sequences(np.array([1, 0])).signal_at_every_layer(name)
    assert np.array_equal(turned, np.concatenate(found[::-1]))
    point = OperatingPoint("p", "f", LAYERS, LAYERS, (2,), ((0.5,),), signal=name)
    assert trace.rule_signal(point) is trace.signal_at_every_layer(name)


def test_a_signal_that_was_not_recorded_is_refused(stepper):
    trace = take_trace(stepper, [sequence(9)])
    first, *rest = LAYERWISE
    without = replace(trace, signals={name: trace.signal_at_every_layer(name) for name in rest})
    with pytest.raises(BadArgument, match=f"signal='{first}', but expected one that this trace records"):
        without.signal_at_every_layer(first)


def test_the_last_layer_of_the_lens_is_the_model_itself(stepper):
    one = sequence(20)
    with torch.inference_mode():
        theirs = stepper.model(torch.from_numpy(one.tokens)[None]).logits[0].numpy()
    assert np.abs(compute_layer_logits(stepper, one.tokens)[:, -1] - theirs).max() < 1e-9


def test_rows_belong_to_their_sequences(stepper):
    trace = take_trace(stepper, [sequence(6, 0), sequence(9, 4, 1), sequence(2, 0, 2)])
    assert trace.n_decided_by_sequence.tolist() == [5, 4, 1]
    assert trace.starts.tolist() == [0, 5, 9, 10]
    assert trace.first_decided.tolist() == [0, 4, 0]
    assert trace.sequence_index.tolist() == [0] * 5 + [1] * 4 + [2]
    assert (len(trace), trace.layers, trace.n_sequences) == (10, LAYERS, 3)


def test_answers_of_one_token_to_one_question_share_its_forward(stepper, monkeypatch):
    """Only their targets differ: the same position of the same row is decided."""
    question = sequence(12, 11).tokens
    options = [TokenSequence(np.append(question, answer), 11) for answer in (3, 5, 8)]
    ran = []
    run = stepper.run_layers
    monkeypatch.setattr(stepper, "run_layers", lambda hidden, *rest: ran.append(hidden.shape[:2]) or run(hidden, *rest))
    trace = take_trace(stepper, [*options, sequence(12, 4, 1)])
    assert set(ran) == {(2, 12)}, "one row for the options, one for the other sequence; last tokens are not run"
    monkeypatch.undo()
    alone = [take_trace(stepper, [option]) for option in options]
    assert trace.target[:3].tolist() == [3, 5, 8]
    assert np.abs(trace.nll_nats[:3] - np.concatenate([one.nll_nats for one in alone])).max() < ROUNDING
    assert len({*trace.nll_nats[:3, -1].tolist()}) == 3


def test_sources_tell_inputs_apart():
    one, other = (TokenSequence(np.array([4, 5]), source=np.array([source])) for source in (7, 8))
    assert len(deduplicate_inputs([one, other, one])[0]) == 2
    assert deduplicate_inputs([one, other, one])[1].tolist() == [0, 1, 0]


def test_a_batch_is_bounded_by_what_is_decided_too():
    """Options that share a row still have their own logits."""
    options = [TokenSequence(np.append(np.arange(9), answer)) for answer in range(5)]
    assert [len(batch) for batch in iterate_batches(options, 20)] == [2, 2, 1]


def test_sequences_come_back_in_the_order_they_were_given(stepper):
    """Sequences of like length run together, in any input order."""
    lengths = [9, 3, 14, 3, 6]
    sequences = [sequence(length, 1, number) for number, length in enumerate(lengths)]
    trace = take_trace(stepper, sequences)
    assert trace.n_decided_by_sequence.tolist() == [length - 2 for length in lengths]
    assert trace.target.tolist() == np.concatenate([s.tokens[2:] for s in sequences]).tolist()
    apart = concatenate_traces([trace_batch(stepper, [s]) for s in sequences])
    assert np.abs(trace.nll_nats - apart.nll_nats).max() < ROUNDING


def test_streamed_parts_join_to_the_whole(stepper):
    sequences = [sequence(6, 0), sequence(9, 4, 1), sequence(5, 2, 2)]
    parts = [trace_batch(stepper, [s]) for s in sequences]
    whole, together = concatenate_traces(parts), next(stream_traces(stepper, sequences))
    assert whole.starts.tolist() == together.starts.tolist()
    assert whole.target.tolist() == together.target.tolist()
    assert np.abs(whole.nll_nats - together.nll_nats).max() < ROUNDING


def test_an_empty_corpus_is_an_error_and_not_an_average_of_nothing(stepper):
    with pytest.raises(EmptyCorpus, match="at least one document of two tokens; check the source and the split"):
        take_trace(stepper, [])


def test_logits_that_are_no_numbers_are_refused_by_layer():
    model = small_model("gpt_neox")
    broken = CausalStepper(model)
    with torch.no_grad():
        model.gpt_neox.layers[2].mlp.dense_4h_to_h.bias[0] = torch.nan
    with pytest.raises(NotFinite, match="logits after layer 3: 5 of 5 rows give no finite entropy"):
        take_trace(broken, [sequence(6)])
