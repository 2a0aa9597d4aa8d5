"""The table of families: one row per level and family, ranked, with what cannot be compared left out and said."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from emad_ref.point import truncated
from emad_ref.sweep.families import pareto_rows, ranked
from emad_ref.sweep.losses import Loss


def loss(depth: int, saved: float, perplexity: float, accuracy: float, windows: int = 4) -> Loss:
    rise = perplexity / 2 - 1
    nll = np.zeros(windows)
    return Loss(
        truncated(12, depth), depth, depth, depth, {}, saved, saved, nll, perplexity, rise, accuracy, 0.7 - accuracy
    )


WHOLE = [loss(8, 0.3, 2.02, 0.69), loss(4, 0.6, 2.2, 0.66)]
PRUNED = [loss(7, 0.35, math.inf, 0.65), loss(5, 0.5, math.inf, 0.68), loss(3, 0.7, 2.3, 0.6)]


def rows(validated, windows=4, levels=(0.3, 0.6)):
    """Evaluation repeats validation, on ``windows`` windows."""
    seen = {row.point: replace(row, nll_nats=np.zeros(windows)) for table in validated.values() for row in table}
    return pareto_rows(validated, seen.__getitem__, levels)


def test_every_row_says_what_its_point_was_chosen_by_and_on_how_much_text_it_was_judged():
    found = rows({"whole": WHOLE, "pruned": PRUNED}, windows=9)
    assert [(row["family"], row["chosen by"], row["point"]) for row in found] == [
        ("whole", "perplexity", "first 8 layers"),
        ("pruned", "accuracy", "first 5 layers"),
        ("whole", "perplexity", "first 4 layers"),
        ("pruned", "accuracy", "first 3 layers"),
    ]
    assert {row["windows"] for row in found} == {9}


def test_an_infinite_perplexity_is_absent_and_accuracy_is_not():
    pruned, *_ = rows({"pruned": PRUNED})
    assert (pruned["perplexity"], pruned["rise %"]) == (None, None)
    assert (pruned["accuracy %"], pruned["accuracy lost %"]) == (0.68, 0.7 - 0.68)


def test_rows_rank_by_level_then_rise_and_without_one_by_accuracy():
    """Perplexities of other text do not rank: that of the third row is the lowest."""
    plain = {"net reduction ≥ %": 0.3, "accuracy lost %": 0.0}
    wanted = [
        plain | {"rise %": 0.01, "perplexity": 3.0},
        plain | {"rise %": 0.02, "perplexity": 2.0},
        plain | {"rise %": 0.03, "perplexity": 1.0},
        plain | {"rise %": None, "perplexity": None, "accuracy lost %": 0.01},
        plain | {"rise %": None, "perplexity": None, "accuracy lost %": 0.02},
        plain | {"rise %": 0.0, "perplexity": 1.0, "net reduction ≥ %": 0.6},
    ]
    assert ranked(wanted[::-1]) == wanted
