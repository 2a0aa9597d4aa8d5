"""What a case of requests judges of answers that were all decoded."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pytest_emad.audit.finding import AuditRefutedError, Tally
from pytest_emad.audit.request_cases import History, RequestCases

NO_BENCH: Any = None  # no answer is left to judge


@pytest.mark.parametrize(("log_chance", "rare"), [(-0.7, False), (-18.0, False), (-19.0, True), (-math.inf, True)])
def test_seeds_that_draw_the_same_are_refuted_only_where_chance_does_not(log_chance: float, rare: bool) -> None:
    """A model that is sure of its text draws the same under any seed."""
    history, row = History({}), (b"prompt", (3, 1))
    history.equal_draws.append((1, 2, False, [row]))
    history.again[row] = log_chance
    said = ""
    try:
        RequestCases(NO_BENCH, Tally("requests", needed=0)).judge(history)
    except AuditRefutedError as complaint:
        said = str(complaint)
    assert ("seeds 1 and 2 drew the same tokens in 1 rows, which chance does once in" in said) is rare


def test_rows_that_all_draw_the_same_are_judged_together() -> None:
    history, rows = History({}), [(b"prompt", (number,)) for number in range(9)]
    history.equal_draws.append((1, 2, True, rows))
    history.again |= dict.fromkeys(rows, -3.0)
    with pytest.raises(AuditRefutedError, match=r"in 9 rows, which chance does once in 5e\+11 times"):
        RequestCases(NO_BENCH, Tally("requests", needed=0)).judge(history)
