"""Operating point: all settings that decide depth, as plain data.

A rule compares a signal Ĥ_ℓ with a threshold τ_ℓ at each probe ℓ; a schedule turns fires into depth. Replay, decoding
and users' decoders read the same point.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from emad_ref.console import NotebookReprMixin
from emad_ref.errors import BadArgument, is_number, is_whole, require_instance, require_whole
from emad_ref.signals import ENTROPY, SIGNALS, required_layers

ScheduleName = Literal["monotone", "free_eager", "free_deferred", "copying", "translated", "positional", "chunked"]
# schedule → fields of a point that only it needs; ``schedule.schedules`` implements the schedules
SCHEDULE_FIELDS: dict[ScheduleName, tuple[str, ...]] = {
    "monotone": (),
    "free_eager": (),
    "free_deferred": (),
    "copying": (),
    "translated": ("translators",),
    "positional": ("period", "floor"),
    "chunked": ("period",),
}
RULELESS: tuple[ScheduleName, ...] = ("positional",)  # a token's position decides its depth
STOPS_BY_TOKEN: tuple[ScheduleName, ...] = (  # the rule reads each token
    "monotone", "free_eager", "free_deferred", "copying", "translated",
)  # fmt: skip
EXACT_FREE: tuple[ScheduleName, ...] = ("free_eager", "free_deferred")  # any depth, K and V above an exit computed
ESTIMATORS: tuple[str, ...] = ("full", "topk", "lowrank", "linear")
LENSED: tuple[str, ...] = ("full", "linear")  # estimators that read no part of the model's own head
SEARCHES: tuple[str, ...] = ("exact", "faiss", "lowrank")
FEATURES: tuple[str, ...] = ("position", "top1_probability", "frequency")
EMISSIONS: tuple[str, ...] = ("contrastive", "expert")
DECAY_FORMS: tuple[str, ...] = ("free", "calm")  # of thresholds that fall, by the paper whose code has the form


@dataclass(frozen=True)
class EntropyEstimator:
    """How a probe estimates the entropy (EMAD, "Entropy estimation at inference"), with fitted parameters.

    ``kind``         ``full`` softmax; ``topk`` logits by inner-product search; ``lowrank`` readout; ``linear`` probe.
    ``k``, ``rank``  logits kept (topk, lowrank); r of the factorisation (lowrank).
    ``search``       how topk retrieves: ``exact``, ``faiss``, ``lowrank`` (finds rows, then scores them).
    ``correction``   per probe (slope, intercept) of the linear map to full entropy; () = none.
    ``weights``      linear: per probe, one weight per entry of the head's input, and the intercept last.
    """

    kind: str = "full"
    k: int = 0
    rank: int = 0
    search: str = "exact"
    correction: tuple[tuple[float, float], ...] = ()
    weights: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ESTIMATORS:
            raise BadArgument("estimator.kind", self.kind, f"one of {', '.join(ESTIMATORS)}")
        if self.search not in SEARCHES:
            remedy = "faiss searches inverted lists"
            raise BadArgument("estimator.search", self.search, f"one of {', '.join(SEARCHES)}", remedy)
        if (self.kind in ("topk", "lowrank")) != (self.k > 0):
            raise BadArgument("estimator.k", self.k, "a count ≥ 1 for topk and lowrank, 0 for the others")
        factored = self.kind == "lowrank" or (self.kind == "topk" and self.search == "lowrank")
        if factored != (self.rank > 0):
            raise BadArgument("estimator.rank", self.rank, "a rank ≥ 1 for lowrank readout or search, 0 for the others")

    @property
    def name(self) -> str:
        """``full``, ``topk-64``, ``topk-64 faiss``, ``topk-64 lowrank-16``, ``lowrank-64 top-32``, ``linear``."""
        if self.kind == "topk":
            how = f"lowrank-{self.rank}" if self.search == "lowrank" else self.search
            return f"topk-{self.k}" + ("" if self.search == "exact" else f" {how}")
        return f"lowrank-{self.rank} top-{self.k}" if self.kind == "lowrank" else self.kind


@dataclass(frozen=True)
class ConfidenceParameters:
    """Parameters of a confidence that uses shallower layers of the same token (early-exit LLMs, "Methodology").

    Symbols: p_ℓ the expert (the layer of a possible exit), p_m the amateur (a shallower one), H the head set.

    ``minimum``      j, the first layer after which a token may exit.
    ``alpha``        α of H = {p_ℓ ≥ α·max p_ℓ}; 0 keeps every token.
    ``alpha_decay``  decay rate of α′ = α / (1 + rate·ℓ) · (1 − (top-1 − top-2 of p_ℓ)); None: α as it is.
    ``emit``         distribution of an exiting token: ``contrastive``, the score itself, or ``expert``, p_ℓ.
    ``rescale``      whether the score on H is scaled to the mass of H under p_ℓ.
    ``kept``         pruned vocabulary: k of each layer after j, never rising; (): no list. A k ≥ |V| keeps all tokens.
    ``shrink``       s of the adaptive k = ⌊|V|·(1 − s·c)⌋, c the confidence at the layer below; None: not adaptive.

    Raises:
        BadArgument: values outside these ranges, or both ways of pruning.
    """

    minimum: int
    alpha: float = 0.1
    alpha_decay: float | None = None
    emit: str = "contrastive"
    rescale: bool = False
    kept: tuple[int, ...] = ()
    shrink: float | None = None

    def __post_init__(self) -> None:
        if self.minimum < 1:
            raise BadArgument("confidence.minimum", self.minimum, "a layer ≥ 1")
        if not 0 <= self.alpha <= 1:
            raise BadArgument("confidence.alpha", self.alpha, "a share in 0–1", "0 puts every token in the head set")
        if self.alpha_decay is not None and not 0 <= self.alpha_decay < math.inf:
            raise BadArgument("confidence.alpha_decay", self.alpha_decay, "a finite rate ≥ 0, or None for a constant α")
        if self.emit not in EMISSIONS:
            raise BadArgument("confidence.emit", self.emit, f"one of {', '.join(EMISSIONS)}")
        if min(self.kept, default=2) < 2:
            raise BadArgument("confidence.kept", self.kept, "2 tokens or more", "of one there is no second to compare")
        if list(self.kept) != sorted(self.kept, reverse=True):
            raise BadArgument("confidence.kept", self.kept, "sizes that never rise", "a pruned token is not read again")
        if self.shrink is not None and not 0 <= self.shrink < 1:
            raise BadArgument("confidence.shrink", self.shrink, "a share in 0–1, below 1", "1 would keep no token")
        if self.kept and self.shrink is not None:
            raise BadArgument("confidence.shrink", self.shrink, "None where kept lists the sizes", "choose one of them")

    @property
    def prunes_vocabulary(self) -> bool:
        """Whether layers after j read only part of the vocabulary."""
        return bool(self.kept) or self.shrink is not None


@dataclass(frozen=True)
class ThresholdBinSpec:
    """Assignment of tokens to the rows of ``thresholds`` (EMAD, "Conditioning") by zero to two features.

    ``features``          of ``position``, ``top1_probability`` (at the first probe) and ``frequency`` (of the top-1
                          token there).
    ``position_edges``    last position, counted from 1, of each bucket but the last.
    ``top1_probability_edges``  lower bound of each bucket but the first.
    ``frequency``         bucket of each token id, one byte each: 0 for the most frequent, … 2.
    """

    features: tuple[str, ...] = ()
    position_edges: tuple[int, ...] = (32, 128)
    top1_probability_edges: tuple[float, ...] = (0.4, 0.7)
    frequency: bytes = b""

    def __post_init__(self) -> None:
        known = all(feature in FEATURES for feature in self.features)
        if not known or len(self.features) > 2 or len(set(self.features)) != len(self.features):
            raise BadArgument("bins.features", self.features, f"at most two of {', '.join(FEATURES)}, each once")
        if ("frequency" in self.features) != bool(self.frequency):
            raise BadArgument(
                "bins.frequency", f"{len(self.frequency)} bytes", "one byte per token id where frequency is a feature"
            )

    @property
    def buckets_per_feature(self) -> tuple[int, ...]:
        """Buckets of each feature, in order."""
        sizes = {
            "position": len(self.position_edges) + 1,
            "top1_probability": len(self.top1_probability_edges) + 1,
            "frequency": max(self.frequency, default=0) + 1,
        }
        return tuple(sizes[feature] for feature in self.features)

    @property
    def bin_count(self) -> int:
        """Bins: the product of the features' buckets; 1 without features."""
        return math.prod(self.buckets_per_feature)

    @property
    def name(self) -> str:
        return "×".join(self.features) or "none"


FIELD_TYPES: dict[str, type] = {  # types of a point's fields that hold no numbers
    "name": str,
    "family": str,
    "schedule": str,
    "signal": str,
    "decay_form": str,
    "estimator": EntropyEstimator,
    "bins": ThresholdBinSpec,
    "interpolate": bool,
    "lens": str,
    "translators": str,
    "confidence": ConfidenceParameters,
}
OPTIONAL_FIELDS = frozenset({"lens", "translators", "confidence"})


def _require_tuple(name: str, row: object, is_one: Callable[[object], bool], what: str) -> None:
    """Raise BadArgument unless ``row`` is a tuple or list of numbers of this type."""
    if not isinstance(row, tuple | list) or not all(map(is_one, row)):
        raise BadArgument(name, row, f"a tuple of {what}", "see OperatingPoint")


def _canonical(value: Any) -> Any:
    """``value`` with one text for equal numbers: 1, 1.0 and NumPy's 1 are ``1.0``, and −0.0 is ``0.0``."""
    if isinstance(value, dict):
        return {key: _canonical(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(part) for part in value]
    return float(value) + 0.0 if is_number(value) and not isinstance(value, bool) else value


@dataclass(frozen=True, repr=False)
class OperatingPoint(NotebookReprMixin):
    """One configuration of adaptive depth. Points with equal fields are one point, whatever their names.

    Attributes
    ----------
    name : str
        Label in reports, e.g. ``emad m=0.20``, with as many digits as tell the points of a set apart. It identifies
        nothing: points are compared by all other fields, and files refer to one by its ``digest``.
    family : str
        Source of the thresholds: ``full``, ``truncation``, ``emad`` (profile − margin), ``fixed_entropy``,
        ``quantile``, ``softmax_response``, ``jsd_contrast``, ….
    layers : int
        L of the model it belongs to.
    probes : tuple of int
        Layers after which the signal is read, ascending, all < ``ceiling``.
    thresholds : tuple of tuple of float, [bins][probes]
        τ in the unit of the signal. A token exits at ℓ when signal_ℓ ≤ τ_ℓ (≥ for signals that rise).
    ceiling : int
        Depth of a token that never exits, and the cap at the start of a sequence.
    schedule : str
        How exits become depths: ``monotone`` (EMAD), ``free_eager``, ``free_deferred``, ``chunked``, ….
    estimator : EntropyEstimator
        How a probe computes its entropy: the full head, or part of it.
    signal : str
        The value compared with τ; entropy by default.
    bins : ThresholdBinSpec
        Features that choose a token's row of ``thresholds``; no features: one row.
    margin_nats : float or None
        m of the EMAD family, for reports.
    period : int or None
        Tokens of a chunk (chunked), or over which depth falls from ceiling to ``floor`` (positional).
    floor : int or None
        The last depth of the positional schedule.
    interpolate : bool
        Whether tokens may exit between probes, where the line through the last two readings crosses τ.
    confidence : ConfidenceParameters or None
        Parameters of a signal of several layers, or of a pruned one; None for other signals.
    decay : (float, float) or None
        (rate, N): thresholds fall with the decided tokens t = 0, 1, … of a sequence of at most N tokens, by
        ``decay_form``; None: constant. Only for signals that rise.
    decay_form : str
        ``free``, τ_ℓ·(0.9 + 0.1·exp(−rate·t/N)), as in the code of FREE and of the early-exit LLMs, which starts at
        τ_ℓ; or ``calm``, 0.9·τ_ℓ + 0.1·exp(−rate·t/N) (CALM, Eq. 5), which starts nearer to 1. Both end at 0.9·τ_ℓ.
        ``free`` without a decay.
    lens : str or None
        Digest of the tuned lens in front of heads below the last layer, attached to the model that decodes
        (``probes.tuned_lens``); None: the model's own head. Linear probes read the state itself, so only their exits
        use the lens.
    translators : str or None
        Digest of the state translators that produce K and V above an exit (schedule ``translated``), attached to the
        model that decodes (``probes.tuned_lens``).

    Raises
    ------
    BadArgument
        Probes outside 1…ceiling−1 or not ascending, thresholds of another shape or not a number, ….

    References
    ----------
    EMAD, "Algorithm (per token)"; CALM, FREE (decaying thresholds).
    """

    name: str = field(compare=False)
    family: str
    layers: int
    ceiling: int
    probes: tuple[int, ...] = ()
    thresholds: tuple[tuple[float, ...], ...] = ((),)
    schedule: ScheduleName = "monotone"
    estimator: EntropyEstimator = EntropyEstimator()
    signal: str = ENTROPY.name
    bins: ThresholdBinSpec = ThresholdBinSpec()
    margin_nats: float | None = None
    period: int | None = None
    floor: int | None = None
    interpolate: bool = False
    confidence: ConfidenceParameters | None = None
    decay: tuple[float, float] | None = None
    decay_form: str = DECAY_FORMS[0]
    lens: str | None = None
    translators: str | None = None

    @property
    def _notebook_title(self) -> str:
        return self.name

    @property
    def _notebook_facts(self) -> dict[str, str]:
        probes = ", ".join(map(str, self.probes)) or "none"
        depth = f"at most {self.ceiling} of {self.layers} layers"
        named = {"family": self.family, "signal": self.signal, "schedule": self.schedule}
        return named | {"probes": f"probes {probes}", "depth": depth}

    def __post_init__(self) -> None:
        self._require_types()
        if not 1 <= self.ceiling <= self.layers:
            raise BadArgument("ceiling", self.ceiling, f"a layer in 1–{self.layers}")
        for probe in self.probes:
            if not 1 <= probe < self.ceiling:
                raise BadArgument(
                    "probes", self.probes, f"layers in 1–{self.ceiling - 1}", "a probe at the ceiling decides nothing"
                )
        if list(self.probes) != sorted(set(self.probes)):
            raise BadArgument("probes", self.probes, "ascending layers, each once")
        if len(self.thresholds) != self.bins.bin_count:
            raise BadArgument(
                "thresholds",
                self.thresholds,
                f"one row per bin, {self.bins.bin_count} for bins {self.bins.name}",
                "without probes and bins, ((),)",
            )
        for row in self.thresholds:
            if len(row) != len(self.probes):
                raise BadArgument("thresholds", self.thresholds, f"{len(self.probes)} values per bin, one per probe")
            if any(math.isnan(value) for value in row):
                raise BadArgument(
                    "thresholds", self.thresholds, "numbers, not NaN", "-inf says never exit at this probe"
                )
        known_names = ("schedule", self.schedule, tuple(SCHEDULE_FIELDS)), ("signal", self.signal, tuple(SIGNALS))
        for name, value, known in known_names:
            if value not in known:
                raise BadArgument(name, value, f"one of {', '.join(known)}")
        self._require_scheduled()
        read = set(self.bins.features) - {"position"}
        if read and self.estimator.kind != "full":
            raise BadArgument(
                "bins.features", self.bins.features, "position alone", f"a {self.estimator.name} probe knows no other"
            )
        if self.estimator.kind != "full" and self.confidence is None and not SIGNALS[self.signal].estimated:
            estimated = " and ".join(name for name, signal in SIGNALS.items() if signal.estimated)
            expected = f"the full readout for {self.signal}"
            raise BadArgument("estimator", self.estimator.name, expected, f"estimators read {estimated}")
        if SIGNALS[self.signal].is_learned and (self.estimator.kind != "linear" or self.confidence is not None):
            remedy = f"no readout shows {self.signal}; calibration.linear_maps.fit_gate fits one"
            raise BadArgument("estimator", self.estimator.name, "linear, without a confidence", remedy)
        if self.lens is not None:
            self._require_lens(self.lens)
        if self.decay_form not in DECAY_FORMS or (self.decay is None and self.decay_form != DECAY_FORMS[0]):
            expected = f"one of {', '.join(DECAY_FORMS)}; {DECAY_FORMS[0]} without a decay"
            raise BadArgument("decay_form", self.decay_form, expected, "decay holds the rate and the longest sequence")
        if self.decay is not None:
            self._require_decaying(*self.decay)
        if self.confidence is not None:
            self._require_confident(self.confidence)
        elif SIGNALS[self.signal].needs_confidence_parameters:
            raise BadArgument("confidence", None, f"the parameters of {self.signal}", "see exit_rules.early_exit_point")

    @cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits of a SHA-256 over every field but the name: equal for equal points."""
        plain = {key: _canonical(value) for key, value in self.to_json().items() if key != "name"}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]

    @cached_property
    def threshold_table(self) -> NDArray[np.float32]:
        """Array [bins, probes] of ``thresholds`` for comparison with signals, read-only; [1, 0] without probes."""
        table = np.array(self.thresholds, dtype=np.float32)
        table.setflags(write=False)
        return table

    def _require_types(self) -> None:
        """Refuse fields of another type than the class declares; numbers of NumPy pass, and lists for tuples."""
        require_whole("layers", self.layers, 1)
        for name in ("ceiling", "period", "floor"):
            value = getattr(self, name)
            if not is_whole(value) and (name == "ceiling" or value is not None):
                raise BadArgument(name, value, "a whole number", "pass an int")
        _require_tuple("probes", self.probes, is_whole, "whole numbers")
        for row in self.thresholds if isinstance(self.thresholds, tuple | list) else (self.thresholds,):
            _require_tuple("thresholds", row, is_number, "numbers")
        if self.decay is not None:
            _require_tuple("decay", self.decay, is_number, "numbers")
            if len(self.decay) != 2:
                raise BadArgument("decay", self.decay, "two numbers, the rate and the longest sequence")
        for name, kind in FIELD_TYPES.items():
            if getattr(self, name) is not None or name not in OPTIONAL_FIELDS:
                require_instance(name, getattr(self, name), kind, "see OperatingPoint")
        if self.margin_nats is not None and not is_number(self.margin_nats):
            raise BadArgument("margin_nats", self.margin_nats, "a number of nats, or None")

    def _require_scheduled(self) -> None:
        """Refuse missing fields that the schedule needs, and fields that it would ignore."""
        fields = SCHEDULE_FIELDS[self.schedule]
        if ("period" in fields) != (self.period is not None) or (self.period is not None and self.period < 1):
            raise BadArgument("period", self.period, "tokens ≥ 1 for positional and chunked, None for other schedules")
        inside = self.floor is None or 1 <= self.floor <= self.ceiling
        if ("floor" in fields) != (self.floor is not None) or not inside:
            raise BadArgument("floor", self.floor, f"a layer in 1–{self.ceiling} for positional, None for others")
        if ("translators" in fields) != bool(self.translators) or self.translators == "":
            expected = "the digest of state translators for translated, None for other schedules"
            raise BadArgument("translators", self.translators, expected, "fit them: calibration.linear_maps")
        if self.schedule in RULELESS and self.probes:
            raise BadArgument("probes", self.probes, f"none under the {self.schedule} schedule", "it has no rule")

    def _require_lens(self, digest: str) -> None:
        """Refuse readouts without the lens: parts of the model's own head, and rules that contrast its readouts."""
        if not digest:
            raise BadArgument("lens", digest, "the digest of a tuned lens", "None reads by the model's own head")
        remembers = self.confidence is not None and SIGNALS[self.signal].cost is not None
        if remembers or self.estimator.kind not in LENSED:
            asked = self.estimator.name if self.confidence is None else f"{self.signal} with parameters"
            expected = f"None for {asked}"
            remedy = "a lens serves full heads, linear probes of one layer, and rules that read no head at probes"
            raise BadArgument("lens", digest, expected, remedy)

    def _require_decaying(self, rate: float, longest: float) -> None:
        if not 0 <= rate < math.inf or not 1 <= longest < math.inf:
            raise BadArgument(
                "decay", self.decay, "(rate ≥ 0, tokens ≥ 1), both finite", "None for constant thresholds"
            )
        if SIGNALS[self.signal].sense == "falls" or self.interpolate:
            expected = "None for a signal that falls, and where exits lie between probes"
            raise BadArgument("decay", self.decay, expected, "its formula is about a confidence at a probe")

    def _require_confident(self, confidence: ConfidenceParameters) -> None:
        """Refuse combinations without meaning, and probes other than those that the signal needs."""
        signal, pruned = self.signal, confidence.prunes_vocabulary
        if not SIGNALS[signal].needs_confidence_parameters and not pruned:
            raise BadArgument("confidence", confidence, f"None for {signal} of a full readout", "it has no parameters")
        if pruned and not SIGNALS[signal].prunable:
            prunable = " and ".join(name for name, each in SIGNALS.items() if each.prunable)
            raise BadArgument("confidence", confidence, f"no pruning for {signal}", f"for {prunable} alone")
        needed = required_layers(signal, confidence.minimum, self.ceiling)
        if self.probes != needed:
            raise BadArgument("probes", self.probes, f"{needed}, the layers {signal} needs")
        below = [i for i, probe in enumerate(needed) if probe < confidence.minimum]
        if any(row[i] != math.inf for row in self.thresholds for i in below):
            raise BadArgument("thresholds", self.thresholds, "inf below the minimum layer", "nothing is decided there")
        if confidence.kept and len(confidence.kept) != self.ceiling - 1 - confidence.minimum:
            expected = f"one per probe after the minimum layer, {self.ceiling - 1 - confidence.minimum}"
            raise BadArgument("confidence.kept", confidence.kept, expected)
        plain = (self.estimator, self.bins.name, self.interpolate) == (EntropyEstimator(), "none", False)
        if not plain or self.schedule not in STOPS_BY_TOKEN:
            raise BadArgument(
                "confidence",
                confidence,
                f"a full estimator, no bins, exits at probes, and a schedule of {', '.join(STOPS_BY_TOKEN)}",
                "what a token emits depends on whether it was asked",
            )

    @property
    def has_adaptive_depth(self) -> bool:
        """Whether any token can exit before ``ceiling``."""
        return any(value != SIGNALS[self.signal].unreachable_threshold for row in self.thresholds for value in row)

    @property
    def has_fixed_depth(self) -> bool:
        """Whether every token runs to the ceiling."""
        return not self.probes and self.schedule not in RULELESS

    @property
    def is_full_depth(self) -> bool:
        """Whether every token runs all layers of the model."""
        return self.has_fixed_depth and self.ceiling == self.layers

    @property
    def readout_layers(self) -> tuple[int, ...]:
        """Layers at which a replay compares or emits readouts, ascending."""
        lowest = self.ceiling if self.floor is None else self.floor
        if self.interpolate and self.probes:
            lowest = min(lowest, self.probes[0])
        return tuple(sorted({*self.probes, *range(lowest, self.ceiling + 1)}))

    def to_json(self) -> dict[str, Any]:
        """Every field by name, as built-in types; the frequency table in hexadecimal."""
        plain = asdict(self)
        plain["bins"]["frequency"] = self.bins.frequency.hex()
        return plain


def full_depth(layers: int) -> OperatingPoint:
    """The point that runs all layers for every token.

    Parameters
    ----------
    layers : int
        L of the model.

    Returns
    -------
    OperatingPoint

    Examples
    --------
    >>> full_depth(12).name, full_depth(12).has_fixed_depth
    ('full depth', True)
    """
    return OperatingPoint("full depth", "full", layers, layers)


def truncated(layers: int, depth: int) -> OperatingPoint:
    """The point that runs only the first layers for every token, prompts included.

    Parameters
    ----------
    layers : int
        L of the model.
    depth : int
        Layers that run, 1…L.

    Returns
    -------
    OperatingPoint

    Raises
    ------
    BadArgument
        ``depth`` outside 1…L.
    """
    require_whole("depth", depth, 1)
    return OperatingPoint(f"first {depth} layers", "truncation", layers, depth)
