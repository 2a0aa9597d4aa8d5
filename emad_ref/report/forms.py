"""How the page writes numbers: the one place where it turns a value of ``report.json`` into text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emad_ref.report.tables import ABSENT, claim_rows


def percent(share: float | None, digits: int = 1, *, signed: bool = False) -> str:
    """0.1234 → ``12.3 %``; a share that rounds to zero has no sign."""
    return ABSENT if share is None else f"{100 * share:{'+' if signed else ''}z.{digits}f} %"


def rise(share: float | None) -> str:
    """A rise of perplexity: ``+0.07 %``, from 10 % on with fewer digits."""
    return percent(share, 2 if share is None or abs(share) < 0.1 else 1 if abs(share) < 1 else 0, signed=True)


def between(interval: Sequence[float] | None) -> str:
    """95 % interval of a rise: ``[+0.03 %, +0.11 %]``."""
    return ABSENT if interval is None else f"[{rise(interval[0])}, {rise(interval[1])}]"


def number(value: float | None, digits: int = 4) -> str:
    """To so many significant digits."""
    return ABSENT if value is None else f"{value:z.{digits}g}"


def layers(value: float | None) -> str:
    """A mean depth."""
    return ABSENT if value is None else f"{value:.2f}"


def answered(claim: Mapping[str, Any]) -> dict[str, str]:
    """``estimate``, ``[95 %]`` and ``threshold`` of a verdict, as every table writes them."""
    (row,) = claim_rows([claim])
    return {name: row[name].text for name in ("estimate", "[95 %]", "threshold")}
