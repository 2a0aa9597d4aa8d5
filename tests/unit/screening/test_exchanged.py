"""The table of exchanges: shares, gains and intervals of hand-made columns."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.point import full_depth
from emad_ref.screening.exchanged import exchange_rows
from emad_ref.sweep.losses import Columns
from emad_ref.sweep.parts import BEST, EMAD, Exchange, Set, Way
from emad_ref.verdict.units import DocumentOf

TOKENS = np.tile([10.0, 30.0], 20)
DOCUMENTS = DocumentOf(np.repeat(np.arange(20), 2))


def at(way: Way, saved: float, lost: float, seed: int = 0) -> Set:
    """Two windows of each document, which save and lose so much on average, documents more or less."""
    rng = np.random.default_rng(seed)
    apart = np.repeat(rng.uniform(-0.01, 0.01, 20), 2)
    pair = np.stack([TOKENS, TOKENS * (1 - saved - (apart - apart.mean() if saved else 0))], axis=1)
    nll = np.stack([TOKENS, TOKENS * (1 + np.log1p(lost))], axis=1)
    return Set(way, full_depth(4), Columns(nll, 0 * nll, 100 * pair, 4 * pair))


FOUND = [
    Exchange("readout", at(EMAD, 0.0, 0.0), at(Way(True, "profile", "falling", "exact"), 0.1, 0.01), False),
    Exchange("monotone rule", at(BEST, 0.4, 0.005), at(Way(True, "gate", "falling", "exact"), 0.15, 0.02, 1), True),
]


def test_rows_tell_what_each_way_saves_and_what_its_exchange_gains() -> None:
    rows = exchange_rows(FOUND, TOKENS, DOCUMENTS, np.random.default_rng(0))
    assert [(row["exchanged"], row["from"]) for row in rows] == [
        ("nothing", ""),
        ("readout", "EMAD as published"),
        ("nothing", ""),
        ("monotone rule", "the best, back"),
    ]
    assert [row["net reduction %"] for row in rows] == pytest.approx([0.0, 0.1, 0.4, 0.15])
    assert [row["blocks %"] for row in rows] == pytest.approx([0.0, 0.1, 0.4, 0.15])
    assert [row["rise %"] for row in rows] == pytest.approx([0.0, 0.01, 0.005, 0.02])
    assert [row["gain %"] for row in rows] == [None, pytest.approx(0.1), None, pytest.approx(-0.25)]
    assert rows[0]["net interval"] is None, "full depth, on both sides"
    low, high = rows[3]["gain interval"]
    assert -0.27 < low < -0.25 < high < -0.23
    assert rows[3]["way"] == "tuned lens, gate, falling depth"
    assert rows[2]["way"].endswith("free depth, K/V as if copied")
