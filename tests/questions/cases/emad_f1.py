"""One point put forward, or two, whose perplexity and accuracy are lost at known rates."""

from __future__ import annotations

from typing import Any

import numpy as np

from emad_ref.questions.quality import Found
from emad_ref.verdict.claims import Verdict
from tests.questions.points import point
from tests.questions.simulation import Case


def put_forward(**options: Any):
    def found(rng: np.random.Generator) -> Found:
        return Found([point(rng, **options)])

    return found


def two_points(rng: np.random.Generator) -> Found:
    return Found([point(rng, "good"), point(rng, "bad", rise=0.03)])


def unscored(rng: np.random.Generator) -> Found:
    return Found([point(rng, saves=0.1)], {"humaneval": "it runs generated programs"})


def names_the_bad_point(verdict: Verdict) -> None:
    assert "bad: perplexity on world" in verdict.reason


def by_accuracy(verdict: Verdict) -> None:
    assert verdict.unit == "accuracy drop"


CASES = [
    Case("quality holds", "holds", put_forward(rise=0.002), draws=10),
    Case("one task of three falls", "holds", put_forward(lost={"a": 0.06, "b": 0.0, "c": 0.0}), draws=10),
    Case("perplexity rises", "fails", put_forward(rise=0.03), draws=10),
    Case("two tasks fall", "fails", put_forward(lost={"a": 0.06, "b": 0.05, "c": 0.0}), draws=10, check=by_accuracy),
    Case("one point of two is bad", "fails", two_points, draws=10, check=names_the_bad_point),
    Case("perplexity rises by the threshold", "edge", put_forward(rise=0.01), draws=60),
    Case("the second-worst task falls by the threshold", "edge", put_forward(lost={"a": 0.06, "b": 0.01}), draws=40),
    Case("nothing saves enough", "premise", put_forward(rise=0.5, saves=0.149)),
    Case("nothing saves enough, and a task was not scored", "premise", unscored),
    Case("no point at all", "premise", lambda rng: Found([])),
]
