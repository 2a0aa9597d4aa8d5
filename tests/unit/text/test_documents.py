"""Examples know their own answer and what a guess is worth."""

from __future__ import annotations

import pytest

from emad_ref.errors import BadArgument
from emad_ref.text.documents import SPLITS, Example, clean_text

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


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain\ntext", "plain\ntext"),
        ("\ufeffplain", "plain"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("a\rb", "a\nb"),
        ("a\r\n\rb", "a\n\nb"),
        ("\u2028 and \x0c stay", "\u2028 and \x0c stay"),
        ("a \ufeff b", "a \ufeff b"),  # behind the start it is a space of no width
        ("", ""),
    ],
)
def test_the_same_words_are_the_same_text_whichever_system_wrote_them(text, clean):
    assert clean_text(text, "here") == clean


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ab\0c", r"here='ab\\x00c', but expected text without NUL; character 2 is one"),
        ("\ud83d", r"half of a surrogate pair \(U\+D83D\); character 0"),
        ("x" * 100 + "\udcff", r"half of a surrogate pair \(U\+DCFF\); character 100"),
    ],
)
def test_what_is_no_text_is_refused_by_its_place(text, said):
    with pytest.raises(BadArgument, match=said) as caught:
        clean_text(text, "here")
    assert len(str(caught.value)) < 250
