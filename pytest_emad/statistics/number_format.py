"""Number formats: one form per unit for terminal, tables, pages and messages of failing tests.

Shares are fractions in data and percent in text; a ratio carries its ×. An unmeasured number is a dash. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "–"
VAST = 1e6  # a factor of a million; larger percentages are written with a power of ten
TENFOLD = 9.0  # a rise by 900 %; a larger change is shown as a ratio

# Units whose numbers are shares, and the form of their percentage. A change shows its sign, a size does not.
# "z" in the forms: a change that rounds to zero has no sign, so "-0.0 %" never shows.
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
TIMES = "× "  # start of a ratio's unit: "× as fast"


def format_value(x: float | None, unit: str) -> str:
    """A number of ``unit`` with its sign of percent or ×, without the unit's words.

    >>> [format_value(x, unit) for x, unit in [(0.0125, "relative rise"), (1.0534, "× as fast"), (None, "")]]
    ['+1.25 %', '1.053×', '–']
    >>> format_value(0.01084, "nats per layer")
    '0.01084'
    """
    if x is None:
        return ABSENT
    if unit in SHARES:
        return format_percent(x, SHARES[unit])
    return format_ratio(x) if unit.startswith(TIMES) else format_digits(x)


def format_interval(bounds: Sequence[float | None] | None, unit: str) -> str:
    """``[low, high]``, each as ``format_value``."""
    return ABSENT if bounds is None else f"[{format_value(bounds[0], unit)}, {format_value(bounds[1], unit)}]"


def format_quantity(x: float | None, unit: str, bounds: Sequence[float | None] | None = None) -> str:
    """A number with its interval, if it has one, and the words of its unit.

    >>> format_quantity(0.535, "accuracy drop", (0.486, 0.583)), format_quantity(0.0, "1 = tied")
    ('53.50 % [48.60 %, 58.30 %] accuracy drop', '0 (1 = tied)')
    """
    words = unit.removeprefix(TIMES)
    parts = [
        format_value(x, unit),
        format_interval(bounds, unit) if bounds else "",
        f"({words})" if "=" in words else words,
    ]
    return " ".join(part for part in parts if part)


def format_percent(share: float | None, form: str = "+z.2f") -> str:
    """A fraction in percent; a change to tenfold and more as a ratio: 228× instead of +22,715 %.

    >>> format_percent(0.0125), format_percent(227.147), format_percent(2e6, "z.1f")
    ('+1.25 %', '228×', '2e+08 %')
    """
    if share is None:
        return ABSENT
    if form.startswith("+") and share >= TENFOLD:
        return f"{1 + share:.3g}×"
    return f"{100 * share:.4g} %" if abs(share) >= VAST else f"{100 * share:{form}} %"


def format_reduction_as_change(reduction: float | None) -> str:
    """A reduction as a change: 0.2 reads ``-20.0 %``."""
    return ABSENT if reduction is None else format_percent(-reduction, "+z.1f")


def format_ratio(times: float | None) -> str:
    """A ratio: ``1.053×``."""
    return ABSENT if times is None else f"{times:z.4g}×"


def format_digits(x: float | None, form: str = "z.4g") -> str:
    """A number that is neither share nor ratio, by default to four digits (``form``)."""
    return ABSENT if x is None else f"{x:{form}}"


def format_count_or_dash(n: int | None) -> str:
    """A count of units; None is a dash."""
    return f"{n:,}" if n else ABSENT


def format_before_and_after(before: float | None, after: float | None, form: str = "z.4g") -> str:
    """``2.056 → 2.058``; a dash if neither is known."""
    return (
        ABSENT if before is None and after is None else f"{format_digits(before, form)} → {format_digits(after, form)}"
    )


def format_requirement(entry: Mapping[str, Any]) -> str:
    """The threshold of a verdict, leg or claim of ``report.json``, and which way is better; "" without one.

    >>> format_requirement({"threshold": 0.01, "unit": "accuracy drop", "good": "lower"})
    'at most 1.00 %'
    """
    if entry["threshold"] is None:
        return ""
    bound = {"lower": "at most ", "higher": "at least "}.get(entry.get("good", ""), "")
    return f"{bound}{format_value(entry['threshold'], entry['unit'])}"
