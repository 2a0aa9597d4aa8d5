"""``emad compare`` between two reports: regressions, changes that are no regression, and entries it cannot compare."""

from __future__ import annotations

import pytest

from pytest_emad import cli
from pytest_emad.report.comparison import changed_rows, compare_reports, describe_setting_changes, format_run_label
from pytest_emad.report.schema import BadReport, read_report
from pytest_emad.statistics.verdicts import OUTCOMES, Leg
from tests.unit.report.sample_report import foreign_report, passed, report, verdict, written

F1, E1 = "EMAD-F1", "EMAD-E1"  # of the sample's rows, F1 gates


def of(*claims, **changes):
    return foreign_report(claims=list(claims), points=[], tests=[]) | changes


def only(old, new):
    """Return the only row of two reports."""
    (change,) = compare_reports(old, new).rows
    return change


def compared(tmp_path, capsys, old, new, *options):
    """Return (exit status, lines on stdout, stderr)."""
    argv = ["compare", str(written(tmp_path / "a", old)), str(written(tmp_path / "b", new)), *options]
    status = cli.main(argv)
    said = capsys.readouterr()
    return status, said.out.splitlines(), said.err


# ---------------------------------------------------------------- verdicts


WORSE = {("survived", other) for other in OUTCOMES if other != "survived"} | {
    (other, "falsified") for other in OUTCOMES if other != "falsified"
}
BETTER = {(other, "survived") for other in OUTCOMES if other != "survived"} | {("falsified", "inconclusive")}


@pytest.mark.parametrize("old", OUTCOMES)
@pytest.mark.parametrize("new", OUTCOMES)
def test_a_verdict_turns_for_worse_for_better_or_into_another(old, new):
    mark = only(of(verdict(old)), of(verdict(new))).mark
    expected = "worse" if (old, new) in WORSE else "better" if (old, new) in BETTER else "changed"
    assert mark == ("as before" if old == new else expected)


@pytest.mark.parametrize(
    ("claim", "old", "mark"),
    [(F1, "survived", "worse"), (F1, "falsified", "only old"), (E1, "survived", "only old")],
)
def test_of_rows_that_are_gone_a_gate_that_had_survived_is_worse(claim, old, mark):
    gone = only(of(verdict(old, claim)), of())
    assert (gone.mark, gone.after, gone.before.partition(",")[0]) == (mark, "", old)
    came = only(of(), of(verdict("falsified", claim)))
    assert (came.mark, came.before) == ("only new", "")


def test_a_row_gates_where_either_report_says_so():
    old, new = verdict("survived"), verdict("falsified") | {"gate": False}
    change = only(of(old), of(new))
    assert change.gate
    assert "gated only in the old report" in change.reason


# ---------------------------------------------------------------- numbers


def numbers(estimate, interval, outcome="inconclusive", **changes):
    return verdict(outcome, estimate=estimate, interval=interval, legs=()) | changes


@pytest.mark.parametrize(
    ("outcome", "estimate", "worse"),
    [("falsified", 0.04, +1), ("survived", 0.005, +1), ("falsified", 0.005, -1), ("survived", 0.04, -1)],
)
def test_the_outcome_tells_which_side_is_worse(outcome, estimate, worse):
    """The threshold is 0.01. A change of 0.003 at half-widths of 0.001 is significant."""
    for by in (+0.003, -0.003):
        interval = (estimate - 0.001, estimate + 0.001)
        moved_ = (estimate + by - 0.001, estimate + by + 0.001)
        change = only(of(numbers(estimate, interval, outcome)), of(numbers(estimate + by, moved_, outcome)))
        assert change.mark == ("moved for worse" if by * worse > 0 else "moved for the better")


def test_another_verdict_with_a_number_that_moved_for_worse_is_marked_as_worse():
    """``--fail-on moved`` sees it: the verdict alone is neither better nor worse."""
    old, new = numbers(0.005, (0.004, 0.006), "inconclusive"), numbers(0.02, (0.018, 0.022), "measured")
    old["legs"] = [Leg("text", "survived", 0.005, (0.004, 0.006), 9, 0.01, "relative rise").to_json()]
    assert only(of(old), of(new)).mark == "moved for worse"
    assert only(of(old), of(old | {"verdict": "measured"})).mark == "changed"


@pytest.mark.parametrize(
    ("falsify", "survive", "mark"),
    [(0.2, 0.8, "moved for worse"), (0.8, 0.2, "moved for the better"), (1, 1, "moved")],
)
def test_what_decided_nothing_tells_by_the_smaller_p_value(falsify, survive, mark):
    def leg(estimate):
        bounds = (estimate - 0.001, estimate + 0.001)
        return Leg("text", "inconclusive", estimate, bounds, 9, 0.01, "relative rise", "", falsify, survive)

    old, new = (verdict("inconclusive", estimate=leg(e).estimate, interval=leg(e).interval, n=9, legs=(leg(e),))
                for e in (0.02, 0.03))  # fmt: skip
    assert only(of(old), of(new)).mark == mark


@pytest.mark.parametrize(
    ("old", "new", "mark"),
    [
        ((0.02, (0.01, 0.03)), (0.02, (0.01, 0.03)), "as before"),
        ((0.02, (0.01, 0.03)), (0.03, (0.02, 0.04)), "within chance"),
        ((0.02, (0.01, 0.03)), (0.02, (0.01, 0.04)), "within chance"),
        ((0.02, None), (0.02, None), "as before"),
        ((0.02, None), (0.020000000000000004, None), "another number"),
        ((0.02, (0.01, 0.03)), (0.02, None), "another number"),
        ((0.02, (0.01, 0.03)), (None, None), "as before"),
    ],
)
def test_a_number_that_did_not_move_says_why(old, new, mark):
    assert only(of(numbers(*old)), of(numbers(*new))).mark == mark


def test_other_quantities_are_not_compared_and_other_thresholds_are_named():
    old = verdict("falsified", estimate=0.5, interval=(0.4, 0.6), legs=()) | {"unit": "accuracy drop"}
    change = only(of(old), of(verdict("falsified", legs=())))
    assert (change.mark, change.reason) == ("as before", "another quantity: accuracy drop → relative rise")
    change = only(of(old), of(verdict("not applicable") | {"estimate": None, "interval": None}))
    assert "another quantity" not in change.reason, "a row without a number has none"
    change = only(of(verdict(threshold=0.02)), of(verdict()))
    assert change.reason == "another threshold: +2.00 % → +1.00 %"
    assert only(of(verdict(threshold=None)), of(verdict())).reason == ""


def test_where_another_leg_decides_it_is_compared_with_itself_or_with_nothing():
    def leg(name, estimate):
        bounds = (estimate - 0.001, estimate + 0.001)
        return Leg(name, "falsified", estimate, bounds, 9, 0.01, "relative rise")

    def decided_by(leg, *others):
        found = {"estimate": leg.estimate, "interval": leg.interval, "n": 9, "deciding": len(others)}
        return of(verdict("falsified", legs=(*others, leg), **found))

    old, new = leg("x", 0.03), leg("y", 0.05)
    change = only(decided_by(old), decided_by(new, old))
    assert (change.mark, change.reason) == ("another leg", "another leg decides: x → y")
    change = only(decided_by(old, leg("y", 0.02)), decided_by(new, old))
    assert (change.mark, change.reason) == ("moved for worse", "another leg decides: x → y (before +2.00 %)")
    assert only(decided_by(old, new), decided_by(new, old)).mark == "as before"
    alike = decided_by(old, leg("y", 0.03))  # the leg before it has the same numbers
    assert only(alike, decided_by(old)).reason == ""


# ---------------------------------------------------------------- matching rows


def test_rows_go_by_model_and_the_last_one_by_claim():
    """One of two models is in both reports; the others are paired. Three of them have no counterpart."""
    old = of(verdict(model="m"), verdict(model="/far/x"))
    new = of(verdict(model="hub/y"), verdict(model="m"))
    assert {change.model for change in compare_reports(old, new).rows} == {"m", "x → hub/y"}
    more = of(verdict(model="y"), verdict(model="z"), verdict(model="m"))
    assert {change.model: change.mark for change in compare_reports(old, more).rows} == {
        "m": "as before",
        "x": "only old",
        "y": "only new",
        "z": "only new",
    }


def test_a_leg_about_a_point_is_compared_by_the_points_role_or_as_the_only_one_of_its_kind():
    """Another calibration gives another digest, and a leg of the same kind is still the same leg."""

    def leg(point, on="x", kind="perplexity"):
        return Leg(f"p {on}", "falsified", 0.03, (0.02, 0.04), 9, 0.01, "relative rise", point=point, kind=kind, on=on)

    def judged(point, *legs):
        numbers = {"estimate": 0.03, "interval": (0.02, 0.04), "n": 9, "deciding": 0}
        (row,) = report()["points"]
        points = [row | {"digest": point, "roles": ["calibrated default"]}]
        return of(verdict("falsified", legs=legs, **numbers), points=points)

    def notes(old, new):
        return [change.reason for change in compare_reports(old, new).rows if change.kind == "claim"]

    old, new = judged("a", leg("a"), leg("z")), judged("b", leg("b"), leg("z"))
    assert notes(old, new) == [""]
    assert notes(judged("b", leg("b"), leg("z")), judged("b", leg("z"), leg("b"))) == [
        "another leg decides: p x → p x (before +3.0 %)"
    ]
    assert notes(judged("a", leg("unlisted")), judged("b", leg("of the other"))) == [""]


def test_points_go_by_digest_and_else_by_their_role():
    (old,), (new,) = report()["points"], report()["points"]
    old |= {"roles": ["chosen"], "name": "emad m=0.20"}
    new |= {
        "roles": ["chosen"],
        "name": "emad m=0.21",
        "digest": "ba9876543210",
        "mean_depth": 8.0,
        "perplexity_rise": 0.05,
    }
    new["interval"] = [0.04, 0.06]
    change = only(of(points=[old]), of(points=[new]))
    assert (change.name, change.mark) == ("emad m=0.21", "moved for worse")
    assert change.reason == "point emad m=0.21 (before emad m=0.20); depth 8.00 (before 7.25)"
    same = only(of(points=[old]), of(points=[old | {"mean_depth": 8.0}]))
    assert same.mark == "another number"
    scores = [{"recall": [0.9, 0.8825], "chart": [0.5, right]} for right in (0.5, 0.25)]
    tasks = only(*(of(points=[old | {"accuracy": score}]) for score in scores))
    assert tasks.reason == "accuracy chart 0.500 → 0.250 (before chart 0.500 → 0.500)"
    fewer = only(of(points=[old | {"accuracy": scores[0]}]), of(points=[old]))
    assert fewer.reason.endswith("recall 0.900 → 0.882 (before recall 0.900 → 0.882, chart 0.500 → 0.500)")
    assert only(of(points=[old]), of(points=[old])).mark == "as before"
    assert only(of(points=[old]), of(points=[])).mark == "only old"


@pytest.mark.parametrize(
    ("old", "new", "mark"),
    [
        ({}, {"outcome": "failed"}, "worse"),
        ({"outcome": "skipped"}, {"outcome": "error"}, "worse"),
        ({}, {"outcome": "skipped", "kind": "refused"}, "worse"),
        ({}, {"outcome": "not reported"}, "worse"),
        ({}, {"outcome": "skipped", "kind": "not applicable"}, "changed"),
        ({"outcome": "failed"}, {"outcome": "error"}, "changed"),
        ({"outcome": "failed"}, {}, "better"),
        ({}, {}, None),
    ],
)
def test_tests_that_break_or_are_left_undecided_are_worse(old, new, mark):
    name = "suites/invariants/test_depth.py::test_rows"
    old, new = ({"outcome": "passed"} | given for given in (old, new))
    rows = compare_reports(of(tests=[passed(name, **old)]), of(tests=[passed(name, **new)])).rows
    assert [row.mark for row in rows] == ([] if mark is None else [mark])
    asks = "suites/claims/test_model.py::test_claim"  # its verdict changes
    assert compare_reports(of(tests=[passed(asks, **old)]), of(tests=[passed(asks, **new)])).rows == []


def test_tests_that_ended_alike_are_counted(tmp_path, capsys):
    tests = [passed(f"suites/invariants/test_depth.py::test_{name}") for name in ("a", "b")]
    status, lines, _ = compared(tmp_path, capsys, of(tests=tests), of(tests=[*tests, passed("more", shipped=None)]))
    assert status == 0
    assert "2 tests as before" in lines


@pytest.mark.parametrize(("old", "new"), [(of(), of()), (of(verdict("falsified")), of(verdict("survived", E1)))])
def test_reports_without_anything_in_common_are_status_4(tmp_path, capsys, old, new):
    status, lines, err = compared(tmp_path, capsys, old, new)
    assert (status, lines) == (4, [])
    assert "nothing can be compared; run the same suites for both" in err


# ---------------------------------------------------------------- output for people


def test_a_label_names_model_decoder_commit_and_begin():
    run = foreign_report()["run"]
    project = {"root": "/checkouts/mine", "commit": "3f2a91c0d1e2f3a4b5c6d7e8f9a0b1c2d3e4f5a6-dirty"}
    decoder = foreign_report()["decoder"] | {"name": "hook of plugin mylib (mylib.hooks, mylib 1.2)"}
    data = foreign_report("/models/mine", run=run | {"project": project}, decoder=decoder)
    assert format_run_label(data) == "mine · mylib 1.2 · mine 3f2a91c-dirty · 2026-01-02 03:04"
    provenance = foreign_report()["provenance"] | {"commit": "a" * 40}
    ours = foreign_report(provenance=provenance, models=[{"name": name} for name in ("x", "hub/y", "z")])
    assert format_run_label(ours) == "x, hub/y and 1 more · mylib · pytest-emad aaaaaaa · 2026-01-02 03:04"
    assert format_run_label(report(models=[])) == "no model · reference · pytest-emad 0.2 · 2026-01-02 03:04"


def test_what_is_measured_otherwise_is_named():
    old = foreign_report(settings={"seed": 0, "report": "a", "backend": "a", "margin": None, "tasks": ["recall"]})
    assert describe_setting_changes(old, old) == []
    settings = {"seed": 1, "report": "b", "backend": "b", "margin": 0.5, "tasks": []}
    model = {"name": "m", "fingerprint": "beef"}
    provenance = old["provenance"] | {
        "versions": {"pytest-emad": "0.2", "torch": "2.12", "numpy": "2.1"},
        "platform": "here",
    }
    new = foreign_report(settings=settings, models=[model], provenance=provenance)
    new["run"] = new["run"] | {"asked": ["suites/claims"], "claims_file": {"path": "x", "sha256": "0123456789"}}
    assert describe_setting_changes(old, new) == [
        *("seed 0 → 1", "tasks recall → not set", "margin not set → 0.5", "asked suites → suites/claims"),
        *("claims file not set → 0123456", "weights of m f00d → beef", "torch 2.11 → 2.12"),
    ]
    assert describe_setting_changes(old, old | {"settings": {"seed": 0, "new": 1}})[-1].startswith(
        "only one of them knows budget, tasks"
    )


@pytest.mark.parametrize(
    ("name", "fingerprint", "said"),
    [("other", "beef", ["models m → other"]), ("moved", "f00d", []), ("m", "f00d", [])],
)
def test_another_model_is_named_and_a_moved_folder_is_none(name, fingerprint, said):
    new = foreign_report(models=[{"name": name, "fingerprint": fingerprint}])
    assert describe_setting_changes(foreign_report(), new) == said


def test_rows_for_a_page_are_what_is_not_as_before_worst_first():
    old = of(verdict("survived", "EMAD-E1"), verdict("survived"), verdict("measured", "EMAD-R2"))
    new = of(verdict("measured", "EMAD-R2"), verdict("falsified", "EMAD-E3"), verdict("falsified"))
    rows = changed_rows(old, new)
    assert [(row["mark"], row["what"].partition(" on ")[0]) for row in rows] == [
        *(("worse", "EMAD-F1*"), ("only new", "EMAD-E3"), ("only old", "EMAD-E1")),
    ]
    assert rows[0] == {
        "mark": "worse",
        "what": "EMAD-F1* on m: Saving 15 % of FLOPs leaves quality as it was",
        "before": "survived, +3.1 % [+2.1 %, +4.2 %] relative rise",
        "after": "falsified, +3.1 % [+2.1 %, +4.2 %] relative rise",
        "reason": "1 of 2 legs falsified",
    }
    assert {tuple(row) for row in rows} == {tuple(rows[0])}


# ---------------------------------------------------------------- the verb


SMALL = {"estimate": 0.002, "interval": (0.001, 0.003)}
LARGE = {"estimate": 0.005, "interval": (0.004, 0.006)}


@pytest.mark.parametrize(
    ("old", "new", "fails"),
    [
        (verdict("survived", F1), verdict("falsified", F1), "gate verdict moved"),
        (verdict("survived", E1), verdict("falsified", E1), "verdict moved"),
        (verdict("survived", E1, **SMALL), verdict("survived", E1, **LARGE), "moved"),
        (verdict("survived", E1, **LARGE), verdict("survived", E1, **SMALL), ""),
        (verdict("falsified", F1), verdict("survived", F1), ""),
    ],
)
def test_the_exit_status_is_what_was_asked_to_fail(tmp_path, capsys, old, new, fails):
    for word in ("never", "gate", "verdict", "moved"):
        status, lines, err = compared(tmp_path, capsys, of(old), of(new), "--fail-on", word)
        assert (status, err) == (int(word in fails.split()), "")
        assert lines[-1].startswith("Nothing" if word == "never" else "Fails by" if status else "Passes by")
    assert compared(tmp_path, capsys, of(old), of(new))[0] == int("verdict" in fails)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (of(state="running"), "state='running', but expected 'complete'"),
        (of(state="interrupted"), "state='interrupted'"),
        (of(state="usage error"), "state='usage error'"),
    ],
)
def test_what_cannot_be_compared_is_one_error_and_status_2(tmp_path, capsys, new, said):
    for pair in ((of(), new), (new, of())):
        status, lines, err = compared(tmp_path, capsys, *pair)
        assert (status, lines) == (4, [])
        assert said in err
        assert len(err.splitlines()) == 1
    with pytest.raises(BadReport, match="new: state='running'"):
        compare_reports(of(), of(state="running"))


def test_a_report_that_is_missing_or_the_same_is_status_2(tmp_path, capsys):
    folder = written(tmp_path / "a", of())
    for other, said in ((tmp_path / "none", "cannot be read"), (folder, "each once")):
        assert cli.main(["compare", str(folder), str(other)]) == 4
        assert said in capsys.readouterr().err


def many(outcome):
    long = "an operating point with a name that nobody would want to read twice " * 3
    claims = [verdict(outcome, f"EMAD-X{number}", reason=long, legs=()) for number in range(60)]
    settings = {f"option_{number}": outcome for number in range(40)}
    return of(*claims, settings=settings, models=[{"name": long}])


def test_what_is_shown_is_40_lines_of_80_columns_and_all_of_it_on_request(tmp_path, capsys):
    status, lines, _ = compared(tmp_path, capsys, many("survived"), many("falsified"))
    assert status == 1
    assert 35 <= len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert any(line.endswith("more rows: pass -v") for line in lines)
    _, lines, _ = compared(tmp_path, capsys, many("survived"), many("falsified"), "-v")
    assert all(any(line.startswith(f"  EMAD-X{number} on m") for line in lines) for number in range(60))
    assert sum(line.startswith("    survived, +3.1 %") for line in lines) == 60
    assert max(map(len, lines)) <= 80


def test_what_changed_is_shown_with_both_numbers(tmp_path, capsys):
    settings = {"seed": 0}, {"seed": 1}
    old = of(verdict("survived", **SMALL), verdict("survived", E1), settings=settings[0])
    new = of(verdict("falsified", **LARGE), verdict("survived", E1), settings=settings[1])
    _, lines, _ = compared(tmp_path, capsys, old, new)
    text = "\n".join(lines)
    assert "not like for like: seed 0 → 1\n\n1 worse, 1 as before\n\nWorse\n" in text
    assert "  EMAD-F1* on m: Saving 15 % of FLOPs leaves quality as it was\n    survived, +0.20 %" in text
    difference = "+0.20 % [+0.10 %, +0.30 %] relative rise → falsified, +0.50 % [+0.40 %, +0.60 %] relative rise"
    assert difference in " ".join(text.split())
    assert "    1 of 2 legs falsified\n" in text
    assert "Gates now: Saving 15 % of FLOPs leaves quality as it was (EMAD-F1): falsified\n" in text
    assert "EMAD-E1" not in text
    assert "EMAD-E1" in "\n".join(compared(tmp_path, capsys, old, new, "-v")[1])


def test_markdown_is_a_table_in_which_names_stay_text(tmp_path, capsys):
    model = "<b>a|b</b>"
    old, new = of(verdict("survived", model=model)), of(verdict("falsified", model=model), verdict("measured", E1))
    status, lines, _ = compared(tmp_path, capsys, old, new, "--markdown")
    assert status == 1
    assert lines[0] == "### emad compare: 1 worse, 1 only new"
    (row,) = [line for line in lines if line.startswith("| worse")]
    assert "&lt;b&gt;a\\|b&lt;/b&gt;" in row
    assert row.replace("\\|", "").count("|") == 6
    assert "Only in the new report: EMAD-E1" in lines
    assert not any(line.startswith("| only new") for line in lines)
    points = ([point | {"name": "a|b", "mean_depth": depth} for point in report()["points"]] for depth in (1, 2))
    _, lines, _ = compared(tmp_path, capsys, *(of(points=part) for part in points), "--markdown", "-v")
    assert any(line.startswith("| another number | a\\|b ") for line in lines)
    assert any(line.startswith("| only new") for line in compared(tmp_path, capsys, old, new, "--markdown", "-v")[1])


def test_a_report_read_from_its_file_compares_with_itself(tmp_path):
    data = read_report(written(tmp_path, foreign_report()))
    assert {change.mark for change in compare_reports(data, data).rows} == {"as before"}


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_comparison_is_as_wide_as_the_terminal(tmp_path, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    old, new = of(verdict("falsified")), of(verdict("survived"), verdict("falsified", E1))
    lines = compared(tmp_path, capsys, old, new)[1]
    assert [line for line in lines[:-1] if len(line) > width] == [], "the last line stays whole, for a script to find"


def test_a_folder_of_reports_is_a_history_oldest_first_and_its_last_two_decide(tmp_path, capsys):
    """For any folder names; units are not mixed."""
    story = [
        ("z", 0.2, "relative rise", "survived"),
        ("m", 5.0, "nats", "falsified"),
        ("a", 0.4, "relative rise", None),
    ]
    places = {"m": "m/report"}  # the layout of downloaded artifacts: a folder around the report's own
    for day, (name, estimate, unit, outcome) in enumerate(story, start=1):
        row = verdict(outcome or "falsified") | {"estimate": estimate, "unit": unit, "legs": [], "deciding": None}
        found = of(row, verdict("not applicable", E1))
        found["run"]["started"] = f"2026-11-0{day}T10:00:00+00:00"
        (tmp_path / name).mkdir()
        written(tmp_path / places.get(name, name), found)
    assert cli.main(["compare", str(tmp_path)]) == 0, "falsified before and now"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 reports, from ")
    place = lines.index(f"{F1}   Saving 15 % of FLOPs leaves quality as it was")
    assert lines[place + 1] == "    ▁·█  survived → falsified, +20.00 % → +40.00 % (relative rise)"
    assert lines[-1] == "Passes by --fail-on verdict: nothing got worse."
    assert not [line for line in lines if line.startswith(E1)], "rows that no report decides have no history"
    assert cli.main(["compare", *(str(tmp_path / places.get(name, name)) for name in "amz")]) == 0, (
        "as given: better at last"
    )
    assert cli.main(["compare", *(str(tmp_path / places.get(name, name)) for name in "azm"), "--fail-on", "never"]) == 0
    assert cli.main(["compare", str(tmp_path / "z"), str(tmp_path / "a")]) == 1, "only two reports are compared"
