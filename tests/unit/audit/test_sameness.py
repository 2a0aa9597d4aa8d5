"""Token sequences are the same to the end, or to a tie; ties are counted, and too many are no longer noise."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.audit.finding import AuditRefutedError
from emad_ref.audit.lens import LogitLens
from emad_ref.audit.token_comparison import same_tokens
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt

LAYERS, TOLERANCE, MANY = 3, 1e-3, 150
PROMPT = Prompt(np.array([1, 2, 3]))
FLAT, SURE = np.zeros(4), np.array([9.0, 0.0, 0.0, 0.0])


def lens(*, near: dict[int, int] | None = None, first_probe: np.ndarray = SURE):
    """Logits [n, layers, 4] that are sure of token 0, except at ``near``: position → layer where two lead closely."""

    def logits(tokens):
        given = np.broadcast_to(SURE, (len(tokens), LAYERS, 4)).copy()
        given[:, 0] = first_probe
        for position, layer in (near or {}).items():
            if position < len(tokens):
                given[position, layer - 1, 1] = 9.0 - TOLERANCE / 2
        return given

    return LogitLens(logits)


def rows(*different: int, length: int = MANY) -> list[list[int]]:
    row = [0] * length
    for at in different:
        row[at] = 1
    return [row]


def compared(found, wanted, oracle=None, point=None, depths=(None, None), prompts=(PROMPT,)):
    return same_tokens(oracle or lens(), TOLERANCE, prompts, found, wanted, point, *depths)


def test_equal_rows_pass_without_a_tie() -> None:
    finding = compared(rows(), rows())
    assert (finding.passed, finding.ties, finding.n) == (True, 0, MANY)
    finding.require()


def test_an_untied_difference_names_the_row_and_both_tokens() -> None:
    prompts, found, wanted = (PROMPT, PROMPT), [*rows(), *rows(7)], [*rows(), *rows()]
    finding = compared(found, wanted, prompts=prompts)
    assert finding.passed is False
    assert finding.detail == ("row 1, new token 7: 1 (depth full), but expected 0 (depth full), and no tie excuses it")
    with pytest.raises(AuditRefutedError, match="row 1, new token 7"):
        finding.require()


def test_a_short_row_may_end_in_a_tie_where_no_share_is_asked_for() -> None:
    oracle = lens(near={3 + 4 - 1: LAYERS})
    found, wanted = rows(4, length=8), rows(length=8)
    assert same_tokens(oracle, TOLERANCE, [PROMPT], found, wanted).passed is False
    assert same_tokens(oracle, TOLERANCE, [PROMPT], found, wanted, most_ties=1.0).passed is True
    assert same_tokens(lens(), TOLERANCE, [PROMPT], found, wanted, most_ties=1.0).passed is False


def test_a_row_that_ends_early_is_another_text() -> None:
    finding = compared(rows(length=4), rows(length=5))
    assert (finding.passed, finding.detail) == (False, "row 0: 4 tokens, but 5 expected")


def test_two_logits_within_the_tolerance_excuse_the_rest_of_the_row() -> None:
    """Position 9 is that of the prompt's three tokens and seven new ones: its logits emit new token 7."""
    finding = compared(rows(7, 8, 100), rows(), lens(near={9: LAYERS}))
    assert (finding.passed, finding.ties) == (True, 1)
    assert finding.detail == f"1 of {MANY} tokens stand after a tie's first difference"
    assert compared(rows(8), rows(), lens(near={9: LAYERS})).passed is False, "the tie is one token earlier"


def test_more_than_one_token_in_a_hundred_tied_is_no_longer_noise() -> None:
    short = 99
    finding = compared(rows(7, length=short), rows(length=short), lens(near={9: LAYERS}))
    assert (finding.passed, finding.ties) == (False, 1)
    assert finding.detail == "1 ties in 99 tokens: more than 1% is no longer noise"


def test_another_depth_is_a_difference_and_logits_are_read_where_it_stopped() -> None:
    found, wanted = [[LAYERS] * MANY], [[LAYERS] * 7 + [2] * (MANY - 7)]
    finding = compared(rows(), rows(), depths=(found, wanted))
    assert finding.detail == "row 0, new token 7: 0 (depth 3), but expected 0 (depth 2), and no tie excuses it"
    assert compared(rows(), rows(), lens(near={9: 2}), depths=(found, wanted)).passed
    assert compared(rows(), rows(), lens(near={9: LAYERS}), depths=(found, wanted)).passed is False


@pytest.mark.parametrize(("off", "passed"), [(TOLERANCE / 2, True), (2 * TOLERANCE, False)])
def test_a_signal_near_its_threshold_is_a_tie_where_depth_is_decided(off, passed) -> None:
    flat = float(np.log(4))  # nats of FLAT
    point = OperatingPoint("p", "quantile", LAYERS, LAYERS, (1,), ((flat + off,),))
    oracle = lens(first_probe=FLAT)
    assert compared(rows(7), rows(), oracle, point).passed is passed
    assert compared(rows(7), rows(), oracle, full_depth(LAYERS)).passed is False, "full depth compares no signal"
