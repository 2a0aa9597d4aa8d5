"""Entropies of a batch of text after some layers: what a calibration reads, and no more than that.

    window → one pass up to the last layer read → head after each of them → H_ℓ [tokens, read] → running statistics

A threshold needs the mean entropy at its probe alone: no head elsewhere, and no layer above the last probe. A lens
trace reads every layer, and five numbers more there, two sorts of the vocabulary among them, which nothing of a profile
is made of. What both read is the same to the last bit: a law holds the statistics of one to those of the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.calibration.running import Entropies, Statistics, counted, needs_first_probe, require_first_probe
from emad_ref.calibration.trace import TokenSequence, positions_of, states_after
from emad_ref.models.stepper import Stepper
from emad_ref.point import BinSpec
from emad_ref.readout.blocks import in_blocks
from emad_ref.readout.signals import entropy_nats, require_finite
from emad_ref.signals import Readout


def statistics_of_batch(
    stepper: Stepper, batch: Sequence[TokenSequence], spec: BinSpec, first_probe: int | None, layers: Sequence[int]
) -> Statistics:
    """Statistics of ``batch`` after ``layers`` in the bins of ``spec``, from one forward.

    ``first_probe`` as of ``statistics_of``, one of ``layers``.

    Raises:
        BadArgument: features without the probe that shows them; an entropy outside 0–16 nats.
        NotFinite: a layer's logits hold NaN.
    """
    require_first_probe(spec, first_probe)
    return counted(entropies_of(stepper, batch, first_probe if needs_first_probe(spec) else None, layers), spec)


@torch.inference_mode()
def entropies_of(
    stepper: Stepper, batch: Sequence[TokenSequence], shown_after: int | None, layers: Sequence[int]
) -> Entropies:
    """Entropies of ``batch`` after ``layers``, ascending, from one forward.

    ``shown_after``: the layer after which likeliest tokens are read too; None: after none, and −1 and NaN stand for
    them, which no bin accepts.

    Raises:
        NotFinite: a layer's logits hold NaN.
    """
    position = positions_of(batch)
    top1: NDArray[np.int32] = np.full(len(position), -1, dtype=np.int32)
    probability: NDArray[np.float32] = np.full(len(position), np.nan, dtype=np.float32)
    columns = []
    for layer, states in zip(layers, states_after(stepper, batch, layers), strict=True):
        logits = stepper.logits(states)
        entropy = fast_entropy_nats(logits)
        require_finite(entropy, f"after layer {layer}")
        columns.append(entropy.cpu().numpy())
        if layer == shown_after:
            top1 = in_blocks(logits, _top1).cpu().numpy()
            probability = in_blocks(logits, _top1_probability).cpu().numpy()
    return Entropies(np.stack(columns, axis=1), position, top1, probability, len(batch))


def fast_entropy_nats(logits: Tensor) -> Tensor:
    """``entropy_nats`` of ``logits`` [n, V] in float32, to the last bit, but faster where none is −inf.

    What 0·log 0 is has to be said only where a product came out as NaN; then all is read the usual way.
    """
    entropy = -in_blocks(logits, _expected_log_p)
    return entropy if math.isfinite(entropy.sum().item()) else in_blocks(logits, _entropy)


def _expected_log_p(logits: Tensor) -> Tensor:
    """Σ p log p."""
    log_p = logits.float().log_softmax(dim=-1)
    return log_p.exp().mul_(log_p).sum(dim=-1)


def _entropy(logits: Tensor) -> Tensor:
    return entropy_nats(logits.float())  # in float32 whatever the model's, as a trace has it


def _top1(logits: Tensor) -> Tensor:
    return Readout(logits.float()).top2[1][:, 0].int()


def _top1_probability(logits: Tensor) -> Tensor:
    return Readout(logits.float()).top2[0][:, 0].exp()
