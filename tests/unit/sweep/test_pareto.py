"""Fronts and duels against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from emad_ref.point import truncated
from emad_ref.sweep.losses import Loss
from emad_ref.sweep.pareto import LEVELS, Duel, duels


def row(net: float, perplexity: float, depth: int = 1) -> Loss:
    return Loss(truncated(99, depth), 0.0, 0.0, 0.0, {}, net, net, np.zeros(1), perplexity, 0.0, 0.5, 0.0)


def pairs(table):
    return [(r.net_reduction, r.perplexity) for r in table]


# few distinct values, so that ties are common
rows = st.lists(st.builds(row, st.sampled_from([-0.1, 0.0, 0.2, 0.4]), st.sampled_from([1.0, 1.5, 2.0])), max_size=8)


def test_each_side_sends_its_best_that_saves_enough():
    ours = [row(0.16, 3.0, 1), row(0.2, 2.0, 2), row(0.5, 4.0, 3)]
    rival = [row(0.1, 1.0, 4), row(0.35, 5.0, 5), row(0.32, 6.0, 6)]
    assert duels(ours, rival, (0.15, 0.30)) == [
        Duel(0.15, ours[1].point, rival[1].point),
        Duel(0.30, ours[2].point, rival[1].point),
    ]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_level_that_one_side_misses_has_no_duel(swapped):
    far, near = [row(0.7, 2.0, 1)], [row(0.31, 2.0, 2)]
    sides = (near, far) if swapped else (far, near)
    assert [duel.reduction for duel in duels(*sides)] == [level for level in LEVELS if level <= 0.31] == [0.15, 0.30]
    assert duels(far, []) == duels([], far) == []
