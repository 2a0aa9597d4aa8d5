"""Known verdicts: comparison of a run with a record, and errors in a record."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_emad.measurements.study import Study
from pytest_emad.statistics.goldens import (
    SCHEMA,
    VERDICTS,
    DamagedGolden,
    KnownVerdicts,
    VerdictConditions,
    absent_comparison,
    format_comparison_summary,
    list_changes_from_shipped_register,
    load_known_verdicts_from_folders,
    record_verdict,
    require_known_verdicts_file,
    summarise_seed_outcomes,
    updated_verdict_entries_and_change,
    verdict_key_fields,
)
from pytest_emad.statistics.verdicts import OUTCOMES, load_register

RUN = VerdictConditions(0, "smoke")
KEY = verdict_key_fields("EMAD-F1", "sha", "world:premise", RUN)
ENTRY = {**KEY, "name": "m", "seeds": {"0": "survived"}, "verdict": "unsettled"}


def record(*seeds: str) -> KnownVerdicts:
    entries: list[Any] = []
    for seed, outcome in enumerate(seeds):
        entries, _ = updated_verdict_entries_and_change(entries, KEY, "m", seed, outcome)
    return KnownVerdicts(tuple(entries))


@given(st.lists(st.sampled_from(OUTCOMES), max_size=5), st.integers(0, 6))
def test_what_passes_is_what_was_seen_and_only_agreement_speaks_for_other_seeds(seeds: list[str], seed: int) -> None:
    expected = record(*seeds).find_outcome(KEY, seed)
    if len(set(seeds)) > 1 or len(seeds) >= 3 or seed < len(seeds):
        assert expected.outcomes == set(seeds)
    else:
        assert expected is None


@pytest.mark.parametrize("part", KEY)
def test_every_part_of_the_key_keeps_unlike_runs_apart(part: str) -> None:
    known = record("survived", "survived", "survived")
    assert known.find_outcome(KEY, 9).outcomes == {"survived"}
    assert known.find_outcome(KEY | {part: "other"}, 9) is None
    entries, change = updated_verdict_entries_and_change(known.entries, KEY | {part: "other"}, "m", 9, "falsified")
    assert (len(entries), change) == (2, "added")


def test_a_message_says_which_seed_gave_what() -> None:
    said = record("survived", "inconclusive", "survived").find_outcome(KEY, 0).label
    assert said == "seed-dependent (survived: seed 0, 2; inconclusive: seed 1)"


def test_departures_are_what_may_change_a_verdict(tmp_path: Path) -> None:
    assert (
        Study().non_default_setting_lines
        == Study(seed=3, corpus="wikitext", device="cuda").non_default_setting_lines
        == []
    )
    profile = tmp_path / "profile.json"
    texts = []
    for content in ("{}", "{ }"):
        profile.write_text(content)
        texts.append(Study(profile=profile, margin=0.0, tasks=frozenset({"b", "a"}), limit=3).non_default_setting_lines)
    assert texts[0][:2] == ["limit=3", "margin=0.0"]
    assert texts[0][-1] == "tasks=a+b"
    assert texts[0] != texts[1], "two profiles of one name"
    assert Study(exit=profile).non_default_setting_lines == [f"exit={sha256(profile.read_bytes()).hexdigest()[:16]}"]


def test_rows_in_force_that_are_not_the_shipped_ones_are_departures() -> None:
    register = load_register()
    assert (
        list_changes_from_shipped_register(register)
        == list_changes_from_shipped_register(register, frozenset({"EMAD-F1"}))
        == []
    )
    assert list_changes_from_shipped_register(register, frozenset({"EMAD-R1"})) == ["EMAD-R1.gate=true"]
    stricter = replace(
        register["EMAD-F1"], gate=False, thresholds=register["EMAD-F1"].thresholds | {"accuracy_drop": 0}
    )
    assert list_changes_from_shipped_register(register | {"EMAD-F1": stricter}) == [
        "EMAD-F1.accuracy_drop=0",
        "EMAD-F1.gate=false",
    ]


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ("{", "cannot be read as JSON"),
        ([], "expected a table of schema, a whole number, and verdicts"),
        ({"schema": "2", "verdicts": []}, "expected a table of schema, a whole number, and verdicts"),
        ({"schema": True, "verdicts": []}, "expected a table of schema, a whole number, and verdicts"),
        ({"schema": SCHEMA, "later": []}, "expected a table of schema, a whole number, and verdicts"),
        ({"schema": SCHEMA, "verdicts": {}}, "expected a list"),
        ({"schema": SCHEMA, "verdicts": [{"claim": "EMAD-F1"}]}, "expected a table with exactly budget, claim"),
        ({"schema": SCHEMA, "verdicts": [ENTRY | {"corpus": None}]}, "corpus=None, but expected a text"),
        ({"schema": SCHEMA, "verdicts": [ENTRY | {"seeds": {}}]}, "expected seed → outcome"),
        ({"schema": SCHEMA, "verdicts": [ENTRY | {"seeds": {"x": "survived"}}]}, "expected seed → outcome"),
        (
            {"schema": SCHEMA, "verdicts": [ENTRY | {"seeds": {"0": "ok"}}]},
            "outcome='ok', but expected one of",
        ),
        ({"schema": SCHEMA, "verdicts": [ENTRY | {"verdict": "survived"}]}, "but its seeds say 'unsettled'"),
        ({"schema": SCHEMA, "verdicts": [ENTRY, ENTRY]}, "is on record twice"),
    ],
)
def test_a_damaged_record_is_an_error_with_a_remedy(tmp_path: Path, stored: object, said: str) -> None:
    (tmp_path / VERDICTS).write_text(stored if isinstance(stored, str) else json.dumps(stored))
    with pytest.raises(DamagedGolden, match=r"verdicts\.json.*restore it") as raised:
        load_known_verdicts_from_folders([tmp_path])
    assert said in str(raised.value)


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
def test_a_record_of_another_schema_is_refused_and_not_written_over(tmp_path: Path, schema: int) -> None:
    (tmp_path / VERDICTS).write_text(json.dumps({"schema": schema, "verdicts": ["of another version"]}))
    said = rf"verdicts\.json: schema={schema}, but this version reads {SCHEMA} alone; move the file away"
    with pytest.raises(DamagedGolden, match=said):
        load_known_verdicts_from_folders([tmp_path])
    with pytest.raises(DamagedGolden, match=said):
        record_verdict(tmp_path, KEY, "m", 0, "survived")
    assert "of another version" in (tmp_path / VERDICTS).read_text()


def test_a_run_against_the_record_needs_one(tmp_path: Path) -> None:
    with pytest.raises(DamagedGolden, match=r"expected verdicts on record; looked at .*verdicts\.json"):
        require_known_verdicts_file([tmp_path])
    (tmp_path / VERDICTS).write_text(json.dumps({"schema": SCHEMA, "verdicts": []}))
    require_known_verdicts_file([tmp_path])


def test_the_shipped_record_is_whole() -> None:
    """The test does not depend on the verdicts in it."""
    folder = Path(__file__).parents[3] / "golden"
    assert load_known_verdicts_from_folders([folder]).entries


def line(claim: str, *outcomes: str, changed: bool = False, why: str = "") -> dict[str, Any]:
    expected = " or ".join(outcomes) or None
    return {"claim": claim, "model": "m", "expected": expected, "outcomes": outcomes, "changed": changed, "why": why}


def test_a_summary_counts_what_was_compared_and_why_the_rest_was_not() -> None:
    rows = [
        line("A", "survived"),
        line("B", "survived", changed=True),
        line("C", "falsified", "survived"),
        line("D", why="no reason"),
    ]
    assert format_comparison_summary(rows).splitlines() == [
        "3 verdicts compared with the record: 2 as recorded, 1 changed: B",
        "1 of them seed-dependent, any outcome seen passes: C",
        "1 not compared, no reason: D",
    ]
    (timed,) = format_comparison_summary([line("EMAD-N1", why="no device")]).splitlines()[1:]
    assert timed == "1 not compared, no device: Energy per token falls (EMAD-N1)"
    assert absent_comparison(rows) is absent_comparison([]) is None
    assert "nothing was compared" in absent_comparison(rows[-1:]).reason


def test_two_seeds_never_settle_and_three_do() -> None:
    assert summarise_seed_outcomes({"0": "measured", "1": "measured"}) == "unsettled"
    assert summarise_seed_outcomes({"0": "measured", "1": "measured", "5": "measured"}) == "measured"
