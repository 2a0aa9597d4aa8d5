"""EE-1, EE-4 and EE-8 on T5-large (24 layers, D = 1,024, V = 32,128), derived by hand: no weights, no decoder.

A token that never exits reads a full head after each of the layers j … 23 and one at the top: 25 − j heads of 2·D·V
FLOPs. Under pruning the heads after j and at the top stay full, and 23 − j of them read k tokens. The paper's formula
charges D²·V for each of 24 layers instead.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor

import pytest

from emad_ref.exit_rules import early_exit_point, kept_vocabulary_size
from emad_ref.flop_ledger import flops
from emad_ref.models.geometry import published_geometry
from emad_ref.probes.pruned_vocabulary import vocabulary_size_at_confidence
from pytest_emad.sweep.diagnostics import efficiency_gain_bound, published_efficiency_gain, token_work_without_exit

L, D, V = 24, 1_024, 32_128
T5_LARGE = published_geometry("t5-large")
# j, k*, bound L/j, the formula's gain, the executed gain: all to the digits that a row shows
ROWS = [(2, 2781, 12.0, 6.147, 6.024), (7, 842, 3.429, 3.223, 7.440), (19, 315, 1.263, 1.260, 2.942)]


def executed(signal: str, pruning: str, minimum: int) -> int:
    """Return the FLOPs of all readouts of one token that never exits, certain at every layer."""
    point = early_exit_point(signal, L, V, minimum, 2.0, pruning=pruning)
    return sum(flops(token_work_without_exit(point, T5_LARGE), T5_LARGE).readouts.values())


def test_the_geometry_is_the_papers() -> None:
    assert (T5_LARGE.layers, T5_LARGE.hidden, T5_LARGE.embedding_width, T5_LARGE.vocabulary) == (L, D, D, V)
    assert T5_LARGE.head_flops() == 2 * D * V


@pytest.mark.parametrize(("j", "k", "bound", "formula", "_executed"), ROWS)
def test_the_formula_stays_below_the_bound_that_no_k_exceeds(
    j: int, k: int, bound: float, formula: float, _executed: float
) -> None:
    assert kept_vocabulary_size(j, L, V) == k == max(250, floor(Fraction(35_000) / (1 + Fraction(139 * j, 24))))
    assert efficiency_gain_bound(L, j) == pytest.approx(bound, abs=5e-4)
    as_printed = Fraction(D**2 * V * L, D**2 * k * (L - j) + D**2 * V * j)
    assert published_efficiency_gain(L, V, j, k) == pytest.approx(float(as_printed))
    assert published_efficiency_gain(L, V, j, k) == pytest.approx(formula, abs=5e-4)
    assert published_efficiency_gain(L, V, j, 1) < efficiency_gain_bound(L, j) < 100, "no k reaches a hundredfold"


@pytest.mark.parametrize(("j", "k", "_bound", "_formula", "gain"), ROWS)
def test_what_is_executed_is_two_full_heads_and_k_tokens_of_the_others(
    j: int, k: int, _bound: float, _formula: float, gain: float
) -> None:
    plain, pruned = executed("softmax_response", "none", j), executed("softmax_response", "fixed", j)
    assert plain == (25 - j) * 2 * D * V
    assert pruned == 2 * (2 * D * V) + (23 - j) * 2 * D * k
    assert plain / pruned == pytest.approx(gain, abs=5e-4)
    assert plain / pruned < (25 - j) / 2 < 100, "no k reaches a hundredfold"
    charged = D**2 * V * L  # the formula's multiply-adds without pruning
    assert charged / (plain / 2) == pytest.approx(D * L / (25 - j)), "a factor D, and the layers below j"


@pytest.mark.parametrize(("j", "gain"), [(2, 5.610), (7, 5.001), (19, 2.500)])
def test_adaptive_pruning_keeps_a_tenth_where_every_readout_is_sure(j: int, gain: float) -> None:
    """EE-4's 250 and 190 times: the adaptive k never falls below V/10."""
    k = vocabulary_size_at_confidence(V, 0.9, 1.0)
    assert k == 3_212
    plain, pruned = executed("jsd_contrast", "none", j), executed("jsd_contrast", "adaptive", j)
    assert plain == (25 - j) * 2 * D * V
    assert pruned == 2 * (2 * D * V) + (23 - j) * 2 * D * k
    assert plain / pruned == pytest.approx(gain, abs=5e-4)
