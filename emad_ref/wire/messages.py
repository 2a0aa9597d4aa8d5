"""What stands in a frame: prompts, steps, states, work and records, as header fields and arrays, and back.

Writers return a ``Frame`` with the part that is theirs; frames add up. Readers hold every field against its type, and
every array against its dtype and shape, and raise ``BadArgument`` with its name: from a request that is an answer, from
a reply a failure. What the numbers mean is for audits to say, as of any decoder, as long as they can be looked up:
depths are layers, sequences are rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, ModelRef, Prompt, Request, Step
from emad_ref.record import FILLS, PHASES, READOUTS, Floats, Ints, Record, StopReason, Tokens, Work
from emad_ref.wire import points
from emad_ref.wire.fields import amount, count, field, flag, items, mapping, positive, text
from emad_ref.wire.frames import Array, Frame

FLOATS = ("float32", "float64")
STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)
COLUMNS = tuple(column.name for column in fields(Tokens))
COUNTS = ("encoder_tokens", "encoder_context")  # fields of Work that are numbers


@dataclass(frozen=True)
class Model:
    """The model that a decoder is wanted for: where its weights lie, and what the judge itself runs in.

    ``folder``: absolute, with config.json and safetensors. ``fingerprint``: as ``models.loading.fingerprint_of``.
    """

    name: str
    folder: str
    fingerprint: str
    dtype: str
    device: str


@dataclass(frozen=True)
class Sizes:
    """What the shapes of replies follow from. ``vocabulary``: V; ``counted``: whether work comes with each reply."""

    layers: int
    probes: int
    vocabulary: int
    counted: bool


# ---------------------------------------------------------------- arrays by name


def array(frame: Frame, name: str, dtypes: Sequence[str], shape: Sequence[int | None]) -> Array:
    """An array of one of ``dtypes`` and of ``shape``, None standing for any size.

    Raises:
        BadArgument: it is not there, or another.
    """
    expected = f"{' or '.join(dtypes)} [{', '.join('n' if size is None else str(size) for size in shape)}]"
    if name not in frame.arrays:
        raise BadArgument(name, None, f"an array, {expected}")
    found = frame.arrays[name]
    fits = found.ndim == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(found.shape, shape, strict=False)
    )
    if not fits or found.dtype.name not in dtypes:
        raise BadArgument(name, f"{found.dtype.name} {list(found.shape)}", expected)
    return found


def ints(frame: Frame, name: str, *shape: int | None) -> Ints:
    return array(frame, name, ("int64",), shape)


def floats(frame: Frame, name: str, *shape: int | None) -> Floats:
    return array(frame, name, FLOATS, shape).astype(np.float64, copy=False)


def integers(name: str, values: Any) -> Ints:
    """``values`` as int64. Raises BadArgument for floats and flags, which a cast would quietly change."""
    found = np.asarray(values)
    if found.size and found.dtype.kind not in "iu":
        raise BadArgument(name, found.dtype.name, "integers", "cast them if that is what they are")
    return found.astype(np.int64)


# ---------------------------------------------------------------- requests


def request_frame(request: Request, model: Model) -> Frame:
    """What ``open`` carries."""
    return Frame(
        {
            "model": asdict(model),
            "point": points.to_json(request.point),
            "seed": int(request.seed),
            "max_rows": int(request.max_rows),
            "temperature": float(request.temperature),
        }
    )


def request_of(frame: Frame) -> Request:
    """The request of an ``open``; its model's ``load`` gives the ``Model`` that the judge described."""
    described = field(frame.header, "model", mapping)
    model = Model(**{part.name: field(described, part.name, text) for part in fields(Model)})
    return Request(
        ModelRef(model.name, lambda: model),
        points.from_json(field(frame.header, "point", mapping)),
        seed=field(frame.header, "seed", count),
        max_rows=field(frame.header, "max_rows", positive),
        temperature=field(frame.header, "temperature", amount),
    )


def capabilities_json(capabilities: Capabilities) -> dict[str, Any]:
    return asdict(capabilities) | {"schedules": sorted(capabilities.schedules)}


def capabilities_of(header: Mapping[str, Any]) -> Capabilities:
    given = field(header, "capabilities", mapping)
    schedules = field(given, "schedules", items)
    if not all(isinstance(name, str) for name in schedules):
        raise BadArgument("schedules", schedules, "a list of names")
    return Capabilities(
        max_feed=field(given, "max_feed", positive),
        schedules=frozenset(schedules),
        counted=field(given, "counted", flag),
        logit_noise=field(given, "logit_noise", amount),
        deepens=field(given, "deepens", flag),
    )


def prompts_frame(prompts: Sequence[Prompt]) -> Frame:
    """Rows one after the other, and how long each is.

    Raises:
        BadArgument: prompts that are no vectors of integers; sources for some rows and not for others.
    """
    frame = _ragged("tokens", "lengths", [_row(f"prompts[{i}]", prompt.tokens) for i, prompt in enumerate(prompts)])
    sources = [prompt.source for prompt in prompts if prompt.source is not None]
    if not sources:
        return frame
    if len(sources) < len(prompts):
        raise BadArgument("prompts", f"{len(sources)} sources for {len(prompts)} rows", "one for each row, or none")
    return frame + _ragged("source", "source_lengths", [_row(f"sources[{i}]", one) for i, one in enumerate(sources)])


def prompts_of(frame: Frame) -> list[Prompt]:
    rows = _split(frame, "tokens", "lengths")
    if "source" not in frame.arrays:
        return [Prompt(tokens) for tokens in rows]
    sources = _split(frame, "source", "source_lengths", len(rows))
    return [Prompt(tokens, source) for tokens, source in zip(rows, sources, strict=True)]


def _row(name: str, values: Any) -> Ints:
    found = integers(name, values)
    if found.ndim != 1:
        raise BadArgument(name, found.shape, "shape [n]", "one Prompt per row")
    return found


def _ragged(name: str, lengths: str, rows: Sequence[Ints]) -> Frame:
    whole = np.concatenate([np.empty(0, dtype=np.int64), *rows])
    return Frame(arrays={name: whole, lengths: np.array([len(row) for row in rows], dtype=np.int64)})


def _split(frame: Frame, name: str, lengths: str, rows: int | None = None) -> list[Ints]:
    sizes = ints(frame, lengths, rows).tolist()
    if min(sizes, default=0) < 0:
        raise BadArgument(lengths, sizes, "lengths ≥ 0")
    flat = ints(frame, name, sum(sizes))
    ends = np.cumsum(sizes).tolist()
    return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]


# ---------------------------------------------------------------- replies


def step_frame(step: Step) -> Frame:
    depth = integers("depth", step.depth)
    return Frame(arrays={"logits": _travelling(step.logits), "depth": depth, "signal": _travelling(step.signal)})


def _travelling(values: Array) -> NDArray[Any]:
    return values if values.dtype.name in FLOATS else values.astype(np.float32)


def step_of(frame: Frame, rows: int, n: int, read: int, sizes: Sizes) -> Step:
    """A step of ``n`` tokens per row, of which ``read`` have logits."""
    return Step(
        floats(frame, "logits", rows, read, sizes.vocabulary),
        _layers(ints(frame, "depth", rows, n), "depth", sizes),
        floats(frame, "signal", rows, n, sizes.probes),
    )


def state_frame(length: Ints, cap: Ints, work: Work | None) -> Frame:
    arrays = {"length": integers("length", length), "cap": integers("cap", cap)}
    return Frame(arrays=arrays) + work_frame(work, "work")


@dataclass(frozen=True)
class State:
    """``length``, ``cap`` int64 [rows]; ``work`` None where the decoder does not count."""

    length: Ints
    cap: Ints
    work: Work | None


def state_of(frame: Frame, rows: int, sizes: Sizes) -> State:
    cap = _layers(ints(frame, "cap", rows), "cap", sizes)
    return State(ints(frame, "length", rows), cap, work_of(frame, "work", sizes) if sizes.counted else None)


def work_frame(work: Work | None, prefix: str) -> Frame:
    """Arrays and fields ``prefix.NAME``; nothing for None."""
    if work is None:
        return Frame()
    parts = {part.name: getattr(work, part.name) for part in fields(Work)}
    counts = {f"{prefix}.{name}": int(parts.pop(name)) for name in COUNTS}
    return Frame(counts, {f"{prefix}.{name}": integers(name, values) for name, values in parts.items()})


def work_of(frame: Frame, prefix: str, sizes: Sizes) -> Work:
    rows = {"readout_rows": (len(READOUTS),), "readout_macs": (len(READOUTS),), "fills": (len(FILLS),)}
    names = [part.name for part in fields(Work) if part.name not in COUNTS]
    # a decoder without state translators need not say so
    frame = Frame(arrays={f"{prefix}.fill_macs": np.zeros(sizes.layers, dtype=np.int64)}) + frame
    parts: dict[str, Any] = {name: ints(frame, f"{prefix}.{name}", *rows.get(name, ()), sizes.layers) for name in names}
    header = {f"{prefix}.{name}": 0 for name in COUNTS} | frame.header
    return Work(**parts | {name: field(header, f"{prefix}.{name}", count) for name in COUNTS})


def record_frame(record: Record) -> Frame:
    """A record of one model: of several, it is not a decoder's. Raises BadArgument for work of others."""
    columns = {f"token.{name}": getattr(record.tokens, name).astype(np.int64) for name in COLUMNS}
    frame = Frame({"stop": list(record.stop)}, columns | {"signal": _travelling(record.signal)})
    frame += _ragged("emitted", "emitted_lengths", [np.asarray(row, dtype=np.int64) for row in record.emitted])
    for prefix, held in (("work", record.work), ("prompt_work", record.prompt_work)):
        if held is not None:
            if set(held) != {0}:
                raise BadArgument(prefix, sorted(held), "work of model 0", "a decoder belongs to one model")
            frame += work_frame(held[0], prefix)
    return frame


def record_of(frame: Frame, rows: int, sizes: Sizes) -> Record:
    depth = ints(frame, "token.depth", None)
    columns = {name: ints(frame, f"token.{name}", len(depth)) for name in COLUMNS}
    _within(columns["sequence"], "token.sequence", 0, rows - 1)
    _within(columns["phase"], "token.phase", 0, len(PHASES) - 1)
    _within(columns["kept"], "token.kept", 0, 1)
    for name in ("depth", "cap"):
        _layers(columns[name], f"token.{name}", sizes)
    stop = field(frame.header, "stop", items)
    if len(stop) != rows or any(reason not in STOP_REASONS for reason in stop):
        raise BadArgument("stop", stop, f"one of {', '.join(STOP_REASONS)} for each of {rows} rows")
    return Record(
        Tokens(**columns | {"kept": columns["kept"].astype(np.bool_)}),  # type: ignore[arg-type]  # one of bools
        floats(frame, "signal", len(depth), sizes.probes),
        _split(frame, "emitted", "emitted_lengths", rows),
        list(stop),
        {0: work_of(frame, "work", sizes)} if sizes.counted else None,
        {0: work_of(frame, "prompt_work", sizes)} if sizes.counted else None,
    )


def _layers(values: Ints, name: str, sizes: Sizes) -> Ints:
    return _within(values, name, 1, sizes.layers)


def _within(values: Ints, name: str, least: int, most: int) -> Ints:
    outside = values[(values < least) | (values > most)]
    if outside.size:
        raise BadArgument(name, int(outside[0]), f"{least}–{most}")
    return values


def sizes_of(point: OperatingPoint, vocabulary: int, capabilities: Capabilities) -> Sizes:
    return Sizes(point.layers, len(point.probes), vocabulary, capabilities.counted)
