"""Entropy estimator: what do cheaper readings of entropy save, and what do they lose? (EMAD, "Ablations")"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from emad_ref.point import Estimator
from pytest_emad.ablated import UNTIMED, Estimated, Table, margins, not_applicable, speeds, usable

KS, RANKS, LOW_RANK_K = (32, 64, 128), (16, 32, 64), 64
TIMED = ("full", "topk-64", "lowrank-32 top-64", "linear")  # at m = 0: what the others take follows from their FLOPs
ROUNDING_NATS = 1e-3  # of a float32 estimate whose linear map is undone, with slopes down to a hundredth


@pytest.mark.emad(budget="standard", measures=True)
def test_entropy_estimator(emad_evidence, emad_record, emad_rng):
    """The thresholds are the profile's for all; an estimate meets them after its linear map to full entropy."""
    evidence = emad_evidence
    if reason := not_applicable(evidence):
        pytest.skip(reason)
    topk, lowrank = (Estimator("topk", k=k) for k in KS), (Estimator("lowrank", k=LOW_RANK_K, rank=r) for r in RANKS)
    estimated = Estimated(evidence, [*usable(evidence, [*topk, *lowrank]), evidence.estimates.linear])
    tried = margins(evidence)
    fits = {estimator.name: estimated.fit(estimator, tried) for estimator in estimated.fitted}
    tried_points = {
        (estimator.name, margin): replace(evidence.profile.point(margin), estimator=estimator)
        for estimator in (Estimator(), *estimated.fitted)
        for margin in tried
    }
    times = speeds(evidence, {name: tried_points[name, 0.0] for name in TIMED if (name, 0.0) in tried_points})
    table, rows = Table(evidence, emad_rng), []
    for (name, margin), point in tried_points.items():
        agreement = agreed(fits.get(name), margin)
        cost = {"probe FLOPs per token": estimated.probe_flops(point)}
        (row,) = table.rows([point], estimated.trace, estimator=name, **agreement, **cost)
        rows.append(row | (times.get(name, UNTIMED) if margin == 0 else UNTIMED))
    emad_record.table(f"ablation, entropy estimator on {evidence.corpus}: worst probe", evidence.name, rows)

    assert all(row["net reduction %"] <= row["gross reduction %"] for row in rows)
    assert all(row["probe FLOPs per token"] >= 0 for row in rows)
    bounds = [fits[f"topk-{k}"].bias_nats for k in KS if f"topk-{k}" in fits]
    for fewer, more in pairwise(bounds):
        assert all(a >= b - ROUNDING_NATS for a, b in zip(fewer, more, strict=True)), "Ĥ rises with K"
    assert all(bias >= -ROUNDING_NATS for biases in bounds for bias in biases), "top-K is no upper bound"
    assert all(fits[name].recall == 1 for name in fits if name.startswith("topk")), "exact search missed a row"
    linear = next(row for row in rows if row["estimator"] == "linear")
    dear = next(row for row in rows if row["estimator"].startswith("topk"))
    assert linear["probe FLOPs per token"] < dear["probe FLOPs per token"]


def agreed(fit, margin):
    """Leading columns; the full softmax is its own reference."""
    if fit is None:
        return {"ρ": 1.0, "RMSE, nats": 0.0, "recall@K": None, "decisions changed %": 0.0}
    return {
        "ρ": fit.spearman,
        "RMSE, nats": fit.rmse_nats,
        "recall@K": fit.recall,
        "decisions changed %": fit.changed[margin],
    }
