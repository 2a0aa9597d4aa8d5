"""Requests whose true ratio of total times is known, as EMAD-F2's: the same rule, asked of another point."""

from __future__ import annotations

from tests.questions.cases.emad_f2 import COMPILED, checked, timed
from tests.questions.cases.emad_x1 import says
from tests.questions.simulation import Case, celled

UNUSABLE = "no usable exit: EMAD-X1 is falsified"

CASES = [
    Case("a third faster", "holds", timed(1.33, 1.3), draws=10),
    Case("as fast", "fails", timed(1.0, pairs=60), draws=10),
    Case("slower than compiled steps alone", "fails", timed(0.9, speeds=COMPILED), draws=10),
    Case("what was timed is not what was asked", "fails", checked(timed(1.33), False, "adaptive, row 0: 3 tokens"),
         draws=5, check=says("adaptive, row 0")),
    *celled("faster by the threshold", "edge", lambda n, _: timed(1.1, pairs=n), icc=(0.0,), draws=20),
    *celled("twice the threshold's gain", "power", lambda n, _: timed(1.2, pairs=n), icc=(0.0,), wanted="survived"),
    Case("no exit that X1 lets survive", "premise", timed(1.33, unusable=UNUSABLE), draws=5, check=says(UNUSABLE)),
    Case("nothing was timed", "premise", timed()),
]  # fmt: skip
