"""Drift: whether fresh documents resemble those that a guarantee was certified on, before any loss is known.

    exits after ℓ    share of a document's tokens that exited after layer ℓ, the last one included
    signal at ℓ      mean of the signal that the rule compared with its threshold there, over tokens that reached ℓ

Each document is one row of these features, from a trace if replay is exact, else by decoding. Two samples of documents
are compared by their energy distance, each feature in standard deviations of both together (Székely & Rizzo 2013),

    E = 2·mean |x − y| − mean |x − x′| − mean |y − y′|,    x calibration, y fresh

with a p-value from permutations of the documents, exact whatever their distribution. Kolmogorov–Smirnov tests under
Holm then name the features that moved. ``speaks`` means that no drift was detected. The result then has the smallest
shift, in standard deviations, that this many fresh documents would show in 80 % of draws. If that exceeds one standard
deviation, there is too little text. The test cannot detect larger losses without a change of features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from emad_ref.calibration.trace import EmptyCorpus, Trace, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.teacher_forcing import BATCH_ROWS, TeacherForcedText
from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import EntropyEstimator, OperatingPoint
from emad_ref.record import DECODE, Floats, Ints, Record
from emad_ref.replay.losses import teacher_force_at_point
from emad_ref.replay.replay import replay
from emad_ref.schedule.schedules import get_point_schedule
from pytest_emad.statistics.estimate import holm_adjusted_pvalues
from pytest_emad.statistics.units import ByDocument, DocumentMembership

DIGITS = 7  # significant digits in a file: signals are float32


@dataclass(frozen=True, eq=False)
class DocumentFeatures:
    """``values`` [documents, features] under ``names``; ``text``: a description of the documents.

    Raises:
        BadArgument: names that are not one per column, or twice the same; infinite values.
    """

    names: tuple[str, ...]
    values: ByDocument
    text: str

    def __post_init__(self) -> None:
        shape = np.shape(self.values.values)
        if len(shape) != 2 or shape[1] != len(self.names) or len(set(self.names)) < len(self.names):
            raise BadArgument("names", self.names, f"one for each column of {list(shape)}, each once")
        if np.isinf(self.values.values).any():
            raise BadArgument("values", "inf", "numbers, or NaN where no token came so far")

    def __len__(self) -> int:
        return len(self.values)

    def to_json(self) -> dict[str, Any]:
        """Built-in types for a file; None for a layer that no token reached."""
        rows = [
            [None if math.isnan(value) else float(f"{value:.{DIGITS}g}") for value in row]
            for row in self.values.values.tolist()
        ]
        return {"names": list(self.names), "values": rows, "text": self.text}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> DocumentFeatures:
        """Read the output of ``to_json``, to ``DIGITS`` digits."""
        values = np.array(data["values"], dtype=np.float64)  # None reads as NaN
        return DocumentFeatures(tuple(data["names"]), ByDocument.from_whole_documents(values), data["text"])


def compute_document_features(
    depth: Ints, signal: Floats | None, document: DocumentMembership, point: OperatingPoint, text: str
) -> DocumentFeatures:
    """Features of documents whose tokens ran to these depths.

    Args:
        depth: [tokens] under ``point``.
        signal: [tokens, probes] the compared signal; values at probes that a token did not reach are ignored. None:
            unknown.
        document: [tokens] the document of each.
        text: a description of the documents.

    Raises:
        BadArgument: columns of other lengths, no token, a depth that the point does not have.
    """
    if len(depth) == 0 or len(depth) != len(document):
        raise BadArgument("depth", f"{len(depth)} tokens", f"the {len(document)} of the documents, at least one")
    if not ((depth >= 1) & (depth <= point.ceiling)).all():
        raise BadArgument("depth", f"{depth.min()}–{depth.max()}", f"layers in 1–{point.ceiling}", "see the point")
    tokens = document.sum_by_document(np.ones(len(depth)))
    exits = possible_exit_layers(point)
    columns = {f"exits after {layer}": document.sum_by_document(depth == layer) / tokens for layer in exits}
    if signal is not None:
        if signal.shape != (len(depth), len(point.probes)):
            raise BadArgument("signal", f"shape {signal.shape}", f"shape ({len(depth)}, {len(point.probes)})")
        for number, probe in enumerate(point.probes):
            read = (depth >= probe) & ~np.isnan(signal[:, number])
            total = document.sum_by_document(np.where(read, signal[:, number].astype(np.float64), 0.0))
            count = document.sum_by_document(read)
            columns[f"signal at {probe}"] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    values = ByDocument(np.stack(list(columns.values()), axis=1), np.unique(document.number))
    return DocumentFeatures(tuple(columns), values, text)


def possible_exit_layers(point: OperatingPoint) -> tuple[int, ...]:
    """Layers after which a token can exit: probes, those between them if the point interpolates, and the ceiling."""
    between = range(point.probes[0], point.ceiling) if point.interpolate and point.probes else point.probes
    return (*between, point.ceiling)


def features_of_record(record: Record, point: OperatingPoint, text: str) -> DocumentFeatures:
    """Features of the sequences that one call of ``generate`` decoded, each as a document without its prompt.

    Raises:
        BadArgument: nothing decoded, and as ``compute_document_features``.
    """
    tokens = record.tokens
    decided = (tokens.phase == DECODE) & tokens.kept
    return compute_document_features(
        tokens.depth[decided], record.signal[decided], DocumentMembership(tokens.sequence[decided]), point, text
    )


def features_of_windows(
    stepper: Stepper,
    point: OperatingPoint,
    windows: Sequence[TokenSequence],
    text: str,
    *,
    progress: str | None = None,
) -> DocumentFeatures:
    """Features of the documents that ``windows`` were cut from, from a trace if its schedule has a replay.

    ``text``: a description of the documents. ``progress`` names the bar, None shows none.

    Raises:
        EmptyCorpus: no window.
        BadArgument: a point or a text that a decoder or a trace refuses; a lens that is not attached.
        NotFinite: logits hold NaN or +inf.
    """
    if get_point_schedule(point).resolve_depths is None or point.confidence is not None:
        return decode_features(stepper, point, windows, text, progress=progress)
    estimators = {} if point.estimator == EntropyEstimator() else {point.estimator: point.probes}
    read = {"layers": point.readout_layers, "lens": point.lens}
    trace = take_trace(stepper, windows, estimators=estimators, **read, progress=progress)  # type: ignore[arg-type]
    return replay_features(trace, point, DocumentMembership(np.array([window.document for window in windows])), text)


def decode_features(
    stepper: Stepper,
    point: OperatingPoint,
    windows: Sequence[TokenSequence],
    text: str,
    *,
    rows: int = BATCH_ROWS,
    progress: str | None = None,
) -> DocumentFeatures:
    """As ``features_of_windows``, by decoding under any schedule; at most ``rows`` per batch."""
    if not windows:
        raise EmptyCorpus(f"corpus={text!r} has no window, but expected at least one; name another text")
    texts = teacher_force_at_point(stepper, windows, point, rows=rows, progress=progress)
    return features_of_teacher_forced_texts(
        texts, DocumentMembership(np.array([window.document for window in windows])), point, text
    )


def features_of_teacher_forced_texts(
    texts: Sequence[TeacherForcedText], windows: DocumentMembership, point: OperatingPoint, text: str
) -> DocumentFeatures:
    """As ``features_of_windows``, from fed texts; ``windows`` [texts]: the document of each."""
    depth, signal = (np.concatenate([getattr(each, name) for each in texts]) for name in ("depth", "signal"))
    document = DocumentMembership(np.repeat(windows.number, [len(each.depth) for each in texts]))
    return compute_document_features(depth, signal, document, point, text)


def replay_features(trace: Trace, point: OperatingPoint, windows: DocumentMembership, text: str) -> DocumentFeatures:
    """As ``features_of_windows``, from a trace; ``windows`` [sequences]: the document of each of its sequences.

    Raises:
        BadArgument: a point that this trace cannot replay.
    """
    columns = [probe - 1 for probe in point.probes]
    document = DocumentMembership(windows.number[trace.sequence_index])
    signal = trace.rule_signal(point)[:, columns].astype(np.float64)
    return compute_document_features(replay(trace, point).depth, signal, document, point, text)


FALSE_ALARMS, POWER = 0.05, 0.8
PERMUTATIONS, DRAWS = 1999, 400
COARSEST = 1.0  # standard deviations; with less power than this there is too little text
SHIFTS = np.round(np.geomspace(0.1, 3.0, 18), 2)
ENTRIES = 2**20  # distances per batch


class FeatureShift(NamedTuple):
    """Shift of one feature: its mean at calibration and now, in standard deviations of calibration, and Holm's p."""

    name: str
    before: float
    now: float
    deviations: float
    p: float


@dataclass(frozen=True)
class DriftResult:
    """Result of a drift test. ``state``: ``speaks``, ``moved`` or ``too little text``.

    ``documents`` fresh ones of ``text`` against ``reference`` of ``calibration``; ``p`` of "nothing moved", ``error``
    ε. ``smallest``: the shift that 80 % of draws would show, in standard deviations; None: none up to 3. ``shifts``: of
    every feature, smallest p first.
    """

    state: str
    text: str
    calibration: str
    documents: int
    reference: int
    p: float
    error: float
    smallest: float | None
    shifts: tuple[FeatureShift, ...]

    @property
    def statement(self) -> str:
        """Text of the result and its meaning."""
        compared = f"{self.documents} documents of {self.text} beside {self.reference} of {self.calibration}"
        if self.state == "moved":
            first = self.shifts[0]
            return (
                f"Drift detected (p = {self.p:.2g}; {compared}): the guarantee does not apply. Largest shift: "
                f"{first.name}, {first.before:.3g} at calibration, {first.now:.3g} now, "
                f"{first.deviations:+.1f} standard deviations of a document."
            )
        if self.state == "speaks":
            return (
                f"No drift detected (p = {self.p:.2g}; {compared}): the guarantee applies. A shift of "
                f"{self.smallest:g} standard deviations of a document would have been detected in {POWER:.0%} of draws."
            )
        could = "none up to 3" if self.smallest is None else f"{self.smallest:g}"
        return (
            f"Too little text for a drift test (p = {self.p:.2g}; {compared}): the smallest shift that would have been "
            f"detected in {POWER:.0%} of draws is {could} standard deviations of a document, at most {COARSEST:g} is "
            "needed."
        )


def detect_drift(
    reference: DocumentFeatures, fresh: DocumentFeatures, *, error: float = FALSE_ALARMS, seed: int = 0
) -> DriftResult:
    """Compare fresh documents with calibration documents by their common features.

    ``seed``: of permutations and simulated draws.

    Raises:
        BadArgument: no common feature, fewer than four calibration documents or no fresh one, ε out of range.
    """
    if not 0 < error < 1:
        raise BadArgument("error", error, "a number strictly between 0 and 1", "ε is the chance of a false alarm")
    if len(reference) < 4:
        raise BadArgument("reference", f"{len(reference)} documents", "at least 4", "screen the model on more text")
    if len(fresh) < 1:
        raise BadArgument("fresh", "no document", "at least 1")
    names = [name for name in reference.names if name in fresh.names]
    if not names:
        raise BadArgument("fresh.names", fresh.names, f"some of {', '.join(reference.names)}", "use the same point")
    before, now = (_shared_columns(signs, names) for signs in (reference, fresh))
    rng = np.random.default_rng(seed)
    p = _p_value(before, now, rng)
    smallest = _smallest_shift(before, len(now), error, rng)
    state = "moved" if p <= error else "too little text" if (smallest or math.inf) > COARSEST else "speaks"
    shifts = _feature_shifts(names, before, now)
    return DriftResult(state, fresh.text, reference.text, len(now), len(before), p, error, smallest, shifts)


def _shared_columns(signs: DocumentFeatures, names: list[str]) -> Floats:
    return np.asarray(signs.values.values, dtype=np.float64)[:, [signs.names.index(name) for name in names]]


def _standardised(values: Floats) -> Floats:
    """Columns in their own standard deviations; 0 for unknown values, without columns that never vary."""
    varies = np.array([len(np.unique(column[~np.isnan(column)])) > 1 for column in values.T])
    values = values[:, varies]
    with np.errstate(invalid="ignore"):
        scaled = (values - np.nanmean(values, axis=0)) / np.nanstd(values, axis=0)
    return np.asarray(np.nan_to_num(scaled), dtype=np.float64)


def _distances(left: Floats, right: Floats) -> Floats:
    return np.asarray(np.sqrt(((left[:, None] - right[None]) ** 2).sum(axis=-1)))


def _energy(across: Floats, before: Floats, now: Floats, old: int, new: int) -> Floats:
    """E of ``old`` documents and ``new`` ones, from sums of distances [draws] across both and within either."""
    return np.asarray(2 * across / (old * new) - now / new**2 - before / old**2, dtype=np.float64)


# ---------------------------------------------------------------- test of a shift


def _p_value(before: Floats, now: Floats, rng: np.random.Generator) -> float:
    """p-value of "both are drawn alike", by permutations of the pool; its distances are the same in all of them."""
    pool = _standardised(np.concatenate([before, now]))
    if pool.shape[1] == 0 or len(now) < 2:  # no variation; or one document, without a distance within its sample
        return 1.0
    between = _distances(pool, pool)
    sums, total, old, new = between.sum(axis=1), between.sum(), len(before), len(now)

    def energy(x: NDArray[Any], y: NDArray[Any], axis: int) -> NDArray[Any]:
        """E of documents numbered ``x`` [..., old] and ``y`` [..., new], from the sums over the smaller side."""
        side = y if new <= old else x
        inside = between[side[..., :, None], side[..., None, :]].sum(axis=(-1, -2))
        across = sums[side].sum(axis=-1) - inside
        outside = total - 2 * across - inside
        within = (outside, inside) if new <= old else (inside, outside)
        return _energy(across, *within, old, new)

    batch = max(1, ENTRIES // min(old, new) ** 2)
    numbers = np.arange(old + new)
    test = stats.permutation_test(
        (numbers[:old], numbers[old:]), energy, vectorized=True, n_resamples=PERMUTATIONS, batch=batch,
        alternative="greater", axis=-1, rng=rng,
    )  # fmt: skip
    return float(test.pvalue)


def _feature_shifts(names: list[str], before: Floats, now: Floats) -> tuple[FeatureShift, ...]:
    """Every feature's shift, the smallest p first."""
    rows, p = [], []
    for name, x, y in zip(names, before.T, now.T, strict=True):
        x, y = x[~np.isnan(x)], y[~np.isnan(y)]
        if not len(x) or not len(y):  # reached in only one of the texts or in none
            continue
        spread, gap = float(x.std()), float(y.mean() - x.mean())
        deviations = gap / spread if spread > 0 else math.copysign(math.inf, gap) if gap else 0.0
        rows.append((name, float(x.mean()), float(y.mean()), deviations))
        p.append(float(stats.ks_2samp(x, y).pvalue))
    shifts = [FeatureShift(*row, p) for row, p in zip(rows, holm_adjusted_pvalues(p), strict=True)]
    return tuple(sorted(shifts, key=lambda shift: (shift.p, -abs(shift.deviations))))


# ---------------------------------------------------------------- power of the test


def _smallest_shift(before: Floats, fresh: int, error: float, rng: np.random.Generator) -> float | None:
    """The smallest of ``SHIFTS`` that this many documents show in 80 % of draws; None: not even the largest.

    Repeated splits move ``fresh`` calibration documents (half of them, if there are no more) along the first principal
    direction, and keep the others. Since fewer are kept than exist, the real power is larger.
    """
    scaled = _standardised(before)
    if scaled.shape[1] == 0 or fresh < 2:
        return None
    n = min(fresh, len(scaled) // 2)
    order = np.argsort(rng.random((DRAWS, len(scaled))), axis=1)[:, :n]
    moving = np.zeros((DRAWS, len(scaled)))
    np.put_along_axis(moving, order, 1.0, axis=1)
    staying, stay_count = 1 - moving, len(scaled) - n
    still = _distances(scaled, scaled)
    within = [((side @ still) * side).sum(axis=1) for side in (staying, moving)]  # a shift does not change it
    _, spread, directions = np.linalg.svd(scaled, full_matrices=False)
    step = directions[0] * spread[0] / np.sqrt(len(scaled))  # one standard deviation

    def energies(shift: float) -> Floats:
        across = ((staying @ _distances(scaled, scaled + shift * step)) * moving).sum(axis=1)
        return _energy(across, within[0], within[1], stay_count, n)

    critical = np.quantile(energies(0.0), 1 - error, method="higher")
    for shift in SHIFTS:
        if (energies(shift) > critical).mean() >= POWER:
            return float(shift)
    return None
