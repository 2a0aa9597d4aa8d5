"""Prompts, steps, states, work and records as header fields and arrays of frames, and back.

Writers return a ``WireFrame`` with their part; frames add up. Readers check the type of every field and the dtype and
shape of every array, and raise ``BadArgument`` with its name: the server answers with it, the client fails. Values are
checked only if they serve as indices (depths are layers, sequences are rows); audits check their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, ModelRef, Prompt, Request, Step, as_int64
from emad_ref.record import FILLS, PHASES, READOUTS, Floats, Ints, Record, StopReason, TokenTable, Work
from pytest_emad.remote import json_fields
from pytest_emad.remote.frames import Array, WireFrame
from pytest_emad.remote.json_fields import (
    parse_bool,
    parse_count,
    parse_list,
    parse_mapping,
    parse_nonnegative_number,
    parse_optional,
    parse_positive_integer,
    parse_text,
    read_field,
)

FLOATS = ("float32", "float64")
STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)
COLUMNS = tuple(column.name for column in fields(TokenTable))
COUNTS = ("encoder_tokens", "encoder_context")  # numeric fields of Work


@dataclass(frozen=True)
class RequestedModel:
    """The model to decode with: the folder of its weights, and the client's own dtype and device.

    ``folder``: absolute, with config.json and safetensors. ``fingerprint``: as ``models.fingerprint.fingerprint_of``.
    """

    name: str
    folder: str
    fingerprint: str
    dtype: str
    device: str


@dataclass(frozen=True)
class ReplyShapes:
    """Sizes that replies depend on. ``vocabulary``: V; ``counted``: whether work comes with each reply."""

    layers: int
    probes: int
    vocabulary: int
    counted: bool


# ---------------------------------------------------------------- arrays by name


def read_array(frame: WireFrame, name: str, dtypes: Sequence[str], shape: Sequence[int | None]) -> Array:
    """The array ``name``, of one of ``dtypes`` and of ``shape``; None allows any size.

    Raises:
        BadArgument: it is missing, or of another dtype or shape.
    """
    expected = f"{' or '.join(dtypes)} [{', '.join('n' if size is None else str(size) for size in shape)}]"
    if name not in frame.arrays:
        raise BadArgument(name, None, f"an array, {expected}")
    array = frame.arrays[name]
    fits = array.ndim == len(shape) and all(
        expected_size in (None, size) for size, expected_size in zip(array.shape, shape, strict=False)
    )
    if not fits or array.dtype.name not in dtypes:
        raise BadArgument(name, f"{array.dtype.name} {list(array.shape)}", expected)
    return array


def read_int64_array(frame: WireFrame, name: str, *shape: int | None) -> Ints:
    return read_array(frame, name, ("int64",), shape)


def read_floats(frame: WireFrame, name: str, *shape: int | None) -> Floats:
    return read_array(frame, name, FLOATS, shape).astype(np.float64, copy=False)


# ---------------------------------------------------------------- requests


def encode_open_decoder_request(request: Request, model: RequestedModel) -> WireFrame:
    """The fields of ``open``."""
    return WireFrame(
        {
            "model": asdict(model),
            "point": json_fields.point_to_json(request.point),
            "seed": int(request.seed),
            "max_rows": int(request.max_rows),
            "temperature": float(request.temperature),
        }
    )


def decode_open_decoder_request(frame: WireFrame) -> Request:
    """The request of an ``open``; ``load()`` of its model returns the ``RequestedModel`` that the client described."""
    described = read_field(frame.header, "model", parse_mapping)
    model = RequestedModel(
        **{part.name: read_field(described, part.name, parse_text) for part in fields(RequestedModel)}
    )
    return Request(
        ModelRef(model.name, lambda: model, lambda: Path(model.folder)),
        json_fields.point_from_json(read_field(frame.header, "point", parse_mapping)),
        seed=read_field(frame.header, "seed", parse_count),
        max_rows=read_field(frame.header, "max_rows", parse_positive_integer),
        temperature=read_field(frame.header, "temperature", parse_nonnegative_number),
    )


def capabilities_to_json(capabilities: Capabilities) -> dict[str, Any]:
    return asdict(capabilities) | {"schedules": sorted(capabilities.schedules)}


def capabilities_from_header(header: Mapping[str, Any]) -> Capabilities:
    fields = read_field(header, "capabilities", parse_mapping)
    schedules = read_field(fields, "schedules", parse_list)
    if not all(isinstance(name, str) for name in schedules):
        raise BadArgument("schedules", schedules, "a list of names")
    return Capabilities(
        max_feed=read_field(fields, "max_feed", parse_positive_integer),
        schedules=frozenset(schedules),
        counted=read_field(fields, "counted", parse_bool),
        logit_noise=read_field(fields, "logit_noise", parse_nonnegative_number),
        deepens=read_field(fields, "deepens", parse_bool),
        max_positions=read_field(fields, "max_positions", parse_optional(parse_positive_integer)),
    )


def encode_prompts(prompts: Sequence[Prompt]) -> WireFrame:
    """The concatenated rows and their lengths.

    Raises:
        BadArgument: a prompt that is no vector of integers; sources for some rows only.
    """
    frame = _ragged_frame(
        "tokens", "lengths", [_token_row(f"prompts[{i}]", prompt.tokens) for i, prompt in enumerate(prompts)]
    )
    sources = [prompt.source for prompt in prompts if prompt.source is not None]
    if not sources:
        return frame
    if len(sources) < len(prompts):
        raise BadArgument("prompts", f"{len(sources)} sources for {len(prompts)} rows", "one for each row, or none")
    return frame + _ragged_frame(
        "source", "source_lengths", [_token_row(f"sources[{i}]", one) for i, one in enumerate(sources)]
    )


def decode_prompts(frame: WireFrame) -> list[Prompt]:
    rows = _split_rows(frame, "tokens", "lengths")
    if "source" not in frame.arrays:
        return [Prompt(tokens) for tokens in rows]
    sources = _split_rows(frame, "source", "source_lengths", len(rows))
    return [Prompt(tokens, source) for tokens, source in zip(rows, sources, strict=True)]


def _token_row(name: str, values: Any) -> Ints:
    row = as_int64(name, values)
    if row.ndim != 1:
        raise BadArgument(name, row.shape, "shape [n]", "one Prompt per row")
    return row


def _ragged_frame(name: str, lengths: str, rows: Sequence[Ints]) -> WireFrame:
    whole = np.concatenate([np.empty(0, dtype=np.int64), *rows])
    return WireFrame(arrays={name: whole, lengths: np.array([len(row) for row in rows], dtype=np.int64)})


def _split_rows(frame: WireFrame, name: str, lengths: str, rows: int | None = None) -> list[Ints]:
    sizes = read_int64_array(frame, lengths, rows).tolist()
    if min(sizes, default=0) < 0:
        raise BadArgument(lengths, sizes, "lengths ≥ 0")
    flat = read_int64_array(frame, name, sum(sizes))
    ends = np.cumsum(sizes).tolist()
    return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]


# ---------------------------------------------------------------- replies


def encode_step(step: Step) -> WireFrame:
    depth = as_int64("depth", step.depth)
    return WireFrame(arrays={"logits": _as_float(step.logits), "depth": depth, "signal": _as_float(step.signal)})


def _as_float(values: Array) -> NDArray[Any]:
    return values if values.dtype.name in FLOATS else values.astype(np.float32)


def decode_step(frame: WireFrame, rows: int, n: int, read: int, sizes: ReplyShapes) -> Step:
    """A step of ``n`` tokens per row, ``read`` of them with logits."""
    return Step(
        read_floats(frame, "logits", rows, read, sizes.vocabulary),
        _require_layers(read_int64_array(frame, "depth", rows, n), "depth", sizes),
        read_floats(frame, "signal", rows, n, sizes.probes),
    )


def encode_session_state(length: Ints, cap: Ints, work: Work | None) -> WireFrame:
    arrays = {"length": as_int64("length", length), "cap": as_int64("cap", cap)}
    return WireFrame(arrays=arrays) + encode_work(work, "work")


@dataclass(frozen=True)
class RemoteSessionState:
    """``length``, ``cap`` int64 [rows]; ``work`` None if the decoder does not count."""

    length: Ints
    cap: Ints
    work: Work | None


def decode_session_state(frame: WireFrame, rows: int, sizes: ReplyShapes) -> RemoteSessionState:
    cap = _require_layers(read_int64_array(frame, "cap", rows), "cap", sizes)
    return RemoteSessionState(
        read_int64_array(frame, "length", rows), cap, decode_work(frame, "work", sizes) if sizes.counted else None
    )


def encode_work(work: Work | None, prefix: str) -> WireFrame:
    """Arrays and fields ``prefix.NAME``; nothing for None."""
    if work is None:
        return WireFrame()
    parts = {part.name: getattr(work, part.name) for part in fields(Work)}
    counts = {f"{prefix}.{name}": int(parts.pop(name)) for name in COUNTS}
    return WireFrame(counts, {f"{prefix}.{name}": as_int64(name, values) for name, values in parts.items()})


def decode_work(frame: WireFrame, prefix: str, sizes: ReplyShapes) -> Work:
    rows = {"readout_rows": (len(READOUTS),), "readout_macs": (len(READOUTS),), "fills": (len(FILLS),)}
    names = [part.name for part in fields(Work) if part.name not in COUNTS]
    # a decoder without state translators may leave this out
    frame = WireFrame(arrays={f"{prefix}.fill_macs": np.zeros(sizes.layers, dtype=np.int64)}) + frame
    parts: dict[str, Any] = {
        name: read_int64_array(frame, f"{prefix}.{name}", *rows.get(name, ()), sizes.layers) for name in names
    }
    header = {f"{prefix}.{name}": 0 for name in COUNTS} | frame.header
    return Work(**parts | {name: read_field(header, f"{prefix}.{name}", parse_count) for name in COUNTS})


def encode_record(record: Record) -> WireFrame:
    """A record of a decoder, which has one model. Raises BadArgument for work of several models."""
    columns = {f"token.{name}": getattr(record.tokens, name).astype(np.int64) for name in COLUMNS}
    frame = WireFrame({"stop": list(record.stop)}, columns | {"signal": _as_float(record.signal)})
    frame += _ragged_frame("emitted", "emitted_lengths", [np.asarray(row, dtype=np.int64) for row in record.emitted])
    for prefix, counts in (("work", record.work), ("prompt_work", record.prompt_work)):
        if counts is not None:
            if set(counts) != {0}:
                raise BadArgument(prefix, sorted(counts), "work of model 0", "a decoder belongs to one model")
            frame += encode_work(counts[0], prefix)
    return frame


def decode_record(frame: WireFrame, rows: int, sizes: ReplyShapes) -> Record:
    depth = read_int64_array(frame, "token.depth", None)
    columns = {name: read_int64_array(frame, f"token.{name}", len(depth)) for name in COLUMNS}
    _require_range(columns["sequence"], "token.sequence", 0, rows - 1)
    _require_range(columns["phase"], "token.phase", 0, len(PHASES) - 1)
    _require_range(columns["kept"], "token.kept", 0, 1)
    for name in ("depth", "cap"):
        _require_layers(columns[name], f"token.{name}", sizes)
    stop = read_field(frame.header, "stop", parse_list)
    if len(stop) != rows or any(reason not in STOP_REASONS for reason in stop):
        raise BadArgument("stop", stop, f"one of {', '.join(STOP_REASONS)} for each of {rows} rows")
    return Record(
        TokenTable(**columns | {"kept": columns["kept"].astype(np.bool_)}),  # type: ignore[arg-type]  # one of bools
        read_floats(frame, "signal", len(depth), sizes.probes),
        _split_rows(frame, "emitted", "emitted_lengths", rows),
        list(stop),
        {0: decode_work(frame, "work", sizes)} if sizes.counted else None,
        {0: decode_work(frame, "prompt_work", sizes)} if sizes.counted else None,
    )


def _require_layers(values: Ints, name: str, sizes: ReplyShapes) -> Ints:
    return _require_range(values, name, 1, sizes.layers)


def _require_range(values: Ints, name: str, least: int, most: int) -> Ints:
    outside = values[(values < least) | (values > most)]
    if outside.size:
        raise BadArgument(name, int(outside[0]), f"{least}–{most}")
    return values


def reply_shapes(point: OperatingPoint, vocabulary: int, capabilities: Capabilities) -> ReplyShapes:
    return ReplyShapes(point.layers, len(point.probes), vocabulary, capabilities.counted)
