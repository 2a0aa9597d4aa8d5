"""Confidence rules on a lens trace: what a rule sees, would emit and has to run after every layer, for every token.

A rule looks at the states of one token after layers ≤ ℓ, and under an exact schedule these are the full model's
wherever a token gets to. So the rule's own watch, led up all its layers with no token stopping, shows what decoding
will show it:

    signal     c_ℓ                                          NaN where the rule decides nothing
    nll_nats   −log p(next token) of what it would emit     inf where a pruned vocabulary has lost that token
    top1       its argmax
    macs       multiply-adds of that row's pruned readout

Which layers it reads by which kind of head is taken from the watch's own ledger, the one that decoding charges. No
threshold is known here: all points of one rule share its columns. State copying changes states; it has no columns.
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
from emad_ref.point import Confidence, OperatingPoint
from emad_ref.readout.confidence import confidence_watch
from emad_ref.readout.subset import SharedHeads
from emad_ref.readout.watch import Watch
from emad_ref.record import READOUTS, Bools, Ints, Work
from emad_ref.signals import raised

ENTRIES = 2**19  # logits that a rule remembers at a time, over all layers: 2 MB of float32 stay near the core
FEWEST = 32  # tokens read at a time whatever they take: 0.1 GB for a rule of 17 layers and 50,304 tokens


@dataclass(frozen=True)
class Rule:
    """What determines a rule's columns: its signal, its parameters (pruning included) and the layers it reads."""

    signal: str
    confidence: Confidence
    probes: tuple[int, ...]

    @staticmethod
    def of(point: OperatingPoint) -> Rule:
        """The rule of a point, whatever its thresholds and its schedule.

        Raises:
            BadArgument: a point without a confidence, whose signal every trace holds.
        """
        if point.confidence is None:
            raise BadArgument("point.confidence", None, "a confidence", f"any trace decides {point.name}")
        return Rule(point.signal, point.confidence, point.probes)


@dataclass(frozen=True, eq=False)
class RuleColumns:
    """``signal``, ``nll_nats`` float32, ``top1`` int32, ``macs`` int64, each [tokens, L]; see the module's docstring.

    At layers that are no probes of the rule, ``nll_nats`` and ``top1`` are those of a full head.
    ``heads`` bool [kinds of ``READOUTS``, L]: which readout a probe runs after each layer, before any token stops.
    ``shows`` bool [L]: whether that readout is what a token that stops there emits from; else a full head follows.
    """

    signal: NDArray[np.float32]
    nll_nats: NDArray[np.float32]
    top1: NDArray[np.int32]
    macs: Ints
    heads: Bools
    shows: Bools

    @staticmethod
    def unread(nll_nats: NDArray[np.float32], top1: NDArray[np.int32]) -> RuleColumns:
        """Columns of a rule before it has read anything, to be written: it emits from full heads."""
        tokens, layers = nll_nats.shape
        return RuleColumns(
            np.full((tokens, layers), np.nan, dtype=np.float32),
            nll_nats.copy(),
            top1.copy(),
            np.zeros((tokens, layers), dtype=np.int64),
            np.zeros((len(READOUTS), layers), dtype=np.bool_),
            np.zeros(layers, dtype=np.bool_),
        )

    def of_tokens(self, tokens: Ints) -> RuleColumns:
        """The columns of these tokens, in this order."""
        return replace(self, **{name: getattr(self, name)[tokens] for name in TOKENWISE})

    @staticmethod
    def joined(parts: Sequence[RuleColumns]) -> RuleColumns:
        """One rule's columns over the tokens of all parts, in order."""
        rows = {name: np.concatenate([getattr(part, name) for part in parts]) for name in TOKENWISE}
        return RuleColumns(**rows, heads=parts[0].heads, shows=parts[0].shows)


TOKENWISE = ("signal", "nll_nats", "top1", "macs")


def layers_of(rules: Iterable[Rule]) -> frozenset[int]:
    """Layers after which any of the rules reads."""
    return frozenset(layer for rule in rules for layer in rule.probes)


@torch.inference_mode()
def rule_columns(
    stepper: Stepper,
    rules: Mapping[Rule, OperatingPoint],
    states: Mapping[int, Tensor],
    target: Tensor,
    nll_nats: NDArray[np.float32],
    top1: NDArray[np.int32],
) -> dict[Rule, RuleColumns]:
    """The columns of every rule.

    Args:
        rules: rule → any point of it.
        states: layer → states [tokens, D] after it, for every layer that a rule reads.
        target: int64 [tokens] next tokens.
        nll_nats, top1: [tokens, L] of full heads, for what a rule emits where its watch shows nothing.

    Raises:
        NotFinite: a layer's signals are no numbers.
    """
    heads = SharedHeads(stepper)
    watches = {rule: confidence_watch(stepper, point, heads) for rule, point in rules.items()}
    found = {rule: RuleColumns.unread(nll_nats, top1) for rule in rules}
    step = max(FEWEST, ENTRIES // (stepper.vocabulary * max(1, len(states))))
    for rows in (slice(start, start + step) for start in range(0, len(target), step)):
        for watch in watches.values():
            watch.begin()
        for layer in sorted(states):
            hidden = states[layer][rows]  # one tensor for all rules: their heads are shared
            for rule, watch in watches.items():
                if layer in rule.probes:
                    _write(found[rule], watch, hidden, rule.probes.index(layer), layer, rows, target)
    return found


def _write(
    columns: RuleColumns, watch: Watch, hidden: Tensor, probe: int, layer: int, rows: slice, target: Tensor
) -> None:
    """What ``watch`` sees in ``hidden``, into its columns."""
    at, work = layer - 1, Work.none(columns.signal.shape[1])
    seen = watch.see(hidden, probe, work)
    columns.signal[rows, at] = seen.signal.float().cpu().numpy()
    columns.heads[:, at] = work.readout_rows[:, at] > 0
    if seen.macs is not None:
        columns.macs[rows, at] = seen.macs
    if seen.logits is not None:
        columns.shows[at] = True
        log_p = torch.log_softmax(raised(seen.logits), dim=-1)
        columns.nll_nats[rows, at] = -log_p.gather(-1, target[rows, None])[:, 0].float().cpu().numpy()
        columns.top1[rows, at] = seen.logits.argmax(dim=-1).cpu().numpy()
