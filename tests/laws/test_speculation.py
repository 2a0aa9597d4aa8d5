"""Speculative output is the verifier's: token for token when greedy, in distribution when sampled, depths included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import compute_layer_logits
from emad_ref.decoding.partner import Partner
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.speculation import ACCEPTED, DRAFTER, REFUSED, VERIFIER, speculate
from emad_ref.models.causal import CausalStepper
from emad_ref.models.loading import load, shared_vocabulary_size
from emad_ref.point import OperatingPoint, full_depth, truncated
from emad_ref.protocol import Prompt
from emad_ref.record import CATCH_UP, DECODE, VERIFY
from emad_ref.text.world import generate_documents
from tests.decoders.markov_decoder import POINT, TEXT_LENGTH, TEXTS, MarkovDecoder, chance, draw_two_laws
from tests.small_models import LAYERS, VOCABULARY, small_model, small_partner

pytestmark = pytest.mark.each_value

ROWS, NEW, BUNDLED_NEW = 4, 11, 12
PROMPTS = [Prompt(np.array(tokens)) for tokens in ([7], [5, 9, 2, 44], [3, 1, 4, 1, 5, 9, 2], [8, 8])]
STOP = frozenset({11})
EXACT = 1e-9  # float64: the same operations in chunks of different shape
FLOAT32_CHUNK = 1e-3  # logits of a float32 chunk against single steps differ by about 1e-5


@pytest.fixture(scope="module")
def large():
    return CausalStepper(small_model("gpt_neox", seed=0))


@pytest.fixture(scope="module")
def small():
    return CausalStepper(small_partner())


def adaptive(stepper, quantile=0.1, schedule="monotone", period=None):
    """Return an entropy rule under which a row falls probe by probe."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 60)
    logits = torch.from_numpy(compute_layer_logits(stepper, tokens))
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).numpy()
    probes = tuple(range(2, stepper.layers, 2))
    thresholds = tuple(float(np.quantile(entropy[:, probe - 1], quantile)) for probe in probes)
    return OperatingPoint(
        "spread", "quantile", stepper.layers, stepper.layers, probes, (thresholds,), schedule, period=period
    )


def partner(stepper, point, rows=ROWS):
    return Partner(WalkedDecoder(stepper, point, max_rows=rows), point)


DRAFTS = {
    "another model": lambda small, large: (small, full_depth(small.layers)),
    "another model, adaptive": lambda small, large: (small, adaptive(small)),
    "itself, shallower": lambda small, large: (large, truncated(LAYERS, LAYERS - 1)),
    "itself, adaptive": lambda small, large: (large, adaptive(large)),
    "itself": lambda small, large: (large, full_depth(LAYERS)),
}
VERIFIERS = {
    "full depth": lambda large: full_depth(LAYERS),
    "emad": adaptive,
    "free depth": lambda large: adaptive(large, 0.3, "free_eager"),
}
OTHERS = {
    "chunked": lambda large: adaptive(large, 0.3, "chunked", period=3),
    "positional": lambda large: OperatingPoint(
        "by position", "positional", LAYERS, LAYERS, schedule="positional", period=8, floor=2
    ),
}


PAIRS = [
    ("another model", "full depth"),
    ("itself, shallower", "full depth"),
    ("itself", "full depth"),
    ("another model, adaptive", "emad"),
    ("itself, adaptive", "emad"),
    ("another model", "free depth"),
    ("another model", "chunked"),
    ("itself, shallower", "positional"),
]


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(("drafter", "verifier"), PAIRS)
def test_greedy_output_is_the_verifiers_own_tokens_and_depths(small, large, drafter, verifier, rows):
    point = (VERIFIERS | OTHERS)[verifier](large)
    one, other = partner(*DRAFTS[drafter](small, large)), partner(large, point)
    own = other.decoder.generate(PROMPTS[:rows], NEW, STOP)
    for k in range(1, 7):
        done = speculate(one, other, PROMPTS[:rows], NEW, k=k, stop=STOP)
        assert done.record.stop == own.stop
        tokens = done.record.tokens
        for row in range(rows):
            assert done.record.emitted[row].tolist() == own.emitted[row].tolist()
            standing = (tokens.sequence == row) & (tokens.model == VERIFIER) & tokens.kept
            standing &= np.isin(tokens.phase, (DECODE, VERIFY))
            expected = own.tokens.select_sequence(row, DECODE)
            for column in ("token", "position", "depth", "cap"):
                assert getattr(tokens, column)[standing].tolist() == getattr(expected, column).tolist(), column
    if verifier != "full depth":
        assert len(set(own.tokens.select_sequence(0, DECODE).depth.tolist())) > 1, (
            "the drawn case must exit at several depths"
        )


def test_the_drawn_drafts_are_now_accepted_and_now_refused(small, large):
    """Otherwise the laws above test plain decoding only."""
    close = speculate(partner(large, truncated(LAYERS, LAYERS - 1)), partner(large, full_depth(LAYERS)), PROMPTS, NEW)
    far = speculate(partner(small, full_depth(3)), partner(large, full_depth(LAYERS)), PROMPTS, NEW)
    assert close.count_drafts_by_sequence(ACCEPTED).sum() > 5 < close.count_drafts_by_sequence(REFUSED).sum()
    assert far.count_drafts_by_sequence(REFUSED).sum() > 20
    itself = speculate(partner(large, full_depth(LAYERS)), partner(large, full_depth(LAYERS)), PROMPTS, NEW)
    assert itself.acceptance_rate == 1.0


@pytest.mark.parametrize("rows", [1, ROWS])
def test_the_bundled_pair_emits_what_the_large_one_emits(rows):
    tiny, nano = load("emad-tiny"), load("emad-nano")
    assert shared_vocabulary_size(nano, tiny) == nano.geometry.vocabulary
    walked, drafting = CausalStepper(tiny.model), CausalStepper(nano.model)
    texts = generate_documents("world:premise", "evaluate", seed=7)
    prompts = [Prompt(np.array(tiny.tokenizer(next(texts))["input_ids"][:n])) for n in (40, 23, 35, 31)[:rows]]
    verifier = partner(walked, full_depth(12))
    own = verifier.decoder.generate(prompts, BUNDLED_NEW)
    for prompt, emitted in zip(prompts, own.emitted, strict=True):
        logits = compute_layer_logits(walked, np.concatenate([prompt.tokens, emitted]))[len(prompt.tokens) - 1 : -1, -1]
        runner_up, best = np.sort(logits)[:, -2:].T
        assert (best - runner_up).min() > FLOAT32_CHUNK, "a tie: choose another text"
    for k in range(1, 7):
        draft = partner(walked, truncated(12, 4)) if k == 4 else partner(drafting, full_depth(4))
        done = speculate(draft, verifier, prompts, BUNDLED_NEW, k=k)
        for emitted, expected in zip(done.record.emitted, own.emitted, strict=True):
            assert emitted.tolist() == expected.tolist()
        assert done.acceptance_rate > 0.2, "too few drafts were accepted: the test has no power"


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_work_of_both_models_is_what_was_fed(small, large, verifier, rows):
    """Rejected tokens stay counted. Prompts of one length: padding is executed, but is no token."""
    point = VERIFIERS[verifier](large)
    prompts = [Prompt(np.arange(3) + 7 * row) for row in range(rows)]
    done = speculate(partner(small, adaptive(small)), partner(large, point), prompts, NEW, k=3)
    tokens = done.record.tokens
    assert not tokens.kept.all(), "no token was rejected"
    for model, stepper in ((DRAFTER, small), (VERIFIER, large)):
        depth = tokens.depth[tokens.model == model]
        whole = depth if model == DRAFTER or point.schedule == "monotone" else np.full_like(depth, LAYERS)
        reached = np.array([(whole >= layer).sum() for layer in range(1, stepper.layers + 1)])
        work = done.record.work[model]
        executed = work.tokens + work.fills.sum(axis=0)
        if model == VERIFIER and verifier == "emad" and rows > 1:  # rows that leave a chunk early pad it for the others
            assert (executed >= reached).all()
        else:
            assert executed.tolist() == reached.tolist()


class Kept:
    """A decoder whose sessions outlive ``close``, so that a test can read their caches."""

    def __init__(self, decoder):
        self._decoder, self.capabilities, self.sessions = decoder, decoder.capabilities, []

    def start(self, prompts):
        session, step = self._decoder.start(prompts)
        session.close = lambda: None
        self.sessions.append(session)
        return session, step


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("drafter", ["another model", "itself, adaptive"])
def test_both_caches_hold_what_they_would_after_the_same_tokens(small, large, drafter, verifier, k):
    points = DRAFTS[drafter](small, large), (large, VERIFIERS[verifier](large))
    pair = [Partner(Kept(WalkedDecoder(stepper, point)), point) for stepper, point in points]
    prompt = PROMPTS[0]
    done = speculate(*pair, [prompt], NEW, k=k)
    history = np.concatenate([prompt.tokens, done.record.emitted[0]])
    for (stepper, point), one in zip(points, pair, strict=True):
        session = one.decoder.sessions[0]
        fresh, _ = WalkedDecoder(stepper, point).start([prompt])
        for token in history[len(prompt.tokens) : session.length[0]]:
            fresh.feed(token[None, None])
        assert session.length.tolist() == fresh.length.tolist()
        assert session.cap.tolist() == fresh.cap.tolist()
        rest = history[session.length[0] :][None]
        mine, theirs = session.feed(rest), fresh.feed(rest)
        assert mine.depth.tolist() == theirs.depth.tolist()
        assert np.abs(mine.logits - theirs.logits).max() < EXACT


@pytest.fixture(scope="module")
def laws():
    """Return logits after each token: of a draft that is right about half of the time, and of its verifier."""
    return draw_two_laws()


def under_the_verifiers_law(laws, k, temperature, gate_bits=None):
    """Return the p-value of all texts of three tokens in thousands of rows, under the verifier's chain; and the run."""
    draft, verifier = (Partner(MarkovDecoder(logits), POINT) for logits in laws)
    prompts = [Prompt(np.array([0]))] * TEXTS
    done = speculate(draft, verifier, prompts, TEXT_LENGTH, k=k, temperature=temperature, seed=1, gate_bits=gate_bits)
    return chance(np.array(done.record.emitted), laws[1], temperature), done


@pytest.mark.parametrize(("k", "temperature"), [(1, 1.0), (2, 1.0), (2, 1.5)])
def test_sampled_output_has_the_verifiers_distribution(laws, k, temperature):
    p_value, done = under_the_verifiers_law(laws, k, temperature)
    assert 0.3 < done.acceptance_rate < 0.9, "both branches must be taken often"
    assert p_value > 0.01  # the seed is fixed: this fails for a wrong law, not by chance


def test_the_test_of_distribution_sees_a_lossy_gate(laws):
    assert under_the_verifiers_law(laws, 2, 1.0, gate_bits=1.0)[0] < 1e-6


def test_catch_up_is_read_only_where_all_drafts_stood(large):
    done = speculate(partner(large, full_depth(LAYERS)), partner(large, full_depth(LAYERS)), PROMPTS[:1], NEW, k=4)
    tokens = done.record.tokens
    assert (tokens.phase == CATCH_UP).sum() == done.rounds[0] - 1
