"""A prefix tree that many rules share changes no result: every rule and speculation writes what it writes alone."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emad_ref.decoding.partner import Partner
from emad_ref.decoding.prefix_tree import AHEAD, PrefixTrees, TextGenerationRequest
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.speculation import ACCEPTED, GATED, REFUSED, speculate
from emad_ref.decoding.switching import LARGE, SMALL, SwitchingRule, switch
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import Work
from tests.decoders.markov_decoder import POINT, MarkovDecoder, V, prompt
from tests.small_models import small_model, small_partner

pytestmark = pytest.mark.each_value

EXACT = 1e-9  # float64: the same operations in different batch sizes
NEW = 2 * AHEAD + 5  # calls of a model that writes everything
PROMPTS = [Prompt(np.array(tokens)) for tokens in ([5, 9, 2, 44], [7], [3, 1, 4, 1, 5, 9, 2], [7])]

chains = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).normal(0, 2, (V, V)))
# between the entropies of the chains, so that none lies on a threshold
rules = st.builds(
    SwitchingRule, st.floats(0.01, 2.5), st.integers(1, 4), st.integers(1, 5), st.sampled_from([SMALL, LARGE])
)


def chained(*tables):
    return tuple(Partner(MarkovDecoder(table), POINT) for table in tables)


@given(chains, chains, st.lists(rules, min_size=1, max_size=6), st.integers(1, NEW), st.booleans())
@settings(max_examples=60)
def test_every_rule_writes_what_it_would_alone(small, large, many, most, stops):
    partners, stop = chained(small, large), frozenset({3}) if stops else frozenset()
    prompts = [prompt(0), prompt(2, 1), prompt(0)]
    texts, wanted = PrefixTrees(rows=2), [TextGenerationRequest(each.tokens, most, stop) for each in prompts]
    walks = texts.generate_switched(partners, [(text, rule) for rule in many for text in wanted])
    for at, rule in enumerate(many):
        own = switch(*partners, rule, prompts, most, stop=stop)
        for row, walk in enumerate(walks[at * len(prompts) : (at + 1) * len(prompts)]):
            assert walk.tokens.tolist() == own.record.emitted[row].tolist()
            assert walk.model.tolist() == own.model[row].tolist()
            np.testing.assert_allclose(walk.entropy_bits, own.entropy_bits[row], atol=EXACT)
            np.testing.assert_allclose(walk.rolling_bits, own.rolling_bits[row], atol=EXACT)


@given(chains, chains, st.integers(1, 5), st.none() | st.floats(0.01, 2.5), st.integers(1, 20), st.booleans())
@settings(max_examples=60)
def test_speculation_writes_what_it_would_alone(draft, verifier, k, gate, most, stops):
    partners, stop = chained(draft, verifier), frozenset({3}) if stops else frozenset()
    prompts = [prompt(0), prompt(2, 1)]
    spoken = PrefixTrees(rows=2).generate_speculative(
        partners, [TextGenerationRequest(each.tokens, most, stop) for each in prompts], k, gate
    )
    own = speculate(*partners, prompts, most, k=k, stop=stop, gate_bits=gate)
    standing = own.count_drafts_by_sequence(ACCEPTED) + own.count_drafts_by_sequence(GATED)
    for row, one in enumerate(spoken):
        assert one.tokens.tolist() == own.record.emitted[row].tolist()
        assert (one.model == SMALL).sum() == standing[row]
        judged = (own.drafts.sequence == row) & np.isin(own.drafts.verdict, (ACCEPTED, GATED, REFUSED))
        np.testing.assert_allclose(one.entropy_bits, own.drafts.entropy_bits[judged], atol=EXACT)


# ---------------------------------------------------------------- real models and their executed work


@pytest.fixture(scope="module")
def partners():
    models = small_partner(), small_model("gpt_neox", seed=0)
    return tuple(partnered(CausalStepper(model)) for model in models)


def partnered(stepper):
    point = full_depth(stepper.layers)
    return Partner(WalkedDecoder(stepper, point, max_rows=4), point)


RULES = [
    SwitchingRule(bits, 3, run, start) for bits in (0.0, 3.0, 4.0, 5.0) for run in (1, 4) for start in (SMALL, LARGE)
]


@pytest.fixture(scope="module")
def walked(partners):
    texts = [TextGenerationRequest(each.tokens, 24) for each in PROMPTS]
    walks = PrefixTrees(rows=3).generate_switched(partners, [(text, rule) for rule in RULES for text in texts])
    return {(rule, row): walks[at * len(texts) + row] for at, rule in enumerate(RULES) for row in range(len(texts))}


@pytest.mark.parametrize("rule", RULES)
def test_work_is_what_decoding_alone_executes(partners, walked, rule):
    for row, each in enumerate(PROMPTS):
        own, walk = switch(*partners, rule, [each], 24), walked[rule, row]
        assert walk.model.tolist() == own.model[0].tolist()
        assert [walk.count_catch_up_tokens(model) for model in (SMALL, LARGE)] == own.catch_up_tokens_by_model.tolist()
        read = np.bincount(own.record.tokens.model, minlength=2).tolist()
        assert [walk.count_tokens_read(model) for model in (SMALL, LARGE)] == read
        for spent, opening in ((own.record.work, False), (own.opening_work, True)):
            for model, work in spent.items():
                widest = partners[model].decoder.capabilities.max_feed
                assert_same_work(walk.compute_work_of_model(model, work.layers, widest, opening), work)


class Alternating(SwitchingRule):
    """The large model writes one token, the small one ``least_run``, and so on, at whatever entropy."""

    def next_model(self, mean_bits, model, run):
        return SMALL if model == LARGE or run < self.least_run else LARGE


@pytest.mark.parametrize("widest", [64, 3])
@pytest.mark.parametrize("caught_up", [1, 2, 63, 64, 65, 110])
def test_work_is_what_decoding_alone_executes_at_any_catch_up_length(partners, monkeypatch, caught_up, widest):
    """A catch-up longer than a feed of the decoder is read in several."""
    for partner in partners:
        capabilities = replace(partner.decoder.capabilities, max_feed=widest)
        monkeypatch.setattr(partner.decoder, "capabilities", capabilities)
    rule, most = Alternating(0.0, 1, caught_up, LARGE), caught_up + 4
    own = switch(*partners, rule, PROMPTS[:1], most)
    (walk,) = PrefixTrees(rows=1).generate_switched(partners, [(TextGenerationRequest(PROMPTS[0].tokens, most), rule)])
    assert (caught_up + 1) in [n for _, n in walk.iterate_feeds(LARGE)], "its own last token besides"
    for model, work in own.record.work.items():
        assert_same_work(walk.compute_work_of_model(model, work.layers, widest), work)


def assert_same_work(derived, executed):
    for field in fields(Work):
        assert np.array_equal(getattr(derived, field.name), getattr(executed, field.name)), field.name


def test_rules_that_never_part_are_not_decoded_twice(partners):
    texts, wanted = PrefixTrees(rows=4), TextGenerationRequest(PROMPTS[0].tokens, 24)
    (first,) = texts.generate_switched(partners, [(wanted, RULES[0])])
    closed = tuple(Partner(None, partner.point) for partner in partners)
    (again,) = texts.generate_switched(closed, [(wanted, RULES[0])])
    assert again.tokens.tolist() == first.tokens.tolist()
    with pytest.raises(AttributeError):
        texts.generate_switched(closed, [(TextGenerationRequest(PROMPTS[2].tokens, 24), RULES[0])])


def test_choices_are_the_models_own_after_the_same_history(partners, walked):
    texts, wanted = PrefixTrees(rows=4), TextGenerationRequest(PROMPTS[0].tokens, 24)
    for rule in RULES:
        walk = walked[rule, 0]
        for model in (SMALL, LARGE):
            agrees = texts.greedy_choice_mask(partners, wanted, walk, model)
            assert agrees[walk.model == model].all(), "its own tokens"
            history = np.concatenate([wanted.prompt, walk.tokens])
            for at in (0, 7, len(walk.tokens) - 1):
                stood = Prompt(history[: len(wanted.prompt) + at])
                own = partners[model].decoder.generate([stood], 1, frozenset()).emitted[0][0]
                assert agrees[at] == (own == walk.tokens[at])


def test_options_are_read_by_the_model_in_charge(partners):
    """Compared token by token with either model's own log-probabilities and the rule's own formula."""
    options = [(PROMPTS[0].tokens, np.array(tokens)) for tokens in ([4, 8, 15], [16], [23, 42, 4, 8])]
    alone = [
        PrefixTrees(rows=1).score_continuations(partners, options, SwitchingRule(0.0, least_run=99, start=model))
        for model in (SMALL, LARGE)
    ]
    rule = SwitchingRule(float(np.median(alone[0][2].entropy_bits)), 2, 1, SMALL)
    for at, heard in enumerate(PrefixTrees(rows=1).score_continuations(partners, options, rule)):
        assert heard.model.tolist() == rule.model_by_token(heard.entropy_bits.tolist())[:-1].tolist()
        for name in ("log_p", "greedy", "entropy_bits"):
            own = np.array([getattr(side[at], name) for side in alone])
            assert getattr(heard, name).tolist() == own[heard.model, np.arange(len(heard.model))].tolist()
    (prompt_tokens, tokens) = options[2]
    for model, heard in zip((SMALL, LARGE), alone, strict=True):
        decoder = partners[model].decoder
        logits = [
            decoder.start([Prompt(np.concatenate([prompt_tokens, tokens[:n]]))])[1].logits[0, -1] for n in range(4)
        ]
        expected = [z[t] - np.log(np.exp(z).sum()) for z, t in zip(logits, tokens, strict=True)]
        np.testing.assert_allclose(heard[2].log_p, expected, atol=1e-5)  # float32 chunks of different width


def test_a_partner_that_decides_its_depth_is_refused(partners):
    small, large = partners
    layers = large.point.layers
    adaptive = OperatingPoint("early", "quantile", layers, layers, (1,), ((9.0,),))
    with pytest.raises(BadArgument, match="two models at full depth"):
        PrefixTrees(rows=1).generate_switched(
            (small, Partner(large.decoder, adaptive)), [(TextGenerationRequest(PROMPTS[0].tokens, 4), RULES[0])]
        )
    with pytest.raises(BadArgument, match="at least one new token"):
        PrefixTrees(rows=1).generate_switched(partners, [(TextGenerationRequest(PROMPTS[0].tokens, 0), RULES[0])])
