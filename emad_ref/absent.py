"""``Absent``: there is no value, and this is why.

A function that may have none returns its value or ``Absent``; ``isinstance(found, Absent)`` tells them apart. Never
None beside a sentence, a tuple of both, or a sentence in place of the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lacking = Literal["data", "premise"]


@dataclass(frozen=True)
class Absent:
    """No value, for this ``reason``: a sentence without a full stop, as reports print it.

    ``lacking``: ``data``, an instrument or a text that somebody could bring, or a ``premise`` that does not hold here.
    """

    reason: str
    lacking: Lacking = "data"


def reason_if_absent(found: object) -> str:
    """The reason of an ``Absent``, for texts and files; "" for anything else."""
    return found.reason if isinstance(found, Absent) else ""
