"""Guarantee of an exit: the loosest threshold whose mean loss on text like the calibration text is bounded.

    P(E[c] ≤ δ) ≥ 1 − ε        over draws of the calibration documents; E over documents drawn like them

c is a loss of each document in 0–B:

    excess   c = clip((nll_λ − nll_full) / tokens, 0, B)    nats per token that exits added to a document's NLL
    changed  c = tokens whose greedy token differs from full depth's / tokens

Learn-then-Test (``calibration.learn_then_test``) walks thresholds from strict to loose, with p-values by betting. It
holds at finite n for independent documents of one kind, for the mean over such documents, about text that is read. It
does not hold for a single document, for other text, or for text that the model writes itself.

E[c] ≤ δ bounds the mean rise of log-perplexity over documents by δ; gains count as 0. A corpus' own rise weighs
documents by their tokens n, Σn·c / Σn = E[c] + Cov(n, c)/E[n]: at most longest/mean times δ. B clips larger losses of a
document; at most a share δ/B of documents reaches B (Markov). B = 0.2 nats per token (a document's perplexity up by 22
%, twenty times δ) is fixed before any data. No valid test certifies on fewer than ln ε / ln(1 − δ/B) = 59 documents;
betting needs 79 without any loss, about 160 if half of δ is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from emad_ref.calibration.learn_then_test import (
    betting_pvalues,
    documents_needed_to_certify,
    fixed_sequence_test,
    min_sequences_to_certify,
    simulate_certification_power,
)
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.record import Floats
from emad_ref.signals import SIGNALS
from pytest_emad.screening.settings import EXCESS_CAP_NATS
from pytest_emad.statistics.units import ByDocument


@dataclass(frozen=True)
class LossCapAndRisk:
    """A loss in 0–``cap``; ``risk``: the default δ. ``mean_text``: name of its mean."""

    name: str
    cap: float
    risk: float
    mean_text: str


EXCESS = LossCapAndRisk("excess", EXCESS_CAP_NATS, math.log(1.01), "nats per token above full depth")
CHANGED = LossCapAndRisk("changed", 1.0, 0.05, "of tokens told otherwise than at full depth")
BOUNDED_LOSSES = {each.name: each for each in (EXCESS, CHANGED)}


def excess_loss(nll_nats: ByDocument, full_nats: ByDocument, tokens: ByDocument) -> ByDocument:
    """[documents, λ] nats per token that exits added, clipped to 0–B.

    Args:
        nll_nats: [documents, λ] sums over each document's tokens at its depths; inf counts as B.
        full_nats: [documents] sums at full depth.
        tokens: [documents] decided tokens.

    Raises:
        BadArgument: of different documents, a document without tokens, or NaN.
    """
    return nll_nats.with_values(np.clip(_per_token(nll_nats, tokens, full_nats), 0.0, EXCESS.cap))


def changed_share(changed_tokens: ByDocument, tokens: ByDocument) -> ByDocument:
    """[documents, λ] share of tokens that differ from full depth's, from ``changed_tokens`` [documents, λ] counts.

    Raises:
        BadArgument: as ``excess_loss``; more changed tokens than tokens.
    """
    return changed_tokens.with_values(_per_token(changed_tokens, tokens))


def _per_token(sums: ByDocument, tokens: ByDocument, less: ByDocument | None = None) -> Floats:
    for name, other in (("tokens", tokens), *([("full_nats", less)] if less is not None else [])):
        if not np.array_equal(sums.number, other.number):
            raise BadArgument(name, len(other), f"the same {len(sums)} documents in the same order")
    if (tokens.values < 1).any():
        raise BadArgument("tokens", int(tokens.values.min()), "at least one token in every document", "leave it out")
    if less is not None and not np.isfinite(less.values).all():
        raise BadArgument("full_nats", "inf or NaN", "finite numbers", "full depth loses no token")
    base = 0.0 if less is None else less.values[:, None]
    each = (np.asarray(sums.values, dtype=np.float64) - base) / tokens.values[:, None]
    if np.isnan(each).any():
        raise BadArgument("sums", "NaN", "numbers")
    return np.asarray(each, dtype=np.float64)


ERROR = 0.05  # ε


class ThresholdTest(NamedTuple):
    """A tested threshold: its name, its mean loss over documents, and the p-value of "the risk exceeds δ".

    ``point``: ``OperatingPoint.digest`` of the threshold's point; "" of thresholds that belong to none.
    """

    name: str
    loss: float
    p: float
    point: str = ""


@dataclass(frozen=True)
class Guarantee:
    """The guarantee: its promise, threshold, number of documents, and text.

    ``loss``       one of ``BOUNDED_LOSSES``; ``cap`` B and ``risk`` δ in its unit, ``error`` ε.
    ``text``       a description of the calibration documents.
    ``tested``     thresholds from strict to loose up to the first failure; ``passed``: index of the last that passed,
                   ``chosen``; None: full depth, which needs no promise.
    ``capped``     share of calibration documents whose loss reached B, under ``chosen`` or else the strictest.
    ``power``      probability that another calibration set of this size certifies any exit, estimated at the observed
                   losses; ``needed``: documents that make it 80 %. None: none within reach.
    ``again``      probability that it certifies ``chosen`` or a looser one; None without ``chosen``.
    """

    loss: str
    cap: float
    risk: float
    error: float
    documents: int
    text: str
    tested: tuple[ThresholdTest, ...]
    passed: int | None
    capped: float
    power: float
    needed: int | None
    again: float | None

    @property
    def chosen(self) -> str | None:
        """Name of the chosen threshold; None: full depth."""
        return None if self.passed is None else self.tested[self.passed].name

    @property
    def chosen_point(self) -> str | None:
        """Digest of the chosen threshold's point; None: full depth."""
        return None if self.passed is None else self.tested[self.passed].point

    @property
    def statement(self) -> str:
        """Text of the promise and its limits."""
        if self.chosen is None:
            return f"Nothing is promised but full depth: {self._refused}."
        rise, cut = "", ""
        if self.loss == EXCESS.name:
            rise = f" (perplexity +{math.expm1(self.risk):.1%})"
            cut = f", gains counted as nothing and losses above {self.cap:g} as {self.cap:g}"
        return (
            f"With probability {1 - self.error:.0%} over draws of these {self.documents} calibration documents, "
            f"{self.chosen} costs at most {self.risk:.3g} {BOUNDED_LOSSES[self.loss].mean_text}{rise}, as a mean over "
            f"documents like those of {self.text}{cut}; nothing is promised of a single document, of text of another "
            "kind, or of text that the model goes on to write itself."
        )

    @property
    def _refused(self) -> str:
        strictest, fewest = self.tested[0], min_sequences_to_certify(self.risk / self.cap, self.error)
        if self.documents < fewest:
            return f"{self.documents} documents of {self.text} certify nothing, {fewest} are the fewest that could"
        unit = BOUNDED_LOSSES[self.loss].mean_text
        return (
            f"{strictest.name}, the strictest, costs {strictest.loss:.3g} {unit} on {self.documents} documents of "
            f"{self.text}, against {self.risk:.3g} (p = {strictest.p:.2g}, at most {self.error:g} is needed)"
        )

    def to_json(self) -> dict[str, Any]:
        """Every field by name, as built-in types."""
        return asdict(self) | {"tested": [list(tried) for tried in self.tested]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Guarantee:
        """Read the output of ``to_json``."""
        return Guarantee(**{**data, "tested": tuple(ThresholdTest(*each) for each in data["tested"])})


# ---------------------------------------------------------------- the choice


def certify_losses(
    losses: ByDocument,
    names: Sequence[str],
    kind: LossCapAndRisk = EXCESS,
    *,
    text: str,
    digests: Sequence[str] = (),
    risk: float | None = None,
    error: float = ERROR,
    seed: int = 0,
) -> Guarantee:
    """Test the thresholds from strict to loose, while each risk is shown to be at most δ.

    Args:
        losses: [documents, λ] of ``kind``, in its unit; documents drawn independently, none of them used for the lens,
            the gate or the grid.
        names: of each λ, strict to loose (``require_strict_to_loose``), in an order fixed before losses were seen.
        text: a description of these documents.
        digests: of the points of these thresholds, if they have points.
        risk: δ in the unit of ``kind``, its own by default.
        error: ε.
        seed: of the simulations of ``power`` and ``needed``.

    Raises:
        BadArgument: losses outside 0–B, no document, no threshold, another number of names, names that are not all
            different, δ or ε out of range.
    """
    delta = kind.risk if risk is None else risk
    if not 0 < delta < kind.cap:
        raise BadArgument("risk", delta, f"a number between 0 and {kind.cap:g}, both excluded", kind.mean_text)
    if not 0 < error < 1:
        raise BadArgument("error", error, "a number strictly between 0 and 1", "ε is the chance that δ is exceeded")
    values = np.asarray(losses.values, dtype=np.float64)
    if values.ndim != 2 or not values.size or values.shape[1] != len(names):
        expected = f"shape [documents, {len(names)}], at least one of each"
        raise BadArgument("losses", f"shape {values.shape}", expected, "one column per name")
    if len(set(names)) < len(names):
        raise BadArgument("names", list(names), "each once")
    if not ((values >= 0) & (values <= kind.cap)).all():  # NaN is outside
        shown = f"{values.min():g}–{values.max():g}"
        raise BadArgument("losses", shown, f"values in 0–{kind.cap:g}", "clip them to that")
    shares, tolerance = values / kind.cap, delta / kind.cap
    p, mean, n = risk_p_values(losses, delta, kind, error), values.mean(axis=0), len(values)
    walk = fixed_sequence_test(p, mean / kind.cap, n, tolerance, error)
    last = walk.index or 0  # the strictest if none passes
    return Guarantee(
        loss=kind.name,
        cap=kind.cap,
        risk=delta,
        error=error,
        documents=n,
        text=text,
        tested=tuple(
            map(ThresholdTest, names[: walk.tested], mean.tolist(), p.tolist(), digests or ("",) * len(names))
        ),
        passed=walk.index,
        capped=float((values[:, last] >= kind.cap).mean()),
        power=simulate_certification_power(shares[:, :1], n, tolerance, error, seed=seed),
        needed=documents_needed_to_certify(shares[:, :1], tolerance, error, seed=seed),
        again=None
        if walk.index is None
        else simulate_certification_power(shares[:, : last + 1], n, tolerance, error, seed=seed),
    )


def risk_p_values(losses: ByDocument, risk: float, kind: LossCapAndRisk = EXCESS, error: float = ERROR) -> Floats:
    """[λ] p-values of "the risk exceeds ``risk``", from ``losses`` [documents, λ] of ``kind``."""
    return betting_pvalues(losses.values / kind.cap, risk / kind.cap, error)


def require_strict_to_loose(points: Sequence[OperatingPoint]) -> None:
    """Check that points are one rule from strict to loose: each exits at least where the one before it exits.

    Raises:
        BadArgument: points that differ in more than name and thresholds, or a threshold that is stricter than before.
    """
    turned = dict.fromkeys(("name", "thresholds", "margin_nats"))
    for before, after in pairwise(points):
        alike = before.to_json() | turned == after.to_json() | turned
        looser = np.greater_equal if SIGNALS[after.signal].sense == "falls" else np.less_equal
        if not alike or not looser(after.thresholds, before.thresholds).all():
            expected = f"{before.name} with thresholds that exit at least as often"
            raise BadArgument("points", after.name, expected, "order them from strict to loose before any loss is seen")
