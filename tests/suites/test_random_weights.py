"""Random weights: invariants and cost are judged, claims of quality are ``not applicable`` with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from emad_ref.models import bundled
from pytest_emad.measurements.latency import INDICATIVE_PAIRS
from tests.suites.conftest import SIZES, Run, only, text_of, verdicts_of

QUALITY = ("EMAD-E1", "EMAD-F1", "EMAD-F1-literal")


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a bundled name with a tiny geometry: ``random:`` reads its config and no weights."""
    AutoConfig.for_model("gpt_neox", **SIZES).save_pretrained(tmp_path / "weights" / "pocket")
    monkeypatch.setattr(bundled, "weights_folder", lambda: tmp_path / "weights")
    return "random:pocket"


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(("invariants/test_kv_consistency.py", "claims"), id="claims"),
        pytest.param(("invariants", "fidelity", "claims"), marks=pytest.mark.slow, id="everything"),
    ],
)
def test_quality_is_not_applicable_and_everything_else_runs(
    judge: Run, bundle: str, tmp_path: Path, asked: tuple[str, ...]
) -> None:
    result = judge(*asked, model=bundle, report=tmp_path / "out")
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    verdicts = verdicts_of(tmp_path / "out")
    for claim in QUALITY:
        assert verdicts[claim]["verdict"] == "not applicable"
        assert "random weights" in verdicts[claim]["reason"]
    assert verdicts["EMAD-E2"]["verdict"] == "survived"


def test_a_required_decision_on_quality_fails(judge: Run, bundle: str) -> None:
    result = judge("claims", model=bundle, require="quality")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "--emad-require quality asks for a decision" in text_of(result)


def test_time_is_measured_but_no_speed_up_counts_without_quality(judge: Run, bundle: str, tmp_path: Path) -> None:
    """A required verdict on speed fails and names the missing premise; block compute is counted."""
    chosen = {"report": tmp_path / "out", "require": "speed", "more": only("EMAD-F2", "EMAD-E5")}
    result = judge("cost/test_claims.py::test_claim", model=bundle, **chosen)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "asks for weights that were trained" in text_of(result)
    assert verdicts_of(tmp_path / "out")["EMAD-E5"]["verdict"] == "survived"
    verdict = verdicts_of(tmp_path / "out")["EMAD-F2"]
    assert verdict["verdict"] == "not applicable", text_of(result)
    assert "random weights" in verdict["reason"]
    ratios = {leg["name"]: leg for leg in verdict["legs"] if ", against " in leg["name"]}
    raced = {f"batch {rows}, against {name}" for rows in (1, 4) for name in ("full depth", "generate")}
    assert set(ratios) == raced | {"batch 1, against generate with prompt lookup"}
    assert {(leg["outcome"], leg["n"]) for leg in ratios.values()} == {("measured", INDICATIVE_PAIRS)}
    checked = [leg for leg in verdict["legs"] if leg["name"].endswith("timed requests")]
    assert [leg["outcome"] for leg in checked] == ["measured"] * 2, "the timed path must be honest"
