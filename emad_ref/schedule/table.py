"""All schedules by name: the one place where a point's ``schedule`` becomes what it means."""

from __future__ import annotations

from emad_ref.point import OperatingPoint, ScheduleName
from emad_ref.schedule.chunked import CHUNKED
from emad_ref.schedule.copying import COPYING
from emad_ref.schedule.free import FREE_DEFERRED, FREE_EAGER
from emad_ref.schedule.interface import Schedule
from emad_ref.schedule.monotone import MONOTONE
from emad_ref.schedule.positional import POSITIONAL
from emad_ref.schedule.translated import TRANSLATED

SCHEDULES: dict[ScheduleName, Schedule] = {
    schedule.name: schedule
    for schedule in (MONOTONE, FREE_EAGER, FREE_DEFERRED, COPYING, TRANSLATED, POSITIONAL, CHUNKED)
}


def schedule_of(point: OperatingPoint) -> Schedule:
    """The schedule of ``point``."""
    return SCHEDULES[point.schedule]
