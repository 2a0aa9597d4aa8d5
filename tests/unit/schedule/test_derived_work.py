"""Work derived from depths equals the sum over layers and tokens, also where it is counted once for many points."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emad_ref.flop_ledger import flops
from emad_ref.models.geometry import Geometry
from emad_ref.point import RULELESS, SCHEDULE_FIELDS, OperatingPoint, ScheduleName
from emad_ref.record import FILLS, READOUTS
from emad_ref.schedule.derived_work import ProbeCosts, derive_sequence_flops, derive_work
from emad_ref.schedule.schedules import MONOTONE, SCHEDULES, TokenPositions, deferred_layer_counts

LAYERS, CEILING, PROBES = 7, 5, (2, 3)
NEEDED = {"period": 3, "floor": 2, "translators": "digest"}
FULL = READOUTS.index("full")
GEOMETRY = Geometry("llama", LAYERS, 8, 2, 1, 4, 16, True, 32, 8, True)
SEQUENCES = st.lists(st.lists(st.sampled_from((*PROBES, CEILING)), min_size=1, max_size=9), min_size=1, max_size=4)


def point(name: ScheduleName, ceiling: int = CEILING) -> OperatingPoint:
    needed: dict[str, Any] = {field: NEEDED[field] for field in SCHEDULE_FIELDS[name]}
    if name in RULELESS:
        return OperatingPoint(name, "test", LAYERS, ceiling, schedule=name, **needed)
    return OperatingPoint(name, "test", LAYERS, ceiling, PROBES, ((1.0, 1.0),), schedule=name, **needed)


def positions_of(sequences: list[list[int]], prompt: int = 2) -> tuple[TokenPositions, np.ndarray]:
    """Return the positions of tokens of sequences of these depths, after a prompt each; and the depths."""
    lengths = [len(sequence) for sequence in sequences]
    position = np.concatenate([prompt + np.arange(length) for length in lengths])
    return TokenPositions(position, np.concatenate([[0], np.cumsum(lengths)])), np.concatenate(sequences)


def histogram_of(depth: np.ndarray) -> np.ndarray:
    return np.bincount(depth, minlength=LAYERS + 1)


@pytest.mark.parametrize("ceiling", [CEILING, LAYERS])
@pytest.mark.parametrize("name", SCHEDULES)
@given(sequences=SEQUENCES, prompt=st.integers(0, 3))
@settings(max_examples=50)
def test_what_is_counted_is_what_ran_token_by_token(
    name: ScheduleName, ceiling: int, sequences: list[list[int]], prompt: int
) -> None:
    positions, depth = positions_of(sequences, prompt)
    schedule, layers = SCHEDULES[name], range(1, LAYERS + 1)
    counted = schedule.layer_work_totals(positions, depth, histogram_of(depth), ceiling)
    ran = [schedule.layer_work(positions, depth, layer, ceiling) for layer in layers]
    assert counted.tokens.tolist() == [np.count_nonzero(each.keys) for each in ran]
    assert counted.context.tolist() == [each.keys.sum() for each in ran]
    fills = [0 if each.fills is None else np.count_nonzero(each.fills) for each in ran]
    assert (np.zeros(LAYERS) if counted.fills is None else counted.fills).tolist() == fills


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("name", SCHEDULES)
@given(sequences=SEQUENCES)
@settings(max_examples=25)
def test_work_is_the_flops_of_each_sequence_added_up(
    name: ScheduleName, shows: bool, alike: bool, sequences: list[list[int]]
) -> None:
    """Two independent derivations, one by layer and one by sequence."""
    positions, depth = positions_of(sequences)
    chosen, lens_macs = point(name), np.arange(LAYERS) + 100
    macs = np.arange(len(depth))[:, None] + 10 * np.arange(LAYERS)
    if alike:  # one row of costs serves all tokens
        macs = np.broadcast_to(macs[0], macs.shape)
    costs = ProbeCosts(
        np.eye(len(READOUTS), LAYERS, dtype=np.bool_) | (np.arange(LAYERS) == 2), np.full(LAYERS, shows), macs
    )
    work = derive_work(chosen, positions, depth, histogram_of(depth), costs, lens_macs)
    assert set(np.flatnonzero(work.fills.any(axis=1))) <= {FILLS.index(SCHEDULES[name].fills)}
    assert (
        flops(work, GEOMETRY).total == derive_sequence_flops(chosen, positions, depth, costs, lens_macs, GEOMETRY).sum()
    )


@given(sequences=SEQUENCES, layer=st.integers(1, LAYERS))
def test_a_token_runs_with_the_next_of_its_sequence_that_goes_so_deep(sequences: list[list[int]], layer: int) -> None:
    positions, depth = positions_of(sequences)
    expected = []
    for sequence in sequences:
        for at in range(len(sequence)):
            later = [to for to in range(at, len(sequence)) if sequence[to] >= layer]
            expected.append(2 + later[0] + 1 if later else 0)
    assert deferred_layer_counts(positions, depth, layer, CEILING).keys.tolist() == expected


@pytest.mark.parametrize("alike", [True, False])
def test_readings_are_charged_to_whoever_is_asked(alike: bool) -> None:
    positions, depth = positions_of([[5, 3, 2], [2]])
    each = np.full(4, 7) if alike else np.array([1, 10, 100, 1000])
    column = np.broadcast_to(np.int64(7), 4) if alike else each
    macs = np.broadcast_to(column[:, None], (4, LAYERS))
    heads = np.zeros((len(READOUTS), LAYERS), dtype=np.bool_)
    heads[FULL] = True
    costs = ProbeCosts(heads, np.ones(LAYERS, dtype=np.bool_), macs)
    work = derive_work(
        point(MONOTONE.name), positions, depth, histogram_of(depth), costs, np.zeros(LAYERS, dtype=np.int64)
    )
    asked_at_3 = each[:2].sum()  # two tokens ran beyond layer 2
    assert work.readout_macs[FULL].tolist() == [0, each.sum(), asked_at_3, 0, 0, 0, 0]
