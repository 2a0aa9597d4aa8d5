"""Continuation-choice items: the source and order of the options, and refused corpora."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pytest_emad.tasks.datasets import TaskDataUnavailable
from pytest_emad.tasks.scoring import (
    CONTEXT_TOKENS,
    CONTINUATION_TOKENS,
    FEWEST_DOCUMENTS,
    MOST_READ,
    OPTIONS,
    cluster_duplicate_items,
    make_continuation_items,
    to_token_sequences,
)

OPENING = 0
END = CONTEXT_TOKENS + CONTINUATION_TOKENS


def corpus(*lengths: int) -> list[np.ndarray]:
    """Return documents without common tokens: position p in document d has token 1000 (d + 1) + p."""
    return [1000 * (number + 1) + np.arange(length, dtype=np.int64) for number, length in enumerate(lengths)]


def made(documents, count=500, *, opening=OPENING, seed=3):
    return make_continuation_items(documents, count, text="t", opening=opening, rng=np.random.default_rng(seed))


def document_of(tokens) -> int:
    """Return the document that ``tokens`` come from."""
    (number,) = {int(token) // 1000 - 1 for token in tokens}
    return number


def test_an_item_is_one_documents_beginning_its_own_next_tokens_and_those_of_three_others():
    items = made(corpus(*[70] * 40))
    assert [document_of(item.prompt[1:]) for item in items] == list(range(40)), "one item per document, in their order"
    for number, item in enumerate(items):
        assert item.prompt.tolist() == [OPENING, *(1000 * (number + 1) + np.arange(CONTEXT_TOKENS))]
        own = item.continuations[item.example.answer_index]
        assert own.tolist() == (1000 * (number + 1) + np.arange(CONTEXT_TOKENS, END)).tolist()
        others = [document_of(each) for at, each in enumerate(item.continuations) if at != item.example.answer_index]
        assert len(others) == len({*others}) == OPTIONS - 1
        assert number not in others
        assert {len(each) for each in item.continuations} == {CONTINUATION_TOKENS}
        assert all((each % 1000 == own % 1000).all() for each in item.continuations), "the same place of each document"
    assert len(np.unique(cluster_duplicate_items(items))) == 40
    starts = {sequence.first_decided for sequence in to_token_sequences(items)}
    assert starts == {CONTEXT_TOKENS}, "the last token of the context, behind the opening token, is decided first"


def test_each_piece_is_right_once_and_wrong_as_often_as_any_other():
    offered = Counter(document_of(piece) for item in made(corpus(*[60] * 50)) for piece in item.continuations)
    assert offered == dict.fromkeys(range(50), OPTIONS)


def test_the_answers_place_tells_nothing():
    places = Counter(item.example.answer_index for item in made(corpus(*[60] * 400)))
    assert set(places) == set(range(OPTIONS))
    assert max(places.values()) < 0.35 * 400


def test_the_seed_fixes_documents_and_order():
    def shown(seed):
        return [[piece.tolist() for piece in item.continuations] for item in made(corpus(*[60] * 40), seed=seed)]

    assert shown(1) == shown(1)
    assert shown(1) != shown(2)
    neighbours = [
        {document_of(piece) for piece in item.continuations} == {(number + step) % 40 for step in range(OPTIONS)}
        for number, item in enumerate(made(corpus(*[60] * 40)))
    ]
    assert not all(neighbours), "neighbours in the corpus are not offered together"


def test_without_an_opening_token_the_context_stands_alone():
    item = made(corpus(*[60] * 40), opening=None)[0]
    assert len(item.prompt) == CONTEXT_TOKENS


def test_short_documents_are_left_out_and_no_more_are_read_than_asked_for():
    lengths = [END - 1, END] * 60
    assert [document_of(item.prompt[1:]) for item in made(corpus(*lengths), 35)] == list(range(1, 70, 2))
    endless = (np.arange(3, dtype=np.int64) for _ in iter(int, 1))
    with pytest.raises(TaskDataUnavailable, match=f"0 of {MOST_READ * 40} documents read have {END} tokens"):
        made(endless, 40)


def test_a_corpus_too_small_or_of_documents_too_short_is_refused_by_name():
    assert len(made(corpus(*[END] * FEWEST_DOCUMENTS))) == FEWEST_DOCUMENTS
    few = f"t: {FEWEST_DOCUMENTS - 1} of {FEWEST_DOCUMENTS - 1} documents read have {END} tokens"
    with pytest.raises(
        TaskDataUnavailable, match=f"{few}, but continuation choice needs {FEWEST_DOCUMENTS}; use a lar"
    ):
        made(corpus(*[END] * (FEWEST_DOCUMENTS - 1)))
    with pytest.raises(TaskDataUnavailable, match=f"1 of 100 documents read have {END} tokens.* of longer documents"):
        made(corpus(END, *[END - 1] * 99))


def test_equal_pieces_are_offered_once():
    """Every second document continues alike: such a piece is never both the answer and a wrong option."""
    documents = corpus(*[60] * 40)
    for document in documents[::2]:
        document[CONTEXT_TOKENS:] = 7
    for item in made(documents):
        assert len({piece.tobytes() for piece in item.continuations}) == OPTIONS
    for document in documents:
        document[CONTEXT_TOKENS:] = document[0] % 3
    with pytest.raises(TaskDataUnavailable, match="40 documents, but only 3 kinds of tokens after their first 32"):
        made(documents)
