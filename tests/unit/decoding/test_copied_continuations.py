"""Copied continuations: the tokens that followed the last occurrence of the text's end."""

from __future__ import annotations

from emad_ref.decoding.self_speculation import MATCHED_TOKENS, PromptLookup


def test_the_last_place_counts_and_a_new_end_copies_nothing():
    assert PromptLookup().find_continuation([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 2) == [8, 1]
    assert PromptLookup().find_continuation([1, 2, 3, 4], 5) == []
    assert PromptLookup().find_continuation([1] * MATCHED_TOKENS, 5) == [], "there is no earlier text"


def test_a_period_goes_on():
    assert PromptLookup().find_continuation([4, 5, 4, 5, 4], 5) == [5, 4, 5, 4, 5]
    assert PromptLookup().find_continuation([7] * (MATCHED_TOKENS + 1), 3) == [7, 7, 7]


def test_a_text_that_grows_is_read_on():
    text, copies = [1, 2, 3, 9, 5, 1, 2], PromptLookup()
    assert copies.find_continuation(text, 4) == []
    text += [3]
    assert copies.find_continuation(text, 4) == [9, 5, 1, 2]
    assert copies.find_continuation(text, 0) == []
    text += [9, 5]
    assert copies.find_continuation(text, 1) == [1]
    assert copies.find_continuation(text, 1) == PromptLookup().find_continuation(text, 1), "as if read at once"
