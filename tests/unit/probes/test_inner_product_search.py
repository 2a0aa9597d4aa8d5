"""Inner-product search: exact search is exact, approximate search states its recall and its cost."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from emad_ref.errors import BadArgument, MissingExtra
from emad_ref.probes.estimators import ExactIndex, FaissIndex, recall_at_k_by_row

VOCABULARY, WIDTH, TOPICS = 900, 24, 30


@pytest.fixture(scope="module")
def rows():
    """Return an unembedding in topics, with rows of unlike length around a common mean, as in trained models."""
    generator = torch.Generator().manual_seed(0)
    topics = torch.randn(TOPICS, WIDTH, generator=generator)
    length = 0.5 + torch.rand(VOCABULARY, 1, generator=generator)
    near = topics[torch.arange(VOCABULARY) % TOPICS] + 0.4 * torch.randn(VOCABULARY, WIDTH, generator=generator)
    return length * near + 2 * torch.randn(WIDTH, generator=generator)


@pytest.fixture(scope="module")
def states(rows):
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(0, VOCABULARY, (50,), generator=generator)
    return rows[chosen] + 0.5 * torch.randn(50, WIDTH, generator=generator)


@pytest.fixture(scope="module")
def bias():
    return 3 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def approximate():
    pytest.importorskip("faiss", reason="the extra pytest-emad[faiss] is not installed")
    return FaissIndex


def test_exact_search_returns_the_largest_logits_in_order(rows, states, bias):
    values, ids = ExactIndex(rows, bias).search(states, 7)
    z = states @ rows.T + bias
    assert torch.allclose(values, z.sort(dim=1, descending=True).values[:, :7], atol=1e-5)
    assert torch.allclose(z.gather(1, ids), values, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_searching_every_list_is_exact(approximate, rows, states, bias, biased):
    """Values up to float32 rounding of products summed in another order; ids except where logits tie that closely."""
    with_bias = bias if biased else None
    index = approximate(rows, with_bias, lists_searched=30)
    values, ids = index.search(states, 40)
    exact, exact_ids = ExactIndex(rows, with_bias).search(states, 40)
    assert torch.allclose(values, exact, atol=1e-4)
    assert recall_at_k_by_row(ids, exact_ids).min() >= 39 / 40


@pytest.mark.parametrize("searched", [2, 6, 12])
def test_values_are_the_logits_of_the_ids_and_never_above_the_exact_ones(approximate, rows, states, bias, searched):
    values, ids = approximate(rows, bias, lists_searched=searched).search(states, 20)
    z = states @ rows.T + bias
    assert torch.allclose(z.gather(1, ids), values, atol=1e-4)
    assert (values <= ExactIndex(rows, bias).search(states, 20)[0] + 1e-4).all()
    assert all(len(set(row)) == 20 for row in ids.tolist()), "a row is returned once"


def test_recall_and_cost_grow_with_the_lists_searched(approximate, rows, states):
    exact = ExactIndex(rows).search(states, 20)[1]
    indices = [approximate(rows, lists_searched=n) for n in (3, 8, 30)]
    recalls = [float(recall_at_k_by_row(index.search(states, 20)[1], exact).mean()) for index in indices]
    costs = [index.macs_per_row(20) for index in indices]
    assert recalls == sorted(recalls)
    assert costs == sorted(costs)
    assert recalls[1] > 0.75, "a quarter of the lists finds most near rows"


def test_rows_are_searched_alike_alone_and_in_a_batch(approximate, rows, states):
    index = approximate(rows, lists_searched=5)
    together = index.search(states, 10)
    for i in range(5):
        alone = index.search(states[i : i + 1], 10)
        assert torch.equal(alone[1][0], together[1][i])
        assert torch.allclose(alone[0][0], together[0][i], atol=1e-5)


def test_a_search_reads_at_least_the_lists_asked_for_and_enough_for_twice_k(approximate, rows):
    index = approximate(rows, lists_searched=2)
    assert index.count_lists_to_search(1) == 2
    fewest = [index.count_lists_to_search(k) for k in (10, 100, VOCABULARY)]
    assert 2 < fewest[0] < fewest[1] < fewest[2] == 30
    assert index._fewest[fewest[1] - 1] >= 200 > index._fewest[fewest[1] - 2]


def test_recall_counts_ids_in_any_order():
    found, exact = torch.tensor([[3, 1, 2], [7, 8, 9]]), torch.tensor([[1, 2, 3], [9, 5, 6]])
    assert recall_at_k_by_row(found, exact).tolist() == [1.0, pytest.approx(1 / 3)]
    with pytest.raises(BadArgument, match="the shape of the exact ids"):
        recall_at_k_by_row(found[:, :2], exact)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lists": 0}, "lists=0, but expected 1–900"),
        ({"lists": 901}, "lists=901, but expected 1–900"),
        ({"lists_searched": 0}, "lists_searched=0, but expected 1–30"),
        ({"lists_searched": 31}, "lists_searched=31, but expected 1–30"),
    ],
)
def test_impossible_sizes_are_refused(approximate, rows, arguments, message):
    with pytest.raises(BadArgument, match=message):
        approximate(rows, **arguments)


def test_without_faiss_the_error_names_the_extra(monkeypatch, rows):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtra, match=r"pip install 'pytest-emad\[faiss\]', or search='lowrank'"):
        FaissIndex(rows)


def test_a_half_precision_unembedding_is_searched_in_its_own_dtype(approximate, rows, states):
    values, _ = approximate(rows.bfloat16(), lists_searched=4).search(states.bfloat16(), 5)
    assert values.dtype == torch.bfloat16
    assert np.isfinite(values.float().numpy()).all()
