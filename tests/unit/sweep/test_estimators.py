"""Entropy estimators against the full softmax, on numbers that can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from emad_ref.point import EntropyEstimator
from pytest_emad.sweep.diagnostics import compare_estimator, compare_estimators

TOP = EntropyEstimator("topk", k=8)
FULL = np.array([0.0, 1.0, 2.0, 3.0])


def test_a_shifted_estimate_keeps_the_ranking_and_shows_its_bias():
    row = compare_estimator(TOP, 4, FULL + 0.5, FULL, thresholds=(0.25, 1.25))
    assert row.spearman == pytest.approx(1)
    assert row.bias_nats == pytest.approx(0.5)
    assert row.rmse_nats == pytest.approx(0.5)
    assert row.changed == {0.25: 0.25, 1.25: 0.25}, "one of four tokens crosses each threshold"
    assert (row.tokens, row.corrected, row.recall) == (4, False, None)


def test_a_correction_mends_error_and_decisions_but_not_the_reported_bias():
    row = compare_estimator(TOP, 4, 2 * FULL + 1, FULL, line=(0.5, -0.5), thresholds=(1.5,))
    assert (row.bias_nats, row.rmse_nats, row.corrected) == (pytest.approx(2.5), pytest.approx(0), True)
    assert row.changed == {1.5: 0.0}


def test_ranking_is_spearmans():
    assert compare_estimator(TOP, 4, np.array([0.0, 9.0, 1.0, 10.0]), FULL).spearman == pytest.approx(0.8)
    assert compare_estimator(TOP, 4, FULL[::-1], FULL).spearman == pytest.approx(-1)


def test_a_line_that_turns_the_estimate_over_leaves_the_reported_ranking_alone():
    assert compare_estimator(TOP, 4, FULL, FULL, line=(-1.0, 0.0)).spearman == pytest.approx(1)


@pytest.mark.parametrize(("raw", "full"), [(np.ones(4), FULL), (FULL, np.ones(4))])
def test_what_never_varies_has_no_ranking(raw, full):
    row = compare_estimator(TOP, 4, raw, full)
    assert math.isnan(row.spearman)
    assert math.isfinite(row.rmse_nats)


def test_a_table_has_one_row_per_estimator_and_probe():
    full = np.stack([FULL, 2 * FULL], axis=1)
    corrected = EntropyEstimator("topk", k=8, correction=((1.0, -0.5), (1.0, -0.5)))
    linear = EntropyEstimator("linear", weights=((1.0,),) * 2)
    rows = compare_estimators(
        (4, 8),
        full,
        {corrected: full + 0.5, linear: full},
        thresholds=((0.5,), (1.0, 3.0)),
        recall={corrected: (0.9, 0.8)},
    )
    assert [(row.estimator.name, row.probe) for row in rows] == [
        ("topk-8", 4),
        ("topk-8", 8),
        ("linear", 4),
        ("linear", 8),
    ]
    assert [row.recall for row in rows] == [0.9, 0.8, None, None]
    assert [row.rmse_nats for row in rows] == pytest.approx([0] * 4)
    assert [list(row.changed) for row in rows] == [[0.5], [1.0, 3.0]] * 2
