"""The audit checks the lens' answer before it uses it; its entropies are SciPy's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import special, stats

from emad_ref.errors import BadArgument
from emad_ref.exit_rules import early_exit_point
from emad_ref.point import EntropyEstimator, OperatingPoint, ThresholdBinSpec
from emad_ref.signals import LAYERWISE
from pytest_emad.audit.reference_logits import LogitLens, candidate_bins, compute_reference
from tests.decoders.audited_model import entropy_nats

TOKENS = np.arange(3)
POINT = OperatingPoint("p", "emad", 4, 4, (1, 3), ((0.5, 0.5),))


def test_entropy_is_that_of_the_softmax() -> None:
    logits = np.random.default_rng(0).normal(0, 20, (5, 7))
    np.testing.assert_allclose(
        entropy_nats(logits), stats.entropy(special.softmax(logits, axis=-1), axis=-1), atol=1e-12
    )


def test_entropy_of_even_logits_is_log_v_even_when_they_are_huge() -> None:
    assert entropy_nats(np.full(9, 1e5)) == pytest.approx(np.log(9))


@pytest.mark.parametrize("name", LAYERWISE)
def test_signals_are_taken_after_the_probes_layers(name: str) -> None:
    logits, from_lens = np.random.default_rng(0).normal(size=(3, 4, 6)), LAYERWISE[name].from_lens
    assert from_lens is not None
    reference = compute_reference(LogitLens(lambda tokens: logits), TOKENS, replace(POINT, signal=name), first=1)
    np.testing.assert_array_equal(reference.signal, from_lens(logits[1:, [0, 2]]))
    np.testing.assert_array_equal(reference.emitted, logits[1:])


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (np.zeros((3, 5, 6)), "shape"),
        (np.zeros((2, 4, 6)), "shape"),
        (np.zeros((3, 4, 6), dtype=np.float32), "float64"),
        (np.full((3, 4, 6), np.nan), "finite"),
    ],
)
def test_an_unusable_answer_is_refused(answer: np.ndarray, what: str) -> None:
    with pytest.raises(BadArgument, match=what):
        compute_reference(LogitLens(lambda tokens: answer), TOKENS, POINT)


@pytest.mark.parametrize(
    "point",
    [replace(POINT, estimator=EntropyEstimator("topk", k=2)), early_exit_point("saturation", 4, 6, 2)],
    ids=lambda point: point.signal,
)
def test_what_logits_do_not_decide_needs_a_lens_that_leads_the_rule(point: OperatingPoint) -> None:
    with pytest.raises(BadArgument, match="give a lens that can lead the rule"):
        compute_reference(LogitLens(lambda tokens: np.zeros((3, 4, 6))), TOKENS, point)


def test_bins_are_those_of_the_first_probes_readout() -> None:
    spec = ThresholdBinSpec(("position", "top1_probability"), position_edges=(2,), top1_probability_edges=(0.5,))
    point = replace(POINT, thresholds=((0.5, 0.5),) * 4, bins=spec)
    logits = np.zeros((3, 4, 6))
    logits[1:, 0, 0] = 9.0
    reference = compute_reference(LogitLens(lambda tokens: logits), TOKENS, point)
    assert reference.rows[0].tolist() == [0, 1, 3]


def test_a_bin_that_the_tolerance_leaves_open_is_given_both_ways() -> None:
    spec = ThresholdBinSpec(("top1_probability",), top1_probability_edges=(0.5,))
    rows = candidate_bins(spec, np.arange(3), np.array([0.49, 0.51, 0.9]), [np.zeros(3, dtype=np.int64)], 0.02)
    assert rows[0].tolist() == [0, 1, 1]
    assert np.unique(np.stack(rows)[:, 0]).tolist() == np.unique(np.stack(rows)[:, 1]).tolist() == [0, 1]
    assert np.unique(np.stack(rows)[:, 2]).tolist() == [1]


def test_a_likeliest_token_that_the_tolerance_leaves_open_is_given_both_ways() -> None:
    point = replace(
        POINT, thresholds=((0.5, 0.5),) * 3, bins=ThresholdBinSpec(("frequency",), frequency=bytes([0, 1, 2, 2, 2, 2]))
    )
    logits = np.zeros((3, 4, 6))
    logits[:, 0, 0], logits[:, 0, 1] = 9.0, [9.0 - 1e-9, 8.0, -9.0]
    rows = np.stack(compute_reference(LogitLens(lambda tokens: logits), TOKENS, point, tolerance=1e-6).rows)
    assert rows[0].tolist() == [0, 0, 0]
    assert [np.unique(column).tolist() for column in rows.T] == [[0, 1], [0], [0]]
