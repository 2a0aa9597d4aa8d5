"""Answers as text: the likeliest option, an exact answer up to where it leaves the reference, items that are lost."""

from __future__ import annotations

import numpy as np

from emad_ref.text.documents import TaskExample
from pytest_emad.tasks.answers import SHOWN, LostAnswer, TaskAnswer, answers_from_trace, lost_answers, shorten_beginning
from tests.unit.tasks.test_scoring import CHOICE, EXACT, item, trace_of


def decode(tokens):
    return "".join(chr(ord("a") + token - 1) if token < 27 else "?" for token in tokens)


def test_the_likeliest_option_is_the_answer_and_depths_are_those_of_its_tokens():
    items = [item(CHOICE)]
    trace = trace_of(items, [(False, True), (True, False), (False, False)])
    first, second = (
        answers_from_trace(items, trace, np.full(len(trace), depth, dtype=np.int64), decode)[0] for depth in (1, 2)
    )
    assert first == TaskAnswer("d", (1,))
    assert second == TaskAnswer("c", (2,))


def test_options_of_several_tokens_are_compared_by_their_mean_where_scoring_says_so():
    options = ("eh", "d")
    for scoring, answer in (("choice", "d"), ("mean_choice", "eh")):
        items = [item(TaskExample("facts", "ab", "d", scoring, options=options))]
        trace = trace_of(items, [(False, False), (False, False)])
        trace.nll_nats[:, 0] = (1.0, 1.0, 1.5)  # two tokens of 1.0 against one of 1.5
        depth = np.array([1, 1, 1], dtype=np.int64)
        assert answers_from_trace(items, trace, depth, decode)[0].text == answer


def test_an_exact_answer_is_shown_up_to_the_first_token_that_differs():
    items = [item(EXACT), item(EXACT)]
    trace = trace_of(items, [(True, True), (True, True)])
    trace.top1[4, 0] = 26  # the second item's second token, "e"
    right, wrong = answers_from_trace(items, trace, np.array([1, 2, 1, 2, 1, 1], dtype=np.int64), decode)
    assert right == TaskAnswer("def", (1, 2, 1))
    assert wrong == TaskAnswer("dz …", (2, 1))


def test_lost_items_are_the_first_ones_in_order_with_the_end_of_their_prompts():
    full, other = [TaskAnswer(f"right {n}") for n in range(30)], [TaskAnswer(f"wrong {n}", (n,)) for n in range(30)]
    lost = np.arange(30) % 2 == 1
    found = lost_answers((f"item {n}" for n in range(30)), full, other, lost)
    assert len(found) == SHOWN
    assert found[1] == LostAnswer("item 3", "right 3", "wrong 3", (3,))
    assert found[1].to_json() == {"prompt": "item 3", "full_depth": "right 3", "at_point": "wrong 3", "depths": [3]}
    assert shorten_beginning("abcde fgh", 5) == "… e fgh"
