"""Exit rules are one comparison, signal ≤ τ, with different thresholds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from emad_ref.errors import BadArgument
from emad_ref.exit_rules import (
    calibrated_entropy_point,
    default_probes,
    extrapolate_exits_between_probes,
    fixed_entropy_point,
    format_number,
    format_numbers_distinctly,
    is_exit_rule_met,
    softmax_response_point,
)
from emad_ref.point import OperatingPoint, ThresholdBinSpec

TARGETS = (2.0, 1.5, 0.25)
PROBES = (3, 6, 9)


@pytest.mark.parametrize(
    ("layers", "probes"),
    [(1, ()), (4, (2,)), (6, (2, 4)), (12, (4, 8)), (24, (4, 8, 12, 16, 20)), (32, (8, 16, 24)), (40, (8, 16, 24, 32))],
)
def test_probes_stand_every_few_layers_and_never_at_the_last(layers, probes):
    assert default_probes(layers) == probes


def test_emad_lowers_every_target_by_the_margin():
    point = calibrated_entropy_point(12, PROBES, [TARGETS], 0.25)
    assert point.thresholds == ((1.75, 1.25, 0.0),)
    assert (point.name, point.family, point.margin_nats, point.ceiling) == ("emad m=0.25", "emad", 0.25, 12)


def test_a_schedule_is_named_in_the_point_and_validated_by_it():
    assert calibrated_entropy_point(12, PROBES, [TARGETS], 0.1, "free_eager").name == "emad m=0.10 free_eager"


def test_margins_that_two_decimals_confuse_have_names_of_their_own():
    names = {
        calibrated_entropy_point(12, PROBES, [TARGETS], margin).name for margin in (0.0, 0.003, 0.0031, 0.25, 0.2503)
    }
    assert names == {"emad m=0.00", "emad m=0.003", "emad m=0.0031", "emad m=0.25", "emad m=0.2503"}
    assert fixed_entropy_point(12, PROBES, 0.123456).name == "fixed h0=0.1235"
    with pytest.raises(BadArgument, match="schedule='sideways', but expected one of monotone"):
        calibrated_entropy_point(12, PROBES, [TARGETS], 0.1, "sideways")


@given(st.lists(st.floats(-10, 10).map(lambda x: x + 0.0), max_size=6), st.floats(1e-12, 1e-3))
def test_numbers_told_apart_read_back_as_different_values(numbers, little):
    """As short as distinct names allow: a number without a close neighbour keeps its short form."""
    numbers = [*numbers, *(number + little for number in numbers[:3])]
    texts = format_numbers_distinctly(numbers)
    assert [a == b for a in numbers for b in numbers] == [float(a) == float(b) for a in texts for b in texts]
    assert format_numbers_distinctly(numbers[:1]) == [format_number(number) for number in numbers[:1]]
    assert format_numbers_distinctly([0.3, 0.300001, 0.30001, 0.3]) == ["0.30", "0.300001", "0.30001", "0.30"]


def test_a_missing_target_is_refused():
    with pytest.raises(BadArgument, match="3 values per bin, one per probe"):
        calibrated_entropy_point(12, PROBES, [TARGETS[:2]])


def test_a_fixed_threshold_is_the_same_at_every_probe():
    point = fixed_entropy_point(12, PROBES, 0.7)
    assert point.thresholds == ((0.7, 0.7, 0.7),)
    assert point.name == "fixed h0=0.70"
    assert fixed_entropy_point(12, (), 0.7).thresholds == ((),)


@given(hnp.arrays(np.float64, (5, 3), elements=st.floats(0, 4)))
def test_a_rule_fires_at_or_below_its_threshold(signal):
    point = calibrated_entropy_point(12, PROBES, [TARGETS])
    expected = [[np.float32(row[i]) <= np.float32(TARGETS[i]) for i in range(3)] for row in signal]
    found = np.stack(
        [is_exit_rule_met(point, probe, signal[:, probe].astype(np.float32)) for probe in range(3)], axis=1
    )
    assert found.tolist() == expected


def test_equality_fires_and_nothing_else_that_is_close():
    point = fixed_entropy_point(12, (4,), 0.7)
    threshold = np.float32(0.7)
    signal = np.array([threshold, np.nextafter(threshold, np.float32(1)), np.nan, np.inf, -np.inf], dtype=np.float32)
    assert is_exit_rule_met(point, 0, signal).tolist() == [True, False, False, False, True]


def test_a_threshold_is_rounded_as_the_signals_are():
    """A float32 signal equal to float32(τ) fires although it exceeds τ, also after a round trip through float64."""
    point = fixed_entropy_point(12, (4,), 0.3)  # float32(0.3) > 0.3
    signal = np.array([0.3], dtype=np.float32)
    assert signal.astype(np.float64)[0] > 0.3
    assert (
        is_exit_rule_met(point, 0, signal).tolist()
        == is_exit_rule_met(point, 0, signal.astype(np.float64)).tolist()
        == [True]
    )


def test_each_bin_has_its_own_threshold_and_none_is_guessed():
    point = replace(
        fixed_entropy_point(12, (4,), 0.7), bins=ThresholdBinSpec(("position",)), thresholds=((0.7,), (0.1,), (0.4,))
    )
    signal = np.full((2, 3), 0.3)
    assert is_exit_rule_met(point, 0, signal, np.array([[0, 1, 2], [1, 1, 0]])).tolist() == [
        [True, False, True],
        [False, False, True],
    ]
    with pytest.raises(BadArgument, match="bins=None, but expected a bin in 0–2"):
        is_exit_rule_met(point, 0, signal)


def test_a_signal_that_rises_fires_at_or_above_its_threshold():
    signal = np.array([0.89, 0.9, 0.95, np.nan], dtype=np.float32)
    assert is_exit_rule_met(softmax_response_point(12, (4,), 0.9), 0, signal).tolist() == [False, True, True, False]


def interpolating(thresholds: tuple[float, ...]) -> OperatingPoint:
    return replace(fixed_entropy_point(16, (2, 6, 10), 0.0), thresholds=(thresholds,), interpolate=True)


def test_exits_between_probes_lie_where_the_line_meets_the_threshold():
    """Readings 2.0 and 1.2 at layers 2 and 6 fall by 0.2 a layer; τ from 0.8 at 6 to 0.4 at 10 is met at 10 only."""
    before, here = np.float32(2.0), np.float32(1.2)
    assert extrapolate_exits_between_probes(
        interpolating((0.0, 0.8, 0.4)), 1, np.array([before]), np.array([here])
    ).tolist() == [0]
    # τ flat at 0.8: 1.2 − 0.2·2 = 0.8 at layer 8
    assert extrapolate_exits_between_probes(
        interpolating((0.0, 0.8, 0.81)), 1, np.array([before]), np.array([here])
    ).tolist() == [8]
    assert extrapolate_exits_between_probes(
        interpolating((0.0, 1.1, 1.1)), 1, np.array([before]), np.array([here])
    ).tolist() == [7]


def test_there_is_no_line_at_the_first_probe_and_no_threshold_after_the_last():
    point = interpolating((9.0, 9.0, 9.0))
    assert extrapolate_exits_between_probes(point, 0, np.zeros(2), np.zeros(2)).tolist() == [0, 0]
    assert extrapolate_exits_between_probes(point, 2, np.zeros(2), np.zeros(2)).tolist() == [0, 0]
