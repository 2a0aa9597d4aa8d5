"""The JSON of a screening result stays valid for an interval without a bound."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from pytest_emad.screening.result import value_and_interval_to_json
from pytest_emad.statistics.estimate import Estimate

ESTIMATE = Estimate(0.2, 0.1, 0.3, 30, 0.01, 0.99, "share", "by hand", "documents")


def test_a_bound_that_is_none_is_recorded_as_none() -> None:
    unbounded = replace(ESTIMATE, low=-math.inf, high=math.inf)
    assert json.dumps([value_and_interval_to_json(each) for each in (ESTIMATE, unbounded)], allow_nan=False) == (
        "[[0.2, 0.1, 0.3], [0.2, null, null]]"
    )
