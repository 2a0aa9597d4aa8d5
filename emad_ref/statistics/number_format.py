"""How a number reads: one form per unit, in the terminal, in tables, on pages and in the message of a failing test.

Shares are fractions in data and percent where people read; a ratio carries its ×. What was not measured is a dash.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "–"
VAST = 1e6  # a million times as much: from here on a percentage is written with a power of ten

# Units whose numbers are shares, and the form of their percentage. A change shows its sign, a size does not.
# "z" in the forms: a change that rounds to zero has no sign of its own, so "-0.0 %" never shows.
SHARES = {
    "relative rise": "+z.2f",
    "accuracy drop": "z.2f",
    "score lost": "z.2f",
    "score difference": "+z.2f",
    "score gained": "+z.2f",
    "confidence − accuracy": "+z.2f",
    "net FLOP reduction": "z.1f",
    "saving": "z.1f",
    "saving lost": "z.1f",
    "|difference| of the saving": "z.2f",
    "share of block FLOPs": "z.2f",
    "share of blocks": "z.1f",
    "share of the score": "z.2f",
    "share of tokens": "z.2f",
    "share of hard tokens": "z.2f",
    "share of high-entropy tokens": "z.2f",
    "share of calibration sets": "z.2f",
}
TIMES = "× "  # how the unit of a ratio begins: "× as fast"


def value(found: float | None, unit: str) -> str:
    """A number of ``unit``, its sign of percent or × with it, the unit's words without.

    >>> value(0.0125, "relative rise"), value(1.0534, "× as fast"), value(0.01084, "nats per layer"), value(None, "")
    ('+1.25 %', '1.053×', '0.01084', '–')
    """
    if found is None:
        return ABSENT
    if unit in SHARES:
        return percent(found, SHARES[unit])
    return ratio(found) if unit.startswith(TIMES) else number(found)


def interval(bounds: Sequence[float | None] | None, unit: str) -> str:
    """``[low, high]``, each as ``value``."""
    return ABSENT if bounds is None else f"[{value(bounds[0], unit)}, {value(bounds[1], unit)}]"


def quantity(found: float | None, unit: str, bounds: Sequence[float | None] | None = None) -> str:
    """A number with its interval, where it has one, and the words of its unit.

    >>> quantity(0.535, "accuracy drop", (0.486, 0.583)), quantity(0.0, "1 = tied")
    ('53.50 % [48.60 %, 58.30 %] accuracy drop', '0 (1 = tied)')
    """
    words = unit.removeprefix(TIMES)
    parts = [value(found, unit), interval(bounds, unit) if bounds else "", f"({words})" if "=" in words else words]
    return " ".join(part for part in parts if part)


def percent(share: float | None, form: str = "+z.2f") -> str:
    """A fraction in percent; four digits of one so large that decimals say nothing.

    >>> percent(0.0125), percent(1e300)
    ('+1.25 %', '+1e+302 %')
    """
    if share is None:
        return ABSENT
    return f"{100 * share:{'+' * form.startswith('+')}.4g} %" if abs(share) >= VAST else f"{100 * share:{form}} %"


def saved(reduction: float | None) -> str:
    """A reduction as the change it makes: 0.2 reads ``-20.0 %``."""
    return ABSENT if reduction is None else percent(-reduction, "+z.1f")


def ratio(times: float | None) -> str:
    """How many times as much: ``1.053×``."""
    return ABSENT if times is None else f"{times:z.4g}×"


def number(found: float | None, form: str = "z.4g") -> str:
    """A number that is neither share nor ratio, to four digits unless ``form`` says otherwise."""
    return ABSENT if found is None else f"{found:{form}}"


def count(n: int | None) -> str:
    """How many units; none is a dash."""
    return f"{n:,}" if n else ABSENT


def change(before: float | None, after: float | None, form: str = "z.4g") -> str:
    """``2.056 → 2.058``; a dash where neither is known."""
    return ABSENT if before is None and after is None else f"{number(before, form)} → {number(after, form)}"


def needed(found: Mapping[str, Any]) -> str:
    """What a verdict, a leg or a claim of ``report.json`` is held against, and which way is good; "" for nothing.

    >>> needed({"threshold": 0.01, "unit": "accuracy drop", "good": "lower"})
    '≤ 1.00 %, lower is better'
    """
    if found["threshold"] is None:
        return ""
    sign = {"lower": "≤ ", "higher": "≥ "}.get(found.get("good", ""), "")
    return f"{sign}{value(found['threshold'], found['unit'])}" + (f", {found['good']} is better" if sign else "")
