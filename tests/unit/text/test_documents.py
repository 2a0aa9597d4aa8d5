"""Examples know their own answer and what a guess is worth."""

from __future__ import annotations

import pytest

from emad_ref.text.documents import SPLITS, Example

CHOICE = Example("facts", "Where?", " barn", "choice", options=(" attic", " barn", " shed"))


def test_the_answer_of_a_choice_is_found_among_its_options():
    assert CHOICE.answer_index == 1


@pytest.mark.parametrize(("example", "chance"), [(CHOICE, 1 / 3), (Example("t", "p", "a", "exact"), 0.0)])
def test_a_guess_is_right_once_in_as_many_options_and_never_where_the_answer_is_open(example, chance):
    assert example.chance == chance


def test_there_are_four_splits():
    assert SPLITS == ("train", "calibrate", "validate", "evaluate")
