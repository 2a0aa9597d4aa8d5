"""Text coloured by depth: which colours a terminal has, which of them a depth gets, and a line that says so.

From shallow to deep the scale goes blue, green, yellow, orange, red: near Solarized's accents, made to be read on light
ground and on dark. NO_COLOR (no-color.org) and TERM=dumb are obeyed; COLORTERM says whether there is true colour, else
the 216 of a 256-colour terminal are used.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Literal

Colours = Literal["none", "256", "true"]

SCALE = ((38, 139, 210), (42, 161, 152), (133, 153, 0), (181, 137, 0), (203, 75, 22), (220, 40, 47))
CUBE = (0, 95, 135, 175, 215, 255)  # levels of each primary in a 256-colour terminal
SWATCH = "█"
PLAIN = "\x1b[39m"  # the terminal's own foreground


def colours_of(environment: Mapping[str, str], terminal: bool) -> Colours:
    """What may be written to a stream that is a ``terminal``, or is not."""
    if not terminal or environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return "none"
    return "true" if environment.get("COLORTERM") in ("truecolor", "24bit") else "256"


def painted(text: str, depth: int, layers: int, colours: Colours) -> str:
    """``text`` in the colour of ``depth`` among 1…``layers``."""
    if colours == "none" or not text:
        return text
    red, green, blue = _rgb((depth - 1) / max(layers - 1, 1))
    if colours == "true":
        return f"\x1b[38;2;{red};{green};{blue}m{text}{PLAIN}"
    r, g, b = (min(range(6), key=lambda i, level=level: abs(CUBE[i] - level)) for level in (red, green, blue))  # type: ignore[misc]
    return f"\x1b[38;5;{16 + 36 * r + 6 * g + b}m{text}{PLAIN}"


def _rgb(share: float) -> tuple[int, int, int]:
    """The scale at ``share`` in 0–1, linear between its colours."""
    at = share * (len(SCALE) - 1)
    below = min(int(at), len(SCALE) - 2)
    low, high = SCALE[below], SCALE[below + 1]
    red, green, blue = (round(a + (b - a) * (at - below)) for a, b in zip(low, high, strict=True))
    return red, green, blue


def legend(layers: int, colours: Colours, width: int) -> str:
    """The scale with its ends, at most ``width`` columns; a swatch for each layer where there is room."""
    first, last = "depth 1 ", f" {layers} layers"
    swatches = max(1, min(layers, width - len(first) - len(last)))
    shown = (1 + round(i * (layers - 1) / max(swatches - 1, 1)) for i in range(swatches))
    return first + "".join(painted(SWATCH, depth, layers, colours) for depth in shown) + last


def legend_of_two(names: tuple[str, str], colours: Colours, width: int) -> str:
    """The small and the large model of a pair, each behind its colour; cut to ``width`` columns."""
    room = max(1, (width - 2 * len(SWATCH) - 4) // 2)
    return "  ".join(f"{painted(SWATCH, at, 2, colours)} {name[:room]}" for at, name in enumerate(names, start=1))


def visible(text: str) -> str:
    """``text`` with control characters spelled out: what a model writes must not command a terminal."""
    return "".join(_spelled(c) if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _spelled(character: str) -> str:
    return f"\\x{ord(character):02x}"
