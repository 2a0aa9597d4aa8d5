"""Requests whose time stands in a known ratio between EMAD and speculation, and items of which EMAD loses some."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.emad_r5 import ARMS, Found
from tests.questions.cases.answered import covers, raced, right
from tests.questions.simulation import Case

WORK = {"speculative": 1.6, "self-speculative": 0.9}  # times EMAD's
ACCEPTED = {"speculative": 0.7, "self-speculative": 0.8}


def emad(faster: float, drop: float, arms: tuple[str, ...] = ARMS, items: int = 2000):
    """``faster``: than speculation. ``drop``: of accuracy, nothing gained; full depth is always right."""

    def found(rng: np.random.Generator) -> Found:
        times = dict.fromkeys(arms, 1.0) | {"EMAD": 1 / faster}
        drafting = {arm: rate for arm, rate in ACCEPTED.items() if arm in arms}
        raced_arms = raced(rng, times, dict.fromkeys(arms, 1.0) | {arm: WORK[arm] for arm in drafting}, drafting)
        full, adaptive = right(rng, items, 1.0, drop, 0.0)
        exit_layer = 4 if "self-speculative" in arms else None
        return Found(raced_arms, 8, "emad", exit_layer, "task", full, adaptive)

    return found


def lists_the_rivals(verdict) -> None:
    legs = {leg.name: leg for leg in verdict.legs}
    covers(legs["emad against self-speculation after layer 4, k = 4"], 1.5)
    for arm, work in WORK.items():
        covers(legs[f"FLOPs against {arm}"], work)


def lists_one_rival(verdict) -> None:
    assert not any("self-spec" in leg.name for leg in verdict.legs)


CASES = [
    Case("faster, and loses nothing", "holds", emad(1.5, 0.0005), draws=10, check=lists_the_rivals),
    Case("it cannot draft for itself", "holds", emad(1.5, 0.0005, ARMS[:3]), draws=5, check=lists_one_rival),
    Case("faster, and loses five points", "fails", emad(1.5, 0.05), draws=10),
    Case("slower, and loses nothing", "fails", emad(0.8, 0.0005), draws=10),
    Case("as fast, and loses nothing", "edge", emad(1.0, 0.0005), draws=100),
    Case("faster, and loses exactly a point", "edge", emad(1.5, 0.01), draws=100),
]
