"""Planted defects under the shipped suites' own tests, with their parameters, on the bundled model: each is named.

The tests are called as pytest would call them; whose decoder they judge is what a conftest decides for users.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.host import Host
from emad_ref.evidence.study import BUDGETS, Study
from emad_ref.evidence.subject import open_model
from emad_ref.models.loading import Loaded
from emad_ref.protocol import Decoder, Request
from pytest_emad.auditing import Auditor
from tests.decoders.cached import CachedDecoder
from tests.decoders.planted import PLANTED, OneTokenWhereTimed

STUDY = Study(corpus="world:premise")
FEW_PAIRS = replace(STUDY, budget=replace(BUDGETS["smoke"], pairs=2))  # how many are timed is not what is audited
CALLED = sorted({planted.test for planted in PLANTED.values()})


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with open_model("emad-tiny", STUDY) as model:
        yield model


@pytest.fixture(scope="module")
def known(loaded: Loaded) -> dict[str, Any]:
    """What does not depend on the decoder, gathered once."""
    bridging = Evidence(loaded, STUDY, Host()).bridging
    return {"probing_point": bridging.probing_point, "shallow_point": bridging.shallow_point}


def judged(loaded: Loaded, known: dict[str, Any], decoder: type[CachedDecoder], study: Study = STUDY) -> Evidence:
    """Evidence about ``decoder``, as a run would gather it from the hook."""

    def make(request: Request) -> Decoder:
        return decoder(request.model.load().model, request.point, request.temperature, request.seed)

    evidence = Evidence(loaded, study, Host(make))
    evidence.bridging.__dict__.update(known)
    return evidence


def call(evidence: Evidence, test: tuple[str, ...]) -> None:
    """One test of the suites, with the fixtures it names."""
    settings = SimpleNamespace(gating=SimpleNamespace(inconclusive="fail"), budget=STUDY.budget)
    record = SimpleNamespace(audit=lambda finding: None)
    audit = Auditor(evidence.subject.lens, evidence.subject.tolerance, settings, record)  # type: ignore[arg-type]  # of a run
    function: Callable[..., None] = getattr(importlib.import_module(f"suites.{test[0]}"), test[1])
    function(evidence, audit, np.random.default_rng(evidence.study.seed), *test[2:])


@pytest.mark.parametrize("test", CALLED, ids=lambda test: "-".join(test[1:]))
def test_the_honest_decoder_passes_what_is_called_here(
    loaded: Loaded, known: dict[str, Any], test: tuple[str, ...]
) -> None:
    call(judged(loaded, known, CachedDecoder), test)


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_named(loaded: Loaded, known: dict[str, Any], defect: str) -> None:
    planted = PLANTED[defect]
    with pytest.raises(pytest.fail.Exception) as caught:
        call(judged(loaded, known, planted.decoder), planted.test)
    assert re.search(planted.says, str(caught.value)), caught.value


@pytest.mark.parametrize(("decoder", "passed"), [(OneTokenWhereTimed, False), (CachedDecoder, True)])
@pytest.mark.parametrize("rows", STUDY.budget.batch_sizes)
def test_what_is_timed_is_looked_at_afterwards(
    loaded: Loaded, known: dict[str, Any], decoder: type[CachedDecoder], rows: int, passed: bool
) -> None:
    """What EMAD-F2 asks before it believes a clock: a decoder that reads one token and emits one is caught."""
    stopwatch = judged(loaded, known, decoder, FEW_PAIRS).stopwatch
    stopwatch.__dict__["request_shape"] = STUDY.budget.prompt_tokens, STUDY.budget.new_tokens
    finding = stopwatch.checked(known["probing_point"], rows)
    assert finding.passed is passed, finding.detail
    if not passed:
        assert re.search(r"(full|adaptive), row \d+, position 6\d", finding.detail)
