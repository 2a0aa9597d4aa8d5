"""A row may differ from itself alone only from a tie on, and then both runs are judged by the lens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from emad_ref.audit import rows
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.record import Record
from tests.decoders.foreign import ForeignDecoder
from tests.decoders.subject import drawn, lens_of, spread_point, tiny_neox

PROMPTS, _ = drawn((5, 7), 1)
POINT = spread_point()


def shifted(by: float) -> OperatingPoint:
    return replace(POINT, thresholds=(tuple(value + by for value in POINT.thresholds[0]),))


class Nudged(ForeignDecoder):
    """In a batch its thresholds are slightly higher: the noise of another kernel, made visible."""

    nudge = 0.0

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        if len(prompts) == 1:
            return super().generate(prompts, max_new, stop)
        return ForeignDecoder(self.model, shifted(self.nudge)).generate(prompts, max_new, stop)


@pytest.mark.parametrize(("tolerance", "passed"), [(1e-9, False), (0.6, True)])
def test_a_difference_must_be_a_tie(tolerance: float, passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds nudged by half a nat flip a decision: a tie within 0.6 nats, none within 1e-9."""
    monkeypatch.setattr(Nudged, "nudge", 0.5)
    monkeypatch.setattr("emad_ref.audit.finding.TIE_LIMIT", 1.0)  # ties are counted elsewhere
    finding = rows(Nudged(tiny_neox(), POINT), lens_of(tiny_neox()), POINT, PROMPTS, 10, tolerance, needed=0)
    assert finding.passed is passed, finding.detail
    if passed:
        assert finding.ties > 0
    else:
        assert "no tie at or before it" in finding.detail
