"""Weight layout after loading: large weights by columns on large pages, others along their longer side.

The numbers stay equal; only the strides change.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from emad_ref.models.fast.weight_layout import LARGE, PAGE, RUN_GAP, lay_out_weights, to_preferred_weight_layout
from emad_ref.models.fingerprint import fingerprint_of
from emad_ref.models.loading import load
from tests.small_models import small_model

IDS = torch.arange(3, 11)[None]
ROUNDING = 1e-5  # sums in a different order, of logits of order 1 in float32


def linear(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


def along_its_longer_side(weight: torch.Tensor, gap: int = 0) -> bool:
    out, wide = weight.shape
    return weight.stride() == ((1, out + gap) if out >= wide else (wide, 1))


@pytest.fixture(params=["llama", "llama3", "gpt2"], ids=["apart", "tied", "no linear layer but the head, tied"])
def both(request):
    """Return a small model as constructed, and the same with the new layout."""
    plain = small_model(request.param, torch.float32)
    laid = deepcopy(plain)
    lay_out_weights(laid)
    return plain, laid


def test_a_loaded_model_has_every_linear_weight_along_its_longer_side_and_its_embeddings_by_rows():
    model = load("emad-nano").model
    weights = [module.weight for module in linear(model).values()]
    assert all(along_its_longer_side(weight) for weight in weights)
    assert {weight.is_contiguous() for weight in weights} == {True, False}
    assert model.get_input_embeddings().weight.is_contiguous()
    rounded = linear(load("emad-nano", dtype=torch.bfloat16).model).values()
    assert all(module.weight.is_contiguous() for module in rounded)


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
    assert along_its_longer_side(head) != tied
    inner = {name: module for name, module in linear(laid).items() if module.weight is not head}
    assert all(along_its_longer_side(module.weight) for module in inner.values())
    assert bool(inner) == (laid.config.model_type == "llama")


def test_a_second_time_changes_and_copies_nothing(both):
    _, laid = both
    places = {name: (weight.data_ptr(), weight.stride()) for name, weight in laid.named_parameters()}
    lay_out_weights(laid)
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
    assert to_preferred_weight_layout(weight) is weight


@pytest.mark.parametrize("shape", [(2048, 512), (512, 2048)], ids=["wide", "tall"])
def test_a_large_weight_begins_with_a_large_page_and_goes_there_once(shape):
    weight = torch.randn(shape)
    assert weight.numel() * weight.element_size() == LARGE
    laid, gap = to_preferred_weight_layout(weight), RUN_GAP if shape[0] > shape[1] else 0
    assert torch.equal(laid, weight)
    assert laid.stride() == (1, shape[0] + gap)
    assert laid.data_ptr() % PAGE == 0
    # it ends with its numbers, not with the page: unused bytes of the page are not saved
    assert laid.untyped_storage().nbytes() == LARGE + gap * shape[1] * 4
    assert to_preferred_weight_layout(laid).data_ptr() == laid.data_ptr()
    elsewhere = torch.empty(laid.untyped_storage().nbytes() // 4 + 1)[1:].as_strided(laid.shape, laid.stride())
    assert elsewhere.copy_(laid).data_ptr() % PAGE
    assert to_preferred_weight_layout(elsewhere).data_ptr() % PAGE == 0


def test_where_there_are_no_large_pages_a_large_weight_lies_where_any_does(monkeypatch):
    monkeypatch.setattr("emad_ref.models.fast.weight_layout._ON_LARGE_PAGES", None)
    small, weight = torch.randn(64, 256), torch.randn(512, 2048)
    assert to_preferred_weight_layout(small) is small
    laid = to_preferred_weight_layout(weight.t())
    assert along_its_longer_side(laid, RUN_GAP)
    assert to_preferred_weight_layout(laid) is laid


def test_embeddings_and_what_they_share_go_to_large_pages_together():
    embedding, head = nn.Embedding(4096, 256), nn.Linear(256, 4096, bias=False)
    head.weight = embedding.weight
    before = embedding.weight.detach().clone()
    lay_out_weights(nn.ModuleList([head, embedding]))
    assert head.weight is embedding.weight
    assert embedding.weight.is_contiguous()
    assert embedding.weight.data_ptr() % PAGE == 0
    assert torch.equal(embedding.weight, before)


def test_a_view_of_a_large_weight_lives_on_without_it():
    laid = to_preferred_weight_layout(torch.ones(512, 2048))
    view = laid[:2]
    del laid
    assert torch.equal(view, torch.ones(2, 2048))
