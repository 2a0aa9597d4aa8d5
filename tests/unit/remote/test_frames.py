"""Frames are read back as written; all other bytes are refused by name before the payload is read."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from emad_ref.errors import BadArgument
from pytest_emad.remote.frames import (
    DTYPES,
    FRAME_SIZES,
    MAGIC,
    BadFrame,
    NotAFrame,
    WireFrame,
    encode_frame_to_buffers,
    read_frame,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARRAYS = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)


class Bytes:
    """A stream of fixed content."""

    def __init__(self, held: bytes):
        self.held = held

    def __call__(self, count):
        assert count <= len(self.held), f"{count} bytes were believed, {len(self.held)} are there"
        taken, self.held = self.held[:count], self.held[count:]
        return np.frombuffer(taken, dtype=np.uint8).copy()


def written(frame):
    return b"".join(bytes(memoryview(part).cast("B")) for part in encode_frame_to_buffers(frame))


def raw(header, payload=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return MAGIC + FRAME_SIZES.pack(len(text), len(payload)) + text + payload


@settings(max_examples=60)
@given(
    st.dictionaries(st.text(), JSON, max_size=4).filter(lambda header: "arrays" not in header),
    st.dictionaries(st.text(), ARRAYS, max_size=4),
)
def test_a_frame_comes_back_as_it_was_written(header, held):
    stream = Bytes(written(WireFrame(header, held)) + b"next")
    read = read_frame(stream)
    assert read.header == header
    assert stream.held == b"next"
    assert list(read.arrays) == list(held)
    for name, array in held.items():
        found = read.arrays[name]
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.tobytes() == array.tobytes(), "NaN and signed zeros included"
        assert found.flags.writeable
        assert found.flags.owndata or found.base is not None


def test_bytes_are_those_of_the_page():
    """docs/wire.md, "Frames", byte by byte."""
    frame = WireFrame({"call": "x"}, {"tokens": np.array([[1, 2, 3], [4, 5, -1]], dtype=">i8").T.T})
    held = written(frame)
    assert held[:4] == b"EMW1"
    header_bytes = int.from_bytes(held[4:8], "little")
    assert int.from_bytes(held[8:16], "little") == 48
    header = json.loads(held[16 : 16 + header_bytes])
    assert header == {"call": "x", "arrays": [{"name": "tokens", "dtype": "int64", "shape": [2, 3]}]}
    payload = held[16 + header_bytes :]
    assert payload == b"".join(value.to_bytes(8, "little", signed=True) for value in (1, 2, 3, 4, 5, -1))


def listed(**changes):
    return {"arrays": [{"name": "a", "dtype": "int64", "shape": [2]} | changes]}


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (b"HTTP/1.1 400 Bad Request", "b'HTTP' where a frame begins with b'EMW1'"),
        (MAGIC + FRAME_SIZES.pack((16 << 20) + 1, 0), "a header of 16777217 bytes, but at most 16777216"),
        (MAGIC + FRAME_SIZES.pack(2, (4 << 30) + 1) + b"{}", "a payload of 4294967297 bytes, but at most 4294967296"),
        (raw(b"{"), "a header that is not JSON"),
        (raw(b"\xff\xfe"), "a header that is not JSON"),
        (raw(b"[" * 100_000), "a header that is not JSON"),
        (raw(b'{"arrays": [], "x": NaN}'), "NaN is no JSON"),
        (raw(b'{"arrays": [], "x": ' + b"9" * 5000 + b"}"), "a header that is not JSON"),
        (raw(b"[]"), "a header that is no JSON object"),
        (raw({}), "arrays=None, but expected a list"),
        (raw({"arrays": {}}), "arrays={}, but expected a list"),
        (raw({"arrays": [7]}), "an array without a name: 7"),
        (raw(listed(name=3), bytes(16)), "an array without a name"),
        (raw(listed(dtype="object"), bytes(16)), "array 'a' has dtype='object', but expected one of int64, float32"),
        (raw(listed(dtype=["int64"]), bytes(16)), "array 'a' has dtype=['int64']"),
        (raw(listed(shape=2), bytes(16)), "array 'a' has shape=2"),
        (raw(listed(shape=[-2]), bytes(16)), "array 'a' has shape=[-2]"),
        (raw(listed(shape=[True, 2]), bytes(16)), "array 'a' has shape=[True, 2]"),
        (raw(listed(shape=[2.0]), bytes(16)), "array 'a' has shape=[2.0]"),
        (raw(listed(shape=[1] * 9), bytes(8)), "at most 8 sizes"),
        (raw(listed(shape=[10**30]), bytes(8)), "sizes ≥ 0"),
        (raw(listed(shape=[0, *[1 << 32] * 4])), "an array of shape"),
        (raw(listed(), bytes(15)), "a payload of 15 bytes, but its arrays take 16"),
        (raw(listed(), bytes(24)), "a payload of 24 bytes, but its arrays take 16"),
        (raw({"arrays": []}, b"\0"), "a payload of 1 bytes, but its arrays take 0"),
        (raw({"arrays": listed()["arrays"] * 2}, bytes(32)), "two arrays with the name 'a'"),
        (raw({"arrays": [{"name": str(n), "dtype": "int64", "shape": [0]} for n in range(257)]}), "257 arrays, but at"),
        (raw({"arrays": [0] * 200_000}), "200000 arrays, but at most 256"),
        (raw(b'{"arrays": [], "arrays": [7]}'), "the key 'arrays' stands twice"),
        (raw(b'{"arrays": [], "point": {"layers": 1, "layers": 2}}'), "the key 'layers' stands twice"),
        (raw(b'{"arrays": [], "seconds": 1e999}'), "1e999 is beyond a double"),
        (raw({"arrays": "x" * 100_000}), "..."),
    ],
    ids=str,
)
def test_whatever_else_arrives_is_refused_by_name(held, said):
    with pytest.raises(BadFrame) as refused:
        read_frame(Bytes(held))
    assert said in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_a_reader_may_allow_less_than_the_page_does():
    frame = written(WireFrame(arrays={"a": np.zeros(3)}))
    assert read_frame(Bytes(frame), 24).arrays["a"].size == 3
    with pytest.raises(BadFrame, match="a payload of 24 bytes, but at most 23 are allowed"):
        read_frame(Bytes(frame), 23)


@settings(max_examples=60)
@given(st.binary(min_size=16, max_size=200))
def test_random_bytes_are_no_frame(held):
    with pytest.raises(NotAFrame):
        read_frame(Bytes(held if not held.startswith(MAGIC) else b"x" + held))


def test_what_does_not_travel_is_not_sent():
    with pytest.raises(BadArgument, match="a='float16', but expected an array of int64, float32, float64"):
        encode_frame_to_buffers(WireFrame(arrays={"a": np.zeros(2, dtype=np.float16)}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_frame_to_buffers(WireFrame({"threshold": math.inf}))
    with pytest.raises(BadArgument, match="at most 16777216 of header"):
        encode_frame_to_buffers(WireFrame({"text": "x" * (16 << 20)}))


def test_frames_add_up():
    whole = WireFrame({"a": 1}, {"x": np.zeros(1)}) + WireFrame({"b": 2}, {"y": np.ones(1)})
    assert whole.header == {"a": 1, "b": 2}
    assert list(whole.arrays) == ["x", "y"]
