"""Messages and operating points on the wire: equal after a round trip, or refused by the name of the field."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from emad_ref.point import (
    ConfidenceParameters,
    EntropyEstimator,
    OperatingPoint,
    ThresholdBinSpec,
    full_depth,
    truncated,
)
from emad_ref.protocol import Capabilities, Prompt, Step
from emad_ref.record import Work
from pytest_emad.remote import json_fields
from pytest_emad.remote.frames import WireFrame
from pytest_emad.remote.messages import (
    COLUMNS,
    ReplyShapes,
    capabilities_from_header,
    capabilities_to_json,
    decode_open_decoder_request,
    decode_prompts,
    decode_record,
    decode_session_state,
    decode_step,
    encode_open_decoder_request,
    encode_prompts,
    encode_record,
    encode_session_state,
    encode_step,
)
from tests.unit.remote.scripted_decoder import LAYERS, MODEL, REQUEST, ROWS, VOCABULARY, record, state, step, work

SIZES = ReplyShapes(LAYERS, 1, VOCABULARY, counted=True)
ROW = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(lambda row: np.array(row, dtype=np.int64))


@settings(max_examples=40)
@given(st.lists(ROW, max_size=4), st.randoms())
def test_prompts_come_back_row_by_row(rows, random):
    plain = decode_prompts(encode_prompts([Prompt(row) for row in rows]))
    assert [prompt.tokens.tolist() for prompt in plain] == [row.tolist() for row in rows]
    assert all(prompt.source is None for prompt in plain)
    sources = random.sample(rows, len(rows))
    read = decode_prompts(encode_prompts([Prompt(row, source) for row, source in zip(rows, sources, strict=True)]))
    if rows:
        assert [prompt.source.tolist() for prompt in read] == [source.tolist() for source in sources]


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([Prompt(np.array([0.5]))], "prompts[0]='float64', but expected integers"),
        ([Prompt(np.array([[1]]))], "prompts[0]=(1, 1), but expected shape [n]"),
        ([Prompt(np.array([1]), np.array([1])), Prompt(np.array([1]))], "1 sources for 2 rows"),
        ([Prompt(np.array([1]), np.array([True]))], "sources[0]='bool', but expected integers"),
    ],
)
def test_prompts_that_are_none_are_not_sent(prompts, said):
    with pytest.raises(BadArgument) as refused:
        encode_prompts(prompts)
    assert said in str(refused.value)


def test_requests_come_back_whole():
    request = replace(REQUEST, seed=3, temperature=0.5)
    read = decode_open_decoder_request(encode_open_decoder_request(request, MODEL))
    assert (read.point, read.seed, read.max_rows, read.temperature) == (request.point, 3, ROWS, 0.5)
    assert read.model.name == "m"
    assert read.model.load() == MODEL


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model", None, "model=None, but expected an object"),
        ("model", {"name": "m"}, "folder=None, but expected a text"),
        ("point", 3, "point=3, but expected an object"),
        ("seed", -1, "seed=-1, but expected a whole number ≥ 0"),
        ("max_rows", 0, "max_rows=0, but expected a whole number ≥ 1"),
        ("max_rows", True, "max_rows=True"),
        ("temperature", "hot", "temperature='hot', but expected a finite number ≥ 0"),
    ],
)
def test_a_request_is_read_field_by_field(field, value, said):
    frame = encode_open_decoder_request(REQUEST, MODEL)
    with pytest.raises(BadArgument) as refused:
        decode_open_decoder_request(WireFrame(frame.header | {field: value}))
    assert said in str(refused.value)


CAPABILITIES = Capabilities(
    8, frozenset({"monotone", "chunked"}), counted=False, logit_noise=0.25, deepens=True, max_positions=2048
)


def test_capabilities_come_back_equal():
    for sent in (CAPABILITIES, Capabilities()):
        assert capabilities_from_header({"capabilities": capabilities_to_json(sent)}) == sent
    silent = capabilities_to_json(CAPABILITIES)
    del silent["max_positions"]
    assert capabilities_from_header({"capabilities": silent}).max_positions is None, "a server need not state it"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_feed", 0, "max_feed=0"),
        ("schedules", "monotone", "schedules='monotone', but expected a list"),
        ("schedules", [3], "schedules=[3], but expected a list of names"),
        ("counted", 1, "counted=1, but expected true or false"),
        ("logit_noise", -0.5, "logit_noise=-0.5, but expected a finite number"),
        ("deepens", None, "deepens=None"),
        ("max_positions", 0, "max_positions=0"),
    ],
)
def test_capabilities_are_read_field_by_field(field, value, said):
    with pytest.raises(BadArgument) as refused:
        capabilities_from_header({"capabilities": capabilities_to_json(CAPABILITIES) | {field: value}})
    assert said in str(refused.value)


def test_steps_and_states_come_back_equal():
    read = decode_step(step(ROWS, 2), ROWS, 2, 2, SIZES)
    assert read.logits.dtype == np.float64
    assert read.logits.tolist() == np.arange(ROWS * 2 * VOCABULARY).reshape(ROWS, 2, VOCABULARY).tolist()
    assert np.isnan(read.signal).all()
    found = decode_session_state(state(9), ROWS, SIZES)
    assert (found.length.tolist(), found.cap.tolist(), found.work) == ([9, 9], [LAYERS, LAYERS], work())


def test_whole_numbers_of_any_width_travel_as_int64():
    narrow = encode_step(Step(np.zeros((1, 1, VOCABULARY)), np.ones((1, 1), np.int32), np.ones((1, 1, 1))))
    assert narrow.arrays["depth"].dtype == np.int64
    assert encode_session_state(np.ones(1, np.int32), np.ones(1, np.int8), None).arrays["cap"].dtype == np.int64
    with pytest.raises(BadArgument, match="depth='float64', but expected integers"):
        encode_step(Step(np.zeros((1, 1, VOCABULARY)), np.ones((1, 1)), np.ones((1, 1, 1))))


def test_logits_of_half_precision_travel_as_float32():
    half = encode_step(
        Step(np.full((1, 1, VOCABULARY), 0.1, np.float16), np.ones((1, 1), np.int64), np.ones((1, 1, 1)))
    )
    assert half.arrays["logits"].dtype == np.float32
    assert half.arrays["logits"][0, 0, 0] == np.float16(0.1)


def test_work_with_sources_comes_back_equal_and_is_absent_where_nothing_is_counted():
    sourced = replace(work(), encoder_tokens=7, encoder_context=49)
    assert (
        decode_session_state(encode_session_state(np.ones(1, np.int64), np.ones(1, np.int64), sourced), 1, SIZES).work
        == sourced
    )
    uncounted = encode_session_state(np.ones(1, np.int64), np.ones(1, np.int64), None)
    assert decode_session_state(uncounted, 1, replace(SIZES, counted=False)).work is None
    with pytest.raises(BadArgument, match=r"work\.tokens=None, but expected an array, int64 \[4\]"):
        decode_session_state(uncounted, 1, SIZES)


def test_records_come_back_equal():
    given_record = record()
    read = decode_record(encode_record(given_record), ROWS, SIZES)
    for name in COLUMNS:
        assert getattr(read.tokens, name).tolist() == getattr(given_record.tokens, name).tolist(), name
    assert read.tokens.kept.dtype == np.bool_
    assert read.signal.tolist() == given_record.signal.tolist()
    assert [row.tolist() for row in read.emitted] == [row.tolist() for row in given_record.emitted]
    assert (read.stop, read.work, read.prompt_work) == (given_record.stop, {0: work()}, {0: work()})
    uncounted = replace(given_record, work=None, prompt_work=None)
    read = decode_record(encode_record(uncounted), ROWS, replace(SIZES, counted=False))
    assert (read.work, read.prompt_work) == (None, None)


def test_a_record_of_two_models_is_no_decoders():
    with pytest.raises(BadArgument, match=r"work=\[0, 1\], but expected work of model 0"):
        encode_record(replace(record(), work={0: work(), 1: work()}))


def changed(frame, name, value):
    return WireFrame(frame.header, frame.arrays | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("token.depth", np.array([0, 4]), "token.depth=0, but expected 1–4"),
        ("token.cap", np.array([4, 5]), "token.cap=5, but expected 1–4"),
        ("token.sequence", np.array([0, 2]), "token.sequence=2, but expected 0–1"),
        ("token.phase", np.array([0, -1]), "token.phase=-1, but expected 0–4"),
        ("token.kept", np.array([0, 2]), "token.kept=2, but expected 0–1"),
        ("token.token", np.array([0]), "token.token='int64 [1]', but expected int64 [2]"),
        ("signal", np.zeros((2, 2)), "signal='float64 [2, 2]', but expected float32 or float64 [2, 1]"),
        ("emitted", np.zeros(4, np.int64), "emitted='int64 [4]', but expected int64 [3]"),
        ("emitted_lengths", np.array([3]), "emitted_lengths='int64 [1]', but expected int64 [2]"),
        ("emitted_lengths", np.array([4, -1]), "emitted_lengths=[4, -1], but expected lengths ≥ 0"),
        ("work.fills", np.zeros((3, 4), np.int64), "work.fills='int64 [3, 4]', but expected int64 [2, 4]"),
        ("prompt_work.tokens", np.zeros(4), "prompt_work.tokens='float64 [4]', but expected int64 [4]"),
    ],
)
def test_a_record_is_read_array_by_array(name, value, said):
    with pytest.raises(BadArgument) as refused:
        decode_record(changed(encode_record(record()), name, value), ROWS, SIZES)
    assert said in str(refused.value)


@pytest.mark.parametrize("stop", [None, ["length"], ["length", "bored"], ["length", ["length"]]])
def test_a_record_says_why_each_row_stopped(stop):
    frame = encode_record(record())
    with pytest.raises(BadArgument, match="stop="):
        decode_record(WireFrame(frame.header | {"stop": stop}, frame.arrays), ROWS, SIZES)


def test_a_decoder_without_translators_need_not_count_them():
    frame = encode_session_state(np.ones(1, np.int64), np.ones(1, np.int64), work())
    without = {name: array for name, array in frame.arrays.items() if name != "work.fill_macs"}
    read = decode_session_state(WireFrame(frame.header, without), 1, SIZES).work
    assert work().fill_macs.any()
    assert read == replace(work(), fill_macs=np.zeros(LAYERS, dtype=np.int64))
    assert decode_session_state(frame, 1, SIZES).work == work()


def test_work_is_counted_in_whole_numbers():
    frame = encode_session_state(np.ones(1, np.int64), np.ones(1, np.int64), Work.none(LAYERS))
    with pytest.raises(BadArgument, match=r"work\.encoder_tokens=-1"):
        decode_session_state(WireFrame(frame.header | {"work.encoder_tokens": -1}, frame.arrays), 1, SIZES)


POINT = OperatingPoint("p", "emad", 12, 12, (4, 8), ((0.5, 0.2),))
VALUES = st.floats(allow_nan=False)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ESTIMATORS = st.one_of(
    st.just(EntropyEstimator()),
    st.builds(EntropyEstimator, st.just("topk"), k=st.integers(1, 99), search=st.sampled_from(["exact", "faiss"])),
    st.builds(
        EntropyEstimator,
        st.just("lowrank"),
        k=st.integers(1, 9),
        rank=st.integers(1, 9),
        correction=st.lists(st.tuples(FINITE, FINITE), max_size=3).map(tuple),
    ),
    st.builds(EntropyEstimator, st.just("linear"), weights=st.lists(st.tuples(FINITE, FINITE), max_size=3).map(tuple)),
)


@st.composite
def drawn_points(draw):
    layers = draw(st.integers(2, 9))
    ceiling = draw(st.integers(1, layers))
    probes = tuple(sorted(draw(st.sets(st.integers(1, ceiling - 1))))) if ceiling > 1 else ()
    estimator = draw(ESTIMATORS)
    known = [
        ThresholdBinSpec(),
        ThresholdBinSpec(("position",), position_edges=draw(st.tuples(st.integers(), st.integers()))),
    ]
    if estimator.kind == "full":
        known.append(ThresholdBinSpec(("top1_probability",), top1_probability_edges=draw(st.tuples(FINITE, FINITE))))
        known.append(ThresholdBinSpec(("frequency",), frequency=draw(st.binary(min_size=1, max_size=5).map(_small))))
    bins = draw(st.sampled_from(known))
    schedule = draw(st.sampled_from(["monotone", "free_eager", "free_deferred", "copying", "chunked"]))
    return OperatingPoint(
        draw(st.text()),
        draw(st.text()),
        layers,
        ceiling,
        probes,
        tuple(tuple(draw(VALUES) for _ in probes) for _ in range(bins.bin_count)),
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
    replace(POINT, signal="softmax_response", decay=(4.0, 64.0), decay_form="calm"),
    replace(POINT, name="tuned", lens="0123abcd"),
    replace(POINT, name="translated", schedule="translated", translators="4567cdef"),
    OperatingPoint(
        "jsd", "jsd_contrast", 6, 6, (3, 4, 5), ((math.inf, 0.9, 0.9),), signal="jsd_contrast",
        confidence=ConfidenceParameters(3, alpha_decay=0.5, emit="expert", kept=(9, 4)),
    ),
]  # fmt: skip


@settings(max_examples=80)
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
        ({"decay_form": 7}, "point.decay_form=7, but expected a text"),
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
