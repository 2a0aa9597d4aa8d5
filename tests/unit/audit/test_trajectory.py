"""The audit of one row against the lens, on small arrays: layers 1–4, probes at 1 and 2, thresholds 0.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import entropy

from emad_ref.point import OperatingPoint
from emad_ref.record import Floats, Ints
from pytest_emad.audit.finding import Tally
from pytest_emad.audit.reference_logits import LayerLogits, LensReference, LogitLens, ProbeReadoutWork
from pytest_emad.audit.trajectory import Judge, Trajectory, count_exit_eligible_positions

NAN, TOLERANCE = np.nan, 1e-3
POINT = OperatingPoint("p", "emad", 4, 4, (1, 2), ((0.5, 0.5),))
# Reference signals of five positions; the rule gives depths 4, 2, 2, 1, 1.
REFERENCE = np.array([[0.9, 0.8], [0.7, 0.4], [0.6, 0.9], [0.3, 0.9], [0.9, 0.9]])
DEPTH = np.array([4, 2, 2, 1, 1])
SIGNAL = np.array([[0.9, 0.8], [0.7, 0.4], [0.6, NAN], [0.3, NAN], [NAN, NAN]])


def made(depth: object = DEPTH, signal: Floats = SIGNAL, **change: object) -> Trajectory:
    depth = np.asarray(depth)
    whole = Trajectory("row 0", np.arange(7), 2, depth, signal, np.ones(len(depth), dtype=bool))
    return replace(whole, **change)  # type: ignore[arg-type]  # fields by name


def said(logits: Floats) -> LensReference:
    """Return full heads of ``logits`` [5, L, V], which are also the emitted ones."""
    heads = LayerLogits.from_array(logits)
    return LensReference(
        heads,
        REFERENCE,
        heads,
        ProbeReadoutWork.from_point_with_full_heads(POINT, len(logits)),
        (np.zeros(5, dtype=np.int64),),
        *[np.full(len(logits), TOLERANCE)] * 2,
    )


def complaint(trajectory: Trajectory, reference: Floats = REFERENCE, point: OperatingPoint = POINT) -> str | None:
    with Tally("t") as tally:
        Judge(tally, None, point, TOLERANCE).require_depths_follow_rule(trajectory, reference)
    return tally.complaint


def test_the_rules_own_depths_pass() -> None:
    assert complaint(made()) is None


def test_a_signal_read_at_the_cap_decides_nothing_and_passes() -> None:
    signal = SIGNAL.copy()
    signal[2, 1], signal[4, 0] = 0.9, 0.9
    assert complaint(made(signal=signal)) is None


@pytest.mark.parametrize(
    ("at", "depth", "says"),
    [
        (2, 4, "depth must not rise"),
        (0, 2, "the rule gives depth 4 under cap 4"),
        (0, 3, "the rule gives depth 4 under cap 4"),
        (3, 2, "the rule gives depth 1 under cap 2"),
        (4, 0, "depth must not rise"),
    ],
)
def test_another_depth_is_refused(at: int, depth: int, says: str) -> None:
    changed = DEPTH.copy()
    changed[at] = depth
    signal = np.where(np.array(POINT.probes) > changed[:, None], NAN, REFERENCE)
    found = complaint(made(changed, signal))
    assert found is not None
    assert says in found
    assert f"position {2 + at}" in found


@pytest.mark.parametrize(
    ("at", "probe", "value", "says"),
    [
        (1, 0, 0.71, "signal off by 0.01 nats"),
        (3, 1, 0.9, "read above the exit"),
        (0, 0, NAN, "not read"),
        (3, 0, NAN, "not read"),
    ],
)
def test_another_signal_is_refused(at: int, probe: int, value: float, says: str) -> None:
    signal = SIGNAL.copy()
    signal[at, probe] = value
    found = complaint(made(signal=signal))
    assert found is not None
    assert says in found


def test_a_probe_that_never_fires_need_not_be_read() -> None:
    point = replace(POINT, thresholds=((-np.inf, 0.5),))
    signal = np.array([[NAN, 0.8], [NAN, 0.4], [NAN, NAN], [NAN, NAN], [NAN, NAN]])
    assert complaint(made([4, 2, 2, 2, 2], signal), point=point) is None


def test_forced_depths_need_not_be_the_rules() -> None:
    forced = made([3, 3, 2, 2, 1], np.full((5, 2), NAN), chosen=np.zeros(5, dtype=bool))
    assert complaint(forced) is None
    assert complaint(replace(forced, depth=np.array([3, 4, 2, 2, 1]))) is not None


class TestTies:
    """A threshold within the tolerance excuses either decision, and the consequences are judged under that decision."""

    REFERENCE = np.array([[0.9, 0.5001], [0.6, 0.9], [0.7, 0.7]])

    @pytest.mark.parametrize(("depth", "ties"), [([4, 4, 4], 0), ([2, 2, 2], 1)])
    def test_both_sides_of_a_tie_pass(self, depth: list[int], ties: int) -> None:
        with Tally("t", needed=0) as tally:
            signal = np.where(np.array(POINT.probes) > np.array(depth)[:, None], NAN, self.REFERENCE)
            Judge(tally, None, POINT, TOLERANCE).require_depths_follow_rule(made(depth, signal), self.REFERENCE)
        assert tally.complaint is None
        assert tally.ties == ties

    @pytest.mark.parametrize("depth", [[1, 1, 1], [3, 3, 3], [2, 1, 1], [4, 2, 2]])
    def test_a_tie_excuses_nothing_else(self, depth: list[int]) -> None:
        signal = np.where(np.array(POINT.probes) > np.array(depth)[:, None], NAN, self.REFERENCE)
        assert complaint(made(depth, signal), self.REFERENCE) is not None


def test_free_depth_may_rise_again() -> None:
    point = replace(POINT, schedule="free_eager")
    signal = np.array([[0.9, 0.8], [0.7, 0.4], [0.6, 0.9], [0.3, NAN], [0.9, 0.9]])
    assert complaint(made([4, 2, 4, 1, 4], signal), point=point) is None


def test_logits_are_those_of_the_claimed_depth() -> None:
    reference = np.random.default_rng(0).normal(size=(5, 4, 6))
    shown = reference[np.arange(5), DEPTH - 1]
    for changed, passes in ((shown, True), (reference[:, 3], False), (shown * np.nan, False), (shown[:, :5], False)):
        with Tally("t") as tally:
            Judge(tally, None, POINT, TOLERANCE).require_logits_match_lens(made(logits=changed), said(reference))
        assert (tally.complaint is None) is passes


class RoundingLens(LogitLens):
    """A lens with logits 0 after every layer; the token ``at`` amplifies rounding to ``allowed``."""

    def __init__(self, at: int, allowed: float):
        super().__init__(lambda tokens: np.zeros((len(tokens), 4, 6)))
        object.__setattr__(self, "measured", [])
        object.__setattr__(self, "answer", lambda token: allowed if token == at else 0.0)

    def max_rounding_error(self, tokens: Ints, layers: Sequence[int]) -> float:
        self.measured.append((int(tokens[-1]), tuple(layers)))  # type: ignore[attr-defined]
        return self.answer(tokens[-1])  # type: ignore[attr-defined]


@pytest.mark.parametrize(("at", "off", "passes"), [(1, 0.01, True), (1, 0.03, False), (2, 0.01, False)])
def test_a_complaint_stands_unless_the_measured_rounding_of_its_position_explains_it(
    at: int, off: float, passes: bool
) -> None:
    """Position 1 of the row, token 3, may be off by 0.02 for its rounding, every other by the tolerance of 0.001."""
    lens, shown = RoundingLens(at=3, allowed=0.02), np.zeros((5, 6))
    shown[at, 0] = off
    point = replace(POINT, thresholds=((-np.inf, -np.inf),))
    row = made([4] * 5, np.full((5, 2), NAN), logits=shown)
    tally = Tally("t", needed=0)
    with tally:
        Judge(tally, lens, point, TOLERANCE).require_trajectory_matches_lens(row)
    assert (tally.complaint is None) is passes, tally.complaint
    assert lens.measured == [(2 + at, (1, 2, 4))]  # type: ignore[attr-defined]  # once, of that position alone
    assert ("rounding allows up to 0.02 at 1 of the positions" in tally.to_finding().detail) is (at == 1)
    assert (tally.sample is None) is passes


@pytest.mark.parametrize(("others", "passes"), [(500, True), (1, False)])
def test_an_entropy_may_be_off_by_more_where_it_moves_faster_than_logits(others: int, passes: bool) -> None:
    """One token has half of the probability, and its logit is off by the tolerance."""
    logits = np.zeros(1 + others)
    logits[0] = np.log(others)
    true, moved = (entropy(softmax(logits + by * np.eye(1 + others)[0])) for by in (0.0, TOLERANCE))
    lens = LogitLens(lambda tokens: np.tile(logits, (len(tokens), 4, 1)))
    off = moved - true if passes else 2 * TOLERANCE
    assert TOLERANCE < abs(off) < 4 * TOLERANCE
    tally = Tally("t", needed=0)
    with tally:
        Judge(tally, lens, replace(POINT, thresholds=((0.0, 0.0),)), TOLERANCE).require_trajectory_matches_lens(
            made([4] * 5, np.full((5, 2), true + off))
        )
    assert (tally.complaint is None) is passes, tally.complaint


def test_a_signal_and_a_token_have_the_rounding_of_their_position_too() -> None:
    lens, reading = RoundingLens(at=3, allowed=0.02), np.log(6)
    row = made([4] * 5, np.full((5, 2), reading))
    row.signal[1, 0] += 0.015
    other = np.array([0, 0, 0, 0, 0])
    for allowed, passes in ((0.02, True), (0.002, False)):
        tally, lens = Tally("t", needed=0), RoundingLens(at=3, allowed=allowed)
        with tally:
            judge = Judge(tally, lens, POINT, TOLERANCE)
            judge.require_tokens_are_argmax(row, other, judge.require_trajectory_matches_lens(row))
        assert (tally.complaint is None) is passes, tally.complaint


def test_tokens_are_the_argmax_at_the_claimed_depth_or_a_logit_tie() -> None:
    reference = np.random.default_rng(0).normal(size=(5, 4, 6))
    best = reference[np.arange(5), DEPTH - 1].argmax(axis=-1)
    other = best.copy()
    other[1] = (best[1] + 1) % 6
    tied = reference.copy()
    tied[1, 1, other[1]] = tied[1, 1, best[1]] - TOLERANCE / 2
    for emitted, logits, passes, ties in (
        (best, reference, True, 0),
        (other, reference, False, 0),
        (other, tied, True, 1),
    ):
        with Tally("t") as tally:
            Judge(tally, None, POINT, TOLERANCE).require_tokens_are_argmax(made(), emitted, said(logits))
        assert (tally.complaint is None, tally.ties) == (passes, ties)


def test_discriminating_counts_positions_with_a_probe_below_the_cap() -> None:
    assert count_exit_eligible_positions(made(), POINT) == 4
    assert count_exit_eligible_positions(made(), replace(POINT, probes=(), thresholds=((),))) == 0
