"""The teacher-forcing entropy profile: the result of a calibration, with a fingerprint, and its JSON file.

    mean H_ℓ                     ``mean_nats``, after each layer read       (EMAD, "Teacher-forcing entropy profile")
    E*[H_ℓ] = isotonic(mean H_ℓ)   ``targets_nats``, ℓ ∈ P; ``bin_targets_nats`` by bin             (the same section)
    τ_ℓ = E*[H_ℓ] − m            ``Profile.point(m)``                       (EMAD, "Calibration details")

A profile holds raw means and the isotonic targets of the probes, for all tokens together and for each bin. It keeps its
running statistics, so profiles of several corpora can be merged, and any quantile can be read. A profile belongs to one
model, tokenizer and dtype; ``require`` refuses any other.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from emad_ref.calibration.entropy_statistics import (
    BUCKETS,
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
from emad_ref.file_formats import FileFormat
from emad_ref.files import require_writable
from emad_ref.point import OperatingPoint, ScheduleName, ThresholdBinSpec
from emad_ref.record import Floats, Ints


def bins_to_json(bins: ThresholdBinSpec) -> dict[str, Any]:
    """Every field by name; ``frequency`` as one digit per token id."""
    return asdict(bins) | {"frequency": "".join(map(str, bins.frequency))}


def bins_from_json(data: Mapping[str, Any]) -> ThresholdBinSpec:
    """Read the output of ``bins_to_json``."""
    return ThresholdBinSpec(
        features=tuple(data["features"]),
        position_edges=tuple(data["position_edges"]),
        top1_probability_edges=tuple(data["top1_probability_edges"]),
        frequency=bytes(int(digit) for digit in data["frequency"]),
    )


def statistics_to_json(statistics: EntropyStatistics) -> dict[str, Any]:
    """Sums as numbers; the histogram, mostly zeros, as base64 of zlib of little-endian int64."""
    packed = zlib.compress(statistics.histogram.astype("<i8").tobytes(), 6)
    moments = statistics.documents
    return {
        "tokens": statistics.tokens.tolist(),
        "sums": statistics.sums.tolist(),
        "squares": statistics.squares.tolist(),
        "histogram": base64.b64encode(packed).decode("ascii"),
        "sequences": statistics.sequences,
        "documents": None if moments is None else {"count": moments.count, "products": moments.products.tolist()},
    }


def _statistics_from_json(data: Mapping[str, Any], bins: int, layers: int) -> EntropyStatistics:
    """Read the output of ``statistics_to_json`` for ``bins`` × ``layers``."""
    histogram = np.frombuffer(zlib.decompress(base64.b64decode(data["histogram"])), dtype="<i8")
    moments = data["documents"]
    return EntropyStatistics(
        np.array(data["tokens"], dtype=np.int64),
        np.array(data["sums"], dtype=np.float64),
        np.array(data["squares"], dtype=np.float64),
        histogram.astype(np.int64).reshape(bins, layers, BUCKETS),
        data["sequences"],
        None if moments is None else DocumentMoments(moments["count"], np.array(moments["products"], dtype=np.float64)),
    )


def shorten(value: object) -> object:
    """``value``, or the beginning of a long one, for messages."""
    text = repr(value)
    return value if len(text) <= 120 else f"{text[:100]}…"


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(item) for item in value) if isinstance(value, list) else value


MINIMUM_TOKENS = (
    500  # least tokens for a bin's own thresholds, which give a mean entropy of deviation 1.5 nats to ± 0.07
)


TargetRows = tuple[tuple[float, ...], ...]


class BadProfile(EmadError):
    """Raised for a profile file that cannot be read, or belongs to another model."""


PROFILE = FileFormat("profile", 5, "calibrate again with `emad calibrate`", BadProfile)


@dataclass(frozen=True, repr=False)
class Profile:
    """An entropy profile of one model on one text.

    ``read``             layers whose entropies were read, including the probes.
    ``mean_nats``        [read] raw means.
    ``targets_nats``     [probes] isotonic targets.
    ``tokens``           number of positions averaged.
    ``corpora``          tokens from each corpus; empty: all from ``corpus``.
    ``bins``             assignment of tokens; without features, the following two are empty.
    ``bin_targets_nats`` [bins][probes] isotonic targets of each bin.
    ``dropped_features`` [bins] number of features that the bin dropped for lack of ``minimum_tokens``: its targets are
                         its parent's; 0 for its own targets.
    ``statistics``       the source of all numbers; None for targets set in Python, which have no quantiles.
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
    dropped_features: tuple[int, ...] = ()
    minimum_tokens: int = MINIMUM_TOKENS
    statistics: EntropyStatistics | None = None

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
        assert len(rows) == len(self.dropped_features) == bins.bin_count * bool(bins.features), (
            "one row of targets per bin"
        )
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

        rows = _values_of_bins_or_parents(levels, self._statistics, self.bins, self.dropped_features)
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
        """[bins, read] the ``quantile`` of H in each bin, of its own tokens; NaN for a bin without tokens.

        Raises:
            BadArgument: a quantile outside (0, 1), or of a profile without statistics.
        """
        return self._statistics.quantile_nats(quantile)

    def drop_last_bin_features(self, dropped: int = 1) -> Profile:
        """The same calibration without its last ``dropped`` features.

        Raises:
            BadArgument: more features than there are, or a profile without statistics.
        """
        parent = bin_indices_without_last_features(self.bins, dropped)
        features = self.bins.features[: len(self.bins.features) - dropped]
        frequency = self.bins.frequency if "frequency" in features else b""
        bins = replace(self.bins, features=features, frequency=frequency)
        statistics = self._statistics.pool_bin_groups(parent)
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
        PROFILE.write_json(Path(path), self.to_json())


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
        Tokens below which a bin uses the targets of its parent.
    document : int64 [tokens] or None
        The number of each token's text.

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
    if not set(probes) <= set(read) or statistics.n_layers_read != len(read):
        raise BadArgument("read", read, f"the probes {tuple(probes)} among {statistics.n_layers_read} layers")
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
    dropped_features: tuple[int, ...]


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
        Tokens below which a bin takes the targets of its parent.

    References
    ----------
    EMAD, "Teacher-forcing entropy profile" (E*[H_ℓ]) and "Calibration details" (global profile, conditioning).
    """
    columns = _columns(probes, read)

    def targets(statistics: EntropyStatistics) -> Floats:
        means = statistics.mean_nats()[:, columns]
        fitted = np.full(means.shape, np.nan)  # a bin without tokens has no targets of its own
        for number in np.flatnonzero(statistics.tokens > 0):
            count = np.full(len(columns), statistics.tokens[number])
            fitted[number] = isotonic_targets(probes, means[number], count)
        return fitted

    together = statistics.pool_bin_groups(np.zeros(len(statistics.tokens), dtype=np.int64))
    (means,), (overall,) = _to_rows(together.mean_nats()), _to_rows(targets(together))
    if not bins.features:
        return EntropyTargets(means, overall, (), ())
    dropped = tuple(dropped_feature_count_by_bin(bins, statistics.tokens, minimum_tokens).tolist())
    return EntropyTargets(
        means, overall, _to_rows(_values_of_bins_or_parents(targets, statistics, bins, dropped)), dropped
    )


def _values_of_bins_or_parents(
    values: Callable[[EntropyStatistics], Floats],
    statistics: EntropyStatistics,
    bins: ThresholdBinSpec,
    dropped_features: Sequence[int],
) -> Floats:
    """[bins, …] ``values`` of each bin, or of its parent without the ``dropped_features`` [bins] last features."""
    dropped = np.array(dropped_features or (0,), dtype=np.int64)
    chosen: Floats = values(statistics)
    for level in range(1, int(dropped.max()) + 1):
        parent = bin_indices_without_last_features(bins, level)
        theirs = values(statistics.pool_bin_groups(parent))[parent]
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
    if not all(is_whole(p) and 1 <= p < layers for p in probes) or list(probes) != sorted(set(probes)):
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
        The file cannot be read, is no profile, is of another schema, or was changed after it was written.
    """
    data = PROFILE.read_json(path)
    bins, statistics = bins_from_json(data["bins"]), data["statistics"]
    parsed = None if statistics is None else _statistics_from_json(statistics, bins.bin_count, len(data["read"]))
    plain = {name: _to_tuples(value) for name, value in data.items()}
    return Profile(**plain | {"bins": bins, "statistics": parsed})
