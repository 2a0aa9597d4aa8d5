"""The front of a family: what it loses at most at exactly a given saving, by mixing two of its points (METHODS).

A decoder that gives each document to point A with probability w and to point B otherwise is itself a decoder. It saves
and loses what A and B do, weighted by w; so what a family can do is the lower convex hull of

    (net saving, mean loss)   over its points, full depth among them,

and two families can be compared at exactly the same net FLOPs. The hull is chosen on one split. On another its points
have other savings: w there follows from costs alone, never from losses.

    saving    1 − Σ FLOPs / Σ FLOPs of full depth, over documents; FLOPs charge everything executed
    loss      Σ loss / Σ tokens, over documents; nats where perplexity is compared, next tokens told wrong otherwise

Everything here is an array over draws of documents: a bootstrap chooses the hull anew in each. SciPy's ``ConvexHull``
takes one set of points, not thousands of small ones; gift wrapping takes a step of all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.record import Bools, Floats

Places = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Sheet:
    """What the points of a family did on one split; the first point is full depth.

    ``loss``, ``flops`` float64 [documents, points]; ``tokens`` [documents].

    Raises:
        BadArgument: columns of other lengths, no document, a loss that is not finite.
    """

    loss: Floats
    flops: Floats
    tokens: Floats

    def __post_init__(self) -> None:
        documents, points = self.loss.shape
        if self.flops.shape != (documents, points) or self.tokens.shape != (documents,) or not documents:
            shapes = self.loss.shape, self.flops.shape, self.tokens.shape
            raise BadArgument("loss, flops, tokens", shapes, "[documents, points] twice and [documents], one at least")
        if not np.isfinite(self.loss).all():
            lost = int(np.flatnonzero(~np.isfinite(self.loss).all(axis=0))[0])
            raise BadArgument("loss", f"infinite at point {lost}", "finite losses", "compare next tokens told right")

    def drawn(self, counts: Floats) -> tuple[Floats, Floats]:
        """(savings, losses), both [draws, points], of samples with ``counts`` [draws, documents] of each document."""
        spent = counts @ self.flops
        return 1 - spent / spent[:, :1], counts @ self.loss / (counts @ self.tokens)[:, None]

    @property
    def whole(self) -> tuple[Floats, Floats]:
        """(savings, losses), both [points], of the split as it is.

        Column by column, and not as a product of matrices, whose last bit depends on how many columns there are: points
        of the same decisions save the same in every family.
        """
        spent = self.flops.sum(axis=0)
        return 1 - spent / spent[0], self.loss.sum(axis=0) / self.tokens.sum()


@dataclass(frozen=True, eq=False)
class Mixtures:
    """One mixture per draw: point ``first`` with probability ``share``, else point ``second``; all [draws]."""

    first: Places
    second: Places
    share: Floats

    def of(self, values: NDArray[Any]) -> Floats:
        """[draws, …] expectation of ``values`` [points, …]."""
        share = self.share.reshape(-1, *(1,) * (values.ndim - 1))
        mixed: Floats = share * values[self.first] + (1 - share) * values[self.second]
        return mixed

    def at(self, values: Floats) -> Floats:
        """[draws] expectation of ``values`` [draws, points], of each draw its own."""
        draw = np.arange(len(self.share))
        mixed: Floats = self.share * values[draw, self.first] + (1 - self.share) * values[draw, self.second]
        return mixed


def lower_hulls(savings: Floats, losses: Floats) -> Bools:
    """Which points are corners of the lower convex hull of (saving, loss) in each draw; all [draws, points].

    From full depth, the first point, which every family can fall back to, to the point that saves most, always along
    the flattest line; of points on one line the farthest, of those the one that loses least, where rounded slopes hide
    it, and of points in one place the first. What saves nothing is none.
    """
    draw, corner = np.arange(len(savings)), np.zeros(savings.shape, dtype=np.bool_)
    here = np.zeros(len(savings), dtype=np.intp)
    while True:
        corner[draw, here] = True
        right = savings - savings[draw, here][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.where(right > 0, (losses - losses[draw, here][:, None]) / right, np.inf)
        flattest = slope.min(axis=1)
        going = np.isfinite(flattest)
        if not going.any():
            return corner
        along = np.where(slope == flattest[:, None], right, -np.inf)
        farthest = along == along.max(axis=1)[:, None]
        here = np.where(going, np.where(farthest, losses, np.inf).argmin(axis=1), here)


def mixtures(corners: Bools, savings: Floats, saving: Floats) -> Mixtures:
    """Of ``corners`` [draws, points] the two nearest on either side of ``saving`` [draws], mixed to save exactly that.

    ``savings`` [draws, points] of the split on which the mixture decodes; no draw's corners may all save less.
    """
    target = saving[:, None]
    below = np.where(corners & (savings <= target), savings, -np.inf)
    above = np.where(corners & (savings >= target), savings, np.inf)
    first, second = below.argmax(axis=1), above.argmin(axis=1)
    less, more = below.max(axis=1), above.min(axis=1)
    assert np.isfinite(less).all(), "full depth is a corner, and saves nothing"
    assert np.isfinite(more).all(), "a saving that the corners do not reach"
    apart = more - less
    share = np.where(apart > 0, (more - saving) / np.where(apart > 0, apart, 1.0), 1.0)
    return Mixtures(first, second, share)


@dataclass(frozen=True, eq=False)
class Mixture:
    """Document by document what a mixture loses and costs: ``loss``, ``flops`` [documents]; ``share`` is of the first.

    ``name``: of both points with their shares, or of the one that has all documents.
    """

    name: str
    share: float
    loss: Floats
    flops: Floats


@dataclass(frozen=True, eq=False)
class Front:
    """A family's front: ``corners`` bool [points] chosen on one split, what they do on ``sheet``, another.

    ``names`` [points].
    """

    names: tuple[str, ...]
    corners: Bools
    sheet: Sheet

    @property
    def savings(self) -> Floats:
        """[points] net, on the split that is judged."""
        savings, _ = self.sheet.whole
        return savings

    @property
    def reach(self) -> float:
        """The most that any corner saves."""
        return float(np.max(self.savings, where=self.corners, initial=0.0))

    def mixed(self, saving: float) -> Mixtures:
        """The two corners and their shares that save exactly ``saving``.

        Raises:
            BadArgument: more than any corner saves, or less.
        """
        if not 0 <= saving <= self.reach:
            raise BadArgument("saving", saving, f"a saving in 0–{self.reach:.4f}", "the corners reach no other")
        return mixtures(self.corners[None], self.savings[None], np.array([saving]))

    def mixture_at(self, saving: float) -> Mixture:
        """The mixture that saves exactly ``saving``; raises as ``mixed``."""
        mixed = self.mixed(saving)
        (loss,), (flops,) = (mixed.of(values.T) for values in (self.sheet.loss, self.sheet.flops))
        return Mixture(self.named(mixed), float(mixed.share[0]), loss, flops)

    def named(self, mixed: Mixtures) -> str:
        """e.g. ``38% full depth, 62% emad m=0.20``."""
        share: float = mixed.share[0]
        first, second = self.names[int(mixed.first[0])], self.names[int(mixed.second[0])]
        if share in (0.0, 1.0) or first == second:
            return first if share == 1.0 else second
        return f"{share:.1%} {first}, {1 - share:.1%} {second}"


def front(names: Sequence[str], chosen_on: Sheet, judged_on: Sheet) -> Front:
    """The front chosen on one split, as it stands on another."""
    savings, losses = chosen_on.whole
    (corners,) = lower_hulls(savings[None], losses[None])
    return Front(tuple(names), corners, judged_on)
