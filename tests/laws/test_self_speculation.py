"""Self-speculation emits the model's own output, leaves the model's own K/V cache, and runs no layer twice."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from emad_ref.calibration.trace import compute_layer_logits
from emad_ref.decoding.partner import Partner
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import drafting_point, self_speculate
from emad_ref.decoding.speculation import ACCEPTED, DRAFTER, REFUSED, VERIFIER, speculate
from emad_ref.models.causal import CausalStepper
from emad_ref.models.loading import load
from emad_ref.point import full_depth, truncated
from emad_ref.protocol import Prompt
from emad_ref.record import DECODE, DRAFT, PROMPT, READOUTS, VERIFY
from emad_ref.schedule.schedules import DeferredStates
from emad_ref.text.world import generate_documents
from tests.decoders.foreign_decoder import ForeignDecoder
from tests.decoders.markov_decoder import DRAFTING, TEXT_LENGTH, TEXTS, MarkovDecoder, chance, draw_two_laws
from tests.small_models import LAYERS, small_model

pytestmark = pytest.mark.each_value

ROWS, NEW, BUNDLED_NEW = 4, 11, 12
PROMPTS = [Prompt(np.array(tokens)) for tokens in ([7], [5, 9, 2, 44], [3, 1, 4, 1, 5, 9, 2], [8, 8])]
EXITS = (1, 3, LAYERS - 1)
EXACT = 1e-9  # float64: the same operations in chunks of different shape
FLOAT32_CHUNK = 1e-3  # logits of a float32 chunk against single steps differ by about 1e-5
FULL = READOUTS.index("full")


@pytest.fixture(scope="module")
def stepper():
    return CausalStepper(small_model("gpt_neox", seed=0))


def partner(stepper, decoder=WalkedDecoder):
    point = drafting_point(stepper.layers)
    return Partner(decoder(stepper, point, max_rows=ROWS), point)


def alone(stepper, rows, stop=frozenset()):
    return WalkedDecoder(stepper, full_depth(stepper.layers), max_rows=ROWS).generate(PROMPTS[:rows], NEW, stop)


@pytest.fixture(scope="module")
def stop(stepper):
    """Return a token that one row emits early, but not all rows."""
    token = int(alone(stepper, ROWS).emitted[1][4])
    ends = alone(stepper, ROWS, frozenset({token})).stop
    assert {"stop token", "length"} == set(ends)
    return frozenset({token})


# ------------------------------------------------------------ the output


CASES = [*(("gpt_neox", exit_layer) for exit_layer in EXITS), ("llama", 3), ("mistral_window", 3)]


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(("family", "exit_layer"), CASES)
def test_greedy_output_is_the_models_own(stepper, stop, family, exit_layer, rows):
    walked = stepper if family == "gpt_neox" else CausalStepper(small_model(family, seed=2))
    own = alone(walked, rows, stop)
    for k in range(1, 7):
        done = self_speculate(partner(walked), exit_layer, PROMPTS[:rows], NEW, k=k, stop=stop)
        assert done.record.stop == own.stop
        for emitted, expected in zip(done.record.emitted, own.emitted, strict=True):
            assert emitted.tolist() == expected.tolist()


def test_the_drawn_drafts_are_now_accepted_and_now_refused(stepper):
    """Otherwise the laws here test plain decoding only; in a batch, rows must differ."""
    close = self_speculate(partner(stepper), LAYERS - 1, PROMPTS, NEW)
    assert close.count_drafts_by_sequence(ACCEPTED).sum() > 5 < close.count_drafts_by_sequence(REFUSED).sum()
    assert len(set(close.rounds.tolist())) > 1
    assert self_speculate(partner(stepper), 1, PROMPTS, NEW).count_drafts_by_sequence(REFUSED).sum() > 20


@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_decoder_without_a_cache_drafts_for_itself_just_as_well(rows):
    """Only the protocol is used: every feed and every deepening recomputes the history."""
    model = small_model("gpt_neox", seed=0)
    walked, point = CausalStepper(model), drafting_point(LAYERS)
    for exit_layer in (3, LAYERS - 1):
        done = self_speculate(Partner(ForeignDecoder(model, point), point), exit_layer, PROMPTS[:rows], NEW, k=3)
        ours = self_speculate(partner(walked), exit_layer, PROMPTS[:rows], NEW, k=3)
        for emitted, expected in zip(done.record.emitted, ours.record.emitted, strict=True):
            assert emitted.tolist() == expected.tolist()
        assert done.drafts.verdict.tolist() == ours.drafts.verdict.tolist()
        assert done.record.tokens.depth.tolist() == ours.record.tokens.depth.tolist()


@pytest.mark.parametrize("rows", [1, ROWS])
def test_the_bundled_model_drafts_for_itself_at_its_probes(rows):
    tiny = load("emad-tiny")
    walked = CausalStepper(tiny.model)
    texts = generate_documents("world:premise", "evaluate", seed=7)
    prompts = [Prompt(np.array(tiny.tokenizer(next(texts))["input_ids"][:n])) for n in (40, 23, 35, 31)[:rows]]
    own = WalkedDecoder(walked, full_depth(12), max_rows=ROWS).generate(prompts, BUNDLED_NEW)
    for prompt, emitted in zip(prompts, own.emitted, strict=True):
        logits = compute_layer_logits(walked, np.concatenate([prompt.tokens, emitted]))[len(prompt.tokens) - 1 : -1, -1]
        runner_up, best = np.sort(logits)[:, -2:].T
        assert (best - runner_up).min() > FLOAT32_CHUNK, "a tie: choose another text"
    for exit_layer, k in product((4, 8), (1, 3, 5)):
        done = self_speculate(partner(walked), exit_layer, prompts, BUNDLED_NEW, k=k)
        for emitted, expected in zip(done.record.emitted, own.emitted, strict=True):
            assert emitted.tolist() == expected.tolist()
        assert done.acceptance_rate > 0.5, "a model trained with exits agrees with itself most of the time"


# ------------------------------------------------------------ the cache


class Watched:
    """A session that compares its cache with a fresh full pass over the same tokens at each commit of a round."""

    def __init__(self, session, prompts, worst):
        self.session, self.worst = session, worst
        self.history = [list(map(int, prompt.tokens)) for prompt in prompts]

    def __getattr__(self, name):
        return getattr(self.session, name)

    def feed(self, tokens, depth=None, last=None):
        for history, fed in zip(self.history, tokens.tolist(), strict=True):
            history += fed
        return self.session.feed(tokens, depth, last)

    def rollback(self, length):
        self.session.rollback(length)
        for history, held in zip(self.history, length.tolist(), strict=True):
            del history[held:]

    def drop(self, rows):
        self.session.drop(rows)
        self.history = [history for row, history in enumerate(self.history) if row not in rows.tolist()]

    def commit(self, length):
        for row, history in enumerate(self.history):
            assert len(history) == length[row] == self.session.length[row]
            assert self.session._trail[row] == [LAYERS] * len(history), "every accepted token has been deepened"
            assert not any(position >= len(history) for position in self.session._store.deferred.waiting[row])
            fresh, _ = WalkedDecoder(self.session._stepper, full_depth(LAYERS)).start([Prompt(np.array(history))])
            for mine, theirs in zip(self.session._store.cache.layers, fresh._store.cache.layers, strict=True):
                for held, expected in zip(mine.row_kv(row), theirs.row_kv(0), strict=True):
                    assert held.shape == expected.shape
                    self.worst.append(float((held - expected).abs().max()))
        self.session.commit(length)


class Watching(WalkedDecoder):
    """A decoder of watched sessions; ``worst`` holds the largest difference of each comparison."""

    def start(self, prompts):
        self.worst = []
        session, step = super().start(prompts)
        return Watched(session, prompts, self.worst), step


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(("exit_layer", "k"), [(1, 2), (3, 4), (LAYERS - 1, 1), (LAYERS - 1, 6)])
def test_after_each_round_the_cache_is_that_of_a_full_pass(stepper, stop, exit_layer, k, rows):
    model = partner(stepper, Watching)
    done = self_speculate(model, exit_layer, PROMPTS[:rows], NEW, k=k, stop=stop)
    assert len(model.decoder.worst) >= done.rounds.max() * LAYERS * 2
    assert max(model.decoder.worst) < EXACT


# ------------------------------------------------------------ the work


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("exit_layer", EXITS)
@pytest.mark.parametrize("k", [1, 4])
def test_work_is_what_the_record_says(stepper, exit_layer, k, rows):
    """Prompts of one length: padding is executed, but is no token. Rounds keep rows in step, so no row is padded even
    if rows accept unevenly."""
    prompts = [Prompt(np.arange(3) + 7 * row) for row in range(rows)]
    done = self_speculate(partner(stepper), exit_layer, prompts, NEW, k=k)
    tokens, work, rounds = done.record.tokens, done.record.work[0], int(done.rounds.sum())
    drafted, verified, opening = (np.isin(tokens.phase, phase) for phase in (DRAFT, VERIFY, (PROMPT, DECODE)))
    assert drafted.sum() == verified.sum(), "every token of a round is deepened, accepted or not"
    assert (tokens.depth[drafted] == exit_layer).all()
    assert (tokens.depth[verified] == LAYERS).all()
    assert (tokens.cap == LAYERS).all()
    ran = [opening.sum() + (drafted if layer <= exit_layer else verified).sum() for layer in range(1, LAYERS + 1)]
    assert work.tokens.tolist() == ran
    heads = np.zeros(LAYERS, dtype=np.int64)
    heads[exit_layer - 1] += drafted.sum() - rounds  # no proposal after the last draft of a round
    heads[-1] += verified.sum() + rows
    assert work.readout_rows[FULL].tolist() == heads.tolist()
    assert not work.fills.any()


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("exit_layer", EXITS)
@pytest.mark.parametrize("k", [1, 4])
def test_two_sessions_would_run_the_layers_below_the_exit_twice(stepper, exit_layer, k, rows):
    """The saving is all block work of a second session: layers 1 … e of the tokens that both read."""
    itself = Partner(WalkedDecoder(stepper, full_depth(LAYERS), max_rows=rows), full_depth(LAYERS))
    point = truncated(LAYERS, exit_layer)
    shallow = Partner(WalkedDecoder(stepper, point, max_rows=rows), point)
    prompts = PROMPTS[:rows]
    two = speculate(shallow, itself, prompts, NEW, k=k)
    one = self_speculate(partner(stepper), exit_layer, prompts, NEW, k=k)
    assert one.rounds.tolist() == two.rounds.tolist()
    assert one.drafts.verdict.tolist() == two.drafts.verdict.tolist()
    mine, draft, verifier = one.record.work[0], two.record.work[DRAFTER], two.record.work[VERIFIER]
    assert mine.tokens.tolist() == verifier.tokens.tolist()
    saved = (draft.tokens + verifier.tokens) - mine.tokens
    assert saved.tolist() == draft.tokens.tolist()
    assert (saved[:exit_layer] > 0).all()
    assert not saved[exit_layer:].any()
    # single drafts see fewer keys than the chunk that repeats them; above the exit the chunks are the same
    assert (mine.context[:exit_layer] < verifier.context[:exit_layer]).all() or max(done_width(one)) == 1
    assert mine.context[exit_layer:].tolist() == verifier.context[exit_layer:].tolist()
    heads = draft.readout_rows + verifier.readout_rows
    heads[FULL, exit_layer - 1] -= rows  # the second session also reads out its prompts
    assert mine.readout_rows.tolist() == heads.tolist()


def done_width(done):
    """Return the tokens of each verification."""
    return np.bincount(done.record.tokens.sequence[done.record.tokens.phase == VERIFY]) / np.maximum(done.rounds, 1)


# ------------------------------------------------------------ the distribution


@pytest.fixture(scope="module")
def laws():
    """Return logits after each token: of a first layer that is right about half of the time, and of the last."""
    return draw_two_laws()


def under_the_models_law(laws, k, temperature, gate_bits=None):
    """Return the p-value of all three-token texts in thousands of rows, under the last layer's chain; and the run."""
    shallow, deep = laws
    prompts = [Prompt(np.array([0]))] * TEXTS
    model = Partner(MarkovDecoder(deep, shallow), DRAFTING)
    done = self_speculate(model, 1, prompts, TEXT_LENGTH, k=k, temperature=temperature, seed=1, gate_bits=gate_bits)
    return chance(np.array(done.record.emitted), deep, temperature), done


@pytest.mark.parametrize(("k", "temperature"), [(1, 1.0), (2, 1.0), (2, 1.5)])
def test_sampled_output_has_the_models_distribution(laws, k, temperature):
    p_value, done = under_the_models_law(laws, k, temperature)
    assert 0.3 < done.acceptance_rate < 0.9, "both branches must be taken often"
    assert p_value > 0.01  # the seed is fixed: this fails for a wrong law, not by chance


def test_the_test_of_distribution_sees_a_lossy_gate(laws):
    assert under_the_models_law(laws, 2, 1.0, gate_bits=1.0)[0] < 1e-6


# ------------------------------------------------------------ detection of defects by the laws


def keep_the_first(deferred, row, position, states):
    for i, state in enumerate(states):
        deferred.waiting[row].setdefault(position + i, state.clone())


def differing(stepper, exit_layer=LAYERS - 1):
    """Return the rows that differ from the model's own output."""
    done = self_speculate(partner(stepper), exit_layer, PROMPTS, NEW, k=4)
    pairs = zip(done.record.emitted, alone(stepper, ROWS).emitted, strict=True)
    return sum(emitted.tolist() != expected.tolist() for emitted, expected in pairs)


def test_reading_the_state_at_the_exit_for_the_ceilings_is_seen(stepper, monkeypatch):
    assert differing(stepper, 3) == 0
    monkeypatch.setattr(DeferredStates, "put", keep_the_first)
    assert differing(stepper, 3) > 0
