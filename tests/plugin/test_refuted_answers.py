"""A claim whose answers were refuted is not decided: the finding and the verdict go on record, and its test fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emad_ref.audit.finding import Finding
from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.statistics.verdicts import load_register
from pytest_emad.suite_support import record_answer

FOUND = Finding("answers", False, "of the answers that this verdict reads, row 31, position 4: emitted 3", 9, 0)


def refuted(evidence: Any, asked: ClaimContext) -> Answer:
    FOUND.require()
    raise AssertionError("a failed finding goes no further")


def test_a_claim_whose_answers_are_refuted_is_recorded_as_not_decided_and_fails() -> None:
    claim = load_register()["EMAD-F1"]
    audits: list[Finding] = []
    verdicts: list[Any] = []
    record: Any = SimpleNamespace(audit=audits.append, claim=lambda verdict, *about: verdicts.append((verdict, about)))
    docket: Any = SimpleNamespace(asked=lambda *about: ClaimContext(claim, "m", np.random.default_rng(0)))
    evidence: Any = SimpleNamespace(name="m", corpus="text", fingerprint="f00d")
    with pytest.raises(pytest.fail.Exception, match=r"EMAD-F1 is not decided: .*row 31, position 4: emitted 3"):
        record_answer(evidence, 4, docket, record, "EMAD-F1", Question("EMAD-F1", "model", refuted, legs=lambda *_: 1))
    assert audits == [FOUND]
    ((verdict, about),) = verdicts
    assert (verdict.verdict, about) == ("unmeasured", ("text", "f00d"))
    assert "not decided: of the answers" in verdict.reason
