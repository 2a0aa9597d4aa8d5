"""How a probe reads entropy: hidden state → Ĥ by the estimator of an operating point.

The decode loop and the lens trace call the same ``Reader``, so replay and decoding compare the same numbers. The
estimators themselves stand in ``full``, ``topk``, ``lowrank`` and ``linear``; here they get the model's final norm in
front and the linear correction to full entropy behind:

    Ĥ_ℓ = slope_ℓ·estimate(norm(h_ℓ)) + intercept_ℓ

Factors and indices are built once per stepper and kept as long as it lives. Knows no thresholds and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import Estimator
from emad_ref.readout.full import full_softmax
from emad_ref.readout.index import Exact, Faiss, Index, Ivf
from emad_ref.readout.linear import Linear, linear_probe
from emad_ref.readout.lowrank import LowRank, LowRankIndex, factors
from emad_ref.readout.topk import TopK

UNKNOWN_TOKEN = -1
SEARCHES: dict[str, Callable[[Tensor, Tensor | None, Estimator], Index]] = {
    "exact": lambda rows, bias, _: Exact(rows, bias),
    "ivf": lambda rows, bias, _: Ivf(rows, bias),
    "faiss": lambda rows, bias, _: Faiss(rows, bias),
    "lowrank": lambda rows, bias, asked: LowRankIndex(rows, factors(rows, asked.rank), bias),
}

Built = TypeVar("Built")


@dataclass(frozen=True, eq=False)
class Reading:
    """What one probe says about each row.

    ``entropy_nats``      [rows] the estimate, corrected where the estimator has a correction for the probe.
    ``top1``              int64 [rows] the predicted token as the estimator sees it; −1 where it sees none.
    ``top1_probability``  [rows], NaN where unknown.
    ``logits``            [rows, V] of the full readout, which is also the output distribution; None for the others.
    """

    entropy_nats: Tensor
    top1: Tensor
    top1_probability: Tensor
    logits: Tensor | None = None


class Reader(Protocol):
    """One estimator on one model, at the probes of one point."""

    @property
    def kind(self) -> str:
        """Row of ``record.READOUTS``."""

    @property
    def macs_per_row(self) -> int:
        """Multiply-adds executed per row, retrieval included; 0 for ``full``, which the geometry charges as a head."""

    def read(self, hidden: Tensor, probe: int) -> Reading:
        """Read states [rows, D] after the ``probe``-th probe (from 0)."""

    def entropy_nats(self, hidden: Tensor, probe: int) -> Tensor:
        """That of ``read`` alone [rows], which is all that a decision takes."""

    def raw(self, hidden: Tensor) -> Reading:
        """Read states [rows, D] after any layer, without correction.

        Raises:
            BadArgument: a linear estimator, whose weights belong to a probe.
        """


@dataclass(frozen=True, eq=False)
class FullReader:
    """All logits; needs no correction."""

    stepper: Stepper
    kind: str = "full"
    macs_per_row: int = 0

    def read(self, hidden: Tensor, probe: int) -> Reading:
        return self.raw(hidden)

    def entropy_nats(self, hidden: Tensor, probe: int) -> Tensor:
        return self.read(hidden, probe).entropy_nats

    def raw(self, hidden: Tensor) -> Reading:
        logits = self.stepper.logits(hidden)
        return Reading(*full_softmax(logits), logits)


@dataclass(frozen=True, eq=False)
class LogitReader:
    """Some logits, or approximate ones: top-K and low-rank."""

    stepper: Stepper
    kind: str
    estimate: TopK | LowRank
    macs_per_row: int
    correction: tuple[tuple[float, float], ...]

    def read(self, hidden: Tensor, probe: int) -> Reading:
        raw = self.raw(hidden)
        return replace(raw, entropy_nats=corrected(raw.entropy_nats, self.correction, probe))

    def entropy_nats(self, hidden: Tensor, probe: int) -> Tensor:
        return self.read(hidden, probe).entropy_nats

    def raw(self, hidden: Tensor) -> Reading:
        return Reading(*self.estimate(self.stepper.normed(hidden)))


@dataclass(frozen=True, eq=False)
class LinearReader:
    """No logits at all."""

    stepper: Stepper
    estimate: Linear
    macs_per_row: int
    correction: tuple[tuple[float, float], ...]
    kind: str = "linear"

    def read(self, hidden: Tensor, probe: int) -> Reading:
        entropy = self.entropy_nats(hidden, probe)
        token = torch.full(entropy.shape, UNKNOWN_TOKEN, device=entropy.device)
        return Reading(entropy, token, torch.full_like(entropy, torch.nan))

    def entropy_nats(self, hidden: Tensor, probe: int) -> Tensor:
        return corrected(self.estimate(self.stepper.normed(hidden), probe), self.correction, probe)

    def raw(self, hidden: Tensor) -> Reading:
        raise BadArgument("estimator.kind", "linear", "an estimator that reads any layer", "read it at its probes")


def corrected(entropy: Tensor, correction: Sequence[tuple[float, float]], probe: int) -> Tensor:
    """``entropy`` with the line of ``probe`` applied; itself where there is none."""
    if not correction:
        return entropy
    slope, intercept = correction[probe]
    return slope * entropy + intercept


def reader_of(stepper: Stepper, estimator: Estimator, probes: Sequence[int]) -> Reader:
    """The reader of ``estimator`` on this model; ``probes``: the layers its corrections and weights belong to.

    Raises:
        BadArgument: k or rank beyond the model's sizes, corrections or weights for other probes or another width.
        FaissMissing: ``search="faiss"`` without the extra.
    """
    if estimator.correction and (estimator.kind == "full" or len(estimator.correction) != len(probes)):
        expected = "none for the full softmax" if estimator.kind == "full" else f"one per probe ({len(probes)})"
        raise BadArgument("estimator.correction", estimator.correction, expected)
    return READERS[estimator.kind](stepper, estimator, len(probes))


def _full(stepper: Stepper, estimator: Estimator, probes: int) -> Reader:
    return FullReader(stepper)


def _topk(stepper: Stepper, estimator: Estimator, probes: int) -> Reader:
    search = SEARCHES[estimator.search]
    key = ("index", estimator.search, estimator.rank)
    index = _kept(stepper, key, lambda rows: search(rows, _bias(stepper), estimator))
    estimate = TopK(index.wide_enough(estimator.k), estimator.k, len(stepper.unembedding), stepper.softcap)
    return LogitReader(stepper, "topk", estimate, _charged(stepper, estimate.macs_per_row), estimator.correction)


def _lowrank(stepper: Stepper, estimator: Estimator, probes: int) -> Reader:
    parts = _kept(stepper, ("factors", estimator.rank), lambda rows: factors(rows, estimator.rank))
    estimate = LowRank(parts, estimator.k, _bias(stepper), stepper.softcap)
    return LogitReader(stepper, "lowrank", estimate, _charged(stepper, estimate.macs_per_row), estimator.correction)


def _linear(stepper: Stepper, estimator: Estimator, probes: int) -> Reader:
    estimate = linear_probe(estimator.weights, probes, stepper.unembedding)
    return LinearReader(stepper, estimate, _charged(stepper, estimate.macs_per_row), estimator.correction)


READERS: dict[str, Callable[[Stepper, Estimator, int], Reader]] = {
    "full": _full,
    "topk": _topk,
    "lowrank": _lowrank,
    "linear": _linear,
}

_KEPT: WeakKeyDictionary[Stepper, dict[Hashable, Any]] = WeakKeyDictionary()


def _kept(stepper: Stepper, key: Hashable, build: Callable[[Tensor], Built]) -> Built:
    """What ``build`` makes of the unembedding, made once per stepper: weights are taken to stay as they are."""
    held = _KEPT.setdefault(stepper, {})
    if key not in held:
        # as in the stepper's tables: tensors made in inference mode could not be used outside it
        with torch.inference_mode(False), torch.no_grad():
            held[key] = build(stepper.unembedding.detach())
    built: Built = held[key]
    return built


def _bias(stepper: Stepper) -> Tensor | None:
    return None if stepper.unembedding_bias is None else stepper.unembedding_bias.detach()


def _charged(stepper: Stepper, macs: int) -> int:
    """``macs`` and the projection in front of the head, which a family with D ≠ E runs at every readout (OPT-350m)."""
    hidden, width = stepper.geometry.hidden, stepper.geometry.embedding_width
    return macs + (hidden * width if hidden != width else 0)
