"""Resampling units as types: columns of documents, items and pairs; windows are summed into documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from pytest_emad.statistics.rates import mean_rate
from pytest_emad.statistics.units import ByDocument, ByItem, ByPair, DocumentMembership, Units
from pytest_emad.statistics.verdicts import COUNTED

KINDS = (ByDocument, ByItem, ByPair)
MADE = (ByDocument.from_whole_documents, ByItem.from_independent_items, ByPair)


@pytest.mark.parametrize(("kind", "noun"), list(zip(MADE, COUNTED, strict=True)))
def test_every_kind_knows_what_it_counts(kind, noun):
    column = kind(np.arange(4.0))
    assert (column.noun, len(column)) == (noun, 4)
    assert type(column.with_values(np.ones(4))) is type(column)
    assert column.independent_values.tolist() == [0, 1, 2, 3]
    assert column.select(np.array([True, False, False, True])).values.tolist() == [0, 3]


def test_items_keep_their_clusters_and_count_once_for_each():
    column = ByItem(np.array([1.0, 2.0, 4.0, 8.0]), np.array([5, 3, 5, 3]))
    assert column.independent_values.tolist() == [10, 5]
    assert column.with_values(np.array([True, True, True, False])).independent_values.tolist() == [1, 2]
    assert column.select(np.array([True, False, True, False])).independent_values.tolist() == [5]
    assert column.with_values(np.ones((4, 2))).independent_values.tolist() == [[2, 2], [2, 2]]
    assert not column.has_only_independent_items


@pytest.mark.parametrize("cluster", [np.arange(3), np.arange(4.0), np.zeros((4, 1), dtype=int), 0])
def test_every_item_has_one_cluster(cluster):
    with pytest.raises(BadArgument, match=r"^cluster="):
        ByItem(np.ones(4), cluster)


def test_items_without_clusters_are_no_column():
    with pytest.raises(TypeError, match="cluster"):
        ByItem(np.ones(4))


def test_windows_do_not_pass_for_documents():
    """Each window has the number of its document, so two of one number form no column of documents."""
    windows, document = np.array([1.0, 2.0, 4.0]), np.array([7, 7, 9])
    with pytest.raises(BadArgument, match="expected one entry for each of 2 documents; sum windows first"):
        ByDocument(windows, document)
    with pytest.raises(TypeError, match="number"):
        ByDocument(windows)
    found = ByDocument.from_summed_windows(windows, DocumentMembership(document))
    assert (found.values.tolist(), found.number.tolist()) == ([3.0, 4.0], [7, 9])
    assert found.select(np.array([False, True])).number.tolist() == [9]
    assert found.with_values(np.ones(2)).number.tolist() == [7, 9]


@pytest.mark.parametrize("number", [np.arange(3), np.zeros((4, 1), dtype=int), 0])
def test_every_document_has_one_number(number):
    with pytest.raises(BadArgument, match=r"^number="):
        ByDocument(np.ones(4), number)


def test_columns_of_other_documents_are_not_paired():
    here, there = (ByDocument(np.array([1.0, 2.0]), np.array(number)) for number in ([0, 1], [0, 2]))
    with pytest.raises(BadArgument, match=r"^tokens\.names=.*documents of the other side"):
        mean_rate(here, there, threshold=0.0, rng=np.random.default_rng(0), unit="nats")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "values",
    [3.0, np.float64(2.0), ByItem.from_independent_items(np.ones(3)), ByDocument.from_whole_documents(np.ones(3))],
)
def test_a_scalar_or_another_column_is_no_column(kind, values):
    with pytest.raises(BadArgument, match=rf"^{kind.__name__}=.*\[{kind.noun}, …\]"):
        MADE[KINDS.index(kind)](values)


def test_other_values_of_the_same_units_are_as_many():
    with pytest.raises(BadArgument, match=r"^values=3, but expected 4 entries"):
        ByDocument.from_whole_documents(np.ones(4)).with_values(np.ones(3))


def test_a_column_is_itself_and_not_its_values():
    """Compare ``values``: equality of arrays has no single answer."""
    assert Units(np.ones(2)) != Units(np.ones(2))


def test_windows_are_summed_within_their_documents():
    document = DocumentMembership(np.array([0, 0, 1, 2, 2, 2]))
    assert ByDocument.from_summed_windows(np.array([1, 2, 4, 8, 16, 32]), document).values.tolist() == [3, 4, 56]
    by_layer = ByDocument.from_summed_windows(np.ones((6, 2)), document).values
    assert by_layer.tolist() == [[2.0, 2.0], [1.0, 1.0], [3.0, 3.0]]
    assert document.document_index.tolist() == [0, 0, 1, 2, 2, 2]
    assert len(document) == 6


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), min_size=1, max_size=30))
def test_numbers_are_names_in_any_order_and_sums_come_in_theirs(entries):
    number, values = np.array(entries).T
    sums = DocumentMembership(number).sum_by_document(values)
    assert sums.tolist() == [values[number == name].sum() for name in np.unique(number)]
    assert (np.unique(number)[DocumentMembership(number).document_index] == number).all()


@pytest.mark.parametrize("values", [np.ones(3), np.ones((1, 2)), []])
def test_a_column_of_another_length_is_refused(values):
    with pytest.raises(BadArgument, match=r"^values="):
        ByDocument.from_summed_windows(values, DocumentMembership(np.array([0, 1])))


def test_windows_of_one_document_that_repeat_one_another_narrow_nothing():
    """Ten documents of four equal windows each: resampled as windows they look like forty independent ones."""
    source, document = np.random.default_rng(4), DocumentMembership(np.repeat(np.arange(10), 4))
    rates, tokens = np.repeat(source.normal(0.02, 0.01, 10), 4), np.full(40, 100)

    def width(x: ByDocument, n: ByDocument) -> float:
        rate = mean_rate(x, n, threshold=0.0, rng=np.random.default_rng(0), unit="nats")
        return rate.high - rate.low

    summed = width(
        ByDocument.from_summed_windows(rates * tokens, document), ByDocument.from_summed_windows(tokens, document)
    )
    as_if_independent = width(ByDocument.from_whole_documents(rates * tokens), ByDocument.from_whole_documents(tokens))
    assert summed > 1.8 * as_if_independent


def test_paired_columns_share_their_clusters():
    a, cluster = np.ones(4), np.array([0, 0, 1, 1])
    with pytest.raises(BadArgument, match=r"^tokens\.names="):
        mean_rate(
            ByItem(a, cluster), ByItem.from_independent_items(a), threshold=0.0, rng=np.random.default_rng(0), unit="x"
        )


def test_items_that_repeat_one_another_narrow_nothing():
    """Thirty items, each four times: the estimate and the interval are those of thirty."""
    source = np.random.default_rng(4)
    once = source.normal(0.1, 0.3, 30)

    def width(items: ByItem) -> float:
        ones = items.with_values(np.ones(len(items)))
        rate = mean_rate(items, ones, threshold=0.0, rng=np.random.default_rng(0), unit="x")
        assert rate.value == pytest.approx(once.mean())
        return rate.high - rate.low

    repeated = ByItem(np.repeat(once, 4), np.repeat(np.arange(30), 4))
    assert width(repeated) == pytest.approx(width(ByItem.from_independent_items(once)))
    assert width(ByItem.from_independent_items(repeated.values)) < 0.6 * width(repeated)
