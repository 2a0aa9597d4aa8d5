"""``report.json`` is read back as written, or refused with the file and the wrong place."""

from __future__ import annotations

import json
import re

import pytest

from emad_ref.errors import BadArgument
from pytest_emad.report.schema import (
    OBJECT_KEYS,
    OPTIONAL_KEYS,
    OPTIONAL_PARTS,
    PARTS,
    REQUIRED_KEYS,
    SCHEMA_2_PARTS,
    BadReport,
    read_report,
    read_reports,
)
from pytest_emad.statistics.verdicts import OUTCOMES, Leg, Verdict
from tests.unit.report.sample_report import report, report_2, verdict, written


def test_what_was_written_is_read(tmp_path):
    assert read_report(written(tmp_path, report())) == report()
    assert read_report(written(tmp_path, report(later="unknown"))) == report(later="unknown")
    empty = {part: {} if part in ("settings", "provenance") else [] for part in PARTS}
    assert read_report(written(tmp_path, {"schema": 1, **empty})) == {"schema": 1, **empty}


def test_the_run_and_its_tests_are_read_from_schema_2(tmp_path):
    assert read_report(written(tmp_path, report_2())) == report_2()
    assert read_report(tmp_path / "report.json") == report_2()


def test_every_part_of_schema_2_is_asked_for(tmp_path):
    """A part that is not required is shown or verified without a check."""
    for part in SCHEMA_2_PARTS:
        with pytest.raises(BadReport, match=f"{part} is missing"):
            read_report(written(tmp_path, {key: value for key, value in report_2().items() if key != part}))
    for part in ("tests", "audits", "deselected", "waivers"):
        assert set(REQUIRED_KEYS[part]) == set(report_2()[part][0])
    for part in ("run", "decoder"):
        assert set(OBJECT_KEYS[part]) == set(report_2()[part])


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_outcome_is_read(tmp_path, outcome):
    data = report(claims=[verdict(outcome)])
    assert read_report(written(tmp_path, data)) == data


def test_claims_and_legs_are_asked_for_all_that_verdicts_write():
    """Add every new field of a verdict here: a field that is not checked is shown without a check."""
    whole = Verdict("EMAD-F1", "m", "survived", 1.0, (0.5, 1.5), 3, 2.0, "u", True, "r").to_json()
    later, of_legs = {"good", "why", "enough"}, {"good", "remedy", "enough"}  # earlier versions do not write them
    assert later <= set(OPTIONAL_KEYS["claims"])
    assert set(REQUIRED_KEYS["claims"]) == set(whole) - later
    from pytest_emad.report.schema import LEG

    assert set(LEG) == set(Leg("l", "survived", 1.0, None, 3, None, "u").to_json()) - of_legs
    assert set(OPTIONAL_KEYS) <= set(REQUIRED_KEYS) <= {*PARTS, *SCHEMA_2_PARTS, *OPTIONAL_PARTS}


def broken(part: str, key: str, value: object) -> dict:
    """Return the sample with one changed entry: its first, or that of a claim's first leg."""
    data = report()
    if part == "legs":
        data["claims"][0]["legs"][0][key] = value
    else:
        data[part][0] = data[part][0] | {key: value}
    return data


def without(part: str, key: str) -> dict:
    data = report()
    data[part][0] = {name: value for name, value in data[part][0].items() if name != key}
    return data


def offering(features: object) -> dict:
    """Return a report whose provider answered and declined ``features``."""
    provider = {"name": "mine", "plugin": "mine", "foreign": True, "answered": 1, "declined": 1, "none": 0}
    return report_2(decoder=report_2()["decoder"] | {"providers": [provider | {"features": features}]})


DAMAGED = [
    ([], "is not a report of pytest-emad: expected schema, models"),
    ({"benchmarks": [], "machine_info": {}}, "found benchmarks, machine_info"),
    ({"schema": 1, "claims": "none"}, "models is missing, but expected a list"),
    (report(schema=3), "schema=3, but this version reads 1 and 2; use the version that wrote it"),
    (report(schema="1"), "schema='1', but this version reads 1 and 2"),
    (report(schema=True), "schema=True, but this version reads 1 and 2"),
    (report(schema=2), "tests is missing, but expected a list"),
    (report_2(state="done"), "state='done', but expected one of running, complete, interrupted, usage error"),
    (report_2(tests=[{"nodeid": "a"}]), "tests[0].shipped is missing, but expected a text or null"),
    (report_2(tests=[report_2()["tests"][0] | {"outcome": "good"}]), "tests[0].outcome='good', but expected one of"),
    (report_2(tests=[report_2()["tests"][0] | {"kind": "fine"}]), "tests[0].kind='fine', but expected a kind of skip"),
    (report_2(run={}), "run.started is missing, but expected a text"),
    (
        report_2(run=report_2()["run"] | {"exit_status": "0"}),
        "run.exit_status='0', but expected a whole number ≥ 0",
    ),
    (
        report_2(tests=[report_2()["tests"][0] | {"features": 1}]),
        "tests[0].features=1, but expected a list of texts",
    ),
    *(
        (offering(features), f"decoder.providers[0].features={features}, but expected feature → [answered, declined]")
        for features in (3, {"exits": 3}, {"exits": [1]}, {"exits": [1, "2"]})
    ),
    (report(settings={"gate_claims": 3}), "settings.gate_claims=3, but expected a list of texts"),
    (report(settings={"budget": []}), "settings.budget=[], but expected a text"),
    (report_2(decoder=report_2()["decoder"] | {"foreign": 1}), "decoder.foreign=1, but expected true or false"),
    (report_2(decoder=report_2()["decoder"] | {"providers": [3]}), "decoder.providers[0]=3, but expected an object"),
    (report_2(decoder=report_2()["decoder"] | {"providers": [{}]}), "decoder.providers[0].name is missing"),
    (report_2(waivers=[{"of": "EMAD-F2"}]), "waivers[0].reason is missing"),
    (report_2(claims=[verdict() | {"refused": 1}]), "claims[0].refused=1, but expected a text"),
    (report(claims={}), "claims={}, but expected a list"),
    (report(settings=[]), "settings=[], but expected an object"),
    (report(notes=["fine", 3]), "notes[1]=3, but expected a text"),
    (report(claims=["survived"]), "claims[0]='survived', but expected an object"),
    (without("claims", "reason"), "claims[0].reason is missing, but expected a text"),
    (without("models", "name"), "models[0].name is missing"),
    (without("goldens", "outcome"), "goldens[0].outcome is missing"),
    (broken("claims", "verdict", "fine"), "claims[0].verdict='fine', but expected one of survived, falsified"),
    (broken("claims", "estimate", "0.1"), "claims[0].estimate='0.1', but expected a number or null"),
    (broken("claims", "interval", [0.1]), "claims[0].interval=[0.1], but expected [low, high], low ≤ high, or null"),
    (broken("claims", "interval", [2, 1]), "claims[0].interval=[2, 1], but expected [low, high], low ≤ high, or null"),
    (broken("legs", "interval", [2, 1]), "claims[0].legs[0].interval=[2, 1], but expected [low, high], low ≤ high"),
    (broken("claims", "n", -1), "claims[0].n=-1, but expected a whole number ≥ 0"),
    (broken("legs", "n", -1), "claims[0].legs[0].n=-1, but expected a whole number ≥ 0"),
    (broken("legs", "p_falsify", 1.5), "claims[0].legs[0].p_falsify=1.5, but expected a number from 0 to 1, or null"),
    (report_2(run=report_2()["run"] | {"duration_s": -1}), "run.duration_s=-1, but expected a number ≥ 0, or null"),
    (report_2(run=report_2()["run"] | {"exit_status": -1}), "run.exit_status=-1, but expected a whole number ≥ 0"),
    (broken("claims", "n", 1.5), "claims[0].n=1.5, but expected a whole number"),
    (broken("claims", "gate", 1), "claims[0].gate=1, but expected true or false"),
    (broken("claims", "legs", [3]), "claims[0].legs[0]=3, but expected an object"),
    (broken("legs", "outcome", "good"), "claims[0].legs[0].outcome='good'"),
    (broken("points", "mean_depth", "deep"), "points[0].mean_depth='deep', but expected a number or null"),
    (broken("points", "accuracy", {"recall": 0.9}), "points[0].accuracy={'recall': 0.9}, but expected task → [ref"),
    (broken("points", "time_ratio", {"1": None}), "points[0].time_ratio={'1': None}, but expected batch size"),
    (broken("tables", "rows", []), "tables[0].rows=[], but expected a list of objects that share their keys"),
    (broken("tables", "rows", [{"a": 1}, {"b": 1}]), "tables[0].rows=[{'a': 1}, {'b': 1}]"),
    (broken("tables", "rows", [{}]), "tables[0].rows=[{}]"),
    (broken("tables", "figure", "pie"), "tables[0]: figure='pie', but expected one of cost against quality"),
    (broken("models", "vocabulary", -1), "models[0].vocabulary=-1, but expected a whole number ≥ 0, or null"),
    (
        broken("points", "perplexity_reference", 0),
        "points[0].perplexity_reference=0, but expected a number > 0, or null",
    ),
    (report(settings={"only": 3}), "settings.only=3, but expected a list of texts"),
    (report_2(settings={"tier": []}), "settings.tier=[], but expected a text or null"),
    (
        report_2(deselected=[report_2()["deselected"][0] | {"claim": {}}]),
        "deselected[0].claim={}, but expected a text or null",
    ),
    *(
        (report_2(audits=[report_2()["audits"][0] | {"live": live}]), f"audits[0].live={live}, but expected name → a")
        for live in ({"positions": "3"}, {"positions": None}, {"prompt_lengths": 3}, {"prompt_lengths": [None]})
    ),
    (broken("tables", "rows", [{"a": 1}]), "tables[0]: columns of row 0=['a'], but expected 'family'"),
]


@pytest.mark.parametrize(("data", "message"), DAMAGED, ids=[message[:40] for _, message in DAMAGED])
def test_a_report_that_is_not_ours_or_damaged_is_refused_by_place(tmp_path, data, message):
    with pytest.raises(BadReport, match=re.escape(message)) as refused:
        read_report(written(tmp_path, data))
    assert str(refused.value).startswith(str(tmp_path / "report.json"))


def test_long_values_are_cut_in_messages(tmp_path):
    with pytest.raises(BadReport) as refused:
        read_report(written(tmp_path, report(claims=["x" * 5000])))
    assert len(str(refused.value)) < len(str(tmp_path)) + 120


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is no JSON text"), ("", "is no JSON text"), (json.dumps(report(notes=[float("nan")])), "NaN is no JSON")],
)
def test_what_is_no_json_is_refused(tmp_path, text, message):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(BadReport, match=message):
        read_report(tmp_path)


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "report.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadReport, match="is no JSON text"):
        read_report(tmp_path)


def test_a_missing_report_says_what_writes_one(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BadReport, match=r"No such file or directory.*pytest --emad-report DIR"):
            read_report(folder)


def test_folders_are_read_in_order_and_each_once(tmp_path):
    first, second = written(tmp_path / "a", report("one")), written(tmp_path / "b", report("two"))
    assert [found["models"][0]["name"] for found in read_reports([second, first])] == ["two", "one"]
    for folders in ([], [first, second, tmp_path / "b" / ".." / "a"]):
        with pytest.raises(BadArgument, match="at least one, each once"):
            read_reports(folders)
