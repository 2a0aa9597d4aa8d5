"""The teacher-forcing entropy profile: the result of a calibration, with a fingerprint, and its JSON file.

    mean H_ℓ                     ``mean_nats``, after each layer read       (EMAD, "Teacher-forcing entropy profile")
    E*[H_ℓ] = isotonic(mean H_ℓ)   ``targets_nats``, ℓ ∈ P; ``bin_targets_nats`` by bin             (the same section)
    τ_ℓ = E*[H_ℓ] − m            ``Profile.point(m)``                       (EMAD, "Calibration details")

It has raw means and the isotonic targets of the probes, for all tokens together and for each bin. The profile keeps its
running statistics, so profiles of several corpora can be merged, and any quantile can be read. A profile belongs to one
model, tokenizer and dtype; ``require`` refuses any other. A file is checked field by field before use.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from emad_ref.calibration.entropy_statistics import (
    ADDED,
    BUCKETS,
    EDGES_NATS,
    DocumentMoments,
    EntropyStatistics,
    compute_trace_statistics,
)
from emad_ref.calibration.regression import isotonic_targets
from emad_ref.calibration.trace import Trace
from emad_ref.console import format_facts_html
from emad_ref.errors import BadArgument, EmadError, is_number, is_whole, require_instance
from emad_ref.exit_rules import (
    ONE_BIN,
    bin_indices_without_last_features,
    calibrated_entropy_point,
    dropped_feature_count_by_bin,
    name_with_schedule_and_bins,
)
from emad_ref.files import BadFile, read_json, require_writable, write_atomically
from emad_ref.point import OperatingPoint, ScheduleName, ThresholdBinSpec
from emad_ref.record import Floats, Ints

MEAN_AGREEMENT = 1e-9  # largest relative difference of a mean and its sums, both from exact JSON


def bins_to_json(bins: ThresholdBinSpec) -> dict[str, Any]:
    """Every field by name; ``frequency`` as one digit per token id."""
    return asdict(bins) | {"frequency": "".join(map(str, bins.frequency))}


def bins_from_json(data: Mapping[str, Any]) -> ThresholdBinSpec:
    """Read the output of ``bins_to_json``.

    Raises:
        BadArgument, ValueError, TypeError, KeyError: anything else.
    """
    return ThresholdBinSpec(
        features=tuple(data["features"]),
        position_edges=tuple(data["position_edges"]),
        confidence_edges=tuple(data["confidence_edges"]),
        frequency=bytes(int(digit) for digit in data["frequency"]),
    )


def statistics_to_json(statistics: EntropyStatistics) -> dict[str, Any]:
    """Sums as numbers; the histogram, mostly zeros, as base64 of zlib of little-endian int64."""
    packed = zlib.compress(statistics.histogram.astype("<i8").tobytes(), 6)
    moments = statistics.documents
    documents = (
        {} if moments is None else {"documents": {"count": moments.count, "products": moments.products.tolist()}}
    )
    return {
        "tokens": statistics.tokens.tolist(),
        "sums": statistics.sums.tolist(),
        "squares": statistics.squares.tolist(),
        "histogram": base64.b64encode(packed).decode("ascii"),
        "sequences": statistics.sequences,
        **documents,
    }


def _statistics_from_json(data: Mapping[str, Any], bins: int, layers: int) -> EntropyStatistics:
    """Read the output of ``statistics_to_json`` for ``bins`` × ``layers``; ValueError for anything else."""
    size = bins * layers * BUCKETS * 8
    packed = zlib.decompressobj().decompress(base64.b64decode(data["histogram"], validate=True), size + 1)
    if len(packed) != size:
        raise ValueError(f"histogram of {len(packed)} bytes, not {size}")
    return EntropyStatistics(
        np.array(data["tokens"], dtype=np.int64),
        np.array(data["sums"], dtype=np.float64),
        np.array(data["squares"], dtype=np.float64),
        np.frombuffer(packed, dtype="<i8").astype(np.int64).reshape(bins, layers, BUCKETS),
        data["sequences"],
        _moments_from_json(data["documents"], layers) if "documents" in data else None,
    )


def _moments_from_json(data: Mapping[str, Any], layers: int) -> DocumentMoments:
    """Read moments; ValueError for impossible ones."""
    count, products = data["count"], np.array(data["products"], dtype=np.float64)
    if set(data) != {"count", "products"} or not _is_count(count) or products.shape != (1 + layers, 1 + layers):
        raise ValueError(f"moments of {count!r:.20} documents, not of {layers} layers")
    smallest = float(np.linalg.eigvalsh(products)[0]) if np.isfinite(products).all() else -math.inf
    if not np.array_equal(products, products.T) or smallest < -1e-9 * float(np.trace(products)):
        raise ValueError("moments that no documents have")
    return DocumentMoments(count, products)


def are_valid_probes(value: Any, layers: int) -> bool:
    return all(is_whole(p) and 1 <= p < layers for p in value) and list(value) == sorted(set(value))


def _are_read(value: Any, data: Mapping[str, Any]) -> bool:
    return isinstance(value, list) and are_valid_probes(value, data["layers"] + 1) and set(data["probes"]) <= set(value)


def _are_entropies(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(is_number(h) and math.isfinite(h) and h >= 0 for h in value)
    )


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 1


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_corpora(value: Any, tokens: int) -> bool:
    if not isinstance(value, dict) or not all(_is_name(name) and _is_count(count) for name, count in value.items()):
        return False
    return not value or sum(value.values()) == tokens


def _parsed_bins(value: Any) -> ThresholdBinSpec | None:
    """The bins, or None for an invalid value."""
    if not isinstance(value, dict) or set(value) != {f.name for f in fields(ThresholdBinSpec)}:
        return None
    if not _are_edges(value["position_edges"], int) or not _are_edges(value["confidence_edges"], float):
        return None
    try:
        return bins_from_json(value)
    except (ValueError, TypeError):  # BadArgument is a ValueError
        return None


def _are_edges(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(edge) is kind for edge in value) and value == sorted(set(value))


def _bin_rows(data: Mapping[str, Any]) -> int:
    """Number of rows of ``bin_targets_nats`` and ``fallbacks``: 0 without features."""
    return _bins_of(data).bin_count if _bins_of(data).features else 0


def _bins_of(data: Mapping[str, Any]) -> ThresholdBinSpec:
    bins = _parsed_bins(data["bins"])
    assert bins is not None, "bins were judged before the fields that ask for them"
    return bins


def _are_targets(value: Any, data: Mapping[str, Any]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == _bin_rows(data)
        and all(_are_entropies(row, len(data["probes"])) and row == sorted(row, reverse=True) for row in value)
    )


def _are_fallbacks(value: Any, data: Mapping[str, Any]) -> bool:
    most = len(_bins_of(data).features)
    return isinstance(value, list) and len(value) == _bin_rows(data) and all(v in range(most + 1) for v in value)


def _parsed_statistics(data: Mapping[str, Any]) -> EntropyStatistics | None:
    """The statistics, or None unless they fit the profile's bins and layers read."""
    value, bins, layers = data["statistics"], _bins_of(data).bin_count, len(data["read"])
    if not isinstance(value, dict) or set(value) - {"documents"} != set(ADDED):  # earlier files have no documents
        return None
    try:
        parsed = _statistics_from_json(value, bins, layers)
    except (ValueError, TypeError, KeyError, OverflowError, zlib.error):
        return None
    shapes = parsed.tokens.shape, parsed.sums.shape, parsed.squares.shape
    if shapes != ((bins,), (bins, layers), (bins, layers)) or not is_whole(parsed.sequences):
        return None
    return parsed


@np.errstate(over="ignore")  # a damaged file may hold any number; one that overflows is inconsistent
def _are_statistics(data: Mapping[str, Any]) -> bool:
    """Whether it is None, or numbers that agree with each other and with the profile's tokens, windows and means."""
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
    if parsed.documents is not None and not _are_moments(parsed.documents, parsed):
        return False
    means = parsed.sums.sum(axis=0) / data["tokens"]
    if not (counted and np.allclose(means, data["mean_nats"], rtol=MEAN_AGREEMENT, atol=0)):
        return False
    return _is_within(parsed.sums, parsed, EDGES_NATS) and _is_within(parsed.squares, parsed, EDGES_NATS**2)


def _are_moments(moments: DocumentMoments, parsed: EntropyStatistics) -> bool:
    """Whether this number of documents can have these sums: (Σ v)² ≤ count · Σ v², which is at most (Σ v)²."""
    totals = np.concatenate([[parsed.tokens.sum()], parsed.sums.sum(axis=0)])
    squares, slack = np.diag(moments.products), 1 + 1e-6
    within = (totals**2 <= slack * moments.count * squares + 1e-6) & (squares <= slack * totals**2 + 1e-6)
    return moments.count <= parsed.sequences and bool(within.all())


def _is_within(total: Floats, parsed: EntropyStatistics, edges: Floats) -> bool:
    """Whether ``total`` [bins, layers] agrees with the histogram, with each entropy between its bucket's edges."""
    least, most = (parsed.histogram @ side for side in (edges[:-1], edges[1:]))
    slack = 1e-6 * parsed.tokens[:, None] + 1e-9 * most  # rounding may give an entropy below zero
    return bool(((total >= least - slack) & (total <= most + slack)).all())


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


# field, check of its value given the earlier fields, description of valid values
_FIELD_CHECKS: tuple[tuple[str, Callable[[Any, dict[str, Any]], bool], str], ...] = (
    ("model", lambda v, _: _is_name(v), "a name"),
    ("fingerprint", lambda v, _: _is_name(v), "a checksum"),
    ("corpus", lambda v, _: _is_name(v), "a name"),
    ("dtype", lambda v, _: _is_name(v), "a name"),
    ("layers", lambda v, _: _is_count(v), "a count ≥ 1"),
    (
        "probes",
        lambda v, d: isinstance(v, list) and are_valid_probes(v, d["layers"]),
        "ascending layers below the last",
    ),
    ("read", lambda v, d: _are_read(v, d), "ascending layers of the model, the probes among them"),
    ("mean_nats", lambda v, d: _are_entropies(v, len(d["read"])), "one finite entropy ≥ 0 per layer read"),
    ("targets_nats", lambda v, d: _are_entropies(v, len(d["probes"])), "one finite entropy ≥ 0 per probe"),
    ("targets_nats", lambda v, _: v == sorted(v, reverse=True), "values that never rise"),
    ("tokens", lambda v, _: _is_count(v), "a count ≥ 1"),
    ("sequences", lambda v, _: _is_count(v), "a count ≥ 1"),
    ("versions", lambda v, _: _are_texts(v), "versions by package name"),
    ("corpora", lambda v, d: _are_corpora(v, d["tokens"]), "token counts by corpus that sum to the profile's tokens"),
    ("bins", lambda v, _: _parsed_bins(v) is not None, "features, ascending edges, and a digit per token id"),
    ("bin_targets_nats", _are_targets, "a row per bin that never rises, or none without features"),
    ("fallbacks", _are_fallbacks, "the number of features each bin gave up, or none without features"),
    ("minimum_tokens", lambda v, _: _is_count(v), "a count ≥ 1"),
    ("statistics", lambda _, d: _are_statistics(d), "null, or statistics that agree with tokens, sequences and means"),
)


def find_invalid_field_and_rule(data: dict[str, Any]) -> tuple[str, str] | None:
    """(field, description of valid values) of the first impossible field of ``data``; None if all are possible."""
    return next(
        ((name, expected) for name, possible, expected in _FIELD_CHECKS if not possible(data[name], data)), None
    )


def convert_profile_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of checked ``data`` with a profile's types."""
    plain = {name: _to_tuples(value) for name, value in data.items()}
    statistics = None if data["statistics"] is None else _parsed_statistics(data)
    return plain | {"bins": _bins_of(data), "statistics": statistics}


def shorten(value: object) -> object:
    """``value``, or the beginning of a long one, for messages."""
    text = repr(value)
    return value if len(text) <= 120 else f"{text[:100]}…"


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(item) for item in value) if isinstance(value, list) else value


PROFILE_SCHEMA = 3
MINIMUM_TOKENS = (
    500  # least tokens for a bin's own thresholds, which give a mean entropy of deviation 1.5 nats to ± 0.07
)

DERIVED_FIELDS = ("mean_nats", "targets_nats", "fallbacks", "bin_targets_nats")  # fields computed from the statistics
DERIVED_AGREEMENT = 1e-6  # relative, and nats; versions of SciPy and scikit-learn differ in the order of sums

TargetRows = tuple[tuple[float, ...], ...]


class BadProfile(EmadError):
    """Raised for a profile file that cannot be read, or belongs to another model."""


@dataclass(frozen=True, repr=False)
class Profile:
    """``read``: the layers whose entropies were read, including the probes; ``mean_nats`` [read] raw means;
    ``targets_nats`` [probes] isotonic; ``tokens`` the number of positions averaged.

    ``corpora``          tokens from each corpus; empty: all from ``corpus``.
    ``bins``             assignment of tokens; without features, the following two are empty.
    ``bin_targets_nats`` [bins][probes] isotonic targets of each bin.
    ``fallbacks``        [bins] number of features that the bin dropped for lack of ``minimum_tokens``: its targets are
                         those of all tokens with the same remaining features; 0 for its own targets.
    ``statistics``       the source of all numbers; None for a profile written by hand, which has no quantiles.
    """

    model: str
    fingerprint: str
    corpus: str
    dtype: str
    layers: int
    probes: tuple[int, ...]
    read: tuple[int, ...]
    mean_nats: tuple[float, ...]
    targets_nats: tuple[float, ...]
    tokens: int
    sequences: int
    versions: dict[str, str]
    corpora: dict[str, int] = field(default_factory=dict)
    bins: ThresholdBinSpec = ONE_BIN
    bin_targets_nats: TargetRows = ()
    fallbacks: tuple[int, ...] = ()
    minimum_tokens: int = MINIMUM_TOKENS
    statistics: EntropyStatistics | None = None
    schema: int = PROFILE_SCHEMA

    def __post_init__(self) -> None:
        """Assert what holds for every profile."""
        rows, bins = self.bin_targets_nats, self.bins
        for ascending, end in ((self.probes, self.layers), (self.read, self.layers + 1)):
            assert list(ascending) == sorted({*ascending} & {*range(1, end)}), f"ascending layers below {end}"
        assert {*self.probes} <= {*self.read}, "the probes are among the layers read"
        assert len(self.mean_nats) == len(self.read), "one mean per layer read"
        assert all(map(math.isfinite, self.mean_nats)), "means of tokens"
        for targets in (self.targets_nats, *rows):
            assert len(targets) == len(self.probes), "one target per probe"
            assert list(targets) == sorted(targets, reverse=True), "targets never rise"
        assert len(rows) == len(self.fallbacks) == bins.bin_count * bool(bins.features), "one row of targets per bin"
        assert not self.corpora or sum(self.corpora.values()) == self.tokens, "all tokens are of its corpora"
        if self.statistics is not None:
            assert self.statistics.sums.shape == (bins.bin_count, len(self.read)), "statistics by bin and layer read"
            assert int(self.statistics.tokens.sum()) == self.tokens, "statistics of its tokens"

    def __repr__(self) -> str:
        read = f"{self.tokens:,} tokens of {self.corpus}"
        return (
            f"{type(self).__name__}({self.model}: {read}, probes {', '.join(map(str, self.probes))} of {self.layers})"
        )

    def _repr_html_(self) -> str:
        targets = zip(self.probes, self.targets_nats, strict=True)
        facts = {f"target at layer {probe}": f"{target:.4g} nats" for probe, target in targets}
        return format_facts_html(f"{self.model}: {self.tokens:,} tokens of {self.corpus}", facts)

    def point(
        self, margin_nats: float = 0.0, schedule: ScheduleName = "monotone", *, quantile: float | None = None
    ) -> OperatingPoint:
        """The EMAD operating point τ_ℓ = targets_nats − m; with ``quantile``, τ_ℓ is that quantile of H_ℓ.

        Raises:
            BadArgument: a margin that makes every threshold negative, so that no token can exit; a margin together with
            a quantile; a quantile outside (0, 1), or of a profile without statistics.
        """
        if quantile is not None:
            return self._quantile_point(quantile, margin_nats, schedule)
        if not is_number(margin_nats):
            raise BadArgument("margin_nats", margin_nats, "a number of nats")
        rows = self.bin_targets_nats or (self.targets_nats,)
        highest = max((max(row) for row in rows), default=0.0) if self.probes else math.inf
        if highest - margin_nats < 0:
            raise BadArgument(
                "margin_nats",
                margin_nats,
                f"at most {highest:.4f}, the highest target of this profile",
                "a larger margin makes every threshold negative, and entropy never is: nothing would exit",
            )
        return calibrated_entropy_point(self.layers, self.probes, rows, margin_nats, schedule, self.bins)

    def _quantile_point(self, quantile: float, margin_nats: float, schedule: ScheduleName) -> OperatingPoint:
        if margin_nats != 0:
            raise BadArgument(
                "margin_nats", margin_nats, "0 beside a quantile", "a smaller quantile is the stricter one"
            )

        def levels(statistics: EntropyStatistics) -> Floats:
            return statistics.quantile_nats(quantile)[:, _columns(self.probes, self.read)]

        rows = _values_with_fallbacks(levels, self._statistics, self.bins, self.fallbacks)
        return OperatingPoint(
            name=name_with_schedule_and_bins(f"quantile q={quantile:g}", schedule, self.bins),
            family="quantile",
            layers=self.layers,
            ceiling=self.layers,
            probes=self.probes,
            thresholds=_to_rows(rows),
            schedule=schedule,
            bins=self.bins,
        )

    def quantile_nats(self, quantile: float) -> Floats:
        """[bins, read] the ``quantile`` of H in each bin, without fallback; NaN for a bin without tokens.

        Raises:
            BadArgument: a quantile outside (0, 1), or of a profile without statistics.
        """
        return self._statistics.quantile_nats(quantile)

    def drop_last_bin_features(self, dropped: int = 1) -> Profile:
        """The same calibration without its last ``dropped`` features.

        Raises:
            BadArgument: more features than there are, or a profile without statistics.
        """
        group = bin_indices_without_last_features(self.bins, dropped)
        features = self.bins.features[: len(self.bins.features) - dropped]
        frequency = self.bins.frequency if "frequency" in features else b""
        bins = replace(self.bins, features=features, frequency=frequency)
        statistics = self._statistics.pool_bin_groups(group)
        targets = compute_targets(statistics, self.probes, self.read, bins, self.minimum_tokens)
        return replace(self, bins=bins, statistics=statistics, **targets._asdict())

    @property
    def _statistics(self) -> EntropyStatistics:
        if self.statistics is None:
            raise BadArgument("profile.statistics", None, "running statistics", "calibrate again with `emad calibrate`")
        return self.statistics

    def require(self, fingerprint: str, dtype: str) -> None:
        """Refuse another model or dtype."""
        for name, mine, expected in (("fingerprint", self.fingerprint, fingerprint), ("dtype", self.dtype, dtype)):
            if mine != expected:
                raise BadProfile(
                    f"profile.{name}={mine!r}, but the model under test has {expected!r}; "
                    f"calibrate this model itself (the profile was taken from {self.model!r} on {self.corpus!r})"
                )

    def to_json(self) -> dict[str, Any]:
        """Every field by name, as JSON holds it."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return plain | {
            "bins": bins_to_json(self.bins),
            "statistics": None if self.statistics is None else statistics_to_json(self.statistics),
        }

    def save(self, path: Path | str) -> None:
        """Write as JSON, making its folder if needed; the file is complete or unchanged.

        Raises:
            BadFile: it cannot be written.
        """
        require_writable(Path(path), "profile")  # a missing folder must not lose a long calibration
        write_atomically(Path(path), json.dumps(self.to_json(), indent=1) + "\n", "profile")


# ---------------------------------------------------------------- making a profile


def profile_of(
    trace: Trace,
    probes: tuple[int, ...],
    *,
    model: str,
    fingerprint: str,
    corpus: str,
    dtype: str,
    bins: ThresholdBinSpec = ONE_BIN,
    minimum_tokens: int = MINIMUM_TOKENS,
    document: Ints | None = None,
) -> Profile:
    """Compute the entropy profile of a trace: means over all positions, isotonic over the probes.

    Parameters
    ----------
    trace : Trace
        Entropies after every layer, nats.
    probes : sequence of int
        Ascending layers below the last.
    model, fingerprint, corpus, dtype : str
        Identity of model and text, for the record and for ``Profile.require``.
    bins : ThresholdBinSpec
        Bins with their own targets; none by default.
    minimum_tokens : int
        Tokens below which a bin uses the targets of its ancestor.
    document : DocumentMembership or None
        The text of each token, int64 [tokens], if known.

    Returns
    -------
    Profile
        Mean entropies and targets in nats.

    Raises
    ------
    BadArgument
        Invalid probes; no probe, although bins depend on the first one's readout.

    References
    ----------
    EMAD, "Calibration details".
    """
    require_probes(probes, trace.layers)
    statistics = compute_trace_statistics(trace, bins, probes[0] if probes else None, document)
    return profile_from_statistics(
        statistics,
        probes,
        layers=trace.layers,
        read=trace.layers_read,
        model=model,
        fingerprint=fingerprint,
        corpora={corpus: len(trace)},
        dtype=dtype,
        bins=bins,
        minimum_tokens=minimum_tokens,
    )


def profile_from_statistics(
    statistics: EntropyStatistics,
    probes: tuple[int, ...],
    *,
    layers: int,
    read: tuple[int, ...],
    model: str,
    fingerprint: str,
    corpora: Mapping[str, int],
    dtype: str,
    bins: ThresholdBinSpec = ONE_BIN,
    minimum_tokens: int = MINIMUM_TOKENS,
) -> Profile:
    """The profile of running statistics in ``bins`` after the layers ``read`` of a model's ``layers``.

    ``corpora``: tokens by name.

    Raises:
        BadArgument: probes that are not ascending layers below the last, or not all among those read; statistics of
            another number of layers.
    """
    require_probes(probes, layers)
    if not set(probes) <= set(read) or statistics.layers != len(read):
        raise BadArgument("read", read, f"the probes {tuple(probes)} among {statistics.layers} layers")
    statistics = statistics.with_document_ended()
    targets = compute_targets(statistics, probes, read, bins, minimum_tokens)
    return Profile(
        model=model,
        fingerprint=fingerprint,
        corpus=" + ".join(corpora),
        dtype=dtype,
        layers=layers,
        probes=tuple(probes),
        read=tuple(read),
        tokens=int(statistics.tokens.sum()),
        sequences=statistics.sequences,
        versions=library_versions(),
        corpora=dict(corpora),
        bins=bins,
        minimum_tokens=minimum_tokens,
        statistics=statistics,
        **targets._asdict(),
    )


class EntropyTargets(NamedTuple):
    """The fields of a profile that follow from its statistics; see ``Profile``."""

    mean_nats: tuple[float, ...]
    targets_nats: tuple[float, ...]
    bin_targets_nats: TargetRows
    fallbacks: tuple[int, ...]


def compute_targets(
    statistics: EntropyStatistics,
    probes: Sequence[int],
    read: Sequence[int],
    bins: ThresholdBinSpec,
    minimum_tokens: int,
) -> EntropyTargets:
    """E*[H_ℓ] = isotonic(mean H_ℓ) at the probes, for all tokens together and for each bin.

    Parameters
    ----------
    statistics : EntropyStatistics
        Of H_ℓ in ``bins`` after the layers ``read``, nats.
    probes, read : sequence of int
        P, and the layers whose entropies were read, P among them; both ascending.
    bins : ThresholdBinSpec
        Features of the bins; one bin has no targets besides those of all tokens.
    minimum_tokens : int
        Tokens below which a bin takes the targets of its ancestor.

    References
    ----------
    EMAD, "Teacher-forcing entropy profile" (E*[H_ℓ]) and "Calibration details" (global profile, conditioning).
    """
    columns = _columns(probes, read)

    def targets(statistics: EntropyStatistics) -> Floats:
        means = statistics.mean_nats()[:, columns]
        fitted = np.full(means.shape, np.nan)  # a bin without tokens has no targets, and falls back
        for number in np.flatnonzero(statistics.tokens > 0):
            count = np.full(len(columns), statistics.tokens[number])
            fitted[number] = isotonic_targets(probes, means[number], count)
        return fitted

    together = statistics.pool_bin_groups(np.zeros(len(statistics.tokens), dtype=np.int64))
    (means,), (overall,) = _to_rows(together.mean_nats()), _to_rows(targets(together))
    if not bins.features:
        return EntropyTargets(means, overall, (), ())
    dropped = tuple(dropped_feature_count_by_bin(bins, statistics.tokens, minimum_tokens).tolist())
    return EntropyTargets(means, overall, _to_rows(_values_with_fallbacks(targets, statistics, bins, dropped)), dropped)


def _values_with_fallbacks(
    values: Callable[[EntropyStatistics], Floats],
    statistics: EntropyStatistics,
    bins: ThresholdBinSpec,
    fallbacks: Sequence[int],
) -> Floats:
    """[bins, …] ``values`` of each bin, or of the ancestor without as many features as ``fallbacks`` [bins] says."""
    dropped = np.array(fallbacks or (0,), dtype=np.int64)
    chosen: Floats = values(statistics)
    for level in range(1, int(dropped.max()) + 1):
        group = bin_indices_without_last_features(bins, level)
        theirs = values(statistics.pool_bin_groups(group))[group]
        chosen = np.where((dropped == level)[:, None], theirs, chosen)
    return chosen


def _columns(probes: Sequence[int], read: Sequence[int]) -> Ints:
    """Indices of the ``probes`` among the layers ``read``."""
    return np.searchsorted(np.array(read, dtype=np.int64), probes)


def _to_rows(values: Floats) -> TargetRows:
    return tuple(tuple(float(value) for value in row) for row in values)


def merge(profiles: Sequence[Profile]) -> Profile:
    """Merge profiles of several corpora into one.

    Parameters
    ----------
    profiles : sequence of Profile
        Of one model, dtype, probes, layers read and bins, each with statistics.

    Returns
    -------
    Profile
        Sums of the statistics, with means and targets computed anew, nats.

    Raises
    ------
    BadArgument
        No profiles; profiles that differ in these; one without statistics; a corpus in two of them.
    """
    if not profiles:
        raise BadArgument("profiles", [], "at least one profile")
    require_instance("profiles", profiles, (list, tuple), "pass a list of them")
    for each in profiles:
        require_instance("profiles", each, Profile, "load_profile returns one")
    first, *others = profiles
    corpora = dict(_corpora_of(first))
    statistics = first._statistics
    for other in others:
        for name in ("model", "fingerprint", "dtype", "layers", "probes", "read", "bins", "minimum_tokens"):
            mine, theirs = getattr(first, name), getattr(other, name)
            if mine != theirs:
                raise BadArgument(
                    f"profile.{name}",
                    shorten(theirs),
                    f"{shorten(mine)!r} as in the first",
                    "calibrate alike, with --bins-of for the same bins",
                )
        twice = sorted(corpora.keys() & _corpora_of(other).keys())
        if twice:
            raise BadArgument("profile.corpora", twice, "each corpus in one profile", "its tokens would count twice")
        corpora |= _corpora_of(other)
        statistics = statistics + other._statistics
    return replace(
        first,
        corpus=" + ".join(corpora),
        corpora=corpora,
        tokens=int(statistics.tokens.sum()),
        sequences=statistics.sequences,
        versions=_joined_versions(profiles),
        statistics=statistics,
        **compute_targets(statistics, first.probes, first.read, first.bins, first.minimum_tokens)._asdict(),
    )


def library_versions() -> dict[str, str]:
    """Versions of the libraries that affect a profile's numbers."""
    return {name: version(name) for name in ("torch", "transformers", "numpy", "scipy")}


def _joined_versions(profiles: Sequence[Profile]) -> dict[str, str]:
    """Each library's version, or versions if the profiles were taken with several."""
    names = {name: None for profile in profiles for name in profile.versions}
    return {name: ", ".join(dict.fromkeys(p.versions[name] for p in profiles if name in p.versions)) for name in names}


def _corpora_of(profile: Profile) -> dict[str, int]:
    return profile.corpora or {profile.corpus: profile.tokens}


def require_probes(probes: Sequence[int], layers: int) -> None:
    """Refuse probes that are not ascending layers below the last."""
    if not are_valid_probes(probes, layers):
        raise BadArgument(
            "probes",
            tuple(probes),
            f"ascending layers in 1–{layers - 1} of this model",
            "the last layer is always read",
        )


def load_profile(path: Path | str) -> Profile:
    """Load a calibration profile.

    Parameters
    ----------
    path : Path
        A JSON file of ``Profile.save`` or ``emad calibrate``.

    Returns
    -------
    Profile
        Call its ``require`` before use with a model.

    Raises
    ------
    BadProfile
        The file is missing, not JSON, of another schema, has missing, unknown or impossible fields, or numbers that do
        not follow from its statistics.
    """
    try:
        data = read_json(path, "profile", constants=True)
    except BadFile as error:
        raise BadProfile(
            f"profile={str(path)!r}, but expected a readable JSON file ({error.reason}); calibrate again"
        ) from error
    if not isinstance(data, dict):
        raise BadProfile(
            f"profile={str(path)!r} holds a {type(data).__name__}, but expected an object; calibrate again"
        )
    schema = data.get("schema", PROFILE_SCHEMA)
    if not is_whole(schema) or schema != PROFILE_SCHEMA:  # first: another schema may have other fields
        raise BadProfile(f"profile={str(path)!r} has schema={schema!r}, but expected {PROFILE_SCHEMA}; calibrate again")
    names = {f.name for f in fields(Profile)}
    if set(data) != names:
        raise BadProfile(
            f"profile={str(path)!r} lacks fields {sorted(names - set(data))} and has unknown fields "
            f"{sorted(set(data) - names)}, but expected exactly {sorted(names)}; calibrate again"
        )
    refused = find_invalid_field_and_rule(data)
    if refused is not None:
        name, expected = refused
        raise BadProfile(
            f"profile={str(path)!r} has {name}={shorten(data[name])!r}, but expected {expected}; calibrate again"
        )
    profile = Profile(**convert_profile_fields(data))
    _require_derived(profile, path)
    return profile


def _require_derived(profile: Profile, path: Path | str) -> None:
    """Refuse means, targets and fallbacks that do not follow from the profile's own statistics, as after an edit.

    A profile without statistics was written by hand and declares it so.
    """
    if profile.statistics is None:
        return
    again = compute_targets(profile.statistics, profile.probes, profile.read, profile.bins, profile.minimum_tokens)
    for name in DERIVED_FIELDS:
        stored, derived = (np.array(getattr(each, name), dtype=np.float64) for each in (profile, again))
        if stored.shape != derived.shape or not np.allclose(
            stored, derived, rtol=DERIVED_AGREEMENT, atol=DERIVED_AGREEMENT
        ):
            raise BadProfile(
                f"profile={str(path)!r} has {name}={shorten(getattr(profile, name))!r}, but its statistics give "
                f"{shorten(getattr(again, name))!r}: one of them was edited; calibrate again, or set statistics to "
                "null "
                "in a profile written by hand"
            )
