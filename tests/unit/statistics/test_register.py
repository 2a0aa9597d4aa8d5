"""The register as data: shipped rows, permitted changes by a user's file, and the JSON form of verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.errors import BadArgument
from pytest_emad.statistics import verdicts as verdicts_module
from pytest_emad.statistics.verdicts import OUTCOMES, Leg, Verdict, load_register


def test_only_the_papers_falsifiers_and_exact_identities_gate():
    gating = {name for name, claim in load_register().items() if claim.gate}
    assert gating == {"EMAD-F1", "EMAD-F2", "EMAD-E2", "EMAD-E5", "EAD-H1"}


def test_the_shipped_rows_carry_the_papers_numbers():
    register = load_register()
    assert register["EMAD-F1"].thresholds == {"flop_reduction": 0.15, "perplexity_rise": 0.01, "accuracy_drop": 0.01}
    assert register["EMAD-F1"].minimum == {"documents": 30, "documents_to_survive": 200, "items": 100}
    assert register["EMAD-F1-literal"].thresholds == register["EMAD-F1"].thresholds
    assert register["EMAD-F2"].thresholds == {"speedup_ratio": 1.10}
    assert register["EMAD-F2"].minimum == {"pairs": 30}
    assert register["EMAD-E3"].thresholds == {"probe_share": 0.05}


def test_a_users_file_sets_gate_and_thresholds_and_leaves_the_rest(tmp_path):
    path = tmp_path / "claims.toml"
    path.write_text("[EMAD-F1]\nthresholds = { perplexity_rise = 0.02 }\n[EMAD-E1]\ngate = true\n")
    mine, shipped = load_register(path), load_register()
    assert mine["EMAD-F1"].thresholds == {"flop_reduction": 0.15, "perplexity_rise": 0.02, "accuracy_drop": 0.01}
    assert mine["EMAD-F1"].gate
    assert mine["EMAD-E1"].gate
    assert not shipped["EMAD-E1"].gate
    assert {name: claim for name, claim in mine.items() if name not in ("EMAD-F1", "EMAD-E1")} == {
        name: claim for name, claim in shipped.items() if name not in ("EMAD-F1", "EMAD-E1")
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[EMAD-F9]\ngate = true", ["EMAD-F9", "EMAD-F1"]),
        ("[EMAD-F1]\ntitle = 'mine'", ["EMAD-F1: field", "'title'", "gate or thresholds"]),
        ("[EMAD-F1]\nminimum = { documents = 2 }", ["EMAD-F1: field", "'minimum'"]),
        ("[EMAD-F1]\ngate = 'yes'", ["EMAD-F1: gate", "'yes'", "true or false"]),
        ("[EMAD-F1]\ngate = 1", ["EMAD-F1: gate", "true or false"]),
        ("[EMAD-F1]\nthresholds = { rise = 0.02 }", ["EMAD-F1: thresholds", "'rise'", "perplexity_rise"]),
        ("[EMAD-F1]\nthresholds = { perplexity_rise = '1 %' }", ["thresholds.perplexity_rise", "'1 %'", "number"]),
        ("[EMAD-F1]\nthresholds = { perplexity_rise = true }", ["thresholds.perplexity_rise", "True"]),
        ("[EMAD-F1]\nthresholds = { perplexity_rise = nan }", ["thresholds.perplexity_rise", "finite"]),
        ("[EMAD-F1]\nthresholds = 0.02", ["EMAD-F1: thresholds", "0.02", "table"]),
        ("[EMAD-E2]\nthresholds = { x = 1 }", ["EMAD-E2: thresholds", "no threshold to set"]),
        ("EMAD-F1 = 3", ["EMAD-F1", "table"]),
        ("[EMAD-F1", ["claims file", "valid TOML"]),
        ("# thresholds to come\n", ["claims file", "at least one claim", "leave the file out"]),
        ("[EMAD-F1]\n", ["EMAD-F1={}", "gate, or a threshold", "[EMAD-F1] changes nothing"]),
        ("[EMAD-F1]\nthresholds = {}", ["EMAD-F1={'thresholds': {}}", "gate, or a threshold"]),
    ],
)
def test_what_a_users_file_must_not_say_is_refused_with_file_row_and_field(tmp_path, text, named):
    path = tmp_path / "claims.toml"
    path.write_text(text)
    with pytest.raises(BadArgument) as error:
        load_register(path)
    assert all(part in str(error.value) for part in [str(path), *named]), str(error.value)


def test_rows_of_documents_ask_for_more_of_them_before_they_let_a_leg_survive():
    asked = {name: claim.minimum.get("documents_to_survive") for name, claim in load_register().items()}
    rates = {"EMAD-E1", "EMAD-E4", "EMAD-E6", "EMAD-E9", "ENG-5", "ENG-6"}
    assert {name for name, least in asked.items() if least == 100} == rates
    assert {name for name, least in asked.items() if least and name not in rates} == {
        "EMAD-F1",
        "EMAD-F1-literal",
        "EMAD-E10",
        "EMAD-E12",
        "EMAD-X1",
        "EMAD-X7",
        *("ENG-1", "ENG-4", "ENG-7"),
        *(f"EMAD-R{i}" for i in range(1, 5)),
    }
    assert {least for name, least in asked.items() if name not in rates} == {None, 200}


@pytest.mark.parametrize(
    ("minimum", "named"),
    [
        ("3", ["minimum", "a table"]),
        ("{ windows = 30 }", ["'windows'", "documents_to_survive"]),
        ("{ documents = 30.0 }", ["minimum.documents", "whole number"]),
        ("{ documents = true }", ["minimum.documents", "whole number"]),
        ("{ items = 0 }", ["minimum.items", "at least 1"]),
        ("{ documents = 30, documents_to_survive = 29 }", ["minimum.documents_to_survive", "at least 30"]),
    ],
)
def test_a_minimum_of_an_extension_is_checked(tmp_path, monkeypatch, minimum, named):
    row = 'title = "t"\npaper = "p"\nkind = "statistical"\nunit = "u"\ngate = false\nrequires = ""\nthresholds = {}\n'
    file = tmp_path / "more.toml"
    file.write_text(f"[MY-1]\n{row}minimum = {minimum}\n")
    monkeypatch.setattr(verdicts_module, "list_claim_register_paths", lambda: [file])
    with pytest.raises(BadArgument) as error:
        load_register()
    assert all(part in str(error.value) for part in ["more.toml: MY-1", *named]), str(error.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(BadArgument, match=r"absent\.toml"):
        load_register(tmp_path / "absent.toml")


numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)
intervals = st.none() | st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 2)
legs = st.builds(
    Leg,
    name=st.text(),
    outcome=st.sampled_from(OUTCOMES),
    estimate=numbers,
    interval=intervals,
    n=st.integers(0),
    threshold=numbers,
    unit=st.text(),
    reason=st.text(),
    p_falsify=numbers,
    p_survive=numbers,
)
verdicts = st.builds(
    Verdict,
    id=st.text(),
    model=st.text(),
    verdict=st.sampled_from(OUTCOMES),
    estimate=numbers,
    interval=intervals,
    n=st.integers(0),
    threshold=numbers,
    unit=st.text(),
    reason=st.text(),
    legs=st.lists(legs, max_size=3).map(tuple),
)


@given(verdict=verdicts)
def test_a_verdict_survives_json(verdict):
    assert json.loads(json.dumps(verdict.to_json(), allow_nan=False)) == verdict.to_json()


def test_json_has_exactly_the_registers_keys_and_built_in_types():
    leg = Leg("a", "survived", np.float64(0.5), (np.float64(0.1), np.float64(0.9)), np.int64(3), np.float32(1), "u")
    data = Verdict("X", "m", "survived", np.float64(1), None, np.int64(3), None, "u", "", (leg,)).to_json()
    assert list(data) == [
        "id",
        "model",
        "verdict",
        "estimate",
        "interval",
        "n",
        "threshold",
        "unit",
        "reason",
        "good",
        "why",
        "enough",
        "deciding",
        "legs",
    ]
    stack = [data]
    while stack:
        item = stack.pop()
        assert type(item) in (dict, list, str, int, float, bool, type(None)), type(item)
        stack += list(item.values()) if isinstance(item, dict) else item if isinstance(item, list) else []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["estimate", "threshold", "interval"])
def test_a_number_that_is_none_is_refused(field, value):
    values = {"estimate": 0.0, "interval": None, "threshold": 0.0}
    values[field] = (0.0, value) if field == "interval" else value
    with pytest.raises(BadArgument, match=field):
        Leg(name="a", outcome="survived", n=1, unit="", **values)
    with pytest.raises(BadArgument, match=field):
        Verdict(id="X", model="m", verdict="survived", n=1, unit="", reason="", **values)


def test_a_leg_is_about_what_its_name_names_unless_it_says_what():
    assert [Leg("batch 1", "measured", 1.0, None, 1, None, "").to_json()[key] for key in ("point", "kind", "on")] == [
        "", "", "batch 1",
    ]  # fmt: skip
    told = Leg("p: perplexity", "measured", 1.0, None, 1, None, "", point="p", kind="perplexity")
    assert (told.point, told.kind, told.on) == ("p", "perplexity", "")


def test_a_verdict_is_decided_by_a_leg_that_it_lists():
    leg = Leg("a", "survived", 1.0, None, 1, None, "")
    verdict = Verdict("X", "m", "survived", 1.0, None, 1, None, "", "", (leg,), deciding=0)
    assert verdict.legs[verdict.deciding] is leg
    assert replace(verdict, deciding=None).deciding is None
    with pytest.raises(BadArgument, match="deciding=1, but expected an index of its 1 legs"):
        replace(verdict, deciding=1)


def test_an_outcome_nobody_knows_is_refused():
    with pytest.raises(BadArgument, match="passed"):
        Leg("a", "passed", None, None, 0, None, "")


def test_reading_the_register_needs_neither_numpy_nor_torch():
    code = (
        "import sys; from pytest_emad.statistics.verdicts import load_register; load_register();"
        "print([m for m in ('numpy', 'scipy', 'torch', 'hypothesis') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
