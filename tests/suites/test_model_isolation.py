"""The suites name a decoder that changes the judge's model, and one that runs more than it counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suites.conftest import Run, text_of

HOOK = """
from tests.decoders.{module} import {names}

def pytest_emad_make_decoder(config, request):
    return {made}(request.model.load().model, request.point)
"""
APART, WITNESS = "invariants/test_apart.py", "cost/test_witness.py"


def hook(module: str, names: str, made: str = "") -> str:
    return HOOK.format(module=module, names=names, made=made or names)


ALONE = f"{APART}::test_the_judges_model_is_left_alone"


@pytest.mark.slow  # a process; "judge-weight" of test_mutants.py starts one of the same kind
def test_who_reaches_for_the_judges_model_is_named(pytester: pytest.Pytester, judge_apart: Run, tiny: Path) -> None:
    """In a subprocess: such a decoder changes every model that it finds."""
    pytester.makeconftest(hook("model_mutating", "CHANGES, meddling", "meddling(CHANGES['a weight in place'][0])"))
    result = judge_apart(ALONE, more=(".",), model=tiny)
    result.assert_outcomes(failed=2, errors=1)  # the error: weights are hashed again at the end of the run
    assert "ModelMutatedError: the judge's own model was changed: gpt_neox.layers.1.mlp" in text_of(result)


def test_layers_that_run_before_a_router_chooses_are_named(pytester: pytest.Pytester, judge: Run, tiny: Path) -> None:
    pytester.makeconftest(hook("planted_defects", "AllLayersThenRoute"))
    result = judge(APART, "invariants/test_depth.py", more=(".",), model=tiny)
    result.assert_outcomes(passed=3, failed=1)
    assert "audit witness: request" in text_of(result)
    assert "but its record counts" in text_of(result)


def test_a_gate_may_ask_for_more_than_a_claim(pytester: pytest.Pytester, judge: Run, tiny: Path) -> None:
    pytester.makeconftest(hook("foreign_decoder", "ForeignDecoder"))
    judge(WITNESS, more=(".",), model=tiny).assert_outcomes(passed=1)
    asked = judge(WITNESS, more=(".",), model=tiny, evidence="timed")
    asked.assert_outcomes(failed=1)
    assert "FLOP counts are claimed: the decoder does not count its work" in text_of(asked)
    assert "--emad-evidence timed asks for more" in text_of(asked)
    pytester.makeconftest(hook("cached_decoder", "CachedDecoder"))
    judge(WITNESS, more=(".",), model=tiny, evidence="witnessed").assert_outcomes(passed=1)
