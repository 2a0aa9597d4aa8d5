"""What every layer says of the reference answers, read under teacher forcing: nothing is decoded.

Ranks of the token that the last layer prefers, softmax response, and both contrasts with and without a decaying α.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from emad_ref.calibration.trace import lens_logits
from emad_ref.evidence.exits.tasks import Items
from emad_ref.evidence.subject import Subject
from emad_ref.point import Confidence
from emad_ref.protocol import Prompt
from emad_ref.readout.contrast import score_of
from emad_ref.record import Bools, Floats, Ints
from emad_ref.signals import SIGNALS
from emad_ref.sweep.exits import final_token_ranks
from emad_ref.verdict.units import ByItem

CONTRASTS = ("weighted_contrast", "jsd_contrast")
ALPHAS: dict[str, float | None] = {"α = 0.1": None, "α′": 1.0}  # decay rate of α′, which the paper does not give
READ_TOKENS = 32  # contrasted at once: the readouts of T5-large's layers at so many positions are 0.2 GB

Contrast = tuple[Floats, Bools]  # confidence, and whether what would be emitted is right: [tokens, layers that decide]


@dataclass(frozen=True, eq=False)
class Read:
    """What every layer says of the reference answers; ``item`` int64 [tokens], which item each token belongs to.

    ``cluster`` int64 [items]: items about the same text have the same number.

    ``ranks``, ``response``, ``correct`` [tokens, L]: of the last layer's best token, top-1 minus top-2, top-1 right.
    ``contrasts``: (signal, α) → confidence and correctness of what it would emit, [tokens, layers that can decide].
    """

    item: Ints
    cluster: Ints
    ranks: Ints
    response: Floats
    correct: Bools
    contrasts: dict[tuple[str, str], Contrast]

    def by_item(self, values: NDArray[np.floating]) -> ByItem:
        """Sums of ``values`` [tokens, …] within each item, the unit that intervals resample."""
        _, first = np.unique(self.item, return_index=True)
        return ByItem(np.add.reduceat(values, first, axis=0), self.cluster)

    @property
    def tokens(self) -> ByItem:
        """How many tokens each item's reference has."""
        return self.by_item(np.ones(len(self.item)))


def read(subject: Subject, prompts: Sequence[Prompt], items: Items, minimum: int) -> Read:
    """Feed every item's reference after its source, and read each layer.

    Args:
        prompts: of the items, in their order.
        minimum: layer from which contrasts may decide.
    """
    each = enumerate(zip(prompts, items.targets, items.cluster, strict=True))
    return _joined([_read_item(subject, number, *item, minimum) for number, item in each])


def _read_item(subject: Subject, number: int, prompt: Prompt, target: Ints, cluster: int, minimum: int) -> Read:
    fed = np.concatenate([prompt.tokens, target[:-1]])
    logits = lens_logits(subject.stepper, fed, source=prompt.source)  # [n, L, V]
    return Read(
        np.full(len(target), number),
        np.array([cluster]),
        final_token_ranks(logits),
        np.stack([_response(logits[:, layer]) for layer in range(logits.shape[1])], axis=1),
        logits.argmax(axis=-1) == target[:, None],
        {
            (signal, name): _contrast(signal, Confidence(minimum, alpha_decay=rate), logits, target, subject)
            for signal in CONTRASTS
            for name, rate in ALPHAS.items()
        },
    )


def _contrast(signal: str, parameters: Confidence, logits: Floats, target: Ints, subject: Subject) -> Contrast:
    """One contrast on logits [n, L, V], from the minimum layer on, ``READ_TOKENS`` at a time."""
    blocks = [slice(start, start + READ_TOKENS) for start in range(0, len(target), READ_TOKENS)]
    parts = [_contrast_block(signal, parameters, logits[block], target[block], subject) for block in blocks]
    return np.concatenate([sure for sure, _ in parts]), np.concatenate([right for _, right in parts])


def _contrast_block(signal: str, parameters: Confidence, logits: Floats, target: Ints, subject: Subject) -> Contrast:
    layers = logits.shape[1]
    tensors = torch.from_numpy(logits).to(subject.stepper.device)
    seen = {m: tensors[:, m - 1] for m in range(1, layers)}
    confidence, correct = [], []
    for layer in range(parameters.minimum + SIGNALS[signal].needs.delay, layers):
        shallower = {m: z for m, z in seen.items() if m < layer}
        found = score_of(signal)(parameters, layer, seen[layer], shallower)
        assert found.logits is not None, "contrasts emit what they compare"
        confidence.append(found.signal.cpu().numpy())
        correct.append(found.logits.argmax(dim=-1).cpu().numpy() == target)
    return np.stack(confidence, axis=1), np.stack(correct, axis=1)


def _response(logits: Floats) -> Floats:
    """[n] top-1 minus top-2 probability of ``logits`` [n, V]."""
    away = np.exp(logits - logits.max(axis=-1, keepdims=True))
    best = np.partition(away, -2, axis=-1)[:, -2:] / away.sum(axis=-1, keepdims=True)
    found: Floats = best[:, 1] - best[:, 0]
    return found


def _joined(parts: Sequence[Read]) -> Read:
    return Read(
        item=np.concatenate([part.item for part in parts]),
        cluster=np.concatenate([part.cluster for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        response=np.concatenate([part.response for part in parts]),
        correct=np.concatenate([part.correct for part in parts]),
        contrasts={
            key: (
                np.concatenate([part.contrasts[key][0] for part in parts]),
                np.concatenate([part.contrasts[key][1] for part in parts]),
            )
            for key in parts[0].contrasts
        },
    )
