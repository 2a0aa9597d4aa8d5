"""What a decoder once did, held against what one does now: its tokens, its depths, and how near each decision was.

Beside every new token stand two distances, taken when it was recorded:

margin   logits between the two best that were shown for it; none where it was drawn, and not chosen
room     from the nearest signal that was compared for it to that signal's threshold; none where no signal was read

Machines sum in different orders. So a row may part from its golden at a token whose margin lies within the tolerance,
or where a room at it or before it does: from there on it is another text, and is not compared. No lens is asked, so
this holds for schedules, too, whose logits are not the full model's (state copying).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emad_ref.audit.finding import Finding, excused
from emad_ref.audit.rule import headroom
from emad_ref.errors import EmadError
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import PROMPT, Floats, Ints, Record

CHECK = "golden"
DIGITS = 4  # significant ones of a distance: it is held against a tolerance, not against another distance


class BadGolden(EmadError):
    """A stored golden that is not what one holds."""


@dataclass(frozen=True, eq=False)
class Taken:
    """``token``, ``depth`` int64 [rows, new]; ``margin``, ``room`` float64 [rows, new], inf where there is none.

    ``depth`` is whatever else was decided about the token: of a pair, which model emitted it.
    """

    token: Ints
    depth: Ints
    margin: Floats
    room: Floats

    def to_json(self) -> dict[str, Any]:
        return {
            "token": self.token.tolist(),
            "depth": self.depth.tolist(),
            "margin": [[_rounded(value) for value in row] for row in self.margin],
            "room": [[_rounded(value) for value in row] for row in self.room],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Taken:
        """Raises BadGolden."""
        try:
            token, depth = (np.array(stored[name], dtype=np.int64) for name in ("token", "depth"))
            # None, which JSON has for infinity, reads as NaN
            margin, room = (np.array(stored[name], dtype=np.float64) for name in ("margin", "room"))
            taken = cls(token, depth, *(np.where(np.isnan(each), np.inf, each) for each in (margin, room)))
        except (KeyError, TypeError, ValueError) as error:
            raise BadGolden(
                f"a golden without token, depth, margin and room by row ({error}); record it anew"
            ) from None
        if len({part.shape for part in (taken.token, taken.depth, taken.margin, taken.room)}) > 1:
            raise BadGolden("parts of different sizes; record it anew")
        return taken


def key_of(fingerprint: str, dtype: str, corpus: str, seed: int, kind: str, drawn_by: str = "") -> str:
    """The id of a golden; ``drawn_by``: the release whose generator drew its tokens."""
    return f"{fingerprint}-{dtype}-{corpus}-seed-{seed}-{kind}" + (f"-{drawn_by}" if drawn_by else "")


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None


# ---------------------------------------------------------------- taking


def depths(record: Record) -> Ints:
    """[rows, new] the depth of each step that emitted a token. Rows of equal length."""
    return np.stack([record.tokens.depth[_decided(record, row)] for row in range(len(record.emitted))])


def rooms(record: Record, point: OperatingPoint) -> Floats:
    """[rows, new] distance of the nearest signal read to its threshold; ``point`` has no bins."""
    return np.stack([_room(record.signal[_decided(record, row)], point) for row in range(len(record.emitted))])


def _room(signal: Floats, point: OperatingPoint) -> Floats:
    room, _ = headroom(point, signal, np.zeros(len(signal), dtype=np.int64))
    nearest: Floats = np.abs(room).min(axis=1)  # −inf where nothing is decided
    return nearest


def _decided(record: Record, row: int) -> Ints:
    places = record.tokens.kept_of(row)
    decided: Ints = places[record.tokens.phase[places] != PROMPT]
    return decided


def margins(decoder: Decoder, prompts: Sequence[Prompt], emitted: Sequence[Ints]) -> Floats:
    """[rows, new] logits between the two best that ``decoder`` shows where each of ``emitted`` was chosen."""
    session, step = decoder.start(prompts)
    shown = [step.logits[:, -1]]
    for column in np.stack(emitted)[:, :-1].T:
        shown.append(session.feed(column[:, None]).logits[:, -1])
    session.close()
    best = np.sort(np.stack(shown, axis=1), axis=-1)
    gap: Floats = best[..., -1] - best[..., -2]
    return gap


# ---------------------------------------------------------------- comparing


def thresholds_of(point: OperatingPoint) -> dict[str, Any]:
    """What decides depths under ``point``, as a golden keeps it."""
    return {"probes": list(point.probes), "thresholds": [list(row) for row in point.thresholds]}


def moved(golden: Any, found: dict[str, Any]) -> float:
    """By how much a threshold of ``found`` differs from the ``golden`` one, at most; ∞ where they are not alike.

    Thresholds that are quantiles of a model's own signals end in the last bits of the processor that took them.
    """
    if not isinstance(golden, dict) or golden.keys() != found.keys() or golden["probes"] != found["probes"]:
        return math.inf
    before, now = ([value for row in each["thresholds"] for value in row] for each in (golden, found))
    if len(before) != len(now):
        return math.inf
    # equal ones first: of two infinite ones there is no difference
    return max((0.0 if a == b else abs(a - b) for a, b in zip(before, now, strict=True)), default=0.0)


def same_as(golden: Taken, found: Taken, tolerance: float, noise: float = 1.0, *, declared: float = 0.0) -> Finding:
    """Whether ``found`` did what ``golden`` says, up to its ties.

    ``tolerance`` of a logit; ``noise`` of a signal, in multiples of it. ``declared``: noise that whoever made ``found``
    declares; beyond ``tolerance`` it takes its place, and every row may part at a tie.
    """
    limit, tolerance = excused(tolerance, declared)
    if found.token.shape != golden.token.shape:
        complaint = f"{found.token.shape} rows and new tokens, but the golden holds {golden.token.shape}"
        return Finding(CHECK, False, complaint, 0, 0)
    differs, ties = (found.token != golden.token) | (found.depth != golden.depth), 0
    near = np.logical_or.accumulate(golden.room <= noise * tolerance, axis=1)
    for row in np.flatnonzero(differs.any(axis=1)).tolist():
        at = int(np.argmax(differs[row]))
        close = found.depth[row, at] == golden.depth[row, at] and golden.margin[row, at] <= 2 * tolerance
        if not (close or near[row, at]):
            return Finding(CHECK, False, _parting(golden, found, row, at), golden.token.size, ties)
        ties += 1
    if ties > max(1, limit * golden.token.size):
        complaint = f"{ties} of {len(differs)} rows part from the golden at a tie: that many are no longer rounding"
        return Finding(CHECK, False, complaint, golden.token.size, ties)
    said = f"{ties} of {len(differs)} rows part from the golden at a tie" if ties else "token by token"
    return Finding(CHECK, True, said, golden.token.size, ties)


def _parting(golden: Taken, found: Taken, row: int, at: int) -> str:
    near = golden.room[row, : at + 1].min()
    return (
        f"row {row}, new token {at}: {found.token[row, at]} ({found.depth[row, at]}), but the golden has "
        f"{golden.token[row, at]} ({golden.depth[row, at]}), by a margin of {golden.margin[row, at]:.2g} logits and "
        f"with no signal nearer to its threshold than {near:.2g}"
    )
