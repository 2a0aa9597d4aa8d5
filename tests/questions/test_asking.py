"""How a question is asked: refusals, Holm's company, the register's modules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from emad_ref.claims.base import Answer, ClaimContext, Question, ask, question_of
from emad_ref.errors import BadArgument
from emad_ref.protocol import Unsupported
from emad_ref.statistics.verdicts import load_register

CLAIM = load_register()["EMAD-E5"]


@dataclass(frozen=True)
class Simulated:
    """Evidence that says what any evidence says."""

    name: str = "simulated"
    corpus: str = "made up"
    fingerprint: str = "abc"


def asked() -> ClaimContext:
    return ClaimContext(CLAIM, "simulated", np.random.default_rng(0))


def test_what_a_decoder_declines_is_not_applicable_and_refused() -> None:
    def answer(evidence: Simulated, asked: ClaimContext) -> Answer:
        raise Unsupported("only lowers depth")

    found = ask(Question("EMAD-E5", "model", answer), Simulated(), asked())
    assert found.verdict.verdict == "not applicable"
    assert found.verdict.reason == found.refused == "only lowers depth"
    assert (found.corpus, found.fingerprint) == ("made up", "abc")


@pytest.mark.parametrize("reason", ["", "  ", None])
def test_who_declines_says_why(reason: object) -> None:
    with pytest.raises(BadArgument, match="expected a sentence"):
        Unsupported(reason)  # type: ignore[arg-type]


def test_other_errors_are_not_swallowed() -> None:
    def answer(evidence: Simulated, asked: ClaimContext) -> Answer:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ask(Question("EMAD-E5", "model", answer), Simulated(), asked())


def test_a_row_without_a_question_is_named_with_the_way_to_add_one() -> None:
    with pytest.raises(BadArgument, match=r"claim='EMAD-X9'.*own-claim"):
        question_of("EMAD-X9")
