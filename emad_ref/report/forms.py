"""How the page writes numbers: as everything else does (``verdict.numbers``), by what they are on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emad_ref.report.tables import claim_rows
from emad_ref.verdict import numbers

RISE = "relative rise"


def percent(share: float | None, digits: int = 1) -> str:
    """0.1234 → ``12.3 %``; a share that rounds to zero has no sign."""
    return numbers.percent(share, f"z.{digits}f")


def rise(share: float | None) -> str:
    """A rise of perplexity: ``+0.07 %``."""
    return numbers.value(share, RISE)


def between(interval: Sequence[float] | None) -> str:
    """95 % interval of a rise: ``[+0.03 %, +0.11 %]``."""
    return numbers.interval(interval, RISE)


def number(value: float | None, digits: int = 4) -> str:
    """To so many significant digits."""
    return numbers.number(value, f"z.{digits}g")


def layers(value: float | None) -> str:
    """A mean depth."""
    return numbers.number(value, ".2f")


def answered(claim: Mapping[str, Any]) -> dict[str, str]:
    """``estimate``, ``[95 %]`` and ``threshold`` of a verdict, as every table writes them."""
    (row,) = claim_rows([claim])
    return {name: row[name].text for name in ("estimate", "[95 %]", "threshold")}
