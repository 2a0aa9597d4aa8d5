"""Questions as tests: which rows a suite asks, and what becomes of an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from emad_ref.audit.finding import Refuted
from emad_ref.questions.asking import About, Named, Question, Suite, ask
from emad_ref.questions.company import Docket
from emad_ref.questions.register import question_of, questions_of
from emad_ref.verdict.claims import load_register
from pytest_emad.recording import Recorder

Ask = Callable[..., None]  # asks a claim, by id, of the evidence that a fixture holds, and records the answer


def rows(suite: Suite, *about: About) -> list[Any]:
    """One parameter per claim that ``suite`` asks of such evidence, in the register's order, marked by its question."""
    return [
        pytest.param(claim, marks=pytest.mark.emad(claim=claim, budget=question.budget, measures=question.measures))
        for claim, question in questions_of(load_register()).items()
        if question.suite == suite and question.about in about
    ]


def record_answer(
    evidence: Named, layers: int, docket: Docket, record: Recorder, claim: str, question: Question[Any] | None = None
) -> None:
    """Ask ``claim`` of ``evidence``; put what stands beside the verdict on record, then the verdict, which may fail.

    ``question``: in place of the registered one, for a suite that draws its evidence in a way of its own.

    Where answers that the verdict reads are refuted nothing is decided: the finding goes on record, and the test fails.
    """
    asked = docket.asked(claim, evidence.name, layers)
    try:
        answer = ask(question or question_of(claim), evidence, asked)
    except Refuted as complaint:
        if complaint.finding is not None:
            record.audit(complaint.finding)
        record.claim(asked.unmeasured(f"not decided: {complaint}"), evidence.corpus, evidence.fingerprint)
        pytest.fail(f"{claim} is not decided: {complaint}", pytrace=False)
    record.exhibits(evidence.name, answer.exhibits)
    record.claim(answer.verdict, answer.corpus, answer.fingerprint, answer.refused)
