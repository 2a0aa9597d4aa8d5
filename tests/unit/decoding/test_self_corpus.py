"""Text written by the model itself: reproducible, distinct by split, and an error where the model writes none."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import EmptyCorpus
from emad_ref.decoding.self_corpus import DRY_BATCHES, SAMPLE_ROWS, iterate_sampled_documents
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.text.documents import SPLITS
from tests.small_models import VOCABULARY, small_model

OPENING = 0


@pytest.fixture(scope="module")
def stepper():
    return CausalStepper(small_model("gpt_neox"))


def taken(stepper, split="evaluate", count=20, seed=0):
    return [d.tolist() for d in islice(iterate_sampled_documents(stepper, OPENING, 12, split, seed), count)]


def test_samples_are_documents_without_the_opening_token(stepper):
    for document in taken(stepper):
        assert 2 <= len(document) <= 12
        assert OPENING not in document
        assert all(0 <= token < VOCABULARY for token in document)


def test_the_seed_decides_and_batches_differ(stepper):
    documents = taken(stepper, count=SAMPLE_ROWS + 4)
    assert documents == taken(stepper, count=SAMPLE_ROWS + 4)
    assert documents != taken(stepper, count=SAMPLE_ROWS + 4, seed=1)
    assert len({tuple(d) for d in documents}) == len(documents)


def test_splits_draw_on_their_own(stepper):
    splits = [{tuple(d) for d in taken(stepper, split)} for split in SPLITS]
    assert sum(map(len, splits)) == len(set().union(*splits))


@pytest.mark.parametrize(
    ("tokens", "split", "message"),
    [(1, "evaluate", "tokens=1, but expected at least 2"), (8, "test", "split='test', but expected one of train")],
)
def test_bad_requests_are_refused_at_once(stepper, tokens, split, message):
    with pytest.raises(BadArgument, match=message):
        iterate_sampled_documents(stepper, OPENING, tokens, split)


def test_a_model_that_ends_at_once_is_an_empty_corpus_and_not_an_endless_wait():
    model = small_model("gpt_neox")
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
        norm = model.gpt_neox.final_layer_norm
        norm.weight.zero_()
        norm.bias.fill_(1.0)
        model.get_output_embeddings().weight[OPENING] = 10.0  # 320 nats above every other token
    with pytest.raises(
        EmptyCorpus, match=f"{DRY_BATCHES * SAMPLE_ROWS} samples of this model ended.*name a corpus of real text"
    ):
        next(iterate_sampled_documents(CausalStepper(model), OPENING, 8, "evaluate"))


def test_documents_are_integers(stepper):
    assert next(iterate_sampled_documents(stepper, OPENING, 8, "train")).dtype == np.int64
