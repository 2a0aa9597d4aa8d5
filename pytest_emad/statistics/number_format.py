"""Number formats: one form per unit for terminal, tables, pages and messages of failing tests.

Shares are fractions in data and percent in text; a ratio carries its ×. An unmeasured number is a dash. Standard
library only.
"""

from __future__ import annotations

import math
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


Bounds = Sequence[float | None] | None  # of an interval; None: without one


def format_value(x: float | None, unit: str, bounds: Bounds = None) -> str:
    """A number of ``unit`` with its sign of percent or ×, without the unit's words.

    With ``bounds``, its interval, it has no more decimals than the sample earns: two digits of half the interval.

    >>> [format_value(x, unit) for x, unit in [(0.0125, "relative rise"), (1.0534, "× as fast"), (None, "")]]
    ['+1.25 %', '1.053×', '–']
    >>> format_value(0.01084, "nats per layer"), format_value(0.9127, "× as fast", (0.7311, 1.093))
    ('0.01084', '0.91×')
    >>> format_interval((8.485e-05, 0.000314), "nats")
    '[8e-05, 0.00031]'
    """
    if x is None:
        return ABSENT
    if unit in SHARES:
        form = SHARES[unit]
        kept = _earned_decimals(bounds, 100)
        return format_percent(x, form if kept is None else f"{form[:-2]}{min(kept, int(form[-2]))}f")
    digits = format_digits(x)
    kept = _earned_decimals(bounds, 1)
    if kept is not None:
        mantissa, _, exponent = digits.partition("e")
        kept = max(0, kept + int(exponent or 0))
        if len(mantissa.partition(".")[2]) > kept:
            digits = f"{x:z.{kept}{'e' if exponent else 'f'}}"
    return f"{digits}×" if unit.startswith(TIMES) else digits


def _earned_decimals(bounds: Bounds, scale: float) -> int | None:
    """Decimals that show two digits of half the interval, times ``scale``; None without an interval of finite width."""
    low, high = bounds or (None, None)
    if low is None or high is None or not 0 < high - low < math.inf:
        return None
    return max(0, 1 - math.floor(math.log10(scale * (high - low) / 2)))


def format_interval(bounds: Bounds, unit: str) -> str:
    """``[low, high]``, each as ``format_value``."""
    return ABSENT if bounds is None else f"[{', '.join(format_value(bound, unit, bounds) for bound in bounds)}]"


def format_quantity(x: float | None, unit: str, bounds: Bounds = None) -> str:
    """A number with its interval, if it has one, and the words of its unit.

    >>> format_quantity(0.535, "accuracy drop", (0.486, 0.583)), format_quantity(0.0, "1 = tied")
    ('53.5 % [48.6 %, 58.3 %] accuracy drop', '0 (1 = tied)')
    """
    words = unit.removeprefix(TIMES)
    parts = [
        format_value(x, unit, bounds),
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


def format_peak_memory(count: int, of: str) -> str:
    """``peak memory 412 MB (resident, this process)``, of bytes and the name of their counter."""
    return f"peak memory {count / 1e6:,.0f} MB ({of})"
