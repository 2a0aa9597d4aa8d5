"""Points as the wire carries them: every one comes back equal, whatever is none is refused by the field's name."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from emad_ref.point import BinSpec, Confidence, Estimator, OperatingPoint, full_depth, truncated
from emad_ref.wire import json_fields

POINT = OperatingPoint("p", "emad", 12, 12, (4, 8), ((0.5, 0.2),))
VALUES = st.floats(allow_nan=False)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ESTIMATORS = st.one_of(
    st.just(Estimator()),
    st.builds(Estimator, st.just("topk"), k=st.integers(1, 99), search=st.sampled_from(["exact", "ivf", "faiss"])),
    st.builds(
        Estimator,
        st.just("lowrank"),
        k=st.integers(1, 9),
        rank=st.integers(1, 9),
        correction=st.lists(st.tuples(FINITE, FINITE), max_size=3).map(tuple),
    ),
    st.builds(Estimator, st.just("linear"), weights=st.lists(st.tuples(FINITE, FINITE), max_size=3).map(tuple)),
)


@st.composite
def drawn_points(draw):
    layers = draw(st.integers(2, 9))
    ceiling = draw(st.integers(1, layers))
    probes = tuple(sorted(draw(st.sets(st.integers(1, ceiling - 1))))) if ceiling > 1 else ()
    estimator = draw(ESTIMATORS)
    known = [BinSpec(), BinSpec(("position",), position_edges=draw(st.tuples(st.integers(), st.integers())))]
    if estimator.kind == "full":
        known.append(BinSpec(("confidence",), confidence_edges=draw(st.tuples(FINITE, FINITE))))
        known.append(BinSpec(("frequency",), frequency=draw(st.binary(min_size=1, max_size=5).map(_small))))
    bins = draw(st.sampled_from(known))
    schedule = draw(st.sampled_from(["monotone", "free_eager", "free_deferred", "copying", "chunked"]))
    return OperatingPoint(
        draw(st.text()),
        draw(st.text()),
        layers,
        ceiling,
        probes,
        tuple(tuple(draw(VALUES) for _ in probes) for _ in range(bins.count)),
        schedule,
        estimator,
        bins=bins,
        margin_nats=draw(st.none() | FINITE),
        period=draw(st.integers(1, 99)) if schedule == "chunked" else None,
        interpolate=draw(st.booleans()),
    )


def _small(table: bytes) -> bytes:
    return bytes(value % 3 for value in table)


OTHERS = [
    full_depth(12),
    truncated(12, 3),
    OperatingPoint("falls", "positional", 12, 12, schedule="positional", period=8, floor=4),
    replace(POINT, signal="softmax_response", decay=(4.0, 64.0)),
    replace(POINT, name="tuned", lens="0123abcd"),
    replace(POINT, name="translated", schedule="translated", translators="4567cdef"),
    OperatingPoint(
        "jsd", "jsd_contrast", 6, 6, (3, 4, 5), ((math.inf, 0.9, 0.9),), signal="jsd_contrast",
        confidence=Confidence(3, alpha_decay=0.5, emit="expert", kept=(9, 4)),
    ),
]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(drawn_points())
def test_every_point_comes_back_equal(point):
    text = json.dumps(json_fields.point_to_json(point), allow_nan=False)
    assert json_fields.point_from_json(json.loads(text)) == point
    assert json_fields.point_from_json(point.to_json()) == point, "infinities as they are, too"


@pytest.mark.parametrize("point", OTHERS, ids=lambda point: point.name)
def test_points_of_every_kind_come_back_equal(point):
    assert (
        json_fields.point_from_json(json.loads(json.dumps(json_fields.point_to_json(point), allow_nan=False))) == point
    )


def test_infinities_are_texts():
    plain = json_fields.point_to_json(replace(POINT, thresholds=((-math.inf, math.inf),)))
    assert plain["thresholds"] == [["-inf", "inf"]]


def test_numbers_of_an_array_travel_as_numbers():
    point = replace(POINT, probes=(np.int64(4), np.int64(8)), thresholds=((np.float32(0.5), -np.float32(np.inf)),))
    assert (
        json_fields.point_from_json(json.loads(json.dumps(json_fields.point_to_json(point), allow_nan=False))) == point
    )


def test_unknown_keys_are_ignored_and_absent_ones_take_their_default():
    plain = {"name": "p", "family": "full", "layers": 3, "ceiling": 3, "colour": "red"}
    assert json_fields.point_from_json(plain) == OperatingPoint("p", "full", 3, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": 3}, "point.name=3, but expected a text"),
        ({"layers": 12.0}, "point.layers=12.0, but expected a whole number"),
        ({"layers": True}, "point.layers=True, but expected a whole number"),
        ({"probes": 4}, "point.probes=4, but expected a list"),
        ({"probes": ["4", 8]}, "point.probes[0]='4', but expected a whole number"),
        ({"thresholds": [["none", 0.2]]}, "point.thresholds[0][0]='none', but expected a number, 'inf' or '-inf'"),
        ({"thresholds": [[10**400, 0.2]]}, "a number that a double holds"),
        ({"thresholds": [[0.5]]}, "2 values per bin"),
        ({"schedule": ["monotone"]}, "point.schedule=['monotone'], but expected a text"),
        ({"interpolate": 1}, "point.interpolate=1, but expected true or false"),
        ({"estimator": None}, "point.estimator=None, but expected an object"),
        ({"estimator": {"kind": "guess"}}, "estimator.kind='guess'"),
        ({"bins": {"frequency": "xyz"}}, "point.bins.frequency='xyz', but expected hexadecimal digits"),
        ({"lens": 7}, "point.lens=7, but expected a text"),
        ({"translators": 7}, "point.translators=7, but expected a text"),
        ({"translators": "ab"}, "translators='ab', but expected the digest of state translators for translated"),
        ({"decay": [1.0]}, "point.decay=[1.0], but expected two numbers"),
        ({"confidence": {}}, "point.confidence.minimum=None, but expected a value"),
    ],
    ids=str,
)
def test_what_is_no_point_is_refused_by_the_name_of_the_field(change, said):
    with pytest.raises(BadArgument) as refused:
        json_fields.point_from_json(json_fields.point_to_json(POINT) | change)
    assert said in str(refused.value)


@pytest.mark.parametrize("plain", [None, 3, [], "point"])
def test_a_point_is_an_object(plain):
    with pytest.raises(BadArgument, match="an object with the fields of a point"):
        json_fields.point_from_json(plain)


def test_a_missing_field_without_a_default_is_named():
    with pytest.raises(BadArgument, match=r"point\.layers=None, but expected a value"):
        json_fields.point_from_json({"name": "p", "family": "f", "ceiling": 3})


def test_nan_has_no_text():
    with pytest.raises(BadArgument, match="numbers, not NaN"):
        json_fields.point_to_json(replace(POINT, margin_nats=math.nan))
