"""Table of signals: numbers computed from one token's states, which a rule can compare with a threshold.

A row holds a signal's name and unit, whether it falls or rises with certainty, its inputs, its cost, an audit's second
computation, and its comparisons. Points, probes, the lens trace, replay, early exits, sweeps, the screening and audits
read this table and keep no other list: a new signal of one layer's readout is a new row and its functions.
CONTRIBUTING.md has the recipe.

    entropy_nats       H(p_ℓ) (EMAD)
    softmax_response   top-1 − top-2 of p_ℓ (CALM)
    saturation         cos(h_ℓ, h_{ℓ−1}) (CALM)
    weighted_contrast  top-1 − top-2 of p_DCD, the amateur at ⌊ℓ/2⌋ (early-exit LLMs)
    jsd_contrast       the same, the amateur chosen by its divergence
    top2_gap           top-1 − top-2 of z_ℓ, before the softmax
    agreement          top-1 of p_ℓ if the previous probe has the same top-1 token, else 0; 0 at the first probe. It
                       jumps where two tokens tie
    divergence         √KL(p_L ‖ q_ℓ), q_ℓ the output distribution after ℓ: known only after the last layer, so a linear
                       probe predicts it (``calibration.linear_maps.fit_gate``)

The lens trace and the decode loop both use ``from_logits``: replay equals decoding only if both compute the same number
from the same logits. ``from_lens`` is a second, independent form in float64 NumPy, for audits. ``probes.probe`` reads
several layers together, by a signal's ``needs``. This module has no thresholds or points, and imports torch only when
a signal is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from emad_ref.errors import BadArgument, EmadError
from emad_ref.record import Floats, Ints

if TYPE_CHECKING:  # naming signals needs no torch
    from torch import Tensor


LARGE_VOCABULARY = 4096  # columns from which on more passes over them are faster than slow operations
GROUP = 64  # columns searched together
NEVER_LOG_P = -1e4  # its exponential is 0 in float64, too: a value below it adds 0 to an entropy


class LogitsReadout:
    """Logits [..., V] of one layer, and values derived from them for several signals, each computed once."""

    def __init__(self, logits: Tensor):
        self.logits = upcast_to_float32(logits)

    @cached_property
    def log_probs(self) -> Tensor:
        """log softmax, [..., V]."""
        return self.logits.log_softmax(dim=-1)

    @cached_property
    def top2_logits_and_tokens(self) -> tuple[Tensor, Tensor]:
        """(logits, tokens int64) of the two likeliest tokens, each [..., 2]."""
        return top2_values_and_indices(self.logits)

    @cached_property
    def top2_log_probs_and_tokens(self) -> tuple[Tensor, Tensor]:
        """(log-probabilities, tokens int64) of the two likeliest tokens, each [..., 2]."""
        tokens = self.top2_logits_and_tokens[1]  # log softmax keeps the order of logits
        return self.log_probs.gather(-1, tokens), tokens


def top2_values_and_indices(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(values, indices int64) of the two largest of ``scores`` [..., n ≥ 2], largest first, each [..., 2].

    Equal to ``topk(2)`` but for the choice among equal values. Both are in the two groups of columns with the largest
    maxima, or in the remainder: for 49,152 columns that search takes a sixth of ``topk``'s time on a CPU.
    """
    columns = scores.shape[-1]
    if columns < LARGE_VOCABULARY:
        values, indices = scores.topk(2, dim=-1)
        return values, indices
    import torch  # loaded by now: ``scores`` is one of its tensors

    whole = columns - columns % GROUP
    groups = scores[..., :whole].reshape(*scores.shape[:-1], -1, GROUP)
    best = groups.amax(dim=-1).topk(2, dim=-1).indices.unsqueeze(-1).expand(*scores.shape[:-1], 2, GROUP)
    within = best * GROUP + torch.arange(GROUP, device=scores.device)
    remainder = torch.arange(whole, columns, device=scores.device).expand(*scores.shape[:-1], columns - whole)
    candidates = torch.cat([within.flatten(-2), remainder], dim=-1)
    values, places = scores.gather(-1, candidates).topk(2, dim=-1)
    return values, candidates.gather(-1, places)


@dataclass(frozen=True)
class SignalInputRequirement:
    """Inputs of a signal after layer ℓ besides those of ℓ, for decisions from a minimum layer j on.

    ``least``     the least j that leaves something to compare with.
    ``delay``     layers after j before it is defined.
    ``compared``  (j, ceiling) → layers below j that are read only for comparison.
    """

    name: str
    least: int = 1
    delay: int = 0
    compared: Callable[[int, int], set[int]] = lambda minimum, ceiling: set()


LAYER_LOGITS = SignalInputRequirement("this layer's readout alone")
STATE_BELOW = SignalInputRequirement(
    "the state of the layer below", least=2, compared=lambda minimum, ceiling: {minimum - 1}
)
HALF_DEPTH = SignalInputRequirement(
    "the readout after ⌊ℓ/2⌋", least=2, compared=lambda minimum, ceiling: {at // 2 for at in range(minimum, ceiling)}
)
PREVIOUS_PROBE = SignalInputRequirement("the readout at the probe before", delay=1)
LEARNED = SignalInputRequirement("a linear probe that was fitted to it")
SINCE_MINIMUM = SignalInputRequirement(
    "the readouts since the minimum layer", delay=1
)  # at that layer itself there is none to contrast with


Sweep = Literal["criterion", "front", "screening"]


@dataclass(frozen=True)
class ThresholdRange:
    """Range of thresholds from ``strictest``, which few tokens meet, to ``loosest(vocabulary size)``, which all meet.

    ``symbol``    a threshold in the names of points, e.g. ``response λ``.
    ``distance``  its distance from ``strictest`` in the names of a screening's points, e.g. ``doubt``.
    """

    strictest: float
    loosest: Callable[[int], float]
    symbol: str
    distance: str


@dataclass(frozen=True)
class Signal:
    """One row of the table.

    ``label``        its name in tables.
    ``sense``        ``falls``: a rule fires at or below τ; ``rises``: at or above.
    ``needs``        its inputs; ``LAYER_LOGITS``: one layer's logits.
    ``cost``         kind of ``record.READOUTS`` that a probe runs over the whole vocabulary; None: no readout.
    ``from_logits``  logits [..., V] → [...], float32 (float64 for float64 logits); None if it needs more.
    ``from_lens``    the same in NumPy, float64 [..., V] → [...], for audits; None: audits run the rule's own probe.
    ``noise``        its error bound in multiples of a logit's error bound.
    ``slope``        if no such bound exists: logits float64 [..., V] → [...] that multiple at these logits.
    ``prunable``     whether it is defined over a part of the vocabulary too.
    ``estimated``    whether estimators of it exist (``point.EntropyEstimator``).
    ``early_exit``   whether ``exit_rules.early_exit_point`` builds rules with it, as in the early-exit papers.
    ``sweeps``       its comparisons of thresholds: ``criterion``, criteria at equal probes; ``front``, against EMAD by
                     quantiles of its values (``replay.grids``); ``screening``, the search for an exit, which needs
                     ``thresholds``.
    ``thresholds``   the range of its thresholds, if bounded.
    """

    name: str
    label: str
    sense: Literal["falls", "rises"]
    unit: str
    needs: SignalInputRequirement
    cost: str | None = "full"
    from_logits: Callable[[LogitsReadout], Tensor] | None = None
    from_lens: Callable[[Floats], Floats] | None = None
    noise: float = 1.0
    slope: Callable[[Floats], Floats] | None = None
    prunable: bool = False
    estimated: bool = False
    early_exit: bool = False
    sweeps: tuple[Sweep, ...] = ()
    thresholds: ThresholdRange | None = None

    @property
    def is_single_layer(self) -> bool:
        """Whether one layer's readout gives it; every trace holds such a signal as a column."""
        return self.from_logits is not None

    @property
    def is_learned(self) -> bool:
        """Whether only a fitted linear probe gives it, and no readout (``point.EntropyEstimator``)."""
        return self.needs is LEARNED

    @property
    def needs_confidence_parameters(self) -> bool:
        """Whether it needs ``point.ConfidenceParameters``."""
        return not self.is_single_layer and self.needs not in (LEARNED, PREVIOUS_PROBE)

    @property
    def is_contrastive(self) -> bool:
        """Whether it contrasts readouts of several layers."""
        return self.needs_confidence_parameters and self.cost is not None

    @property
    def needs_only_thresholds(self) -> bool:
        """Whether thresholds suffice for a point: it needs neither parameters nor a fitted probe."""
        return not self.needs_confidence_parameters and not self.is_learned

    @property
    def unreachable_threshold(self) -> float:
        """A threshold that no value reaches."""
        return -math.inf if self.sense == "falls" else math.inf

    def compute(self, readout: LogitsReadout) -> Tensor:
        """Value [...] of a single-layer signal from that layer's readout [..., V]."""
        assert self.from_logits is not None, f"{self.name} needs {self.needs.name}"
        return self.from_logits(readout)

    def compute_from_logits(self, logits: Tensor) -> Tensor:
        """``compute`` from logits [..., V], for callers that need only this signal."""
        return self.compute(LogitsReadout(logits))


@dataclass(frozen=True, eq=False)
class ProbeOutput:
    """``signal`` [rows], NaN where undefined; ``logits`` [rows, V] to emit from, None if the exit must run a head.

    ``macs`` int64 [rows]: multiply-adds of each row's readout if rows may differ (pruned vocabularies), else None.
    """

    signal: Tensor
    logits: Tensor | None
    macs: Ints | None = None


FEW = 32  # number of entries up to which Python's sum is faster than a call into torch


class NotFinite(EmadError):
    """Raised if logits hold NaN or +inf, which allow no decision."""


def require_finite(values: Tensor, where: str) -> None:
    """Raise NotFinite unless every signal, or largest logit, is finite; ``where`` names the place in the message."""
    import torch  # loaded by now: ``values`` is one of its tensors

    # one sum shows NaN and infinity in a third of the calls; in float64, float16 values cannot overflow it
    few = values.is_cpu and values.numel() <= FEW
    if not math.isfinite(sum(values.flatten().tolist()) if few else values.sum(dtype=torch.float64).item()):
        bad = int((~values.isfinite()).sum())
        raise NotFinite(
            f"logits {where}: {bad} of {values.numel()} rows give no finite entropy, but expected finite logits; "
            "check the weights and the dtype (float16 overflows where bfloat16 or float32 do not)"
        )


def require_finite_cpu_float64(signal: Tensor, where: str) -> Tensor:
    """``signal`` [rows] on the host, float64, in one transfer. Raises NotFinite."""
    values = signal.double().cpu()  # before the check: it would cost a second transfer
    require_finite(values, where)
    return values


def to_numpy_float64(signal: Tensor) -> Floats:
    """``signal``, or logits, as NumPy float64."""
    values: Floats = signal.double().cpu().numpy()
    return values


def upcast_to_float32(values: Tensor) -> Tensor:
    """Half precision as float32, since a sum of 50,000 terms loses its second digit; float32 and float64 unchanged."""
    return values if values.element_size() == 8 else values.float()


def exp_log_probabilities(log_p: Tensor) -> Tensor:
    """e^x of log-probabilities x [..., V]; NaN stays NaN.

    For a large vocabulary, values below the dtype's smallest normal number become 0: a CPU takes ten times as long for
    such exponentials, and most of sharp logits are such.
    """
    if log_p.shape[-1] < LARGE_VOCABULARY:
        return log_p.exp()
    import torch  # loaded by now: ``log_probs`` is one of its tensors

    tiny = torch.finfo(log_p.dtype).tiny
    return torch.threshold(log_p.clamp_min(math.log(4 * tiny)).exp_(), 8 * tiny, 0.0)


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax over the last axis, in float32 at least; [..., V]."""
    return upcast_to_float32(logits).log_softmax(dim=-1)


def top2_margin(log_scores: Tensor) -> Tensor:
    """Largest minus second largest of e^x over x [..., n ≥ 2]; [...]."""
    return _difference(top2_values_and_indices(log_scores)[0])


def _difference(log_best: Tensor) -> Tensor:
    first, second = log_best.exp().unbind(dim=-1)
    return first - second


def _entropy(readout: LogitsReadout) -> Tensor:
    """H = log Z − Σ p z of softmax(z), in nats."""
    log_p = readout.log_probs
    # 0·log 0: a masked logit (-inf) contributes 0. NaN must stay NaN, since an entropy of 0 would make every rule fire.
    # A bound on the logarithm does both, in a third of the time of a masked fill
    return -(exp_log_probabilities(log_p) * log_p.clamp_min(NEVER_LOG_P)).sum(dim=-1)


def _response(readout: LogitsReadout) -> Tensor:
    """Top-1 minus top-2 probability (CALM, "softmax response")."""
    return _difference(readout.top2_log_probs_and_tokens[0])


def _gap(readout: LogitsReadout) -> Tensor:
    """Top-1 minus top-2 logit, which still differs between certain tokens where probabilities round to 1."""
    first, second = readout.top2_logits_and_tokens[0].unbind(dim=-1)
    return first - second


def _lens_log_p(logits: Floats) -> Floats:
    z = logits - logits.max(axis=-1, keepdims=True)
    log_p: Floats = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    return log_p


def _lens_entropy(logits: Floats) -> Floats:
    log_p = _lens_log_p(logits)
    entropy: Floats = -(np.exp(log_p) * log_p).sum(axis=-1)
    return entropy


def _lens_entropy_slope(logits: Floats) -> Floats:
    """Σ p·|log p + H|, the sum of |∂H/∂z| over the vocabulary: 3 where half of p is one token's, half 500 others'."""
    log_p = _lens_log_p(logits)
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(axis=-1, keepdims=True)
    slope: Floats = (p * np.abs(log_p + entropy)).sum(axis=-1)
    return slope


def _lens_top2(values: Floats) -> Floats:
    """Largest minus second largest of ``values`` [..., V], [...]."""
    best = np.partition(values, -2, axis=-1)
    gap: Floats = best[..., -1] - best[..., -2]
    return gap


def _lens_response(logits: Floats) -> Floats:
    return _lens_top2(np.exp(_lens_log_p(logits)))


ENTROPY = Signal(
    "entropy_nats",
    "entropy",
    "falls",
    "nats",
    LAYER_LOGITS,
    from_logits=_entropy,
    from_lens=_lens_entropy,
    slope=_lens_entropy_slope,
    estimated=True,
    sweeps=("criterion", "screening"),
    thresholds=ThresholdRange(0.0, math.log, "fixed h0", "H"),
)
RESPONSE = Signal(
    "softmax_response",
    "softmax response",
    "rises",
    "of probability",
    LAYER_LOGITS,
    from_logits=_response,
    from_lens=_lens_response,
    prunable=True,
    early_exit=True,
    sweeps=("criterion", "screening"),
    thresholds=ThresholdRange(1.0, lambda vocabulary: 0.0, "response λ", "doubt"),
)
GAP = Signal(
    "top2_gap",
    "top-2 gap",
    "rises",
    "of logits",
    LAYER_LOGITS,
    from_logits=_gap,
    from_lens=_lens_top2,
    noise=2.0,
    sweeps=("front",),
)
DIVERGENCE = Signal(
    "divergence",
    "gate",
    "falls",
    "√nats",
    LEARNED,
    cost=None,
    estimated=True,
    sweeps=("criterion", "screening"),
    # no divergence of a softmax over float32 comes near 64 √nats
    thresholds=ThresholdRange(0.0, lambda vocabulary: 64.0, "gate", "gate"),
)
SATURATION = Signal(
    "saturation", "saturation", "rises", "of cosine", STATE_BELOW, cost=None, early_exit=True, sweeps=("criterion",)
)
# a contrast is a difference of two log-probabilities, each with the errors of a logit and its normaliser
SIGNALS: dict[str, Signal] = {
    signal.name: signal
    for signal in (
        ENTROPY,
        RESPONSE,
        GAP,
        DIVERGENCE,
        Signal("agreement", "agreement", "rises", "of probability", PREVIOUS_PROBE, sweeps=("criterion",)),
        SATURATION,
        Signal(
            "weighted_contrast",
            "weighted contrast",
            "rises",
            "of probability",
            HALF_DEPTH,
            noise=4.0,
            early_exit=True,
        ),
        Signal(
            "jsd_contrast",
            "JSD contrast",
            "rises",
            "of probability",
            SINCE_MINIMUM,
            noise=4.0,
            prunable=True,
            early_exit=True,
        ),
    )
}
LAYERWISE: dict[str, Signal] = {name: signal for name, signal in SIGNALS.items() if signal.is_single_layer}


def signals_in_sweep(sweep: Sweep) -> list[Signal]:
    """The signals that take part in ``sweep``, in the order of the table."""
    return [signal for signal in SIGNALS.values() if sweep in signal.sweeps]


def required_layers(signal: str, minimum: int, ceiling: int) -> tuple[int, ...]:
    """The layers whose states ``signal`` needs for decisions after layers ``minimum`` … ``ceiling`` − 1.

    Raises:
        BadArgument: a minimum without a layer to decide at, or without one below it to compare with.
    """
    needs = SIGNALS[signal].needs
    if not needs.least <= minimum < ceiling:
        remedy = "layer 0, the embedding, is compared with nothing" if needs.least > 1 else ""
        raise BadArgument("confidence.minimum", minimum, f"a layer in {needs.least}–{ceiling - 1} for {signal}", remedy)
    return tuple(sorted({*range(minimum, ceiling)} | needs.compared(minimum, ceiling)))


STEEPEST_NATS = 700.0  # slightly less than the largest number of nats with a finite exponential


def perplexity_from_nats(nats: float) -> float:
    """exp(``nats``) of a mean loss per token; finite values above 700 nats count as 700; inf stays inf."""
    return math.inf if nats == math.inf else math.exp(min(nats, STEEPEST_NATS))


def perplexity_rise_from_nats(nats: float) -> float:
    """exp(``nats``) − 1 of a rise per token; finite values above 700 nats count as 700; inf stays inf.

    >>> perplexity_rise_from_nats(0.0), perplexity_rise_from_nats(math.inf)
    (0.0, inf)
    >>> perplexity_rise_from_nats(800.0) == perplexity_rise_from_nats(900.0)
    True
    """
    return math.inf if nats == math.inf else math.expm1(min(nats, STEEPEST_NATS))
