"""EAD: the rule is the paper's formula, and each model decodes what it would after the same history."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.calibration.trace import compute_layer_logits
from emad_ref.decoding.partner import Partner, entropy_bits
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.speculation import speculate
from emad_ref.decoding.switching import LARGE, SMALL, SwitchingRule, rolling_means, switch
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.loading import load, shared_vocabulary_size
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import CATCH_UP, DECODE, PROMPT
from emad_ref.signals import NotFinite
from tests.decoders.markov_decoder import POINT, MarkovDecoder
from tests.small_models import VOCABULARY, small_model, small_partner

NEW = 24
PROMPTS = [Prompt(np.array(tokens)) for tokens in ([5, 9, 2, 44], [7], [3, 1, 4, 1, 5, 9, 2])]
EXACT = 1e-9  # float64: the same operations in chunks of different shape


# ---------------------------------------------------------------- the rule

# eighths: sums are exact, so that a mean can fall on a threshold exactly
bits = st.integers(0, 40).map(lambda eighths: eighths / 8)
rules = st.builds(SwitchingRule, bits, st.integers(1, 6), st.integers(1, 8), st.sampled_from([SMALL, LARGE]))


def transcribed(entropies, tau, w, d_min, start):
    """Apply the paper's formula for every t to the whole history each time."""
    m = [start]
    for t in range(1, len(entropies) + 1):
        window = [entropies[i] for i in range(t - w, t) if i >= 0]
        mean = sum(window) / len(window)
        c = 0
        while c < t and m[t - 1 - c] == m[t - 1]:
            c += 1
        if mean >= tau and c >= d_min:
            m.append(LARGE)
        elif mean <= tau and c >= d_min:
            m.append(SMALL)
        else:
            m.append(m[t - 1])
    return m


@given(st.lists(bits, max_size=40), rules)
def test_models_are_the_papers_formula(entropies, rule):
    expected = transcribed(entropies, rule.threshold_bits, rule.window, rule.least_run, rule.start)
    assert rule.model_by_token(entropies).tolist() == expected


@given(st.lists(bits, max_size=40), rules)
def test_no_run_but_the_last_is_shorter_than_the_minimum(entropies, rule):
    chosen = rule.model_by_token(entropies)
    ends = np.flatnonzero(np.diff(chosen)) + 1
    assert (np.diff(np.concatenate([[0], ends])) >= rule.least_run).all()


def test_the_large_model_wins_at_equality():
    assert SwitchingRule(2.0, 1, 1, SMALL).model_by_token([2.0]).tolist() == [SMALL, LARGE]
    assert SwitchingRule(2.0, 1, 1, LARGE).model_by_token([2.0]).tolist() == [LARGE, LARGE]


def test_the_window_means_what_there_is_then_the_last_w():
    assert rolling_means([4.0, 2.0, 0.0, 1.0], 3).tolist() == [4.0, 3.0, 2.0, 1.0]
    assert rolling_means([4.0, 2.0], 1).tolist() == [4.0, 2.0]
    assert rolling_means([], 3).tolist() == []


def test_the_papers_settings_are_the_defaults():
    assert (SwitchingRule(1.0).window, SwitchingRule(1.0).least_run) == (5, 10)


def switches(done):
    """Return the changes of model between emitted tokens, per sequence."""
    return [int(np.count_nonzero(np.diff(models))) for models in done.model]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold_bits": -0.1}, "threshold_bits=-0.1, but expected a finite number of bits ≥ 0"),
        ({"threshold_bits": math.nan}, "threshold_bits=nan"),
        ({"threshold_bits": math.inf}, "threshold_bits=inf"),
        ({"window": 0}, "window=0, but expected at least one token"),
        ({"least_run": 0}, "least_run=0, but expected at least one token"),
        ({"start": 2}, r"start=2, but expected 0 \(small\) or 1 \(large\)"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(BadArgument, match=message):
        SwitchingRule(**{"threshold_bits": 1.0, **options})


# ---------------------------------------------------------------- runs of real models


@pytest.fixture(scope="module")
def large():
    return CausalStepper(small_model("gpt_neox", seed=0))


@pytest.fixture(scope="module")
def small():
    return CausalStepper(small_partner())


def adaptive(stepper):
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 60)
    entropy = entropy_bits(compute_layer_logits(stepper, tokens)) * math.log(2)
    probes = tuple(range(2, stepper.layers, 2))
    thresholds = tuple(float(np.quantile(entropy[:, probe - 1], 0.15)) for probe in probes)
    return OperatingPoint("spread", "quantile", stepper.layers, stepper.layers, probes, (thresholds,))


def partner(stepper, point=None, **options):
    point = point or full_depth(stepper.layers)
    return Partner(WalkedDecoder(stepper, point, **options), point)


def between(small, large, **options):
    """Return a rule with a threshold between the entropies of this pair."""
    rules = SwitchingRule(math.log2(VOCABULARY), start=SMALL), SwitchingRule(0.0, start=LARGE)
    alone = [switch(partner(small), partner(large), rule, PROMPTS, NEW) for rule in rules]
    amid = float(np.mean([np.median(np.concatenate(run.rolling_bits)) for run in alone]))
    return SwitchingRule(amid, **{"window": 2, "least_run": 2, **options})


@pytest.mark.parametrize("start", [SMALL, LARGE])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_token_is_its_models_own_on_the_whole_history(small, large, start, temperature):
    """Both caches are right at every switch: entropies equal those of a plain pass over the history."""
    rule = between(small, large, start=start)
    done = switch(partner(small), partner(large), rule, PROMPTS, NEW, temperature=temperature, seed=4)
    assert max(switches(done)) >= 2, "the drawn case must switch there and back"
    for row, prompt in enumerate(PROMPTS):
        emitted = done.record.emitted[row]
        history = np.concatenate([prompt.tokens, emitted])
        lens = np.stack(
            [compute_layer_logits(stepper, history)[len(prompt.tokens) - 1 : -1, -1] for stepper in (small, large)]
        )
        own = lens[done.model[row], np.arange(NEW)]
        assert np.abs(done.entropy_bits[row] - entropy_bits(own)).max() < EXACT
        if temperature == 0:
            assert emitted.tolist() == own.argmax(axis=-1).tolist()
        assert done.model[row].tolist() == rule.model_by_token(done.entropy_bits[row].tolist())[:-1].tolist()
        assert done.rolling_bits[row].tolist() == rolling_means(done.entropy_bits[row].tolist(), rule.window).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_at_the_ends_of_the_threshold_one_model_decodes_alone(small, large, temperature):
    sampling = {"temperature": temperature, "seed": 9}
    for stepper, tau, start in ((large, 0.0, LARGE), (small, math.log2(VOCABULARY), SMALL)):
        done = switch(partner(small), partner(large), SwitchingRule(tau, 5, 1, start), PROMPTS, NEW, **sampling)
        alone = WalkedDecoder(stepper, full_depth(stepper.layers), max_rows=3, **sampling).generate(PROMPTS, NEW)
        for emitted, expected in zip(done.record.emitted, alone.emitted, strict=True):
            assert emitted.tolist() == expected.tolist()
        assert done.large_share == float(start == LARGE)
        assert done.catch_up_tokens_by_model.tolist() == [0, 0]
        assert done.record.work[1 - start].tokens.sum() == 0 < done.record.work[start].tokens.sum()


@pytest.mark.parametrize("start", [SMALL, LARGE])
def test_from_the_other_model_the_ends_take_over_after_the_minimum(small, large, start):
    tau = 0.0 if start == SMALL else math.log2(VOCABULARY)
    done = switch(partner(small), partner(large), SwitchingRule(tau, start=start), PROMPTS, NEW)
    for models in done.model:
        assert models.tolist() == [start] * 10 + [1 - start] * (NEW - 10)


def test_work_of_both_models_is_what_was_fed(small, large):
    done = switch(partner(small), partner(large), between(small, large, start=SMALL), PROMPTS, NEW)
    tokens = done.record.tokens
    assert tokens.kept.all(), "EAD rejects no token"
    for model, stepper in ((SMALL, small), (LARGE, large)):
        reached = [(tokens.depth[tokens.model == model] >= layer).sum() for layer in range(1, stepper.layers + 1)]
        assert done.record.work[model].tokens.tolist() == reached
        emitting = int(((tokens.model == model) & (tokens.phase == DECODE)).sum())
        assert emitting < reached[-1], "the drawn case must catch up"
        heads = [0] * (stepper.layers - 1) + [emitting]
        assert done.record.work[model].readout_rows[0].tolist() == heads, "catching up computes no other logits"
    assert done.opening_work[SMALL].tokens.tolist() == [sum(len(p.tokens) for p in PROMPTS)] * small.layers
    assert done.opening_work[LARGE] == done.opening_work[LARGE] - done.opening_work[LARGE]


def test_whoever_takes_over_reads_all_it_has_not_seen_once(small, large):
    done = switch(partner(small), partner(large), between(small, large, start=SMALL), PROMPTS, NEW)
    for row, prompt in enumerate(PROMPTS):
        tokens, history = (
            done.record.tokens.select_sequence(row),
            np.concatenate([prompt.tokens, done.record.emitted[row]]),
        )
        for model in (SMALL, LARGE):
            mine = tokens.model == model
            assert tokens.position[mine].tolist() == list(range(mine.sum()))
            assert tokens.token[mine].tolist() == history[: mine.sum()].tolist()
            decoded = tokens.position[mine & (tokens.phase == DECODE)] - (len(prompt.tokens) - 1)
            assert decoded.tolist() == np.flatnonzero(done.model[row] == model).tolist()
        assert (tokens.phase[tokens.model == SMALL] == PROMPT).sum() == len(prompt.tokens) - 1
        assert not (tokens.phase[tokens.model == LARGE] == PROMPT).any()
    assert done.catch_up_tokens_by_model.tolist() == [
        ((done.record.tokens.model == model) & (done.record.tokens.phase == CATCH_UP)).sum() for model in (SMALL, LARGE)
    ]
    assert (done.catch_up_tokens_by_model > 0).all()


@pytest.mark.parametrize("start", [SMALL, LARGE])
def test_an_adaptive_partner_has_the_depths_it_would_choose_reading_live(small, large, start):
    points = adaptive(small), adaptive(large)
    rule = between(small, large, start=start)
    done = switch(partner(small, points[0]), partner(large, points[1]), rule, PROMPTS, NEW)
    assert max(switches(done)) >= 2
    for row, prompt in enumerate(PROMPTS):
        tokens = done.record.tokens.select_sequence(row)
        for model in set(done.model[row].tolist()):
            stepper = (small, large)[model]
            mine = (tokens.model == model) & (tokens.position >= len(prompt.tokens) - 1)
            session, step = WalkedDecoder(stepper, points[model]).start([prompt])
            depths = [int(step.depth[0, 0])]
            for token in tokens.token[mine][1:]:
                depths.append(int(session.feed(np.array([[token]])).depth[0, 0]))
            assert tokens.depth[mine].tolist() == depths
            assert tokens.cap[mine].tolist() == [stepper.layers, *depths[:-1]]
    assert len(set(done.record.tokens.depth[done.record.tokens.model == LARGE].tolist())) > 1


def test_a_row_is_the_same_beside_others_as_alone(small, large):
    options = {"stop": frozenset({11, 40}), "temperature": 0.9, "seed": 2}
    rule = between(small, large)
    together = switch(partner(small), partner(large), rule, PROMPTS, NEW, **options)
    first = switch(partner(small), partner(large), rule, PROMPTS[:1], NEW, **options)
    assert together.record.emitted[0].tolist() == first.record.emitted[0].tolist()
    assert together.model[0].tolist() == first.model[0].tolist()


def test_a_stop_token_is_emitted_and_ends_its_row(small, large):
    free = switch(partner(small), partner(large), between(small, large), PROMPTS, NEW)
    token = int(free.record.emitted[0][7])
    done = switch(partner(small), partner(large), between(small, large), PROMPTS, NEW, stop=frozenset({token}))
    first = free.record.emitted[0].tolist().index(token)
    assert done.record.emitted[0].tolist() == free.record.emitted[0][: first + 1].tolist()
    assert done.record.stop[0] == "stop token"
    assert len(done.model[0]) == len(done.entropy_bits[0]) == first + 1
    assert free.record.stop == ["length"] * 3


# ---------------------------------------------------------------- sessions and refusals


def markov(sharpness=5.0, size=6, **options):
    """Return a chain that repeats the last token; a sharper one is more certain."""
    return Partner(MarkovDecoder(np.eye(size) * sharpness, **options), POINT)


def test_catching_up_is_one_opening_or_chunks_of_what_a_decoder_takes():
    small, large = markov(0.1, max_feed=2), markov(5.0, max_feed=3)
    done = switch(small, large, SwitchingRule(1.0, 1, 4, LARGE), [Prompt(np.array([2, 3]))], 12)
    assert done.model[0].tolist() == [LARGE] * 4 + [SMALL] * 4 + [LARGE] * 4
    assert small.decoder.widths == [1, 1, 1], "a prompt and four tokens were read by opening"
    assert large.decoder.widths == [1, 1, 1, 3, 2, 1, 1, 1]
    assert done.catch_up_tokens_by_model.tolist() == [5, 4], "the last token read is the step that any model would take"
    assert switches(done) == [2]
    assert [work.tokens.tolist() for work in done.record.work.values()] == [[9], [13]]
    heads = [session.read.tolist() for one in (small, large) for session in one.decoder.sessions]
    assert heads == [[4], [8]], "the number that each emitted, for any number of chunks read"
    assert small.decoder.sessions[0].closed
    assert large.decoder.sessions[0].closed


def test_a_decoder_that_does_not_count_leaves_no_half_sum():
    done = switch(markov(counted=False), markov(), SwitchingRule(1.0), [Prompt(np.array([1]))], 3)
    assert done.record.work is None
    assert done.opening_work is None


@pytest.mark.parametrize(
    ("prompts", "max_new", "tau", "message"),
    [
        ([], 3, 1.0, r"prompts=\[\], but expected at least one prompt"),
        ([Prompt(np.array([1]))], 0, 1.0, "max_new=0, but expected at least one new token"),
        ([Prompt(np.array([1]))], 3, 2.6, r"threshold_bits=2.6, but expected at most log₂ V = 2.5850 bits"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(prompts, max_new, tau, message):
    with pytest.raises(BadArgument, match=message):
        switch(markov(), markov(), SwitchingRule(tau), prompts, max_new)


def test_models_over_different_vocabularies_are_refused_where_they_meet():
    with pytest.raises(BadArgument, match=r"vocabularies=\(6, 4\), but expected two models over the same ids"):
        switch(markov(size=4), markov(), SwitchingRule(1.0, 1, 1), [Prompt(np.array([1]))], 3)


def test_logits_that_are_not_numbers_are_refused():
    broken = Partner(MarkovDecoder(np.full((6, 6), np.nan)), POINT)
    with pytest.raises(NotFinite):
        switch(markov(), broken, SwitchingRule(1.0), [Prompt(np.array([1]))], 3)


# ---------------------------------------------------------------- tokenizers


def loaded(name, text="one", vocabulary=512):
    """Return a model whose tokenizer has ids up to 499."""
    tokenizer = None
    if text is not None:
        backend, ids = SimpleNamespace(to_str=lambda: text, padding=None, truncation=None), {"a": 0, "z": 499, "b": 1}
        tokenizer = SimpleNamespace(backend_tokenizer=backend, get_vocab=lambda: ids)
    return SimpleNamespace(name=name, tokenizer=tokenizer, geometry=SimpleNamespace(vocabulary=vocabulary))


def test_the_bundled_models_read_the_same_ids():
    assert shared_vocabulary_size(load("emad-nano"), load("emad-tiny")) == 512


@pytest.mark.parametrize("sizes", [(512, 500), (500, 512), (500, 500)])
def test_rows_beyond_the_tokenizer_are_padding_of_one_model(sizes):
    """As in the Qwen2.5 models, which share a tokenizer and pad embeddings to 151,936 and 152,064."""
    assert (
        shared_vocabulary_size(*(loaded(name, vocabulary=size) for name, size in zip("ab", sizes, strict=True))) == 500
    )


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (loaded("b", None), "models='a, b', but expected two models with a tokenizer each; b came without"),
        (loaded("b", vocabulary=499), "expected vocabularies of one size, or that both cover id 499.*not 512 and 499"),
        (loaded("b", "other"), "models='a, b', but expected the same tokenizer; theirs differ"),
    ],
)
def test_models_that_read_different_ids_are_refused_by_name(second, message):
    with pytest.raises(BadArgument, match=message):
        shared_vocabulary_size(loaded("a"), second)


def padded(table, rows=2):
    """Return the same law with ``rows`` more ids that would win every draw."""
    wide = np.full((len(table) + rows, len(table) + rows), 99.0)
    wide[: len(table), : len(table)] = table
    return wide


DRAWN = np.random.default_rng(5).normal(size=(2, 6, 6)) * 2
TOGETHER = {  # joint output of two models, with partners of small and large tables
    "switching": lambda small, large: switch(
        small, large, SwitchingRule(1.4, 2, 2), [Prompt(np.array([1, 2]))], 30, temperature=1.0, seed=3
    ),
    "speculation": lambda small, large: speculate(
        small, large, [Prompt(np.array([1, 2]))], 30, temperature=1.0, seed=3, gate_bits=0.9
    ),
}


@pytest.mark.parametrize("write", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("which", [SMALL, LARGE])
def test_padding_of_one_vocabulary_changes_nothing(write, which):
    """Neither entropies nor draws nor acceptance use logits that stand for no text."""
    tables = list(DRAWN)
    plain = write(*(Partner(MarkovDecoder(table), POINT) for table in tables))
    tables[which] = padded(tables[which])
    cut = write(*(Partner(MarkovDecoder(table), POINT, 6) for table in tables))
    assert cut.record.emitted[0].tolist() == plain.record.emitted[0].tolist()
    assert len(set(plain.record.tokens.model.tolist())) == 2, "both models must take part"
    if write is TOGETHER["speculation"]:
        assert cut.drafts.verdict.tolist() == plain.drafts.verdict.tolist()
        assert cut.drafts.entropy_bits.tolist() == plain.drafts.entropy_bits.tolist()
    else:
        assert cut.entropy_bits[0].tolist() == plain.entropy_bits[0].tolist()


def test_a_threshold_is_held_against_the_ids_that_are_shared():
    """log₂ 6 bits: no distribution over six ids has more, even if one model has padding."""
    wide = Partner(MarkovDecoder(padded(DRAWN[1], 10)), POINT, 6)
    small = Partner(MarkovDecoder(DRAWN[0]), POINT, 6)
    with pytest.raises(BadArgument, match=r"at most log₂ V = 2\.5850 bits"):
        switch(small, wide, SwitchingRule(3.0), [Prompt(np.array([1]))], 3)


def test_entropy_is_in_bits():
    assert float(entropy_bits(np.zeros(8))) == pytest.approx(3.0)
    assert entropy_bits(np.array([[0.0, -np.inf], [1.0, 1.0]])).tolist() == pytest.approx([0.0, 1.0])
