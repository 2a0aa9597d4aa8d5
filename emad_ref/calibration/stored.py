"""A profile as JSON: how bins and statistics are written, and which values are possible.

One row per field says what is expected of it beside the fields above it; what a file holds is judged by these rows
before anything is made of it. Knows nothing of what a profile is for.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from emad_ref.calibration.running import BUCKETS, EDGES_NATS, Statistics
from emad_ref.point import BinSpec
from emad_ref.record import Floats

AGREEMENT = 1e-9  # relative; a mean and the sums it came from, both through JSON, which keeps every digit


def bins_to_json(bins: BinSpec) -> dict[str, Any]:
    """Every field by name; ``frequency`` as one digit per token id."""
    return asdict(bins) | {"frequency": "".join(map(str, bins.frequency))}


def bins_from_json(data: Mapping[str, Any]) -> BinSpec:
    """What ``bins_to_json`` wrote.

    Raises:
        BadArgument, ValueError, TypeError, KeyError: anything else.
    """
    return BinSpec(
        features=tuple(data["features"]),
        position_edges=tuple(data["position_edges"]),
        confidence_edges=tuple(data["confidence_edges"]),
        frequency=bytes(int(digit) for digit in data["frequency"]),
    )


def statistics_to_json(statistics: Statistics) -> dict[str, Any]:
    """Sums as numbers; the histogram, mostly zeros, as base64 of zlib of little-endian int64."""
    packed = zlib.compress(statistics.histogram.astype("<i8").tobytes(), 6)
    return {
        "tokens": statistics.tokens.tolist(),
        "sums": statistics.sums.tolist(),
        "squares": statistics.squares.tolist(),
        "histogram": base64.b64encode(packed).decode("ascii"),
        "sequences": statistics.sequences,
    }


def _statistics_from_json(data: Mapping[str, Any], bins: int, layers: int) -> Statistics:
    """What ``statistics_to_json`` wrote, of ``bins`` × ``layers``; ValueError for anything else."""
    size = bins * layers * BUCKETS * 8
    packed = zlib.decompressobj().decompress(base64.b64decode(data["histogram"], validate=True), size + 1)
    if len(packed) != size:
        raise ValueError(f"histogram of {len(packed)} bytes, not {size}")
    return Statistics(
        np.array(data["tokens"], dtype=np.int64),
        np.array(data["sums"], dtype=np.float64),
        np.array(data["squares"], dtype=np.float64),
        np.frombuffer(packed, dtype="<i8").astype(np.int64).reshape(bins, layers, BUCKETS),
        data["sequences"],
    )


def are_probes(value: Any, layers: int) -> bool:
    return all(type(p) is int and 1 <= p < layers for p in value) and list(value) == sorted(set(value))


def _are_read(value: Any, data: Mapping[str, Any]) -> bool:
    return isinstance(value, list) and are_probes(value, data["layers"] + 1) and set(data["probes"]) <= set(value)


def _are_entropies(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(type(h) in (int, float) and math.isfinite(h) and h >= 0 for h in value)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_corpora(value: Any, tokens: int) -> bool:
    if not isinstance(value, dict) or not all(_is_name(name) and _is_count(count) for name, count in value.items()):
        return False
    return not value or sum(value.values()) == tokens


def _parsed_bins(value: Any) -> BinSpec | None:
    """None for what is no bins."""
    if not isinstance(value, dict) or set(value) != {f.name for f in fields(BinSpec)}:
        return None
    if not _are_edges(value["position_edges"], int) or not _are_edges(value["confidence_edges"], float):
        return None
    try:
        return bins_from_json(value)
    except (ValueError, TypeError):  # BadArgument is a ValueError
        return None


def _are_edges(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(edge) is kind for edge in value) and value == sorted(set(value))


def _rows(data: Mapping[str, Any]) -> int:
    """Rows of ``bin_targets_nats`` and ``fallbacks``: none without features."""
    return _bins(data).count if _bins(data).features else 0


def _bins(data: Mapping[str, Any]) -> BinSpec:
    bins = _parsed_bins(data["bins"])
    assert bins is not None, "bins were judged before the fields that ask for them"
    return bins


def _are_targets(value: Any, data: Mapping[str, Any]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == _rows(data)
        and all(_are_entropies(row, len(data["probes"])) and row == sorted(row, reverse=True) for row in value)
    )


def _are_fallbacks(value: Any, data: Mapping[str, Any]) -> bool:
    most = len(_bins(data).features)
    return isinstance(value, list) and len(value) == _rows(data) and all(v in range(most + 1) for v in value)


def _parsed_statistics(data: Mapping[str, Any]) -> Statistics | None:
    """None for what is not statistics of the profile's bins and layers read."""
    value, bins, layers = data["statistics"], _bins(data).count, len(data["read"])
    if not isinstance(value, dict) or set(value) != {f.name for f in fields(Statistics)}:
        return None
    try:
        parsed = _statistics_from_json(value, bins, layers)
    except (ValueError, TypeError, OverflowError, zlib.error):
        return None
    shapes = parsed.tokens.shape, parsed.sums.shape, parsed.squares.shape
    if shapes != ((bins,), (bins, layers), (bins, layers)) or type(parsed.sequences) is not int:
        return None
    return parsed


def _are_statistics(data: Mapping[str, Any]) -> bool:
    """None, or numbers that agree with each other and with the profile's tokens, windows and means."""
    if data["statistics"] is None:
        return True
    parsed = _parsed_statistics(data)
    if parsed is None or not np.isfinite(parsed.squares).all():
        return False
    if (parsed.tokens < 0).any() or (parsed.histogram < 0).any():
        return False
    if int(parsed.tokens.sum()) != data["tokens"] or parsed.sequences != data["sequences"]:
        return False
    counted = (parsed.histogram.sum(axis=-1) == parsed.tokens[:, None]).all()
    means = parsed.sums.sum(axis=0) / data["tokens"]
    if not (counted and np.allclose(means, data["mean_nats"], rtol=AGREEMENT, atol=0)):
        return False
    return _is_within(parsed.sums, parsed, EDGES_NATS) and _is_within(parsed.squares, parsed, EDGES_NATS**2)


def _is_within(total: Floats, parsed: Statistics, edges: Floats) -> bool:
    """Whether ``total`` [bins, layers] lies where the histogram puts it: each entropy between its bucket's edges."""
    least, most = (parsed.histogram @ side for side in (edges[:-1], edges[1:]))
    slack = 1e-6 * parsed.tokens[:, None] + 1e-9 * most  # an entropy may be a rounding below zero
    return bool(((total >= least - slack) & (total <= most + slack)).all())


# field, whether its value is possible beside the fields above it, what is expected of it
_FIELDS: tuple[tuple[str, Callable[[Any, dict[str, Any]], bool], str], ...] = (
    ("model", lambda v, _: _is_name(v), "a name"),
    ("fingerprint", lambda v, _: _is_name(v), "a checksum"),
    ("corpus", lambda v, _: _is_name(v), "a name"),
    ("dtype", lambda v, _: _is_name(v), "a name"),
    ("layers", lambda v, _: _is_count(v), "a count ≥ 1"),
    ("probes", lambda v, d: isinstance(v, list) and are_probes(v, d["layers"]), "ascending layers below the last"),
    ("read", lambda v, d: _are_read(v, d), "ascending layers of the model, the probes among them"),
    ("mean_nats", lambda v, d: _are_entropies(v, len(d["read"])), "one finite entropy ≥ 0 per layer read"),
    ("targets_nats", lambda v, d: _are_entropies(v, len(d["probes"])), "one finite entropy ≥ 0 per probe"),
    ("targets_nats", lambda v, _: v == sorted(v, reverse=True), "values that never rise"),
    ("tokens", lambda v, _: _is_count(v), "a count ≥ 1"),
    ("sequences", lambda v, _: _is_count(v), "a count ≥ 1"),
    ("versions", lambda v, _: isinstance(v, dict), "versions by package name"),
    ("corpora", lambda v, d: _are_corpora(v, d["tokens"]), "token counts by corpus that sum to the profile's tokens"),
    ("bins", lambda v, _: _parsed_bins(v) is not None, "features, ascending edges, and a digit per token id"),
    ("bin_targets_nats", _are_targets, "a row per bin that never rises, or none without features"),
    ("fallbacks", _are_fallbacks, "the number of features each bin gave up, or none without features"),
    ("minimum_tokens", lambda v, _: _is_count(v), "a count ≥ 1"),
    ("statistics", lambda _, d: _are_statistics(d), "null, or statistics that agree with tokens, sequences and means"),
)


def impossible(data: dict[str, Any]) -> tuple[str, str] | None:
    """(field, what is expected of it) of the first field of ``data`` whose value is impossible; None if none is."""
    return next(((name, expected) for name, possible, expected in _FIELDS if not possible(data[name], data)), None)


def values(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of judged ``data`` as a profile holds them."""
    plain = {name: _frozen(value) for name, value in data.items()}
    statistics = None if data["statistics"] is None else _parsed_statistics(data)
    return plain | {"bins": _bins(data), "statistics": statistics}


def brief(value: object) -> object:
    """``value``, or the beginning of a long one: a vocabulary's worth of buckets does not belong in a message."""
    said = repr(value)
    return value if len(said) <= 120 else f"{said[:100]}…"


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
