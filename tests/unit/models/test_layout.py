"""Weights lie by columns after loading: the same numbers under other strides, embeddings and their heads left alone."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from emad_ref.models.layout import columns_first, lay_out
from emad_ref.models.loading import fingerprint_of, load
from tests.small import small_model

IDS = torch.arange(3, 11)[None]
ROUNDING = 1e-5  # sums in another order, of logits of order 1 in float32


def linear(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


def by_columns(weight: torch.Tensor) -> bool:
    rows, _ = weight.shape
    return weight.stride() == (1, rows)


@pytest.fixture(params=["llama", "llama3", "gpt2"], ids=["apart", "tied", "no linear layer but the head, tied"])
def both(request):
    """A small model as it is made, and the same laid out."""
    plain = small_model(request.param, torch.float32)
    laid = deepcopy(plain)
    lay_out(laid)
    return plain, laid


def test_a_loaded_model_has_every_linear_weight_by_columns_and_its_embeddings_by_rows():
    model = load("emad-nano").model
    assert all(by_columns(module.weight) for module in linear(model).values())
    assert model.get_input_embeddings().weight.is_contiguous()
    assert not any(
        by_columns(module.weight) for module in linear(load("emad-nano", dtype=torch.bfloat16).model).values()
    )


def test_numbers_names_and_fingerprint_stay(both):
    plain, laid = both
    before, after = plain.state_dict(), laid.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert fingerprint_of(plain, None) == fingerprint_of(laid, None)


def test_what_an_embedding_shares_is_neither_moved_nor_copied(both):
    _, laid = both
    embedding, head = laid.get_input_embeddings().weight, laid.get_output_embeddings().weight
    tied = laid.config.tie_word_embeddings
    assert (embedding is head) == tied
    assert embedding.is_contiguous()
    assert by_columns(head) != tied
    inner = {name: module for name, module in linear(laid).items() if module.weight is not head}
    assert all(by_columns(module.weight) for module in inner.values())
    assert bool(inner) == (laid.config.model_type == "llama")


def test_a_second_time_changes_and_copies_nothing(both):
    _, laid = both
    places = {name: (weight.data_ptr(), weight.stride()) for name, weight in laid.named_parameters()}
    lay_out(laid)
    assert {name: (weight.data_ptr(), weight.stride()) for name, weight in laid.named_parameters()} == places


def test_the_model_says_the_same(both):
    plain, laid = both
    with torch.inference_mode():
        torch.testing.assert_close(laid(IDS).logits, plain(IDS).logits, rtol=0, atol=ROUNDING)
        said = [each.generate(IDS, max_new_tokens=12, do_sample=False).tolist() for each in both]
    assert said[0] == said[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_stay_as_they_are(dtype):
    weight = torch.arange(12, dtype=dtype).reshape(3, 4)
    assert columns_first(weight) is weight
