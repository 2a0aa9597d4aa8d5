"""Colours of the page, light and dark: pairs of letters and ground, whose contrast a test holds to WCAG's AA.

``SHADES`` of depth run from shallow to deep; ``SERIES`` are lines in drawings. Nothing is told by colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LIGHT: Mapping[str, str] = MappingProxyType(
    {
        "paper": "#ffffff",
        "panel": "#f3f5f7",
        "ink": "#1a1d21",
        "muted": "#525a63",
        "line": "#7d8690",
        "accent": "#0b57a4",
        "good": "#e2f3e6",
        "good-ink": "#1d5c31",
        "shade-0": "#dfecfa",
        "shade-0-ink": "#1a1d21",
        "shade-1": "#bfd8f3",
        "shade-1-ink": "#1a1d21",
        "shade-2": "#8fbae6",
        "shade-2-ink": "#1a1d21",
        "shade-3": "#2f6ba6",
        "shade-3-ink": "#ffffff",
        "shade-4": "#123f70",
        "shade-4-ink": "#ffffff",
        "series-0": "#0b57a4",
        "series-1": "#b3541e",
        "series-2": "#2e7d32",
        "series-3": "#7b3fa0",
        "series-4": "#a61e4d",
        "series-5": "#00707a",
        "series-6": "#6b5900",
        "series-7": "#555b61",
        "series-8": "#8f3b76",
        "series-9": "#3d5a00",
    }
)
DARK: Mapping[str, str] = MappingProxyType(
    {
        "paper": "#14171a",
        "panel": "#1e2328",
        "ink": "#e8eaed",
        "muted": "#a9b1ba",
        "line": "#737d88",
        "accent": "#7db7f0",
        "good": "#17301f",
        "good-ink": "#8fd6a3",
        "shade-0": "#1d2732",
        "shade-0-ink": "#e8eaed",
        "shade-1": "#22405f",
        "shade-1-ink": "#e8eaed",
        "shade-2": "#2f5f92",
        "shade-2-ink": "#ffffff",
        "shade-3": "#6fa8de",
        "shade-3-ink": "#14171a",
        "shade-4": "#b9dafa",
        "shade-4-ink": "#14171a",
        "series-0": "#7db7f0",
        "series-1": "#f0a06b",
        "series-2": "#7fcf85",
        "series-3": "#c9a0ea",
        "series-4": "#f08bab",
        "series-5": "#5fc7d1",
        "series-6": "#d6bf52",
        "series-7": "#b6bcc3",
        "series-8": "#e296cc",
        "series-9": "#b2d16b",
    }
)


def variables(palette: Mapping[str, str]) -> str:
    """CSS custom properties."""
    return "; ".join(f"--{name}: {colour}" for name, colour in palette.items())
