"""Examples as token sequences, correctness at any depth, and scoring of programs without running them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.calibration.trace import Trace
from emad_ref.errors import BadArgument
from emad_ref.text.documents import TaskExample
from pytest_emad.tasks.scoring import (
    LARGEST_VALUE,
    cluster_duplicate_items,
    encode_item,
    has_true_asserts_when_interpreted,
    is_code_completion_correct,
    majority_accuracy,
    mark_correct_items_from_trace,
    to_token_sequences,
)
from tests.handmade_traces import layerwise

CHOICE = TaskExample("facts", "ab", "d", "choice", options=("c", "d", "eh"))
EXACT = TaskExample("inventory", "abc", "def", "exact")
CODE = TaskExample("code", "def f(x):\n    return", " x\n", "runs", check="assert f(3) == 3\n")


class Letters:
    """One token per letter."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) - ord("a") + 1 for letter in text]


def item(example, opening=0):
    return encode_item(example, Letters(), opening)


def trace_of(items, likely):
    """Return a two-layer trace; ``likely[i][j]``: per continuation, whether layer j+1 predicts its tokens."""
    sequences = to_token_sequences(items)
    parts = [(s.first_decided, s.tokens[s.first_decided : -1], s.tokens[s.first_decided + 1 :]) for s in sequences]
    lengths = [len(target) for _, _, target in parts]
    liked = np.repeat(np.array(likely, dtype=bool), lengths, axis=0)
    target = np.concatenate([t for _, _, t in parts])
    return Trace(
        signals=layerwise(np.ones(liked.shape, dtype=np.float32), np.ones(liked.shape, dtype=np.float32)),
        nll_nats=np.where(liked, 0.1, 5.0).astype(np.float32),
        top1=np.where(liked, target[:, None], 99).astype(np.int32),
        top1_probability=np.ones(liked.shape, dtype=np.float32),
        token=np.concatenate([t for _, t, _ in parts]),
        target=target,
        position=np.concatenate([start + np.arange(len(t)) for start, t, _ in parts]),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        first_decided=np.array([start for start, _, _ in parts]),
    )


def test_items_of_one_prompt_and_answer_are_one_cluster():
    again, other = (
        TaskExample("facts", "ab", "d", "choice", options=("d", "g", "h")),
        TaskExample("t", "ab", "eh", "exact"),
    )
    numbers = cluster_duplicate_items([item(CHOICE), item(EXACT), item(again), item(other), item(CHOICE)])
    assert numbers[0] == numbers[2] == numbers[4]
    assert len(set(numbers.tolist())) == 3
    assert numbers.dtype == np.int64


def test_the_majority_is_found_elsewhere_and_scored_here():
    def answering(*answers):
        return [TaskExample("t", "a", answer, "exact") for answer in answers]

    here = answering("x", "x", "y", "z")
    assert majority_accuracy(here, answering("x", "x", "y")) == 0.5
    assert majority_accuracy(here, answering("z", "z", "x")) == 0.25
    assert majority_accuracy(here, answering("w", "w", "x")) == 0.0
    assert majority_accuracy(here, answering("z", "x", "w")) == 0.5, "of answers that are as frequent, the luckiest"
    with pytest.raises(BadArgument, match="at least one on either side"):
        majority_accuracy(here, [])


def test_a_prompt_opens_with_the_models_opening_token_if_it_has_one():
    assert item(EXACT).prompt.tolist() == [0, 1, 2, 3]
    assert item(EXACT, None).prompt.tolist() == [1, 2, 3]
    assert [c.tolist() for c in item(CHOICE).continuations] == [[3], [4], [5, 8]]
    assert [c.tolist() for c in item(EXACT).continuations] == [[4, 5, 6]]


def test_the_rule_starts_at_the_last_position_of_the_prompt():
    sequences = to_token_sequences([item(CHOICE), item(EXACT)])
    assert [s.tokens.tolist() for s in sequences] == [
        [0, 1, 2, 3],
        [0, 1, 2, 4],
        [0, 1, 2, 5, 8],
        [0, 1, 2, 3, 4, 5, 6],
    ]
    assert [s.first_decided for s in sequences] == [2, 2, 2, 3]


@pytest.mark.parametrize(
    ("example", "opening", "message"),
    [
        (TaskExample("t", "", "a", "exact"), None, "a prompt and answers of at least one token; leave the example out"),
        (TaskExample("t", "a", "", "exact"), 0, "a prompt and answers of at least one token"),
        (TaskExample("t", "a", "b", "choice", options=("b", "")), 0, "a prompt and answers of at least one token"),
        (TaskExample("t", "a", "z", "choice", options=("b", "c")), 0, r"example.answer='z'.*one of the options"),
    ],
)
def test_an_example_that_cannot_be_scored_is_refused(example, opening, message):
    with pytest.raises(BadArgument, match=message):
        item(example, opening)


@pytest.mark.parametrize(
    ("likely", "first", "second"),
    [
        ([[0, 0], [1, 1], [0, 0]], True, True),
        ([[0, 1], [1, 0], [0, 0]], True, False),  # layer 2 prefers the first option
        ([[1, 0], [0, 1], [0, 0]], False, True),
        ([[0, 0], [0, 0], [1, 1]], False, False),
    ],
)
def test_a_choice_is_right_when_its_option_is_likeliest_at_the_depths_taken(likely, first, second):
    items = [item(CHOICE)]
    trace = trace_of(items, likely)
    assert mark_correct_items_from_trace(items, trace, np.full(len(trace), 1)).tolist() == [first]
    assert mark_correct_items_from_trace(items, trace, np.full(len(trace), 2)).tolist() == [second]


def test_likelihood_is_summed_over_all_tokens_of_an_option():
    """Two tokens of 0.1 nats lose to one of 0.1: no normalisation by length."""
    items = [item(CHOICE)]
    trace = trace_of(items, [[0, 0], [1, 1], [1, 1]])
    assert mark_correct_items_from_trace(items, trace, np.full(len(trace), 1)).tolist() == [True]


def test_a_mean_choice_is_by_log_likelihood_per_token():
    """The third option has two tokens: its sum is below the first's, its mean above."""
    items = [item(replace(CHOICE, scoring="mean_choice", answer="eh"))]
    trace = trace_of(items, [[0, 0], [0, 0], [1, 0]])
    trace.nll_nats[:, 0] = [0.25, 0.5, 0.2, 0.2]  # sums 0.25, 0.5, 0.4: by sums the first is the likeliest
    assert mark_correct_items_from_trace(items, trace, np.full(len(trace), 1)).tolist() == [True]
    assert mark_correct_items_from_trace([item(CHOICE)], trace, np.full(len(trace), 1)).tolist() == [False]


def test_an_exact_answer_is_right_when_every_token_is_the_argmax_at_its_own_depth():
    items = [item(EXACT)]
    trace = trace_of(items, [[1, 0]])  # layer 1 is right, layer 2 is not
    assert mark_correct_items_from_trace(items, trace, np.array([1, 1, 1])).tolist() == [True]
    for wrong in range(3):
        depth = np.ones(3, dtype=np.int64)
        depth[wrong] = 2
        assert mark_correct_items_from_trace(items, trace, depth).tolist() == [False]


def test_items_of_both_kinds_are_judged_in_their_order():
    items = [item(EXACT), item(CHOICE), item(EXACT)]
    trace = trace_of(items, [[0, 1], [0, 0], [0, 1], [0, 0], [1, 0]])
    assert mark_correct_items_from_trace(items, trace, np.full(len(trace), 2)).tolist() == [True, True, False]


def test_a_trace_or_depths_of_something_else_are_refused():
    items = [item(EXACT)]
    trace = trace_of(items, [[1, 1]])
    with pytest.raises(BadArgument, match=r"trace\.sequences=1, but expected 4, one per continuation"):
        mark_correct_items_from_trace([*items, item(CHOICE)], trace, np.full(len(trace), 1))
    with pytest.raises(BadArgument, match=r"depth=\(2,\), but expected one depth per traced position, \[3\]"):
        mark_correct_items_from_trace(items, trace, np.ones(2, dtype=np.int64))


def test_programs_are_not_decided_from_a_trace():
    items = [item(TaskExample("code", "a", "b", "runs"))]
    with pytest.raises(BadArgument, match="scoring='runs', but expected choice, mean_choice or exact"):
        mark_correct_items_from_trace(items, trace_of(items, [[1, 1]]), np.array([1]))


@pytest.mark.parametrize(
    ("continuation", "right"),
    [(" x\n", True), (" x + 0\nnonsense(", True), (" x + 1\n", False), (" x", False), ("", False), ("\n x\n", False)],
)
def test_a_generated_program_is_cut_after_its_first_complete_line(continuation, right):
    assert is_code_completion_correct(CODE, continuation) == right


DOUBLE = "def double(x):\n    return x * 2\n"


def expressions():
    leaves = st.one_of(st.just("x"), st.integers(-20, 20).map(lambda n: f"({n})"))
    return st.recursive(leaves, lambda e: st.builds("({} {} {})".format, e, st.sampled_from("+-*"), e), max_leaves=6)


@given(expressions(), st.integers(-9, 9))
def test_a_program_passes_exactly_when_python_says_so(body, argument):
    program = f"def f(x):\n    return {body}\n"
    value = eval(body, {"x": argument})
    assert has_true_asserts_when_interpreted(f"{program}assert f({argument}) == {value}\n")
    assert not has_true_asserts_when_interpreted(f"{program}assert f({argument}) == {value + 1}\n")


@pytest.mark.parametrize(
    "program",
    [
        DOUBLE + "assert double(3) == 6",
        DOUBLE + "assert double(-3) == -6",
        DOUBLE + "assert double(double(3)) == 12",
        DOUBLE + "assert double(3) == 6\nassert double(0) == 0",
    ],
)
def test_true_asserts_pass(program):
    assert has_true_asserts_when_interpreted(program)


@pytest.mark.parametrize(
    "program",
    [
        "",
        DOUBLE,
        "def double(x):\n    return x *\nassert double(3) == 6",
        "\0",
        "assert 1",
        "assert 2 == 2",
        DOUBLE + "assert double(3)",
        DOUBLE + "assert double(3) == double(3)",
        DOUBLE + "assert double(3) == 6 == 6",
        DOUBLE + "assert double(3) == 6.0",
        DOUBLE + "assert double(3) != 7",
        DOUBLE + "assert double(True) == 2",
        DOUBLE + "assert double(3, 4) == 6",
        DOUBLE + "assert double(x=3) == 6",
        DOUBLE + "assert triple(3) == 6",
        DOUBLE + "assert double(3) == 6\nassert double(3) == 7",
        DOUBLE + "double(3)\nassert double(3) == 6",
        DOUBLE + DOUBLE + "assert double(3) == 6",
        DOUBLE + "import os\nassert double(3) == 6",
        "@double\n" + DOUBLE + "assert double(3) == 6",
        "def double(x, y):\n    return x * 2\nassert double(3) == 6",
        "def double(y, /, x):\n    return x * 2\nassert double(3) == 6",
        "def double(x=1):\n    return x * 2\nassert double(3) == 6",
        "def double(*x):\n    return 6\nassert double(3) == 6",
        "def double(x):\n    return y * 2\nassert double(3) == 6",
        "def double(x):\n    return\nassert double(3) == 6",
        "def double(x):\n    x = 3\n    return x * 2\nassert double(3) == 6",
        "def double(x):\n    return double(x)\nassert double(3) == 6",
        "def double(x):\n    return x ** 2\nassert double(3) == 9",
        "def double(x):\n    return x / 1\nassert double(3) == 3",
        "def double(x):\n    return print(x)\nassert double(3) == 3",
        "def double(x):\n    return 6 if x else 0\nassert double(3) == 6",
    ],
)
def test_anything_else_does_not_pass(program):
    assert not has_true_asserts_when_interpreted(program)


def test_numbers_without_end_are_not_computed():
    assert has_true_asserts_when_interpreted(
        f"def f(x):\n    return x * {LARGEST_VALUE}\nassert f(1) == {LARGEST_VALUE}"
    )
    assert not has_true_asserts_when_interpreted(
        f"def f(x):\n    return x * {LARGEST_VALUE}\nassert f(2) == {2 * LARGEST_VALUE}"
    )


@pytest.mark.parametrize("opener", ["(", "-", "x * ("])
def test_nesting_without_end_is_a_failure_and_not_a_crash(opener):
    assert not has_true_asserts_when_interpreted(f"def f(x):\n    return {opener * 5000}x\nassert f(1) == 1")
