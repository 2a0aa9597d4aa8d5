"""What a family saves at a given loss, with an interval: ``dominance`` the other way round, which fixes the saving.

    saving(δ)   the most that a mixture of neighbouring corners of the family's front saves while it loses at most
                δ nats per token more than full depth

The front (``sweep.front``) is chosen on one split and judged on another; a ceiling, which promises nothing, is chosen
and judged on one. Where the front crosses δ is found on the text that is judged: savings of several families are then
told at exactly the same loss, as tables rank them. Whether a point that was chosen keeps a promise is another question.

Bootstrapped over documents of both splits, fronts and crossings anew in each sample. Samples are smaller than the text
(``bootstrap.document_draws``), their spread is scaled down accordingly. There is no standard error to studentise by: a
crossing is not linear in documents.
"""

from __future__ import annotations

import math

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Bools, Floats
from emad_ref.sweep.front import Sheet, lower_hulls
from emad_ref.verdict.bootstrap import document_draws
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.units import ByDocument

RESAMPLES = 1_999
AT_ONCE = 250  # samples that are worked on together
TAIL = 0.025


def saving_at_loss(
    judged: Sheet,
    nats_per_token: float,
    *,
    chosen: Sheet | None = None,
    threshold: float,
    rng: np.random.Generator,
    resamples: int = RESAMPLES,
) -> Estimate:
    """The saving at ``nats_per_token``, a share of what full depth spends, against ``threshold``.

    ``chosen``: the same points on the split that their front is chosen on; None: on the split that is judged.

    Raises:
        BadArgument: a loss that is no number ≥ 0; other points on either split.
    """
    if not 0 <= nats_per_token < math.inf:
        raise BadArgument("nats_per_token", nats_per_token, "a finite number ≥ 0")
    before = judged if chosen is None else chosen
    if before.loss.shape[1] != judged.loss.shape[1]:
        raise BadArgument("chosen", before.loss.shape[1], f"{judged.loss.shape[1]} points, those that are judged")
    documents = len(judged.tokens)
    once = np.ones((1, len(before.tokens))), np.ones((1, documents))
    (value,) = _crossings(before, judged, *once, nats_per_token)
    noun, unit = ByDocument.noun, "share saved"
    if documents == 1:
        return Estimate(value, -math.inf, math.inf, 1, 1.0, 1.0, unit, "one document has no spread", noun)
    parts = []
    for size in [AT_ONCE] * (resamples // AT_ONCE) + [resamples % AT_ONCE]:
        judged_counts = document_draws(documents, size, rng)
        before_counts = judged_counts if chosen is None else document_draws(len(before.tokens), size, rng)
        parts.append(_crossings(before, judged, before_counts, judged_counts, nats_per_token))
    scale = math.sqrt(judged_counts[0].sum() / documents) if len(judged_counts) else 1.0
    drawn = value + scale * (np.concatenate(parts) - value)
    low, high = np.quantile(drawn, (TAIL, 1 - TAIL))
    above, below = (1 + np.count_nonzero(drawn <= threshold)), (1 + np.count_nonzero(drawn >= threshold))
    method = f"bootstrap, {resamples:,} samples of {noun}, of front and crossing"
    each = resamples + 1
    return Estimate(
        float(value), float(low), float(high), documents, float(above / each), float(below / each), unit, method, noun
    )


def _crossings(before: Sheet, judged: Sheet, before_counts: Floats, judged_counts: Floats, most: float) -> Floats:
    """[draws] savings at ``most``, of samples with these counts [draws, documents]."""
    return savings_within(lower_hulls(*before.drawn(before_counts)), *judged.drawn(judged_counts), most)


def savings_within(corners: Bools, savings: Floats, losses: Floats, most: float) -> Floats:
    """[draws] the most that lies on the lines between neighbouring ``corners`` at ``most`` nats above full depth.

    All [draws, points]; the first point is full depth, a corner, and saves nothing.
    """
    order = np.argsort(np.where(corners, savings, np.inf), axis=1, kind="stable")
    corner = np.take_along_axis(corners, order, axis=1)
    saved, lost = (np.take_along_axis(column, order, axis=1) for column in (savings, losses - losses[:, :1]))
    best: Floats = np.zeros(len(saved))
    for at in range(saved.shape[1]):
        within = corner[:, at] & (lost[:, at] <= most)
        best = np.where(within, np.maximum(best, saved[:, at]), best)
        if at + 1 < saved.shape[1]:
            apart = lost[:, at + 1] - lost[:, at]
            leaving = within & corner[:, at + 1] & (lost[:, at + 1] > most)
            share = np.where(leaving, (most - lost[:, at]) / np.where(apart > 0, apart, 1.0), 0.0)
            best = np.maximum(best, np.where(leaving, saved[:, at] + share * (saved[:, at + 1] - saved[:, at]), 0.0))
    return best
