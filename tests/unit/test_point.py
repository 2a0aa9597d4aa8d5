"""An operating point refuses what could not decide depth, and says so."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from emad_ref.errors import BadArgument, EmadError
from emad_ref.point import SCHEDULES, OperatingPoint, full_depth, truncated

POINT = OperatingPoint("p", "emad", 12, 12, (4, 8), ((0.5, 0.2),))


@pytest.mark.parametrize(
    ("change", "named", "message"),
    [
        ({"ceiling": 0}, "ceiling", "a layer in 1–12"),
        ({"ceiling": 13}, "ceiling", "a layer in 1–12"),
        ({"probes": (0, 8)}, "probes", "layers in 1–11"),
        ({"probes": (4, 12)}, "probes", "a probe at the ceiling decides nothing"),
        ({"ceiling": 8}, "probes", "layers in 1–7"),
        ({"probes": (8, 4)}, "probes", "ascending layers, each once"),
        ({"probes": (4, 4)}, "probes", "ascending layers, each once"),
        ({"thresholds": ()}, "thresholds", "one row per bin"),
        ({"thresholds": ((0.5, 0.2), (0.4, 0.1))}, "thresholds", "bins='none' takes one row"),
        ({"thresholds": ((0.5,),)}, "thresholds", "2 values per bin, one per probe"),
        ({"thresholds": ((0.5, math.nan),)}, "thresholds", "-inf says never exit at this probe"),
        ({"schedule": "rising"}, "schedule", "one of monotone, free_eager"),
        ({"estimator": "guess"}, "estimator", "one of full"),
        ({"signal": "mood"}, "signal", "one of entropy_nats"),
    ],
)
def test_a_point_that_cannot_decide_is_refused_by_name_value_and_expectation(change, named, message):
    with pytest.raises(BadArgument, match=f"^{named}=") as refused:
        replace(POINT, **change)
    assert message in str(refused.value)
    assert refused.value.name == named


def test_bad_arguments_are_value_errors_of_this_package():
    with pytest.raises(ValueError, match="depth=13, but expected a layer; try 12") as refused:
        raise BadArgument("depth", 13, "a layer", "try 12")
    assert isinstance(refused.value, EmadError)
    assert str(BadArgument("depth", "x", "a layer")) == "depth='x', but expected a layer"


def test_adaptive_means_that_some_token_could_leave_early():
    assert POINT.adaptive
    assert replace(POINT, thresholds=((-math.inf, 0.0),)).adaptive
    assert not replace(POINT, thresholds=((-math.inf, -math.inf),)).adaptive
    assert not full_depth(12).adaptive
    assert not truncated(12, 3).adaptive


def test_full_depth_and_truncation_differ_in_their_ceiling_alone():
    assert (full_depth(12).ceiling, truncated(12, 3).ceiling, truncated(12, 3).layers) == (12, 3, 12)
    with pytest.raises(BadArgument, match="ceiling=13"):
        truncated(12, 13)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_point_survives_json(schedule):
    point = replace(POINT, schedule=schedule, thresholds=((0.5, -math.inf),), margin_nats=0.25)
    data = json.loads(json.dumps(point.to_json()))
    again = OperatingPoint(
        **data | {"probes": tuple(data["probes"]), "thresholds": tuple(tuple(row) for row in data["thresholds"])}
    )
    assert again == point
    assert hash(again) == hash(point)
