"""Work derived from depths is the sum of what every layer runs for every token, whatever is counted once for many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emad_ref.point import OperatingPoint, ScheduleName
from emad_ref.record import FILLS, READOUTS
from emad_ref.schedule.derived import Probed, probed_by, work_at
from emad_ref.schedule.free import ran_deferred
from emad_ref.schedule.interface import Places
from emad_ref.schedule.monotone import MONOTONE
from emad_ref.schedule.table import SCHEDULES

LAYERS, CEILING, PROBES = 7, 5, (2, 3)
FULL = READOUTS.index("full")
REPLAYED: list[ScheduleName] = ["monotone", "free_eager", "free_deferred", "chunked", "copying"]
SEQUENCES = st.lists(st.lists(st.sampled_from((*PROBES, CEILING)), min_size=1, max_size=9), min_size=1, max_size=4)


def point(name: ScheduleName, ceiling: int = CEILING) -> OperatingPoint:
    period = 3 if name == "chunked" else None
    return OperatingPoint(name, "test", LAYERS, ceiling, PROBES, ((1.0, 1.0),), schedule=name, period=period)


def places_of(sequences: list[list[int]], prompt: int = 2) -> tuple[Places, np.ndarray]:
    """Where tokens of sequences of these depths stand, after a prompt each; and the depths."""
    lengths = [len(sequence) for sequence in sequences]
    position = np.concatenate([prompt + np.arange(length) for length in lengths])
    return Places(position, np.concatenate([[0], np.cumsum(lengths)])), np.concatenate(sequences)


@pytest.mark.parametrize("ceiling", [CEILING, LAYERS])
@pytest.mark.parametrize("name", REPLAYED)
@given(sequences=SEQUENCES)
@settings(max_examples=25, deadline=None)
def test_layers_that_run_alike_are_counted_as_each_by_itself(
    name: ScheduleName, ceiling: int, sequences: list[list[int]]
) -> None:
    places, depth = places_of(sequences)
    chosen, schedule = point(name, ceiling), SCHEDULES[name]
    ahead = np.zeros(LAYERS, dtype=np.int64)
    work = work_at(chosen, places, depth, probed_by(chosen, len(depth), ahead, 0), ahead)
    for layer in range(1, LAYERS + 1):
        ran = schedule.ran(places, depth, layer, ceiling)
        assert work.tokens[layer - 1] == (ran.keys > 0).sum()
        assert work.context[layer - 1] == ran.keys.sum()
        fills = 0 if ran.fills is None else ran.fills.sum()
        assert work.fills[FILLS.index(schedule.fills), layer - 1] == fills


@given(sequences=SEQUENCES, layer=st.integers(1, LAYERS))
def test_a_token_runs_with_the_next_of_its_sequence_that_goes_so_deep(sequences: list[list[int]], layer: int) -> None:
    places, depth = places_of(sequences)
    expected = []
    for sequence in sequences:
        for at in range(len(sequence)):
            later = [to for to in range(at, len(sequence)) if sequence[to] >= layer]
            expected.append(2 + later[0] + 1 if later else 0)
    assert ran_deferred(places, depth, layer, CEILING).keys.tolist() == expected


@pytest.mark.parametrize("alike", [True, False])
def test_readings_are_charged_to_whoever_is_asked(alike: bool) -> None:
    places, depth = places_of([[5, 3, 2], [2]])
    each = np.full(4, 7) if alike else np.array([1, 10, 100, 1000])
    column = np.broadcast_to(np.int64(7), 4) if alike else each
    macs = np.broadcast_to(column[:, None], (4, LAYERS))
    heads = np.zeros((len(READOUTS), LAYERS), dtype=np.bool_)
    heads[FULL] = True
    probed = Probed(heads, np.ones(LAYERS, dtype=np.bool_), macs)
    work = work_at(point(MONOTONE.name), places, depth, probed, np.zeros(LAYERS, dtype=np.int64))
    asked_at_3 = each[:2].sum()  # two tokens went past layer 2
    assert work.readout_macs[FULL].tolist() == [0, each.sum(), asked_at_3, 0, 0, 0, 0]
