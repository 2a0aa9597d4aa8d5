"""Every schedule declares its properties, and the checks of an operating point agree with the table."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from emad_ref.point import RULELESS, SCHEDULE_FIELDS, STOPS_BY_TOKEN, OperatingPoint, ScheduleName
from emad_ref.schedule.schedules import SCHEDULES, TokenDepthCap, TokenPositions, get_point_schedule

LAYERS, PROBES = 6, (2, 4)
OPTIONS: dict[str, Any] = {"period": 4, "floor": 2, "translators": "f00d"}
CHANGED = {"period": 5, "floor": 3}  # fields that change the admitted depths
EXACT = [name for name in SCHEDULES if name not in ("copying", "translated")]


def point(name: ScheduleName, **changes: Any) -> OperatingPoint:
    """Return a point of the schedule with the fields it needs, and probes if it has a rule."""
    options = {field: OPTIONS[field] for field in SCHEDULE_FIELDS[name]} | changes
    if name in RULELESS:
        return OperatingPoint(name, "test", LAYERS, LAYERS, schedule=name, **options)
    return OperatingPoint(name, "test", LAYERS, LAYERS, PROBES, ((1.0, 1.0),), name, **options)


def trail_of(name: ScheduleName, fires: list[int], first: int, **changes: int) -> tuple[list[int], list[TokenDepthCap]]:
    """Return (depths, admissions) of a sequence after a prompt of ``first`` tokens whose rule fires at these layers."""
    chosen, trail, admitted = point(name, **changes), [LAYERS] * first, []
    for fire in fires:
        admitted.append(get_point_schedule(chosen).admit(chosen, trail, first, len(trail)))
        trail.append(admitted[-1].cap if admitted[-1].fixed else min(admitted[-1].cap, fire))
    return trail[first:], admitted


FIRES = st.lists(st.sampled_from((*PROBES, LAYERS)), min_size=1, max_size=14)


# ---------------------------------------------------------------- the table and the names in other modules


def test_the_table_has_every_name_a_point_may_have_in_the_same_order() -> None:
    assert tuple(SCHEDULES) == tuple(SCHEDULE_FIELDS) == get_args(ScheduleName)
    assert all(name == schedule.name for name, schedule in SCHEDULES.items())


def test_points_without_a_rule_are_those_of_schedules_that_ask_none() -> None:
    assert tuple(name for name, schedule in SCHEDULES.items() if schedule.ruleless) == RULELESS
    for name, schedule in SCHEDULES.items():
        held = [one.fixed for one in trail_of(name, [LAYERS] * 9, 2)[1]]
        assert schedule.ruleless == all(held)
        assert (name in STOPS_BY_TOKEN) == (not any(held)), "a confidence rule must read every token"


@pytest.mark.parametrize("field", OPTIONS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_point_has_the_fields_that_its_schedule_reads_and_no_others(name: ScheduleName, field: str) -> None:
    reads = field in SCHEDULE_FIELDS[name]
    with pytest.raises(BadArgument, match=f"^{field}="):
        point(name, **{field: None if reads else OPTIONS[field]})  # type: ignore[dict-item]  # that is what is refused
    if reads and field in CHANGED:
        falling = [LAYERS, 4, 2, 4, LAYERS, 2, 4, 2, LAYERS]
        assert trail_of(name, falling, 2) != trail_of(name, falling, 2, **{field: CHANGED[field]})


@pytest.mark.parametrize("name", RULELESS)
def test_a_schedule_without_a_rule_refuses_probes_and_is_not_fixed(name: ScheduleName) -> None:
    options = {field: OPTIONS[field] for field in SCHEDULE_FIELDS[name]}
    with pytest.raises(BadArgument, match=f"^probes=.*none under the {name} schedule"):
        OperatingPoint(name, "test", LAYERS, LAYERS, PROBES, ((1.0, 1.0),), name, **options)
    assert not point(name).has_fixed_depth


# ---------------------------------------------------------------- admission


@given(fires=FIRES, first=st.integers(0, 3))
@pytest.mark.parametrize("name", SCHEDULES)
def test_depth_rises_only_where_the_table_says_so(name: ScheduleName, fires: list[int], first: int) -> None:
    depths = trail_of(name, fires, first)[0]
    rises = bool((np.diff(depths) > 0).any())
    assert not (SCHEDULES[name].never_rises and rises)
    assert all(1 <= depth <= LAYERS for depth in depths)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_may_rise_does(name: ScheduleName) -> None:
    depths = trail_of(name, [2] * 4 + [LAYERS] * 4, 1)[0]
    assert SCHEDULES[name].never_rises != bool((np.diff(depths) > 0).any())


def test_what_each_schedule_admits() -> None:
    fires = [4, 2, LAYERS, 4, 2, LAYERS]
    caps = {name: [(one.cap, one.fixed) for one in trail_of(name, fires, 2)[1]] for name in SCHEDULES}
    free = [(LAYERS, False)] * 6
    assert caps == {
        "monotone": [(6, False), (4, False), (2, False), (2, False), (2, False), (2, False)],
        "free_eager": free,
        "free_deferred": free,
        "copying": free,
        "translated": free,
        "positional": [(6, True), (5, True), (4, True), (3, True), (2, True), (2, True)],
        "chunked": [(6, False), (4, True), (4, True), (4, True), (6, False), (2, True)],
    }


# ---------------------------------------------------------------- replay


@given(rows=st.lists(FIRES, min_size=1, max_size=3), first=st.integers(0, 3))
@pytest.mark.parametrize("name", EXACT)
def test_replayed_depths_are_what_is_admitted_token_by_token(
    name: ScheduleName, rows: list[list[int]], first: int
) -> None:
    """Sequences of unequal length share a grid; each result equals that of the sequence alone."""
    grid = np.full((max(map(len, rows)), len(rows)), LAYERS, dtype=np.int16)
    for column, fires in enumerate(rows):
        grid[: len(fires), column] = fires
    chosen = point(name)
    SCHEDULES[name].require_depth_resolver()(chosen, grid)
    for column, fires in enumerate(rows):
        assert grid[: len(fires), column].tolist() == trail_of(name, fires, first)[0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rule_is_asked_about_the_tokens_that_are_not_held(name: ScheduleName) -> None:
    admitted = trail_of(name, [4] * 11, 2)[1]
    asked = SCHEDULES[name].reads_rule_at(point(name), np.arange(11))
    assert asked.tolist() == [not one.fixed for one in admitted]


def test_copying_is_not_replayed_and_says_why() -> None:
    assert [name for name, schedule in SCHEDULES.items() if schedule.resolve_depths is None] == [
        "copying",
        "translated",
    ]
    with pytest.raises(BadArgument, match=r"'translated'.*an exact schedule.*translated states are decoded"):
        SCHEDULES["translated"].require_depth_resolver()
    with pytest.raises(BadArgument, match=r"'copying'.*an exact schedule.*copied states are decoded, not replayed"):
        SCHEDULES["copying"].require_depth_resolver()


# two sequences of which the first starts at position 3, the second at 0; ceiling 3 of 4 layers
POSITIONS = TokenPositions(np.array([3, 4, 5, 6, 0, 1]), np.array([0, 4, 6]))
DEPTH = np.array([3, 1, 2, 1, 1, 2])
ALL, FIRST, NONE = [4, 5, 6, 7, 1, 2], [4, 0, 0, 0, 0, 0], [0] * 6
RAN = {  # per layer 1 … 4: keys of each token, worked out by hand
    "once": [ALL, [4, 0, 6, 0, 0, 2], FIRST, NONE],
    "eagerly": [ALL, ALL, FIRST, NONE],
    # layer 2: the second token runs with the third, against its 6 keys; the fifth with the sixth, against 2; the
    # fourth never
    "deferred": [ALL, [4, 6, 6, 0, 2, 2], FIRST, NONE],
}
ABOVE = {
    1: [False] * 6,
    2: [False, True, False, True, True, False],
    3: [False, True, True, True, True, True],
    4: [False] * 6,
}
FILLED: dict[str, dict[int, list[bool]]] = {  # layer → tokens of which it writes K and V alone
    "free_eager": {3: [False, True, True, True, True, True]},
    "copying": ABOVE,
    "translated": ABOVE,
}
WAYS: dict[ScheduleName, str] = {
    "monotone": "once",
    "positional": "once",
    "copying": "once",
    "translated": "once",
    "free_eager": "eagerly",
    "free_deferred": "deferred",
    "chunked": "deferred",
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_work_that_depths_imply(name: ScheduleName) -> None:
    ran = [SCHEDULES[name].layer_work(POSITIONS, DEPTH, layer, 3) for layer in range(1, 5)]
    assert [each.keys.tolist() for each in ran] == RAN[WAYS[name]]
    filled = {layer: each.fills.tolist() for layer, each in enumerate(ran, start=1) if each.fills is not None}
    assert filled == FILLED.get(name, {})


def test_places_count_within_their_sequences() -> None:
    assert POSITIONS.index_among_decided_tokens.tolist() == [0, 1, 2, 3, 0, 1]
    assert POSITIONS.sequence_end_by_token.tolist() == [4, 4, 4, 4, 6, 6]
