"""Tally: the first complaint ends a check, absence of power is inconclusive, too many ties fail."""

from __future__ import annotations

import pytest

from emad_ref.audit.finding import Tally


def test_the_first_complaint_ends_the_check() -> None:
    tally, reached = Tally("forced", needed=0), False
    with tally:
        tally.n = 3
        tally.require(True, "fine")
        tally.require(False, "row 1: logits off")
        reached = True
    finding = tally.finding()
    assert not reached
    assert (finding.check, finding.passed, finding.n) == ("forced", False, 3)
    assert finding.detail.startswith("row 1: logits off")


def test_a_crash_of_the_decoder_is_not_a_finding() -> None:
    with pytest.raises(RuntimeError, match="cache"), Tally("forced"):
        raise RuntimeError("cache")


@pytest.mark.parametrize(("discriminating", "passed"), [(4, None), (5, True)])
def test_too_few_discriminating_positions_are_inconclusive(discriminating: int, passed: bool | None) -> None:
    finding = Tally("generation", needed=5, n=50, discriminating=discriminating).finding()
    assert finding.passed is passed


def test_a_complaint_outweighs_missing_power() -> None:
    with Tally("generation", needed=5) as tally:
        tally.require(False, "wrong")
    assert tally.finding().passed is False


@pytest.mark.parametrize(("ties", "passed"), [(2, True), (3, False)])
def test_more_than_one_percent_of_ties_fails(ties: int, passed: bool) -> None:
    finding = Tally("rows", needed=0, n=200, ties=ties).finding()
    assert finding.passed is passed
    assert finding.ties == ties
