"""Depth that never rises, compared with a direct transcription of the paper's loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from emad_ref.exit_rules import first_firing_probe
from tests.plain_forms import monotone_depths_from_signal

VALUES = st.one_of(st.floats(0, 3), st.sampled_from([0.5, 1.0, np.nan]))


def by_the_loop(signal, thresholds, probes, ceiling):
    """EMAD, "Algorithm (per token)": exit at the smallest probe ≤ D_{t-1} that fires, else D_t = min(L, D_{t-1})."""
    previous, taken = ceiling, []
    for values in signal:
        depth = min(ceiling, previous)
        for probe, value, threshold in zip(probes, values, thresholds, strict=True):
            if probe <= previous and value <= threshold:
                depth = probe
                break
        taken.append(depth)
        previous = depth
    return taken


@st.composite
def cases(draw):
    ceiling = draw(st.integers(1, 12))
    probes = sorted(draw(st.sets(st.integers(1, ceiling - 1)))) if ceiling > 1 else []
    shape = (draw(st.integers(1, 20)), len(probes))
    signal = draw(hnp.arrays(np.float64, shape, elements=VALUES))
    return signal, np.array([draw(st.floats(-0.5, 3)) for _ in probes]), np.array(probes, dtype=np.int64), ceiling


@given(cases())
def test_the_running_minimum_is_the_papers_loop(case):
    assert monotone_depths_from_signal(*case).tolist() == by_the_loop(*case)


@given(cases())
def test_depth_never_rises_and_is_a_probe_or_the_ceiling(case):
    taken = monotone_depths_from_signal(*case)
    assert (np.diff(taken) <= 0).all()
    assert set(taken.tolist()) <= {*case[2].tolist(), case[3]}


@given(cases(), st.integers(0, 19))
def test_what_stands_at_probes_above_the_cap_changes_nothing(case, at):
    signal, thresholds, probes, ceiling = case
    taken = monotone_depths_from_signal(*case)
    cap = np.concatenate([[ceiling], taken[:-1]])
    unread = signal.copy()
    unread[probes[None, :] > cap[:, None]] = at / 7
    assert monotone_depths_from_signal(unread, thresholds, probes, ceiling).tolist() == taken.tolist()


def test_thresholds_may_differ_from_token_to_token():
    signal = np.full((3, 1), 1.0)
    assert monotone_depths_from_signal(signal, np.array([[0.5], [1.5], [0.5]]), np.array([4]), 12).tolist() == [
        12,
        4,
        4,
    ]


def test_the_first_fire_counts_and_without_probes_there_is_none():
    fires = np.array([[False, True, True], [False, False, False], [True, False, True]])
    assert first_firing_probe(fires, np.array([2, 4, 8]), 12).tolist() == [4, 12, 2]
    assert first_firing_probe(np.zeros((3, 0), dtype=bool), np.array([], dtype=np.int64), 7).tolist() == [7, 7, 7]
