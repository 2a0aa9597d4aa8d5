"""Functions that suite files call: a finding fails, warns or is recorded; a refuted answer decides no claim."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from pytest_emad.audit.finding import Finding
from pytest_emad.audit.token_comparison import GoldenTokens, largest_threshold_change, thresholds_to_golden_json
from pytest_emad.claims.base import Answer, ClaimContext, Question, RunPlan
from pytest_emad.measurements.study import Study
from pytest_emad.run.recorder import decide_and_record_claim
from pytest_emad.run.suite_support import AuditFindingGate
from pytest_emad.statistics.verdicts import load_register

TOLERANCE, NOISE = 1e-3, 2.0
ABOUT = ("0" * 16, "float32", "world:premise", 0, "greedy")
PROMPTS = [Prompt(np.array([3, 4]))]


def at(first: float, probes: tuple[int, ...] = (1, 2), last: float = 1.0) -> OperatingPoint:
    return OperatingPoint("probing", "quantile", 4, 4, probes, ((first, *(last,) * (len(probes) - 1)),))


def taken(depth: int = 4, room: float = 0.5) -> GoldenTokens:
    return GoldenTokens(np.array([[7, 8]]), np.array([[4, depth]]), np.full((1, 2), 3.0), np.array([[0.5, room]]))


class Stored:
    """A recorder with one golden that logs what it did with it."""

    def __init__(self) -> None:
        self.held: Any = None
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def load_golden(self, key: str, give: Callable[[], Any]) -> Any:
        before, self.held = self.held, self.held or give()
        return before

    def record_audit(self, finding: Finding) -> None:
        self.findings.append(finding)

    def record_note(self, said: str) -> None:
        self.notes.append(said)


@pytest.fixture
def stored() -> Stored:
    return Stored()


def holds(stored: Stored, point: OperatingPoint, found: GoldenTokens, prompts: list[Prompt] = PROMPTS) -> None:
    auditor = AuditFindingGate(cast(Any, None), TOLERANCE, cast(Any, None), cast(Any, stored))
    auditor.compare_with_golden(ABOUT, lambda: found, prompts, NOISE, declared=0.0, point=point)


def test_where_none_is_on_record_that_is_said(stored: Stored) -> None:
    holds(stored, at(2.0), taken())
    assert stored.notes == ["golden rows not applicable (no golden recorded)"]
    assert stored.held["point"] == {"probes": [1, 2], "thresholds": [[2.0, 1.0]]}


@pytest.mark.parametrize("shift", [0.0, 7e-7, 1.9e-3])
def test_thresholds_that_differ_by_what_a_signal_may_are_the_same_point(stored: Stored, shift: float) -> None:
    holds(stored, at(2.0), taken())
    holds(stored, at(2.0 + shift), taken())
    (finding,) = stored.findings
    assert finding.passed


@pytest.mark.parametrize(
    "point", [at(2.0021), at(2.0, last=1.1), at(2.0, probes=(1, 3)), at(2.0, probes=(1,)), at(-np.inf)]
)
def test_another_point_has_no_golden(stored: Stored, point: OperatingPoint) -> None:
    holds(stored, at(2.0), taken())
    with pytest.raises(pytest.fail.Exception, match="recorded for another point: record it again"):
        holds(stored, point, taken())


def test_other_prompts_have_no_golden(stored: Stored) -> None:
    holds(stored, at(2.0), taken())
    with pytest.raises(pytest.fail.Exception, match="recorded for another prompts"):
        holds(stored, at(2.0), taken(), [Prompt(np.array([3, 5]))])


def test_a_threshold_that_moved_excuses_what_lies_between(stored: Stored) -> None:
    """A signal 2.5 tolerances above its threshold: too far for its own noise, not for a threshold one tolerance up."""
    holds(stored, at(2.0), taken(room=2.5 * TOLERANCE))
    holds(stored, at(2.0 + TOLERANCE), taken(depth=1))
    assert stored.findings[-1].passed
    assert stored.findings[-1].ties == 1
    with pytest.raises(pytest.fail.Exception, match="the golden has"):
        holds(stored, at(2.0), taken(depth=1))


def test_nothing_is_decoded_where_none_is_on_record() -> None:
    class Without(Stored):
        def load_golden(self, key: str, give: Callable[[], Any]) -> Any:
            return None

    def take() -> GoldenTokens:
        raise AssertionError("decoded")

    auditor = AuditFindingGate(cast(Any, None), TOLERANCE, cast(Any, None), cast(Any, Without()))
    assert not auditor.compare_with_golden(ABOUT, take, PROMPTS, NOISE, declared=0.0)


def test_never_is_never() -> None:
    never = thresholds_to_golden_json(at(-np.inf))
    assert largest_threshold_change(never, never) == 0
    assert (
        largest_threshold_change(never | {"thresholds": never["thresholds"] * 2}, never) == np.inf
    )  # as many rows as there are bins
    assert largest_threshold_change(None, never) == np.inf


class Refuted:
    """Measurements of a model with refuted answers."""

    name, corpus, fingerprint = "m", "text", "f00d"


FOUND = Finding("answers", False, "of the answers that this verdict reads, row 31, position 4: emitted 3", 9, 0)


def refuted(evidence: Any, asked: ClaimContext) -> Answer:
    FOUND.require()
    raise AssertionError("a failed finding goes no further")


def test_a_claim_whose_answers_are_refuted_is_recorded_as_not_decided_and_fails() -> None:
    claim = load_register()["EMAD-F1"]
    audits: list[Finding] = []
    verdicts: list[Any] = []
    record: Any = SimpleNamespace(
        record_audit=audits.append, record_claim=lambda verdict, *about: verdicts.append((verdict, about))
    )
    plan, evidence = RunPlan({claim.id: claim}, Study()), Refuted()
    with pytest.raises(
        pytest.fail.Exception, match=r"EMAD-F1 is not decided: .*row 31, position 4: emitted 3"
    ) as failed:
        decide_and_record_claim(
            evidence, 4, plan, record, "EMAD-F1", Question("EMAD-F1", "model", refuted, legs=lambda *_: 1)
        )
    assert failed.value.__context__ is None, "pytest would print the complaint twice"
    assert audits == [FOUND]
    ((verdict, about),) = verdicts
    assert (verdict.verdict, about) == ("unmeasured", ("text", "f00d"))
    assert "not decided: of the answers" in verdict.reason
