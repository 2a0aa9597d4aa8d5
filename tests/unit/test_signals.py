"""The table of signals: every row is valid, and decoding and audit compute the same from the same logits."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import emad_ref
from emad_ref.calibration.trace import COLUMNS
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import FULL_READOUT, early_exit_point, is_exit_rule_met, threshold_point
from emad_ref.point import EntropyEstimator, OperatingPoint
from emad_ref.record import READOUTS
from emad_ref.signals import (
    ENTROPY,
    LARGE_VOCABULARY,
    LAYERWISE,
    SIGNALS,
    Signal,
    exp_log_probabilities,
    top2_values_and_indices,
)
from pytest_emad.audit.point_fields import PLAIN_SIGNALS, VARIANTS
from pytest_emad.measurements.pareto import CONFIDENCES
from pytest_emad.screening.exit_families import free_depth_families

EXACT = 1e-9  # float64 sums of a hundred terms, of logits up to 30
LOGITS = arrays.arrays(np.float64, (3, 20), elements=st.floats(-30, 30, width=64))


@pytest.fixture(params=SIGNALS)
def signal(request: pytest.FixtureRequest) -> Signal:
    return SIGNALS[request.param]


@pytest.fixture(params=LAYERWISE)
def layerwise(request: pytest.FixtureRequest) -> Signal:
    return LAYERWISE[request.param]


def test_a_row_has_both_ways_of_computing_it_or_neither(signal: Signal) -> None:
    assert (signal.from_logits is None) == (signal.from_lens is None) == (not signal.is_single_layer)
    assert signal.cost is None or signal.cost in READOUTS
    assert signal.unit
    assert signal.noise > 0


def test_one_layers_signal_compares_no_other_layer(signal: Signal) -> None:
    compared = signal.needs.compared(4, 8) | set(range(signal.needs.delay))
    assert signal.is_single_layer <= (not compared)


@pytest.mark.parametrize("name", LAYERWISE)
@given(logits=LOGITS)
def test_what_decoding_computes_an_audit_computes(name: str, logits: np.ndarray) -> None:
    signal = SIGNALS[name]
    assert signal.from_lens is not None
    np.testing.assert_allclose(
        signal.compute_from_logits(torch.from_numpy(logits)).numpy(), signal.from_lens(logits), atol=EXACT
    )


def test_the_slope_of_the_entropy_is_the_most_that_small_changes_of_logits_move_it() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (4, 40))
    assert ENTROPY.slope is not None
    z = torch.from_numpy(logits).requires_grad_()
    ENTROPY.compute_from_logits(z).sum().backward()
    np.testing.assert_allclose(ENTROPY.slope(logits), z.grad.abs().sum(dim=-1).numpy(), atol=1e-12)  # type: ignore[union-attr]


def test_a_surer_readout_is_surer_in_the_signals_own_sense(layerwise: Signal) -> None:
    unsure, sure = layerwise.compute_from_logits(torch.tensor([[1.0, 0.5, 0.0, -1.0], [9.0, 0.5, 0.0, -1.0]])).tolist()
    assert (sure < unsure) == (layerwise.sense == "falls")


def test_logits_that_are_no_numbers_give_a_signal_that_is_none(layerwise: Signal) -> None:
    assert math.isnan(float(layerwise.compute_from_logits(torch.tensor([math.nan, 1.0, 0.0]))))


@pytest.mark.parametrize("columns", [2, LARGE_VOCABULARY - 1, LARGE_VOCABULARY, LARGE_VOCABULARY + 1, 5000])
@pytest.mark.parametrize("rows", [(), (7,), (2, 3)])
def test_the_two_largest_are_those_of_a_plain_search(columns: int, rows: tuple[int, ...]) -> None:
    scores = torch.randn(*rows, columns, generator=torch.Generator().manual_seed(columns))
    if columns > 2:
        scores[..., 1] = -torch.inf
    values, tokens = top2_values_and_indices(scores)
    expected = scores.topk(2, dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(tokens, expected.indices)


@pytest.mark.parametrize("places", [(0, 1), (4099, 4098), (63, 64), (4099, 0)])
def test_the_two_largest_are_found_in_one_group_in_two_and_in_the_remainder(places: tuple[int, int]) -> None:
    scores = torch.zeros(3, 4100)
    scores[:, places[0]], scores[:, places[1]] = 2.0, 1.0
    values, tokens = top2_values_and_indices(scores)
    assert values.tolist() == [[2.0, 1.0]] * 3
    assert tokens.tolist() == [list(places)] * 3


@pytest.mark.parametrize("columns", [300, LARGE_VOCABULARY + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sharpness", [1.0, 30.0, 300.0])
def test_probabilities_are_exponentials_without_what_the_dtype_cannot_hold(
    columns: int, dtype: torch.dtype, sharpness: float
) -> None:
    drawn = sharpness * torch.randn(3, columns, generator=torch.Generator().manual_seed(0), dtype=dtype)
    drawn[1, 7], drawn[2] = torch.nan, -torch.inf
    drawn[2, 5] = 0.0
    log_p = drawn.log_softmax(dim=-1)
    found, plain = exp_log_probabilities(log_p), log_p.exp()
    tiny = torch.finfo(dtype).tiny
    assert torch.equal(
        torch.where(plain[0] > 16 * tiny, plain[0], 0.0), torch.where(found[0] > 16 * tiny, found[0], 0.0)
    )
    if columns >= LARGE_VOCABULARY:
        assert bool(((found[0] == 0) | (found[0] >= tiny)).all())
    assert bool(found[1].isnan().all())
    assert found[2].tolist() == [float(at == 5) for at in range(columns)]
    entropy = ENTROPY.compute_from_logits(drawn[[0, 2]])
    expected = -(plain[0] * log_p[0]).nan_to_num(0.0).sum()
    torch.testing.assert_close(entropy, torch.stack([expected, torch.zeros_like(expected)]), rtol=1e-5, atol=1e-30)


def test_half_precision_is_raised_and_float64_kept(layerwise: Signal) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).double()
    assert layerwise.compute_from_logits(logits).dtype == torch.float64
    assert torch.equal(
        layerwise.compute_from_logits(logits.bfloat16()), layerwise.compute_from_logits(logits.bfloat16().float())
    )


def test_a_point_of_one_layers_signal_needs_no_parameters_and_any_other_does(signal: Signal) -> None:
    made = {"name": "p", "family": "f", "layers": 8, "ceiling": 8, "probes": (4,), "thresholds": ((0.5,),)}
    if signal.needs_only_thresholds:
        assert OperatingPoint(**made, signal=signal.name).has_adaptive_depth
        never = OperatingPoint(**{**made, "thresholds": ((signal.unreachable_threshold,),)}, signal=signal.name)
        assert not never.has_adaptive_depth
    elif signal.is_learned:
        with pytest.raises(BadArgument, match=rf"^estimator='full', but expected linear.*{signal.name}"):
            OperatingPoint(**made, signal=signal.name)
        assert OperatingPoint(**made, signal=signal.name, estimator=EntropyEstimator("linear")).has_adaptive_depth
        with pytest.raises(BadArgument, match=r"^estimator='topk-4', but expected linear"):
            OperatingPoint(**made, signal=signal.name, estimator=EntropyEstimator("topk", k=4))
    else:
        with pytest.raises(BadArgument, match=f"the parameters of {signal.name}"):
            OperatingPoint(**made, signal=signal.name)


def test_an_estimator_of_what_has_none_is_refused() -> None:
    """Estimators read entropy: such a point once compared it with thresholds of another signal."""
    plain = {"name": "p", "family": "f", "layers": 8, "ceiling": 8, "probes": (4,), "thresholds": ((0.5,),)}
    for name, signal in LAYERWISE.items():
        if signal.estimated:
            assert OperatingPoint(**plain, signal=name, estimator=EntropyEstimator("topk", k=4)).has_adaptive_depth
        else:
            with pytest.raises(BadArgument, match=f"the full readout for {name}; estimators read entropy_nats"):
                OperatingPoint(**plain, signal=name, estimator=EntropyEstimator("topk", k=4))


def test_a_row_says_whether_the_signal_makes_an_early_exit(signal: Signal) -> None:
    if signal.early_exit:
        assert signal.sense == "rises", "λ is a least confidence"
        assert early_exit_point(signal.name, 8, 4000, 4).signal == signal.name
    else:
        with pytest.raises(BadArgument, match=f"^signal='{signal.name}'"):
            early_exit_point(signal.name, 8, 4000, 4)


def test_a_row_says_which_sweeps_compare_the_signal(signal: Signal) -> None:
    """Each sweep reads its columns from the row and the trace, and labels the signal by the row."""
    assert "front" not in signal.sweeps or signal.is_single_layer, "quantiles are taken of a trace's column"
    assert "screening" not in signal.sweeps or signal.thresholds is not None, "a screening sweeps a range"
    screened = {family.name for family in free_depth_families(4, 500)}
    assert (signal.label in screened) == ("screening" in signal.sweeps and signal.needs_only_thresholds)
    assert (signal.name in PLAIN_SIGNALS) == (signal.needs_only_thresholds and signal is not ENTROPY)
    assert signal is ENTROPY or any(signal.name == name or signal.is_learned for name in VARIANTS), (
        "no audit compares it"
    )
    early = [name for name, rule in CONFIDENCES.items() if rule.signal == signal.name]
    assert bool(early) == signal.early_exit


def test_ranges_of_thresholds_run_from_strict_to_loose(signal: Signal) -> None:
    if signal.thresholds is not None:
        span, probes = signal.thresholds, (2, 4)
        values = np.array([span.strictest, span.loosest(500)], dtype=np.float32)
        assert (values[0] < values[1]) == (signal.sense == "falls")
        estimator = EntropyEstimator("linear") if signal.is_learned else FULL_READOUT
        strict, loose = (threshold_point(signal, 6, probes, float(value), estimator) for value in values)
        between = np.full(9, values.mean(), dtype=np.float32)
        assert not is_exit_rule_met(strict, 0, between).any()
        assert is_exit_rule_met(loose, 0, between).all()


def test_no_module_lists_signals_beside_the_table() -> None:
    """A new signal is a row: a second list would omit it, or include it unchecked."""
    root = Path(emad_ref.__file__).parents[1]
    sources = [each for package in ("emad_ref", "pytest_emad", "suites") for each in (root / package).rglob("*.py")]
    listed = [
        f"{source.relative_to(root)}:{node.lineno}"
        for source in sources
        if source.name != "signals.py"
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict)
        if len(NAMES & {_text(each) for each in (node.keys if isinstance(node, ast.Dict) else node.elts)}) > 1
    ]
    assert len(sources) > 200, "the modules of the product were not found"
    assert not listed


NAMES = {name for signal in SIGNALS.values() if not signal.is_learned for name in (signal.name, signal.label)}


def _text(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def test_no_signal_repeats_a_column_of_the_trace() -> None:
    assert not set(SIGNALS) & set(COLUMNS)
