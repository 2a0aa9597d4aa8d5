"""The JSON of a screening result stays valid for an interval without a bound."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from pytest_emad.cli.screening import build_screening_tables
from pytest_emad.screening.result import time_to_json, value_and_interval_to_json
from pytest_emad.screening.timing import CandidateTime
from pytest_emad.statistics.estimate import Estimate

ESTIMATE = Estimate(0.2, 0.1, 0.3, 30, 0.01, 0.99, "share", "by hand", "documents")


def test_a_bound_that_is_none_is_recorded_as_none() -> None:
    unbounded = replace(ESTIMATE, low=-math.inf, high=math.inf)
    assert json.dumps([value_and_interval_to_json(each) for each in (ESTIMATE, unbounded)], allow_nan=False) == (
        "[[0.2, 0.1, 0.3], [0.2, null, null]]"
    )


def test_a_time_without_bounds_is_recorded_and_shown() -> None:
    time = time_to_json(CandidateTime("point", 0.01, 1.1, -math.inf, math.inf))
    assert json.loads(json.dumps(time, allow_nan=False)) == {
        "name": "point", "seconds": 0.01, "fast": 1.1, "low": None, "high": None,
    }  # fmt: skip
    record = {"slack": [], "decoded": [], "reached": [], "time": [time], "threads": 1, "peak_memory": {}}
    *_, (_, (row,)) = build_screening_tables(record)
    assert row["× as fast [95 %]"] == "1.10 [–, –]"
