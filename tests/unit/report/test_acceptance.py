"""The acceptance length that a run measured is the record of a later one: a sample with its n, or one clear reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from pytest_emad.claims.base import ClaimContext
from pytest_emad.claims.engines import decide_acceptance
from pytest_emad.measurements.acceptance_record import AcceptanceRecord
from pytest_emad.measurements.engine import AcceptanceEvidence
from pytest_emad.report.acceptance import read_acceptance_record
from pytest_emad.statistics.units import ByDocument
from pytest_emad.statistics.verdicts import Verdict, load_register
from tests.unit.report.sample_report import foreign_report, written

CLAIM = load_register()["ENG-5"]


def judged(documents: int, shares: tuple[float, ...], record: AcceptanceRecord | None = None, seed: int = 0) -> Verdict:
    """The verdict on an engine that accepts each drafted position in these ``shares`` of about ten rounds."""
    rng = np.random.default_rng(seed)
    rounds = rng.integers(7, 14, documents)
    accepted, left = [], rounds
    for at, share in enumerate(shares):
        left = rng.binomial(left, share / (shares[at - 1] if at else 1.0))
        accepted.append(ByDocument.from_whole_documents(left))
    found = AcceptanceEvidence(ByDocument.from_whole_documents(rounds), accepted, True, record)
    return decide_acceptance(found, ClaimContext(CLAIM, "m", rng))


def reported(folder: Path, *verdicts: Verdict) -> Path:
    claims = [verdict.to_json() | {"gate": False, "test": "t", "fails": False} for verdict in verdicts]
    return written(folder, foreign_report(claims=claims))


def test_a_report_is_a_sample_with_its_interval_and_n(tmp_path: Path) -> None:
    before = judged(150, (0.7, 0.5))
    reported(tmp_path / "out", before)
    record = read_acceptance_record("out", tmp_path, "--x")
    leg = before.legs[0]
    assert record == AcceptanceRecord(leg.estimate, 2, "m, an earlier run", leg.interval, leg.n)  # type: ignore[arg-type]
    assert read_acceptance_record("out/report.json,m", tmp_path, "--x") == record
    after = judged(150, (0.7, 0.5), record, seed=1)
    assert after.verdict == "survived"
    tested, length = after.legs[:2]
    assert tested.name == f"length over that on record, {leg.estimate:.4g} (m, an earlier run, n = {leg.n})"
    assert (tested.unit, tested.threshold, tested.n) == ("× on record", 0.95, length.n)
    assert tested.estimate == pytest.approx(length.estimate / leg.estimate)  # type: ignore[operator]
    assert judged(150, (0.5, 0.3), record, seed=1).verdict == "falsified"
    assert judged(150, (0.7, 0.5, 0.4), record).verdict == "not applicable", "a longer draft"


def test_a_record_of_few_documents_decides_less_than_an_exact_one(tmp_path: Path) -> None:
    """A length that falls by a tenth is shown against an exact record, and not against twelve documents."""
    reported(tmp_path / "out", judged(12, (0.7, 0.5)))
    record = read_acceptance_record("out", tmp_path, "--x")
    exact = AcceptanceRecord(record.length, record.drafted, record.source)
    lower = tuple(share * 0.75 for share in (0.7, 0.5))
    assert judged(300, lower, exact).legs[0].outcome == "falsified"
    assert judged(300, lower, record).legs[0].outcome in ("falsified", "inconclusive")
    least = {name: judged(300, lower, each).legs[0] for name, each in (("exact", exact), ("sample", record))}
    assert least["sample"].p_falsify > least["exact"].p_falsify  # type: ignore[operator]


def test_a_run_that_was_itself_held_against_a_record_is_a_record(tmp_path: Path) -> None:
    """Against an exact record the leg with the threshold has the length; against a sample it is listed beside."""
    for record in (AcceptanceRecord(2.2, 2, "curve"), AcceptanceRecord(2.2, 2, "m", (2.1, 2.3), 90)):
        verdict = judged(150, (0.7, 0.5), record)
        reported(tmp_path / "out", verdict)
        found = read_acceptance_record("out", tmp_path, "--x")
        assert found.length == pytest.approx(2.2, abs=0.15)
        assert found.drafted == 2


@pytest.mark.parametrize(
    ("text", "models", "said"),
    [
        ("out", (), "FOLDER[,MODEL] of a run that measured the length of one of no model"),
        ("out", ("m", "n"), "that measured the length of one of m, n"),
        ("out,o", ("m", "n"), "--x='out,o'"),
        ("out,m,thinking_off", ("m",), "FOLDER[,MODEL]"),
        ("nowhere", ("m",), "of an existing file"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, models: tuple[str, ...], said: str) -> None:
    reported(tmp_path / "out", *(replace(judged(40, (0.7,)), model=model) for model in models))
    with pytest.raises(BadArgument) as refusal:
        read_acceptance_record(text, tmp_path, "--x")
    assert said in str(refusal.value)


def test_a_run_of_one_document_is_no_record(tmp_path: Path) -> None:
    reported(tmp_path / "out", judged(1, (0.7,)))
    with pytest.raises(BadArgument, match="a length with an interval"):
        read_acceptance_record("out", tmp_path, "--x")
