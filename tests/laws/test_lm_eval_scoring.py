"""Scores from one pass and a replay equal those of lm-eval's own model and those of token-by-token decoding."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.exit_rules import fixed_entropy_point
from emad_ref.models.bundled import weights_folder
from emad_ref.models.loading import load
from emad_ref.point import EntropyEstimator, OperatingPoint, ThresholdBinSpec, full_depth, truncated

pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")
from pytest_emad.tasks.continuation_scoring import (
    ForcedInput,
    required_layers,
    score_by_decoding,
    trace_required_layers,
)
from pytest_emad.tasks.lm_eval_model import EmadLM

pytestmark = pytest.mark.each_value

LONGEST = 40  # the model reads 512; shorter windows give more of them
WORDS = [
    "Ada",
    "has",
    "9",
    "cards.",
    "Bob",
    "finds",
    "the",
    "key",
    "in",
    "the",
    "white",
    "box!",
    "How",
    "many",
    "cards",
    "are",
    "there",
    "now?",
    "In",
    "1834",
    "it",
    "rained;",
]
EARLY = fixed_entropy_point(12, (4, 8), 1.0)


@pytest.fixture(scope="module")
def loaded():
    """Load in float64, so that the order of a sum cannot move a signal across a threshold."""
    return load("emad-tiny", dtype=torch.float64)


@pytest.fixture(scope="module")
def theirs(loaded):
    """Return lm-eval's own `hf` model with the same weights."""
    hf = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval[hf] is not installed", exc_type=ImportError)
    return hf.HFLM(
        pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=3, max_length=LONGEST, softmax_dtype="float64"
    )


def request(*arguments):
    return SimpleNamespace(args=arguments)


def texts(count: int, words: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(1, words + 1))) for _ in range(count)]


@pytest.fixture(scope="module")
def pairs():
    """Return contexts of many lengths, some empty or too long; options of one token share their context."""
    contexts, continuations = texts(12, 12, seed=1), texts(12, 6, seed=2)
    drawn = [request(c, " " + k) for c, k in zip(contexts, continuations, strict=True)]
    options = [request("How many cards? Answer:", f" {n}") for n in (3, 7, 9)]
    return [*drawn, *options, request("", "Ada has"), request("Trailing space ", "here"), request("word " * 60, "more")]


def scores(lm, requests):
    likelihood, greedy = zip(*lm.loglikelihood(requests, disable_tqdm=True), strict=True)
    return np.array(likelihood), list(greedy)


def test_log_likelihoods_at_full_depth_are_those_of_lm_evals_own_model(loaded, theirs, pairs):
    mine, greedy = scores(EmadLM(loaded, max_length=LONGEST), pairs)
    hf, hf_greedy = scores(theirs, pairs)
    np.testing.assert_allclose(mine, hf, rtol=0, atol=1e-5)  # sums of a hundred float32 logarithms at most
    assert greedy == hf_greedy


def test_rolling_log_likelihoods_are_those_of_lm_evals_own_model(loaded, theirs):
    documents = [request(text) for text in ["Ada", *texts(6, 90, seed=3)]]
    mine = EmadLM(loaded, max_length=LONGEST).loglikelihood_rolling(documents, disable_tqdm=True)
    hf = theirs.loglikelihood_rolling(documents, disable_tqdm=True)
    np.testing.assert_allclose(mine, hf, rtol=1e-6)  # hundreds of nats, each window summed in float32 here


@pytest.mark.parametrize("stops", [["."], ["\n\n", "? "], []])
def test_greedy_strings_are_those_of_lm_evals_own_model(loaded, theirs, stops):
    settings = {"until": stops, "max_gen_toks": 12, "do_sample": False}
    requests = [request(text, settings) for text in ["Ada", *texts(7, 20, seed=4)]]
    mine = EmadLM(loaded, max_length=LONGEST).generate_until(requests, disable_tqdm=True)
    assert mine == theirs.generate_until(requests, disable_tqdm=True)
    assert len(set(mine)) > 1


POINTS = {
    "monotone": EARLY,
    "free": replace(EARLY, schedule="free_eager"),
    "response": replace(EARLY, signal="softmax_response", thresholds=((0.8, 0.8),)),
    "truncated": truncated(12, 6),
    "low ceiling": OperatingPoint("low", "fixed_entropy", 12, 10, (4, 8), ((1.0, 1.0),)),
    "between probes": replace(fixed_entropy_point(12, (2, 4, 8), 1.0), interpolate=True),
    "chunked": replace(EARLY, schedule="chunked", period=3),
    "positional": OperatingPoint("fall", "positional", 12, 12, schedule="positional", period=6, floor=3),
    "by position": replace(EARLY, thresholds=((0.2, 0.4), (1.0, 1.2)), bins=ThresholdBinSpec(("position",), (9,))),
    "by top1_probability": replace(
        EARLY, thresholds=((0.2, 0.4), (0.5, 0.8), (1.0, 1.2)), bins=ThresholdBinSpec(("top1_probability",))
    ),
}


@pytest.mark.parametrize("name", POINTS)
def test_one_pass_and_a_replay_give_what_decoding_token_by_token_gives(loaded, pairs, name):
    point = POINTS[name]
    decoder = WalkedDecoder(loaded.stepper, point, max_rows=5)
    mine, greedy = scores(EmadLM(loaded, point=point, max_length=LONGEST), pairs)
    slow, slow_greedy = scores(EmadLM(loaded, point=point, decoder=decoder, batch_size=5, max_length=LONGEST), pairs)
    np.testing.assert_allclose(mine, slow, rtol=0, atol=1e-5)  # float32 logarithms against float64 ones
    assert greedy == slow_greedy
    full, _ = scores(EmadLM(loaded, max_length=LONGEST), pairs)
    assert np.abs(mine - full).max() > 0.01, "depth made no difference: nothing was tested"


@pytest.mark.parametrize(
    "point",
    [
        replace(EARLY, estimator=EntropyEstimator("topk", k=64)),
        replace(EARLY, schedule="copying"),
    ],
    ids=["estimated", "copying"],
)
def test_what_replay_cannot_decide_is_decoded(loaded, pairs, point):
    decoder = WalkedDecoder(loaded.stepper, point, max_rows=4)
    mine, _ = scores(EmadLM(loaded, point=point, max_length=LONGEST), pairs[:6])
    slow, _ = scores(EmadLM(loaded, point=point, decoder=decoder, batch_size=4, max_length=LONGEST), pairs[:6])
    np.testing.assert_allclose(mine, slow, rtol=0, atol=1e-9)  # the same decoding in other batches


@pytest.mark.parametrize("point", [full_depth(12), EARLY], ids=lambda point: point.name)
def test_results_do_not_depend_on_the_batch_size(loaded, pairs, point):
    documents = [request(text) for text in texts(3, 60, seed=5)]
    settings = {"until": ["."], "max_gen_toks": 10}
    contexts = [request(text, settings) for text in texts(9, 15, seed=6)]
    results = []
    for rows in (1, 7, None):
        lm = EmadLM(loaded, point=point, batch_size=rows, max_length=LONGEST)
        rolling = lm.loglikelihood_rolling(documents, disable_tqdm=True)
        results.append((*scores(lm, pairs), rolling, lm.generate_until(contexts, disable_tqdm=True)))
    for other in results[1:]:
        np.testing.assert_allclose(other[0], results[0][0], rtol=1e-6)  # −log p is kept in float32
        np.testing.assert_allclose(other[2], results[0][2], rtol=1e-6)
        assert (other[1], other[3]) == (results[0][1], results[0][3])


def test_generation_at_an_adaptive_point_is_the_decoders_own(loaded):
    prompts = texts(5, 15, seed=7)
    lm = EmadLM(loaded, point=EARLY)
    mine = lm.generate_until([request(p, {"until": [], "max_gen_toks": 9}) for p in prompts], disable_tqdm=True)
    decoder = WalkedDecoder(loaded.stepper, EARLY)
    for text, prompt in zip(mine, prompts, strict=True):
        ids = np.array(loaded.tokenizer.encode(prompt))
        record = decoder.generate([SimpleNamespace(tokens=ids, source=None)], 9, frozenset({lm.eot_token_id}))
        assert text == loaded.tokenizer.decode(record.emitted[0].tolist(), skip_special_tokens=True)


def test_padding_is_never_seen_by_a_rule(loaded):
    """Neither the neighbours of an input nor their lengths change any of its readouts."""
    short, long = ForcedInput((5, 6, 7, 8), 2, (9,)), ForcedInput(tuple(range(20, 60)), 3, (61,))
    alone = trace_required_layers(loaded.stepper, EARLY, [short])
    beside = trace_required_layers(loaded.stepper, EARLY, [long, short])
    for name in ("entropy_nats", "nll_nats"):
        np.testing.assert_allclose(getattr(beside, name)[-2:], getattr(alone, name), rtol=1e-6)
    assert np.isfinite(beside.entropy_nats[:, [3, 7]]).all()
    assert not np.isfinite(beside.entropy_nats[:, [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]]).any()


def test_full_depth_reads_the_last_layer_only(loaded):
    assert required_layers(full_depth(12)) == (12,)
    assert required_layers(EARLY) == (4, 8, 12)
    trace = trace_required_layers(loaded.stepper, full_depth(12), [ForcedInput((5, 6, 7), 1, (8,))])
    assert (trace.top1[:, :-1] == -1).all()


def test_continuations_that_share_their_input_are_answered_apart(loaded):
    one_by_one = [
        score_by_decoding(WalkedDecoder(loaded.stepper, EARLY), [ForcedInput((5, 6, 7), 1, (last,))])[0]
        for last in (8, 9)
    ]
    together = score_by_decoding(WalkedDecoder(loaded.stepper, EARLY), [ForcedInput((5, 6, 7), 1, (8, 9))])
    assert together == one_by_one
    assert together[0] != together[1]


def test_in_bfloat16_log_likelihoods_are_those_of_lm_evals_own_model():
    """Each loads the folder itself. Long contexts: rounded rotary frequencies show at high positions."""
    hf = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval[hf] is not installed", exc_type=ImportError)
    folder = str(weights_folder() / "emad-tiny")
    settings = {"dtype": "bfloat16", "device": "cpu", "batch_size": 1}
    theirs = hf.HFLM(pretrained=folder, softmax_dtype="float32", **settings)
    contexts, continuations = texts(5, 200, seed=1), texts(5, 6, seed=2)
    requests = [request(c, " " + k) for c, k in zip(contexts, continuations, strict=True)]
    mine, greedy = scores(EmadLM(folder, **settings), requests)
    expected, hf_greedy = scores(theirs, requests)
    assert max(len(theirs.tok_encode(context)) for context in contexts) > 250
    np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-4)  # sums of ten float32 logarithms; 0.5 if rounded
    assert greedy == hf_greedy
