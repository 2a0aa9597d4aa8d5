"""Planted defects under the shipped suites' own tests, with their parameters, in this process: each is named.

What ``--emad-selfcheck`` runs as a user would, a process for each; here a test is called as pytest would call it, and
only for defects that harm no process. The smallest bundled model holds nearly all of them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.host import Host
from emad_ref.evidence.study import BUDGETS, Study
from emad_ref.evidence.subject import open_model
from emad_ref.models.loading import Loaded
from emad_ref.planted.catalogue import CATALOGUE
from emad_ref.planted.entry import Make, NotPlantable
from pytest_emad.auditing import Auditor

STUDY = Study(corpus="world:premise")
FEW_PAIRS = replace(STUDY, budget=replace(BUDGETS["smoke"], pairs=2))  # how many are timed is not what is audited
APART = ("timed", "refusal", "noise", "exits", "forged", "judge's model", "speculation")  # kinds that need a whole run
ELSEWHERE = ("test_golden", "test_session_machine")  # tests that are held against a record, or shrink what they find
PLANTED = {
    name: planted
    for name, planted in CATALOGUE.items()
    if not planted.honest and planted.kind not in APART and not any(test in planted.test for test in ELSEWHERE)
}
CALLED = sorted({planted.test for planted in PLANTED.values()})
HONEST = CATALOGUE["honest"].make


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with open_model("emad-nano", STUDY) as model:
        yield model


@pytest.fixture(scope="module")
def known(loaded: Loaded) -> dict[str, Any]:
    """What does not depend on the decoder, gathered once."""
    bridging = Evidence(loaded, STUDY, Host()).bridging
    return {"probing_point": bridging.probing_point, "shallow_point": bridging.shallow_point}


def judged(loaded: Loaded, known: dict[str, Any], make: Make, study: Study = STUDY) -> Evidence:
    """Evidence about a decoder, as a run would gather it from the hook."""
    evidence = Evidence(loaded, study, Host(make))
    evidence.bridging.__dict__.update(known)
    return evidence


def complaints(evidence: Evidence, test: str) -> Iterator[str]:
    """Of one test of the suites, called for each of its parameters with the fixtures it names."""
    path, _, name = test.partition("::")
    function: Any = getattr(importlib.import_module(f"suites.{path.removesuffix('.py').replace('/', '.')}"), name)
    settings = SimpleNamespace(gating=SimpleNamespace(inconclusive="fail"), budget=STUDY.budget)
    record = SimpleNamespace(audit=lambda finding: None, note=lambda text: None)
    audit = Auditor(evidence.subject.lens, evidence.subject.tolerance, settings, record)  # type: ignore[arg-type]  # of a run
    marks = [mark.args for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    for values in product(*(given for _, given in marks)):
        rng = np.random.default_rng(evidence.study.seed)
        known = {"emad_evidence": evidence, "emad_audit": audit, "emad_rng": rng}
        known |= dict(zip((argument for argument, _ in marks), values, strict=True))
        try:
            function(**{argument: known[argument] for argument in inspect.signature(function).parameters})
        except pytest.fail.Exception as failure:
            yield str(failure)


@pytest.mark.parametrize("test", CALLED, ids=lambda test: test.partition("::")[2])
def test_the_honest_decoder_passes_what_is_called_here(loaded: Loaded, known: dict[str, Any], test: str) -> None:
    assert list(complaints(judged(loaded, known, HONEST), test)) == []


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_named(loaded: Loaded, known: dict[str, Any], defect: str) -> None:
    planted = PLANTED[defect]
    try:
        said = list(complaints(judged(loaded, known, planted.make), planted.test))
    except NotPlantable as reason:
        pytest.skip(str(reason))
    assert any(re.search(planted.says, complaint) for complaint in said), said


@pytest.mark.parametrize(("name", "passed"), [("timed-one-token", False), ("timed-short", False), ("honest", True)])
@pytest.mark.parametrize("rows", STUDY.budget.batch_sizes)
def test_what_is_timed_is_looked_at_afterwards(
    loaded: Loaded, known: dict[str, Any], name: str, rows: int, passed: bool
) -> None:
    """What EMAD-F2 asks before it believes a clock: a decoder that reads one token and emits one is caught."""
    stopwatch = judged(loaded, known, CATALOGUE[name].make, FEW_PAIRS).stopwatch
    stopwatch.__dict__["request_shape"] = STUDY.budget.prompt_tokens, STUDY.budget.new_tokens
    finding = stopwatch.checked(known["probing_point"], rows)
    assert finding.passed is passed, finding.detail
    if not passed:
        assert re.search(CATALOGUE[name].says, finding.detail)
