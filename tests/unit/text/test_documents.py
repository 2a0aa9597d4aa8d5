"""Examples know their own answer and what a guess is worth."""

from __future__ import annotations

import pytest

from emad_ref.text.documents import SPLITS, Example

CHOICE = Example("facts", "Where?", " barn", "choice", options=(" attic", " barn", " shed"))


def test_the_answer_of_a_choice_is_found_among_its_options():
    assert CHOICE.answer_index == 1


TOLD = Example("chart", "a B b C ? a", "c", "exact", guess=0.5)
NAMED = Example("recall", "Mira met Tom.", " Tom", "choice", options=(" Tom", " Mira", " Ada", " Ben"), guess=0.5)


@pytest.mark.parametrize(
    ("example", "chance"), [(CHOICE, 1 / 3), (Example("t", "p", "a", "exact"), 0.0), (TOLD, 0.5), (NAMED, 0.5)]
)
def test_a_guess_is_what_the_task_says_else_one_option_of_many_else_never_right(example, chance):
    assert example.chance == chance


def test_there_are_four_splits():
    assert SPLITS == ("train", "calibrate", "validate", "evaluate")
