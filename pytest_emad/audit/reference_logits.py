"""The lens: reference logits after every layer from one plain pass, and the depths of a rule on them.

A lens maps one sequence to its logits after each layer, without cache, exits or other rows. Signals of one layer's
readout are recomputed from these logits in float64; the lens itself computes other rules. It implements rules
independently of ``exit_rules.is_exit_rule_met``, which it judges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.exit_rules import assign_bins, first_firing_probe
from emad_ref.point import EntropyEstimator, OperatingPoint, ThresholdBinSpec
from emad_ref.record import READOUTS, Bools, Floats, Ints
from emad_ref.signals import SIGNALS
from pytest_emad.audit.tolerances import Tolerance, max_tied_gap, signal_noise_factor

FULL = READOUTS.index("full")
AT_ONCE = 256  # positions, padding included, of several sequences read in one pass


@dataclass(frozen=True)
class ProbeReadoutWork:
    """Readouts of a rule's probes, for ledgers.

    ``heads`` bool [kinds of ``READOUTS``, L]: the kind of readout of a probe after each layer. ``shows`` bool [L]:
    whether a token that stops there emits from it; else a full head follows. ``macs`` int64 [n, L]: multiply-adds of
    each token's readout besides a full head's own. ``lens_macs`` int64 [L]: those in front of a following full head,
    None without any. ``macs_within``: error of the confidence → least and most of ``macs``, if a confidence determines
    the size of a readout.
    """

    heads: Bools
    shows: Bools
    macs: Ints
    lens_macs: Ints | None = None
    macs_within: Callable[[float], tuple[Ints, Ints]] | None = None

    def work_bounds(self, error: float) -> tuple[ProbeReadoutWork, ProbeReadoutWork]:
        """These readouts with their least and their most work, for a confidence with ``error``."""
        if self.macs_within is None:
            return self, self
        least, most = self.macs_within(error)
        return replace(self, macs=least), replace(self, macs=most)

    @staticmethod
    def from_point_with_full_heads(point: OperatingPoint, positions: int) -> ProbeReadoutWork:
        """Readouts of a full head at every probe, which also serves the exit."""
        at = np.asarray(point.probes, dtype=np.int64) - 1
        heads, shows = np.zeros((len(READOUTS), point.layers), dtype=bool), np.zeros(point.layers, dtype=bool)
        heads[FULL, at] = shows[at] = True
        return ProbeReadoutWork(heads, shows, np.zeros((positions, point.layers), dtype=np.int64))


class LayerLogits:
    """Logits float64 [n, L, V] of n positions; a layer's are read when they are first used.

    A head of a large vocabulary costs as much as several blocks, and most checks use only the depths taken.
    ``np.asarray`` and indexing read every layer. ``read(layer)``: float64 [n, V] after ``layer``, from 1.
    """

    def __init__(self, positions: int, layers: int, read: Callable[[int], Floats]):
        self._positions, self.layers, self._read_layer = positions, layers, read
        self._read: dict[int, Floats] = {}

    @staticmethod
    def from_array(logits: Floats) -> LayerLogits:
        """Logits of an array [n, L, V].

        Raises:
            BadArgument: another number of dimensions or dtype, or values that are not finite.
        """
        if logits.ndim != 3:
            raise BadArgument("lens", logits.shape, "logits of shape (n, L, V)", "one entry per token and layer")
        if logits.dtype != np.float64:
            raise BadArgument("lens", logits.dtype.name, "float64 logits", "convert after the forward pass")
        if not np.isfinite(logits).all():
            raise BadArgument("lens", "NaN or infinite logits", "finite logits", "check the weights and the dtype")
        return LayerLogits(logits.shape[0], logits.shape[1], lambda layer: logits[:, layer - 1])

    def __len__(self) -> int:
        return self._positions

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self), self.layers, self.after_layer(self.layers).shape[-1]

    @property
    def last_layer(self) -> Floats:
        """float64 [n, V] at full depth."""
        return self.after_layer(self.layers)

    def after_layer(self, layer: int) -> Floats:
        """float64 [n, V] after ``layer``."""
        if layer not in self._read:
            self._read[layer] = self._read_layer(layer)
        return self._read[layer]

    def at_depth(self, depth: Ints) -> Floats:
        """float64 [n, V] of each position after its own layer in ``depth`` int64 [n]."""
        layers = np.unique(depth).tolist()
        if len(layers) == 1:
            return self.after_layer(layers[0])
        picked = np.empty((len(self), self.after_layer(layers[0]).shape[-1]))
        for layer in layers:
            rows = depth == layer
            picked[rows] = self.after_layer(layer)[rows]
        return picked

    def slice_positions(self, first: int, end: int) -> LayerLogits:
        """Logits of the positions ``first`` … ``end`` − 1; both objects share the layers read."""
        return LayerLogits(end - first, self.layers, lambda layer: self.after_layer(layer)[first:end])

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(self)[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Floats:
        stacked = np.stack([self.after_layer(layer) for layer in range(1, self.layers + 1)], axis=1)
        return stacked if dtype is None else stacked.astype(dtype)


@dataclass(frozen=True)
class RuleReadings:
    """Readings of a rule at all layers over n positions, as if no token stopped.

    ``signal`` float64 [n, probes], NaN where the rule is not defined; ``emitted`` [n, L, V]: logits of a token that
    stops after each layer, −inf for pruned tokens.
    """

    signal: Floats
    emitted: LayerLogits
    readouts: ProbeReadoutWork


class Lens(Protocol):
    """A function from one sequence of tokens int64 [n] to the model's logits after every layer."""

    def __call__(self, tokens: Ints, first: int = 0) -> LayerLogits:
        """Logits [n − first, L, V]; entry [t, ℓ − 1] is the readout of position first + t after layer ℓ.

        The pass covers all of ``tokens``; only readouts start at ``first``.
        """

    def read_rule(self, tokens: Ints, first: int, point: OperatingPoint) -> RuleReadings:
        """Readings of the rule of ``point`` at positions ``first`` … n − 1.

        Raises:
            BadArgument: a lens with only logits, and a rule that needs more.
        """

    def max_rounding_error(self, tokens: Ints, layers: Sequence[int]) -> float:
        """Largest honest difference by rounding of a logit of the last of ``tokens`` after ``layers``; 0: unknown."""


@dataclass(frozen=True)
class LogitLens:
    """A lens with only logits, enough for every signal of one layer's readout."""

    logits: Callable[[Ints], Floats]

    def __call__(self, tokens: Ints, first: int = 0) -> LayerLogits:
        return LayerLogits.from_array(self.logits(tokens)[first:])

    def read_rule(self, tokens: Ints, first: int, point: OperatingPoint) -> RuleReadings:
        rule = f"{point.signal}/{point.estimator.name}" + ("/pruned" if point.confidence is not None else "")
        rule += "/tuned lens" if point.lens is not None else ""
        expected = "a signal of one layer's full readout"
        raise BadArgument("point", rule, expected, "give a lens that can lead the rule, as audit.model_lens.ModelLens")

    def max_rounding_error(self, tokens: Ints, layers: Sequence[int]) -> float:
        return 0.0


class PrefixCachingLens:
    """A lens that caches its last ``kept`` sequences and serves their prefixes, since entries are causal.

    It reads several announced sequences (``announce_sequences``) at once, if the lens can: a pass over few positions
    takes about as long as one over many.
    """

    def __init__(self, lens: Lens, kept: int = 1):
        self._lens = lens
        self._kept: deque[tuple[Ints, int, LayerLogits]] = deque(maxlen=kept)  # tokens, first, their logits
        self._planned: list[tuple[Ints, int]] = []
        self._shared: Collection[int] = ()  # layers read for all planned sequences
        self._ahead: list[tuple[Ints, int, LayerLogits]] = []  # read, and not requested yet

    def announce_sequences(self, sequences: Iterable[tuple[Ints, int]], shared: Collection[int] = ()) -> None:
        """Announce sequences, each with its ``first``, in the order of their later requests.

        ``shared``: layers after which the logits of all of them will be read.
        """
        self._planned, self._shared = [(np.array(tokens), first) for tokens, first in sequences], shared

    def __call__(self, tokens: Ints, first: int = 0) -> LayerLogits:
        for known, begun, logits in self._kept:
            if begun <= first and np.array_equal(known[: len(tokens)], tokens):
                return logits.slice_positions(first - begun, len(tokens) - begun)
        at = next((at for at, one in enumerate(self._ahead) if _is_same((tokens, first), one[:2])), None)
        read = self._read(tokens, first) if at is None else self._ahead.pop(at)
        self._kept.append(read)
        return read[2]

    def _read(self, tokens: Ints, first: int) -> tuple[Ints, int, LayerLogits]:
        """Read the sequence, with as many planned ones after it as fit one pass."""
        group, together = [(np.array(tokens), first)], getattr(self._lens, "read_layer_logits_by_sequence", None)
        at = next((at for at, one in enumerate(self._planned) if _is_same(group[0], one)), None)
        if together is None or at is None:
            return *group[0], self._lens(tokens, first)
        longest = len(tokens)
        for following in self._planned[at + 1 :]:
            longest = max(longest, len(following[0]))
            if longest * (len(group) + 1) > AT_ONCE:
                break
            group.append(following)
        self._planned = self._planned[at + len(group) :]
        logits = together(group, self._shared)
        read, *self._ahead = [(*one, each) for one, each in zip(group, logits, strict=True)]
        return read

    def read_rule(self, tokens: Ints, first: int, point: OperatingPoint) -> RuleReadings:
        return self._lens.read_rule(tokens, first, point)

    def max_rounding_error(self, tokens: Ints, layers: Sequence[int]) -> float:
        return self._lens.max_rounding_error(tokens, layers)


def _is_same(one: tuple[Ints, int], other: tuple[Ints, int]) -> bool:
    return one[1] == other[1] and np.array_equal(one[0], other[0])


@dataclass(frozen=True)
class LensReference:
    """Reference for n positions of one sequence.

    ``logits`` [n, L, V] of full heads, through the point's tuned lens if it has one; ``signal``, ``emitted``,
    ``readouts`` as in ``RuleReadings``. ``rows``: the threshold row of each position, int64 [n], followed by every
    other assignment that the tolerance allows. ``tolerance`` float64 [n]: largest honest difference of a logit.
    ``signal_tolerance``: that of a signal before ``signal_noise_factor``, larger where the signal moves faster than
    logits.
    """

    logits: LayerLogits
    signal: Floats
    emitted: LayerLogits
    readouts: ProbeReadoutWork
    rows: tuple[Ints, ...]
    tolerance: Floats
    signal_tolerance: Floats

    def with_tolerance_at_position(self, point: OperatingPoint, first: int, at: int, tolerance: float) -> LensReference:
        """This reference with ``tolerance`` at position ``first`` + ``at``; ``first``: that of the reference."""
        each, of_signal = self.tolerance.copy(), self.signal_tolerance.copy()
        each[at], of_signal[at] = tolerance, tolerance * signal_sensitivity(point, self.emitted, slice(at, at + 1))[0]
        rows = self.rows if tolerance == self.tolerance[at] else _rows_of(point, first, self.logits, each)
        return replace(self, tolerance=each, signal_tolerance=of_signal, rows=rows)


def compute_reference(
    lens: Lens, tokens: Ints, point: OperatingPoint, first: int = 0, tolerance: float = 0.0
) -> LensReference:
    """The lens' reference for positions ``first`` … n − 1 of ``tokens`` [n]; ``tolerance`` in logits, for ``rows``.

    Raises:
        BadArgument: the reference has another shape or dtype, or is not finite; a rule that this lens cannot compute.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    logits = lens(tokens, first)
    if (len(logits), logits.layers) != (len(tokens) - first, point.layers):
        expected = f"logits of shape ({len(tokens) - first}, {point.layers}, V)"
        raise BadArgument("lens", (len(logits), logits.layers, "V"), expected, "one entry per token and layer")
    from_lens = SIGNALS[point.signal].from_lens
    if from_lens is None or not is_decided_by_full_heads(point):
        led = lens.read_rule(tokens, first, point)
        if point.lens is not None:  # heads use the lens also at a forced depth, except in the last layer
            logits = led.emitted
    else:
        signal = [from_lens(logits.after_layer(probe)) for probe in point.probes]
        columns = np.stack(signal, axis=1) if signal else np.zeros((len(logits), 0))
        led = RuleReadings(columns, logits, ProbeReadoutWork.from_point_with_full_heads(point, len(logits)))
    each = np.full(len(logits), tolerance)
    rows = _rows_of(point, first, logits, each)
    return LensReference(logits, led.signal, led.emitted, led.readouts, rows, each, each)


def _rows_of(point: OperatingPoint, first: int, logits: LayerLogits, tolerance: Floats) -> tuple[Ints, ...]:
    """``LensReference.rows`` of positions from ``first`` on."""
    if not (point.probes and point.bins.features):
        return (np.zeros(len(logits), dtype=np.int64),)
    return candidate_threshold_rows(
        point, first + np.arange(len(logits)), logits.after_layer(point.probes[0]), tolerance
    )


def is_decided_by_full_heads(point: OperatingPoint) -> bool:
    """Whether full heads determine every comparison of the point, so that its probes run only these."""
    plain = point.estimator == EntropyEstimator() and point.lens is None
    return SIGNALS[point.signal].from_lens is not None and point.confidence is None and plain


def candidate_threshold_rows(
    point: OperatingPoint, position: Ints, logits: Floats, tolerance: Tolerance
) -> tuple[Ints, ...]:
    """``LensReference.rows``, from positions [n] (from 0) and the first probe's logits [n, V]."""
    best = np.argsort(logits, axis=-1)[:, -2:]
    first, second = (np.take_along_axis(logits, best[:, [at]], axis=-1)[:, 0] for at in (1, 0))
    probability = 1 / np.exp(logits - first[:, None]).sum(axis=-1)
    top1 = (best[:, 1], np.where(first - second <= max_tied_gap(None, tolerance), best[:, 0], best[:, 1]))
    return candidate_bins(point.bins, position, probability, top1, tolerance)


def candidate_bins(
    spec: ThresholdBinSpec,
    position: Ints,
    probability: NDArray[np.floating],
    top1: Sequence[Ints],
    tolerance: float | Floats,
) -> tuple[Ints, ...]:
    """The bin of each position [n], and the bins if ``probability`` [n] is off by ``tolerance`` or another token leads.

    ``top1``: int64 [n] likeliest tokens, and possible others.
    """
    return tuple(
        assign_bins(spec, position + 1, (probability + by).astype(np.float32), token).astype(np.int64)
        for token in top1
        for by in (0.0, tolerance, -tolerance)
    )


def signal_sensitivity(point: OperatingPoint, emitted: LayerLogits, positions: slice = slice(None)) -> Floats:
    """How fast signals of ``positions`` move with logits, at the most sensitive probe; float64, at least 1."""
    slope, fastest = SIGNALS[point.signal].slope, np.ones(len(emitted))[positions]
    if slope is not None:
        for probe in point.probes:
            fastest = np.maximum(fastest, slope(emitted.after_layer(probe)[positions]))
    return fastest


def token_thresholds(point: OperatingPoint, rows: Ints) -> Floats:
    """[m, probes] thresholds of decided tokens in order, a sequence's first of them first; ``rows`` [m] their bins."""
    thresholds: Floats = np.array(point.thresholds, dtype=np.float64)[rows]
    if point.decay is not None:
        rate, longest = point.decay
        left = 0.1 * np.exp(-rate * np.arange(len(rows)) / longest)[:, None]
        thresholds = 0.9 * thresholds + left if point.decay_form == "calm" else thresholds * (0.9 + left)
    return thresholds


def headroom_and_noise(point: OperatingPoint, signal: Floats, rows: Ints) -> tuple[Floats, Floats]:
    """(headroom [m, L], −inf where nothing is decided; noise [L]) of ``signal`` [m, probes] in bins ``rows`` [m]."""
    sense = -1.0 if SIGNALS[point.signal].sense == "falls" else 1.0
    room, noise = np.full((len(signal), point.layers), -np.inf), np.full(point.layers, signal_noise_factor(point))
    thresholds = token_thresholds(point, rows)
    with np.errstate(invalid="ignore"):  # inf − inf: an unreachable threshold never fires
        for number, probe in enumerate(point.probes):
            room[:, probe - 1] = sense * (signal[:, number] - thresholds[:, number])
        for number in range(1, len(point.probes) - 1) if point.interpolate else ():
            left, at, right = point.probes[number - 1 : number + 2]
            before, here, near, far = (*signal.T[number - 1 : number + 1], *thresholds.T[number : number + 2])
            for layer in range(at + 1, right):
                run, share = (layer - at) / (at - left), (layer - at) / (right - at)
                room[:, layer - 1] = sense * (here + (here - before) * run - (near + (far - near) * share))
                noise[layer - 1] *= 1 + 2 * run
    return np.where(np.isnan(room), -np.inf, room), noise


def rule_depths(point: OperatingPoint, room: Floats, cap: Ints) -> Ints:
    """[m] the first layer with ``room`` [m, L] ≥ 0, at most ``cap`` [m]."""
    layers = np.arange(1, point.ceiling)
    return np.minimum(cap, first_firing_probe(room[:, : point.ceiling - 1] >= 0, layers, point.ceiling))


def can_fire(point: OperatingPoint, signal: Floats, rows: tuple[Ints, ...]) -> Bools:
    """[m, probes] whether any value could fire there, under each of ``rows``; false where no signal is defined."""
    never = SIGNALS[point.signal].unreachable_threshold
    may: Bools = np.logical_and.reduce([token_thresholds(point, one) != never for one in rows]) & ~np.isnan(signal)
    return may


def is_tied(point: OperatingPoint, signal: Floats, rows: tuple[Ints, ...], tolerance: float | Floats) -> Bools:
    """[m] whether some comparison, or the choice of the bin, is within ``tolerance`` (of a logit; one, or [m])."""
    near: Bools = np.zeros(len(signal), dtype=bool)
    for one in rows:
        room, noise = headroom_and_noise(point, signal, one)
        near |= (np.abs(room) <= np.asarray(tolerance)[..., None] * noise).any(axis=1) | (one != rows[0])
    return near
