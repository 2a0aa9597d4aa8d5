"""Frames: a JSON header and the arrays that it lists, as bytes (docs/wire.md, "Frames"). Nothing is ever unpickled.

    EMW1 | header bytes, uint32 | payload bytes, uint64 | header | payload

The header's ``arrays`` lists the arrays of the payload in order: C order, little-endian. The header is checked against
the limits and for consistency before a byte of the payload is read.
"""

from __future__ import annotations

import json
import math
import reprlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument, EmadError, is_whole
from emad_ref.files import reject_duplicate_keys

MAGIC = b"EMW1"
FRAME_SIZES = struct.Struct("<IQ")
HEADER_BYTES = 16 << 20
PAYLOAD_BYTES = 4 << 30
DIMENSIONS, ARRAYS = 8, 256
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in ("int64", "float32", "float64")}

Array = NDArray[Any]
Read = Callable[[int], NDArray[np.uint8]]  # reads exactly so many bytes


class BadFrame(EmadError):
    """Raised for a header that exceeds a limit, is not JSON, or is inconsistent with itself or its payload."""


class NotAFrame(BadFrame):
    """Raised for bytes that do not begin a frame. ``magic``: the first of them."""

    def __init__(self, magic: bytes):
        self.magic = magic
        super().__init__(f"{magic!r} where a frame begins with {MAGIC!r}")


@dataclass(frozen=True)
class WireFrame:
    """``header``: JSON values by name. ``a + b`` is a frame with the fields and arrays of both."""

    header: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)

    def __add__(self, other: WireFrame) -> WireFrame:
        return WireFrame(self.header | other.header, self.arrays | other.arrays)


def encode_frame_to_buffers(frame: WireFrame) -> list[bytes | memoryview]:
    """The frame's bytes, in parts: large arrays are not copied.

    Raises:
        BadArgument: an array of an unsupported dtype; a header or payload above its limit.
    """
    arrays = {name: np.asarray(array) for name, array in frame.arrays.items()}
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise BadArgument(name, array.dtype.name, f"an array of {', '.join(DTYPES)}")
    listed = [{"name": name, "dtype": array.dtype.name, "shape": list(array.shape)} for name, array in arrays.items()]
    header = json.dumps({**frame.header, "arrays": listed}, allow_nan=False).encode()
    payload = sum(array.nbytes for array in arrays.values())
    if len(header) > HEADER_BYTES or payload > PAYLOAD_BYTES:
        expected = f"at most {HEADER_BYTES} of header and {PAYLOAD_BYTES} of payload"
        raise BadArgument("frame", f"{len(header)} + {payload} bytes", expected, "feed fewer tokens or rows at once")
    plain = [np.ascontiguousarray(array, dtype=DTYPES[array.dtype.name]) for array in arrays.values()]
    small = MAGIC + FRAME_SIZES.pack(len(header), payload) + header
    return [small, *(array.reshape(-1).data for array in plain if array.size)]


def read_frame(read: Read, payload_limit: int = PAYLOAD_BYTES) -> WireFrame:
    """The next frame of a stream; arrays own their memory and may be written to.

    ``payload_limit``: bytes, at most PAYLOAD_BYTES.

    Raises:
        NotAFrame: other bytes than ``MAGIC``.
        BadFrame: sizes above the limits, a header that is not JSON or does not fit its payload.
        Exceptions of ``read``.
    """
    magic = read(len(MAGIC)).tobytes()
    if magic != MAGIC:
        raise NotAFrame(magic)
    header_bytes, payload_bytes = FRAME_SIZES.unpack(read(FRAME_SIZES.size).tobytes())
    if header_bytes > HEADER_BYTES:
        raise BadFrame(f"a header of {header_bytes} bytes, but at most {HEADER_BYTES} are allowed")
    if payload_bytes > payload_limit:
        raise BadFrame(f"a payload of {payload_bytes} bytes, but at most {payload_limit} are allowed")
    header = _parse_header(read(header_bytes).tobytes())
    layout = _parse_layout(header.pop("arrays", None))
    expected = sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())
    if expected != payload_bytes:
        raise BadFrame(f"a payload of {payload_bytes} bytes, but its arrays take {expected}")
    return WireFrame(header, {name: _read_array(read, dtype, shape) for name, (dtype, shape) in layout.items()})


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(
            text.decode(),
            parse_constant=_no_constant,
            parse_float=_finite_float,
            object_pairs_hook=reject_duplicate_keys,
        )
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a header that is not JSON ({error}): {text[:80]!r}") from error
    if not isinstance(header, dict):
        raise BadFrame(f"a header that is no JSON object: {text[:80]!r}")
    return header


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is beyond a double")
    return value


def _parse_layout(listed: Any) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    if not isinstance(listed, list):
        raise BadFrame(f"arrays={reprlib.repr(listed)}, but expected a list, [] where there is no payload")
    if len(listed) > ARRAYS:
        raise BadFrame(f"{len(listed)} arrays, but at most {ARRAYS} are allowed")
    layout: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    for entry in listed:
        name, dtype, shape = _parse_array_entry(entry)
        if name in layout:
            raise BadFrame(f"two arrays with the name {reprlib.repr(name)}")
        layout[name] = dtype, shape
    return layout


def _parse_array_entry(entry: Any) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    fields = entry if isinstance(entry, Mapping) else {}
    name, dtype, shape = fields.get("name"), fields.get("dtype"), fields.get("shape")
    named, sized = f"array {reprlib.repr(name)}", f"shape={reprlib.repr(shape)}"
    if not isinstance(name, str):
        raise BadFrame(f"an array without a name: {reprlib.repr(entry)}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadFrame(f"{named} has dtype={reprlib.repr(dtype)}, but expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > DIMENSIONS or not all(_is_size(size) for size in shape):
        raise BadFrame(f"{named} has {sized}, but expected at most {DIMENSIONS} sizes ≥ 0")
    return name, DTYPES[dtype], tuple(shape)


def _is_size(size: Any) -> bool:
    return is_whole(size) and 0 <= size <= PAYLOAD_BYTES


def _read_array(read: Read, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    flat = read(math.prod(shape) * dtype.itemsize).view(dtype)
    try:
        return flat.reshape(shape).astype(dtype.newbyteorder("="), copy=False)
    except ValueError as error:  # empty, but of sizes whose product NumPy cannot hold
        raise BadFrame(f"an array of shape {list(shape)}: {error}") from error
