"""Covering arrays of cases for small decoders: short prompts, few rows, full depth and one point with exits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Decoder
from emad_ref.record import Ints
from pytest_emad.audit.covering import Offers, check_covering_cases
from pytest_emad.audit.dimensions import REQUEST_CONSTRAINTS, REQUESTS, SESSION_CONSTRAINTS, SESSIONS
from pytest_emad.audit.finding import Finding, Tally
from pytest_emad.audit.reference_logits import Lens
from pytest_emad.audit.request_cases import CaseBench, RequestCases
from pytest_emad.audit.session_cases import SessionCases

WINDOW = 64
FEW: dict[str, tuple[str, ...]] = {
    "ceiling": ("L",),
    "rows": ("1", "2", "5"),
    "prompt": ("within a block", "one token", "strided", "prefix"),
    "place": ("start",),
    "new": ("8", "1"),
    "neighbours": ("none", "session", "decoder", "raised"),
    "temperature": ("0",),
    "seed": ("equal",),
    "call": ("generate",),
}


def check_small_cases(
    kind: str,
    made: Callable[..., Decoder],
    lens: Lens,
    exiting: OperatingPoint,
    tolerance: float,
    **values: tuple[str, ...],
) -> Finding:
    """Check a covering array of ``kind`` "requests" or "sessions", of ``values`` in place of ``FEW``.

    ``made(point)`` makes the decoder at full depth ("full") and at ``exiting`` ("probing"), which has entropy exits; at
    temperatures ``made(point, temperature=…, seed=…)``.
    """
    vocabulary = int(lens(np.zeros(1, dtype=np.int64)).shape[-1])
    watching = replace(exiting, name="watching", thresholds=((-np.inf,) * len(exiting.probes),))
    points = {"full": full_depth(exiting.layers), "probing": exiting, "watching": watching}

    def open_decoder(asked: OperatingPoint, **options: Any) -> nullcontext[Decoder]:
        sampled = {name: options[name] for name in ("temperature", "seed")} if "temperature" in options else {}
        return nullcontext(made(asked, **sampled))

    def draw_texts(rng: np.random.Generator, lengths: Any) -> list[Ints]:
        return [rng.integers(0, vocabulary, length) for length in lengths]

    known = {(name, "L"): each for name, each in points.items()}
    bench = CaseBench(open_decoder, made, lens, known, draw_texts, vocabulary, WINDOW, tolerance)
    tally = Tally(kind, needed=0)
    dimensions, constraints = (REQUESTS, REQUEST_CONSTRAINTS) if kind == "requests" else (SESSIONS, SESSION_CONSTRAINTS)
    asked = {**FEW, "point": ("full", "probing"), **values}
    offers = Offers({name: asked.get(name, each.values) for name, each in dimensions.items()}, constraints, {})
    capabilities = made(points["full"]).capabilities
    runner = RequestCases(bench, tally) if kind == "requests" else SessionCases(bench, tally, capabilities)
    return check_covering_cases(runner, offers, 0).finding
