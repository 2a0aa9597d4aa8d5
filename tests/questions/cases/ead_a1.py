"""Values of w that lose, or gain, a known share of the items."""

from __future__ import annotations

from tests.questions.cases.one_constant import loses, says
from tests.questions.simulation import Case

LOSSES = {1: 0.3, 5: 0.0, 20: -0.1}

CASES = [Case("a loss, none, and a gain", "value", loses("w", LOSSES), draws=20, check=says("w", LOSSES))]
