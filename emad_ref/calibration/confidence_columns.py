"""Columns of confidence rules for a lens trace, from the rules' own probes.

A confidence rule compares a signal of several layers, or of a pruned vocabulary, and emits from its own distribution.
So a trace records after each layer the signal, the loss and the argmax of the rule's emission, and the multiply-adds of
its pruned readout. They come from the rule's own probe, run at all its layers with no token stopping.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import ConfidenceParameters, OperatingPoint
from emad_ref.probes.probe import Probe, make_confidence_probe
from emad_ref.probes.pruned_vocabulary import CachedFullLogitHeads
from emad_ref.record import READOUTS, Bools, Ints, Work
from emad_ref.signals import log_probabilities

LOGITS_AT_A_TIME = 2**19  # logits that a rule holds at a time, over all layers; 2 MB of float32 fit the core's cache
FEWEST_TOKENS = 32  # least tokens read at a time; 0.1 GB for a rule of 17 layers and 50,304 tokens


@dataclass(frozen=True)
class ConfidenceColumnsKey:
    """Key of a rule's columns: its signal, its parameters (pruning included) and its layers."""

    signal: str
    confidence: ConfidenceParameters
    probes: tuple[int, ...]

    @staticmethod
    def from_point(point: OperatingPoint) -> ConfidenceColumnsKey:
        """The rule of a point, regardless of thresholds and schedule.

        Raises:
            BadArgument: a point without a confidence, whose signal every trace holds.
        """
        if point.confidence is None:
            raise BadArgument("point.confidence", None, "a confidence", f"any trace decides {point.name}")
        return ConfidenceColumnsKey(point.signal, point.confidence, point.probes)


@dataclass(frozen=True, eq=False)
class ConfidenceColumns:
    """``signal``, ``nll_nats`` float32, ``top1`` int32, ``macs`` int64, each [tokens, L]; see the module's docstring.

    At layers that are no probes of the rule, ``nll_nats`` and ``top1`` are those of a full head.
    ``heads`` bool [kinds of ``READOUTS``, L]: which readout a probe runs after each layer, before any token stops.
    ``shows`` bool [L]: whether a token that stops there emits from that readout; else a full head follows.
    """

    signal: NDArray[np.float32]
    nll_nats: NDArray[np.float32]
    top1: NDArray[np.int32]
    macs: Ints
    heads: Bools
    shows: Bools

    @staticmethod
    def empty(nll_nats: NDArray[np.float32], top1: NDArray[np.int32]) -> ConfidenceColumns:
        """Columns of a rule before any reading, to be filled: it emits from full heads."""
        tokens, layers = nll_nats.shape
        return ConfidenceColumns(
            np.full((tokens, layers), np.nan, dtype=np.float32),
            nll_nats.copy(),
            top1.copy(),
            np.zeros((tokens, layers), dtype=np.int64),
            np.zeros((len(READOUTS), layers), dtype=np.bool_),
            np.zeros(layers, dtype=np.bool_),
        )

    def select_tokens(self, tokens: Ints) -> ConfidenceColumns:
        """The columns of these tokens, in this order."""
        return replace(self, **{name: getattr(self, name)[tokens] for name in TOKENWISE})

    @staticmethod
    def concatenate(parts: Sequence[ConfidenceColumns]) -> ConfidenceColumns:
        """One rule's columns over the tokens of all parts, in order."""
        rows = {name: np.concatenate([getattr(part, name) for part in parts]) for name in TOKENWISE}
        return ConfidenceColumns(**rows, heads=parts[0].heads, shows=parts[0].shows)


TOKENWISE = ("signal", "nll_nats", "top1", "macs")


def layers_read_by_rules(rules: Iterable[ConfidenceColumnsKey]) -> frozenset[int]:
    """Layers after which any of the rules reads."""
    return frozenset(layer for rule in rules for layer in rule.probes)


@torch.inference_mode()
def compute_columns_by_confidence_rule(
    stepper: Stepper,
    rules: Mapping[ConfidenceColumnsKey, OperatingPoint],
    states: Mapping[int, Tensor],
    target: Tensor,
    nll_nats: NDArray[np.float32],
    top1: NDArray[np.int32],
) -> dict[ConfidenceColumnsKey, ConfidenceColumns]:
    """The columns of every rule.

    Args:
        rules: rule → any point of it.
        states: layer → states [tokens, D] after it, for every layer that a rule reads.
        target: int64 [tokens] next tokens.
        nll_nats, top1: [tokens, L] of full heads, for emissions at layers where a rule's probe shows none.

    Raises:
        NotFinite: a layer's signals are no numbers.
    """
    heads = CachedFullLogitHeads(stepper)
    rule_probes = {rule: make_confidence_probe(stepper, point, heads) for rule, point in rules.items()}
    columns = {rule: ConfidenceColumns.empty(nll_nats, top1) for rule in rules}
    step = max(FEWEST_TOKENS, LOGITS_AT_A_TIME // (stepper.vocabulary_size * max(1, len(states))))
    for rows in (slice(start, start + step) for start in range(0, len(target), step)):
        for rule_probe in rule_probes.values():
            rule_probe.begin_step()
        for layer in sorted(states):
            hidden = states[layer][rows]  # one tensor for all rules, which share their heads
            for rule, rule_probe in rule_probes.items():
                if layer in rule.probes:
                    _write_columns(columns[rule], rule_probe, hidden, rule.probes.index(layer), layer, rows, target)
    return columns


def _write_columns(
    columns: ConfidenceColumns, rule_probe: Probe, hidden: Tensor, column: int, layer: int, rows: slice, target: Tensor
) -> None:
    """Write the probe's readings of ``hidden`` into the columns."""
    at, work = layer - 1, Work.none(columns.signal.shape[1])
    reading = rule_probe.read(hidden, column, work)
    columns.signal[rows, at] = reading.signal.float().cpu().numpy()
    columns.heads[:, at] = work.readout_rows[:, at] > 0
    if reading.macs is not None:
        columns.macs[rows, at] = reading.macs
    if reading.logits is not None:
        columns.shows[at] = True
        log_p = log_probabilities(reading.logits)
        columns.nll_nats[rows, at] = -log_p.gather(-1, target[rows, None])[:, 0].float().cpu().numpy()
        columns.top1[rows, at] = reading.logits.argmax(dim=-1).cpu().numpy()
