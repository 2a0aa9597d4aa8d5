"""Has the text moved? Signs of documents (``screening.signs``) at calibration, and now, as two samples.

A guarantee is about documents drawn like the calibration documents; that fresh ones are not shows before any loss is
known, for full depth is not run. Energy distance between documents, each sign in standard deviations of both samples
together (Székely & Rizzo 2013),

    E = 2·mean |x − y| − mean |x − x′| − mean |y − y′|,    x calibration, y fresh

with its p-value from permutations of the documents: exact whatever their distribution, so that text that has not moved
is called moved at most with probability ε. Which signs moved is then told by Kolmogorov–Smirnov tests under Holm.

``speaks`` means that nothing was seen, and is worth what could have been seen: the smallest shift, in standard
deviations along the direction in which calibration documents differ most, that so many fresh documents would have shown
in 80 % of draws, by splitting the calibration documents. More than one standard deviation: too little text to say.

A test for a change of what decoding shows. A text that loses more while it looks the same is beyond it; how much a
moved text loses only full depth can tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from emad_ref.errors import BadArgument
from emad_ref.record import Floats
from emad_ref.screening.signs import Signs
from emad_ref.verdict.holm import holm

ERROR, POWER = 0.05, 0.8
PERMUTATIONS, DRAWS = 1999, 400
COARSEST = 1.0  # standard deviations: who could not have seen so much has seen too little
SHIFTS = np.round(np.geomspace(0.1, 3.0, 18), 2)
ENTRIES = 2**20  # distances gathered at a time


class Shift(NamedTuple):
    """A sign, its mean at calibration and now, by how many standard deviations of calibration, and Holm's p."""

    name: str
    before: float
    now: float
    deviations: float
    p: float


@dataclass(frozen=True)
class Moved:
    """``state``: ``speaks``, ``moved`` or ``too little text``.

    ``documents`` fresh ones of ``text`` against ``reference`` of ``calibration``; ``p`` of "nothing moved", ``error``
    ε. ``smallest``: shift that would have been seen in 80 % of draws, in standard deviations; None: none up to 3.
    ``shifts``: of every sign, the most telling first.
    """

    state: str
    text: str
    calibration: str
    documents: int
    reference: int
    p: float
    error: float
    smallest: float | None
    shifts: tuple[Shift, ...]

    @property
    def statement(self) -> str:
        """What was found and what it is worth, for a reader who reads nothing else."""
        seen = f"{self.documents} documents of {self.text} beside {self.reference} of {self.calibration}"
        if self.state == "moved":
            first = self.shifts[0]
            return (
                f"The text has moved (p = {self.p:.2g}; {seen}): the guarantee does not speak of it. Most of all "
                f"{first.name}: {first.before:.3g} at calibration, {first.now:.3g} now, "
                f"{first.deviations:+.1f} standard deviations of a document."
            )
        if self.state == "speaks":
            return (
                f"Nothing is seen to have moved (p = {self.p:.2g}; {seen}): the guarantee still speaks. A shift of "
                f"{self.smallest:g} standard deviations of a document would have been seen in {POWER:.0%} of draws."
            )
        could = "none up to 3" if self.smallest is None else f"{self.smallest:g}"
        return (
            f"Too little text to say (p = {self.p:.2g}; {seen}): the smallest shift that would have been seen in "
            f"{POWER:.0%} of draws is {could} standard deviations of a document, {COARSEST:g} at most is needed."
        )


def moved(reference: Signs, fresh: Signs, *, error: float = ERROR, seed: int = 0) -> Moved:
    """Compare fresh documents with those of calibration, by the signs that both have.

    ``seed``: of permutations and simulated draws.

    Raises:
        BadArgument: no sign in common, fewer than four calibration documents or no fresh one, ε out of range.
    """
    if not 0 < error < 1:
        raise BadArgument("error", error, "a number strictly between 0 and 1", "ε is the chance of a false alarm")
    if len(reference) < 4:
        raise BadArgument("reference", f"{len(reference)} documents", "at least 4", "screen the model on more text")
    if len(fresh) < 1:
        raise BadArgument("fresh", "no document", "at least 1")
    names = [name for name in reference.names if name in fresh.names]
    if not names:
        raise BadArgument("fresh.names", fresh.names, f"some of {', '.join(reference.names)}", "use the same point")
    before, now = (_columns(signs, names) for signs in (reference, fresh))
    rng = np.random.default_rng(seed)
    p = _p_value(before, now, rng)
    smallest = _smallest(before, len(now), error, rng)
    state = "moved" if p <= error else "too little text" if (smallest or math.inf) > COARSEST else "speaks"
    shifts = _shifts(names, before, now)
    return Moved(state, fresh.text, reference.text, len(now), len(before), p, error, smallest, shifts)


def _columns(signs: Signs, names: list[str]) -> Floats:
    return np.asarray(signs.values.values, dtype=np.float64)[:, [signs.names.index(name) for name in names]]


def _standard(values: Floats) -> Floats:
    """Each column in its own standard deviations; 0 where nothing is known, columns that never vary left out."""
    varies = np.array([len(np.unique(column[~np.isnan(column)])) > 1 for column in values.T])
    values = values[:, varies]
    with np.errstate(invalid="ignore"):
        scaled = (values - np.nanmean(values, axis=0)) / np.nanstd(values, axis=0)
    return np.asarray(np.nan_to_num(scaled), dtype=np.float64)


def _distances(left: Floats, right: Floats) -> Floats:
    return np.asarray(np.sqrt(((left[:, None] - right[None]) ** 2).sum(axis=-1)))


def _energy(across: Floats, before: Floats, now: Floats, old: int, new: int) -> Floats:
    """E of ``old`` documents and ``new`` ones, from sums of distances [draws] across both and within either."""
    return np.asarray(2 * across / (old * new) - now / new**2 - before / old**2, dtype=np.float64)


# ---------------------------------------------------------------- has it moved


def _p_value(before: Floats, now: Floats, rng: np.random.Generator) -> float:
    """Of "both are drawn alike", by permutations; the pool, and so every distance, is the same in all of them."""
    pool = _standard(np.concatenate([before, now]))
    if pool.shape[1] == 0 or len(now) < 2:  # nothing varies; or one document, which has no distance of its own
        return 1.0
    between = _distances(pool, pool)
    sums, total, old, new = between.sum(axis=1), between.sum(), len(before), len(now)

    def energy(x: NDArray[Any], y: NDArray[Any], axis: int) -> NDArray[Any]:
        """E of documents numbered ``x`` [..., old] and ``y`` [..., new], from the sums over the smaller side."""
        side = y if new <= old else x
        inside = between[side[..., :, None], side[..., None, :]].sum(axis=(-1, -2))
        across = sums[side].sum(axis=-1) - inside
        outside = total - 2 * across - inside
        within = (outside, inside) if new <= old else (inside, outside)
        return _energy(across, *within, old, new)

    batch = max(1, ENTRIES // min(old, new) ** 2)
    numbers = np.arange(old + new)
    found = stats.permutation_test(
        (numbers[:old], numbers[old:]), energy, vectorized=True, n_resamples=PERMUTATIONS, batch=batch,
        alternative="greater", axis=-1, rng=rng,
    )  # fmt: skip
    return float(found.pvalue)


def _shifts(names: list[str], before: Floats, now: Floats) -> tuple[Shift, ...]:
    """Every sign's shift, the smallest p first."""
    rows, p = [], []
    for name, x, y in zip(names, before.T, now.T, strict=True):
        x, y = x[~np.isnan(x)], y[~np.isnan(y)]
        if not len(x) or not len(y):  # reached in one of the texts alone, or in none
            continue
        spread, gap = float(x.std()), float(y.mean() - x.mean())
        deviations = gap / spread if spread > 0 else math.copysign(math.inf, gap) if gap else 0.0
        rows.append((name, float(x.mean()), float(y.mean()), deviations))
        p.append(float(stats.ks_2samp(x, y).pvalue))
    found = [Shift(*row, p) for row, p in zip(rows, holm(p), strict=True)]
    return tuple(sorted(found, key=lambda shift: (shift.p, -abs(shift.deviations))))


# ---------------------------------------------------------------- what could have been seen


def _smallest(before: Floats, fresh: int, error: float, rng: np.random.Generator) -> float | None:
    """The least of ``SHIFTS`` that so many documents show in 80 % of draws; None: not the largest.

    Calibration documents are split, again and again, into those that stay and ``fresh`` others (half of them, if there
    are no more) that all move along the first principal direction: what stays is fewer than there are, so that more can
    be seen than is said.
    """
    scaled = _standard(before)
    if scaled.shape[1] == 0 or fresh < 2:
        return None
    n = min(fresh, len(scaled) // 2)
    drawn = np.argsort(rng.random((DRAWS, len(scaled))), axis=1)[:, :n]
    moving = np.zeros((DRAWS, len(scaled)))
    np.put_along_axis(moving, drawn, 1.0, axis=1)
    staying, kept = 1 - moving, len(scaled) - n
    still = _distances(scaled, scaled)
    within = [((side @ still) * side).sum(axis=1) for side in (staying, moving)]  # no shift changes it
    _, spread, directions = np.linalg.svd(scaled, full_matrices=False)
    step = directions[0] * spread[0] / np.sqrt(len(scaled))  # one standard deviation

    def energies(shift: float) -> Floats:
        across = ((staying @ _distances(scaled, scaled + shift * step)) * moving).sum(axis=1)
        return _energy(across, within[0], within[1], kept, n)

    critical = np.quantile(energies(0.0), 1 - error, method="higher")
    for shift in SHIFTS:
        if (energies(shift) > critical).mean() >= POWER:
            return float(shift)
    return None
