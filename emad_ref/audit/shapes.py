"""Which shapes an audit asks for: drawn, so that no length or number of rows gives it away.

A decoder may be right on short prompts and wrong on long ones: a position table that ends, a buffer that wraps, a
prefill that is cut short. So lengths are drawn evenly on a logarithmic scale, from one token up, and those of a long
audit reach from beyond the first buffers to the last positions of the window.
"""

from __future__ import annotations

import numpy as np

from emad_ref.errors import BadArgument

BRIEF = 40  # tokens that an audit of many rows reads at most before it feeds: cheap, whatever the model
BEFORE = 4  # positions at most before a buffer of 2ⁿ ends
EDGE = 8  # positions from the end of the window that still count as its end


def brief(rng: np.random.Generator, rows: int, longest: int = BRIEF) -> list[int]:
    """``rows`` lengths from 1 to ``longest``, evenly on a logarithmic scale; one of several rows has a single token."""
    drawn = np.exp(rng.uniform(0, np.log(longest + 1), rows)).astype(int).tolist()
    if rows > 1:
        drawn[int(rng.integers(rows))] = 1
    return [min(max(1, int(n)), longest) for n in drawn]


def far(rng: np.random.Generator, room: int) -> list[int]:
    """Three lengths in drawn order: up to a quarter, up to three quarters, and the last ``EDGE`` of ``room`` positions.

    ``room``: positions left for prompts. Under a window of 512 that is below 128, beyond it, and near the end.

    Raises:
        BadArgument: a room too small to tell near from far.
    """
    _require_near_and_far(room)
    quarter = room // 4
    lengths = [rng.integers(quarter // 2, quarter) + 1, rng.integers(quarter, 3 * quarter) + 1]
    lengths.append(rng.integers(max(3 * quarter, room - EDGE), room) + 1)
    return [int(n) for n in rng.permutation(lengths)]


def edges(rng: np.random.Generator, room: int) -> list[int]:
    """Lengths one to ``BEFORE`` positions below 64, 128 and 256, as far as ``room`` goes: buffers grow there.

    Raises:
        BadArgument: as ``far``.
    """
    _require_near_and_far(room)
    ends = [size for size in (64, 128, 256) if size <= room] or [room]
    return [max(1, int(size - rng.integers(1, BEFORE + 1))) for size in ends]


def _require_near_and_far(room: int) -> None:
    if room < 4:
        raise BadArgument("room", room, "at least 4 positions", "this model's window is too short for audits")
