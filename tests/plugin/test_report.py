"""The terminal summary and ``report.json``."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_emad.run.run_report import upsert_model_row
from tests.plugin.conftest import Run, report_of, unwrapped

SUITE = """
from verdicts import verdict
def test_falsified(emad_record):
    emad_record.record_model({"name": "emad-tiny", "fingerprint": "abc", "layers": 12})
    emad_record.record_point({"model": "emad-tiny", "name": "emad m=0.20", "digest": "d", "mean_depth": 5.25}
        | {"net_reduction": 0.41})
    emad_record.record_note("the baseline sleeps")
    emad_record.record_claim(verdict("falsified"))
def test_survived(emad_record):
    emad_record.record_model({"name": "emad-tiny", "fingerprint": "abc", "layers": 12})
    emad_record.record_claim(verdict("survived", "EMAD-E1"))
"""


def test_summary_shows_points_claims_and_notes_after_the_failures(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(SUITE)
    run("-v").stdout.fnmatch_lines(
        [
            "*FAILURES*",
            "*emad operating points*",
            "emad m=0.20*5.25*",
            "*emad claims*",
            "EMAD-F1[*]*falsified*",
            "EMAD-E1 *survived*",
            "*emad notes*",
            "- the baseline sleeps",
            "*emad: emad-tiny*",
            "gates: 0 of 1 hold, 1 falsified",
            "*1 failed, 1 passed*",
        ]
    )


def test_by_default_the_summary_is_all_there_is(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(SUITE.replace('"emad m=0.20", ', '"emad m=0.20", "roles": ["calibrated default"], '))
    result = run()
    result.stdout.fnmatch_lines(
        [
            "  EMAD-F1   Saving 15 % of FLOPs leaves quality as it was: falsified, +3.0 %",
            "            [[]+2.0 %, +4.0 %] relative rise",
            "  EMAD-E1   Each layer is surer of the next token than the last: survived, +3.0*",
            "*FAILURES*",
            'EMAD-F1, "Saving 15 % of FLOPs leaves quality as it was": falsified on emad-tiny',
            "found +3.0 % [[]+2.0 %, +4.0 %] relative rise; needs at most +1.00 %.",
            "This row gates.",
            "*emad: emad-tiny*",
            "FAILED: 1 of 1 gate does not hold",
            "gates: 0 of 1 hold, 1 falsified",
            "  EMAD-F1  Saving 15 % of FLOPs leaves quality as it was: falsified",
            "           found +3.0 % [[]+2.0 %, +4.0 %] relative rise; needs at most +1.00 %",
            "selected operating points:",
            "  emad m=0.20: calibrated default; -41.0 % FLOPs net",
            "1 other claim: 1 survived",
            "  survived: Each layer is surer of the next token than the last (EMAD-E1)",
            "*1 failed, 1 passed*",
        ]
    )
    assert "emad claims" not in result.stdout.str()
    begun = next(number for number, line in enumerate(result.outlines) if line.startswith("emad: decoder:"))
    ours = result.outlines[begun:]  # the headers of pytest and the plugin are as wide as the typed command
    assert max(len(line) for line in ours) <= 80


def test_legs_and_tables_are_printed_at_twice_verbose(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(
        """
        from verdicts import Leg, verdict
        def test_legs(emad_record):
            legs = (Leg("world:premise", "survived", .003, (.002, .004), 200, .01, "relative rise"),)
            emad_record.record_table("equal FLOPs", "emad-tiny", [{"family": "EMAD"}])
            emad_record.record_claim(verdict("survived", "EMAD-E1", legs=legs))
        """
    )
    tables = ["*emad-tiny: equal FLOPs*", "EMAD", "*EMAD-E1 on emad-tiny*", "world:premise*survived*"]
    run("-vv").stdout.fnmatch_lines(tables)
    assert "equal FLOPs" not in run("-v").stdout.str()


def test_a_run_that_recorded_nothing_prints_no_summary(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test(): pass")
    assert "emad claims" not in run().stdout.str()


def test_report(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(SUITE)
    result = run("--emad-report", "out/deep", "--emad-model", "emad-tiny", "--emad-model", "other", "--emad-seed", 5)
    result.stdout.fnmatch_lines(["emad: report written to *report.json"])
    report = report_of(project.path / "out" / "deep")
    assert (report["format"], report["schema"], len(report["sha256"])) == ("report", 8, 64)
    assert report["models"] == [{"name": "emad-tiny", "fingerprint": "abc", "layers": 12}, {"name": "other"}]
    assert [(claim["id"], claim["verdict"], claim["gate"]) for claim in report["claims"]] == [
        ("EMAD-F1", "falsified", True),
        ("EMAD-E1", "survived", False),
    ]
    assert set(report["claims"][0]) == {
        *("id", "model", "verdict", "estimate", "interval", "n", "threshold", "unit", "gate", "reason", "legs"),
        *("title", "good", "why", "enough", "deciding", "test", "fails"),
    }
    assert report["points"][0]["mean_depth"] == 5.25
    assert report["notes"] == ["the baseline sleeps"]
    assert report["settings"]["budget"] == "smoke"
    provenance = report["provenance"]
    assert {"versions", "commit", "platform", "torch_threads", "device", "dtype", "seed"} <= set(provenance)
    assert (provenance["seed"], provenance["device"], provenance["dtype"]) == (5, "cpu", "float32")
    assert provenance["versions"]["pytest"] == pytest.__version__
    pages = {"report.md", "index.html"} if find_spec("jinja2") else {"report.md"}
    assert files(project.path / "out" / "deep") == {"report.json"} | pages


def test_a_repeated_run_says_how_often_it_ran_before(project: pytest.Pytester, run: Run) -> None:
    """A report counts the earlier runs of the same tests, options and weights in its folder."""
    project.makepyfile(SUITE)

    def earlier(*options: str) -> int:
        run("--emad-report", "out", "--emad-model", "emad-tiny", *options)
        return int(report_of(project.path / "out")["run"]["earlier"])

    assert [earlier(), earlier(), earlier("--emad-seed", "5"), earlier("--emad-seed", "5")] == [0, 1, 0, 1]
    again = run("--emad-report", "out", "--emad-model", "emad-tiny", "--emad-seed", "5")
    assert "run 3 of the same tests, options and weights in " in " ".join(again.stdout.str().split())


MEASURING = """
import os
import pytest
from emad_ref.models.fast.product_table import choose_product

@pytest.mark.parametrize("part", range(6))
def test_choice(part):
    own = os.environ["PYTEST_XDIST_WORKER"]
    with open(f"{own}-{part}.chosen", "w") as file:
        file.write(choose_product("a class", ("gw0", "gw1"), lambda: own))
"""


def test_all_processes_of_a_run_take_the_products_that_its_report_names(
    project: pytest.Pytester, run_apart: Run
) -> None:
    project.makepyfile(MEASURING)
    run_apart("-n2", "--emad-report=out").assert_outcomes(passed=6)
    chosen = list(project.path.glob("gw*-*.chosen"))
    assert {file.name[:3] for file in chosen} == {"gw0", "gw1"}
    (product,) = {file.read_text() for file in chosen}
    assert report_of(project.path / "out")["provenance"]["products"] == {"a class": product}


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


FIGURE = """
import pytest
ROWS = [{"family": "EMAD", "net reduction %": 0.25, "rise %": 0.5}]
def test_drawn(emad_record):
    emad_record.record_table("equal FLOPs", "emad-tiny", ROWS, figure="pareto")
"""


def needs(*extra: str) -> None:
    for module in extra:
        pytest.importorskip(module, reason="the extra `report` is not installed")


@pytest.mark.parametrize("workers", [0, 2])
def test_tables_with_a_figure_are_drawn_into_the_report_folder(
    project: pytest.Pytester, run: Run, run_apart: Run, workers: int
) -> None:
    needs("matplotlib", "jinja2")
    project.makepyfile(FIGURE, test_claims=SUITE)
    result = (run_apart if workers else run)("-n", workers, "--emad-report", "out")
    result.stdout.fnmatch_lines(["emad: report written to *", "emad: beside it report.md, index.html, 1 figure"])
    assert files(project.path / "out") == {"report.json", "report.md", "index.html", "emad-tiny-pareto.svg"}
    (table,) = report_of(project.path / "out")["tables"]
    assert table["figure"] == "pareto"
    assert table["rows"] == [{"family": "EMAD", "net reduction %": 0.25, "rise %": 0.5}]
    for name in ("report.md", "index.html"):
        text = (project.path / "out" / name).read_text(encoding="utf-8")
        assert "EMAD-F1" in text
        assert "the baseline sleeps" in text


def test_without_a_report_nothing_is_drawn(project: pytest.Pytester, run_apart: Run) -> None:
    drawing = "import sys\ndef test_nothing_to_draw_with(): assert 'matplotlib' not in sys.modules\n"
    finish = "def pytest_unconfigure():\n    import sys\n    print('loaded:', 'matplotlib' in sys.modules)\n"
    project.makeconftest(finish)
    project.makepyfile(FIGURE + drawing)
    result = run_apart("-s")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["loaded: False"])
    assert not list(project.path.glob("*.svg"))


@pytest.mark.parametrize(("absent", "kept"), [("matplotlib", {"index.html"}), ("jinja2", {"emad-tiny-pareto.svg"})])
def test_what_an_extra_is_missing_for_is_left_out_with_a_note(
    project: pytest.Pytester, run_apart: Run, absent: str, kept: set[str]
) -> None:
    needs("matplotlib", "jinja2")
    project.makeconftest(f"import sys\nsys.modules[{absent!r}] = None\n")
    project.makepyfile(FIGURE)
    result = run_apart("--emad-report", "out")
    result.assert_outcomes(passed=1)
    assert result.ret == 0
    found = re.search(rf"emad: beside it report\.md.*: .*needs {absent}, not installed here.*", unwrapped(result).str())
    assert found
    assert "pip install 'pytest-emad[report]'; `emad report`" in found[0]
    assert files(project.path / "out") == {"report.json", "report.md"} | kept


def test_an_interrupted_run_is_shown_as_far_as_it_got(project: pytest.Pytester, run_apart: Run) -> None:
    project.makepyfile(SUITE + "def test_stop(): raise KeyboardInterrupt\ndef test_never(): pass\n")
    result = run_apart("--emad-report", "out")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert len(report_of(project.path / "out")["claims"]) == 2
    assert "falsified" in (project.path / "out" / "report.md").read_text(encoding="utf-8")
    assert not [name for name in files(project.path / "out") if name.startswith(".")]


@pytest.mark.parametrize(
    ("rows", "figure", "message"),
    [
        ("[{'family': 'a'}]", "pareto", "*columns of row 0*expected 'net reduction %', which figure 'pareto' draws*"),
        ("[{'family': 'a'}]", "pie", "*figure='pie', but expected one of cost against quality, *"),
    ],
)
def test_a_figure_that_cannot_draw_its_rows_fails_where_it_is_recorded(
    project: pytest.Pytester, run: Run, rows: str, figure: str, message: str
) -> None:
    project.makepyfile(f"def test(emad_record):\n    emad_record.record_table('t', 'm', {rows}, figure={figure!r})")
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"BadArgument: {message}"])


def test_quality_and_time_of_one_point_share_a_row(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(
        """
        def test_quality(emad_record):
            emad_record.record_point({"model": "m", "name": "p", "digest": "d", "mean_depth": 5.0, "time_ratio": None})
            emad_record.record_point({"model": "o", "name": "p", "digest": "d", "mean_depth": 6.0, "time_ratio": None})
        def test_time(emad_record):
            emad_record.record_point({"model": "m", "name": "p", "digest": "d", "time_ratio": {"1": 1.5}})
        """
    )
    run("--emad-report", "out")
    assert report_of(project.path / "out")["points"] == [
        {"model": "m", "name": "p", "digest": "d", "mean_depth": 5.0, "time_ratio": {"1": 1.5}},
        {"model": "o", "name": "p", "digest": "d", "mean_depth": 6.0, "time_ratio": None},
    ]


TABLES = """
def test_one(emad_record):
    rows = [{"stride": 2, "rise %": 0.0125, "recall": None}, {"stride": 4, "rise %": 0.0, "recall": 0.5}]
    emad_record.record_table("probe stride", "emad-tiny", rows)
def test_two(emad_record):
    emad_record.record_table("probe stride", "other", [{"interval": [0.5, 1.25]}])
"""


def test_tables_are_printed_between_points_and_claims_and_reported_as_given(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(test_a=TABLES, test_b=SUITE)
    result = run("-vv", "--emad-report", "out")
    result.stdout.fnmatch_lines(
        [
            "*emad operating points*",
            "*emad-tiny: probe stride*",
            "stride*rise %*recall",
            "*2*1.25*–*",
            "*4*0.00*0.5*",
            "*other: probe stride*",
            "interval*",
            "[[]0.5, 1.25]",
            "*emad claims*",
        ]
    )
    assert report_of(project.path / "out")["tables"] == [
        {
            "title": "probe stride",
            "model": "emad-tiny",
            "rows": [{"stride": 2, "rise %": 0.0125, "recall": None}, {"stride": 4, "rise %": 0.0, "recall": 0.5}],
        },
        {"title": "probe stride", "model": "other", "rows": [{"interval": [0.5, 1.25]}]},
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("[]", "*rows of 'probe stride'=*at least one row*"),
        ("[{'a': 1}, {'b': 1}]", "*differing keys*'a'*in every row*"),
        ("[{'a': 1, 'b': 2}, {'b': 2, 'a': 1}]", "*differing keys*"),
        ("[{'a': float('nan')}]", "*built-in JSON values*"),
        ("[{'a': float('inf')}]", "*built-in JSON values*"),
        ("[{'a': __import__('numpy').float32(1)}]", "*built-in JSON values*"),
    ],
)
def test_tables_that_cannot_be_set_or_reported_are_refused(
    project: pytest.Pytester, run: Run, rows: str, message: str
) -> None:
    project.makepyfile(f"def test(emad_record):\n    emad_record.record_table('probe stride', 'm', {rows})")
    result = run("--emad-report", "out")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"BadArgument: {message}"])
    assert report_of(project.path / "out")["tables"] == []


def test_a_verdict_is_kept_when_its_test_fails_later(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(
        """
        from verdicts import verdict
        def test(emad_record):
            emad_record.record_claim(verdict("survived"))
            assert False
        """
    )
    run("--emad-report", "out")
    assert len(report_of(project.path / "out")["claims"]) == 1


def test_a_report_that_cannot_be_written_fails_the_run(
    project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: object, text: str, argument: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("emad_ref.file_formats.write_atomically", full)
    project.makepyfile("def test(): pass")
    result = run("--emad-report", "out")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*FAILED: --emad-report: *No space left*", "*1 passed*"])


def test_collect_only_writes_no_report(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(SUITE)
    run("--emad-report", "out", "--collect-only")
    assert not (project.path / "out" / "report.json").exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_junit_has_flat_short_properties(project: pytest.Pytester, run: Run, run_apart: Run, workers: int) -> None:
    mine = "(emad_record, record_property):\n    record_property('mine', 'x')"
    project.makepyfile(SUITE.replace("(emad_record):", mine))
    (run_apart if workers else run)("--junit-xml", "junit.xml", "-n", workers, "--emad-report", "out")
    cases = ElementTree.parse(project.path / "junit.xml").iter("testcase")
    found = {
        case.get("name"): {each.get("name"): each.get("value") for each in case.iter("property")} for case in cases
    }
    assert found["test_falsified"] == {
        "emad.claim": "EMAD-F1",
        "emad.model": "emad-tiny",
        "emad.verdict": "falsified",
        "emad.gate": "true",
        "emad.estimate": "0.03",
        "emad.low": "0.02",
        "emad.high": "0.04",
        "emad.threshold": "0.01",
        "emad.n": "200",
        "emad.unit": "relative rise",
        "mine": "x",
    }
    assert found["test_survived"]["emad.verdict"] == "survived"
    assert {claim["id"] for claim in report_of(project.path / "out")["claims"]} == {"EMAD-F1", "EMAD-E1"}


def test_a_job_summary_is_added_to_the_file_that_the_job_names(
    project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyfile(SUITE)
    place = project.path / "step.md"
    place.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(place))
    run("--emad-report", "out")
    text = place.read_text(encoding="utf-8")
    assert text.startswith("before\n## emad: ")
    assert "| EMAD-F1 | Saving 15 % of FLOPs leaves quality as it was | falsified |" in " ".join(
        text.split(" ")
    ).replace("  ", " ")
    assert "report written to out/report.json" in text
    assert len(text.splitlines()) <= 41


def test_a_job_summary_that_cannot_be_written_is_one_error_and_loses_no_report(
    project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyfile(
        "from verdicts import verdict\ndef test(emad_record): emad_record.record_claim(verdict('survived'))"
    )
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path))
    result = run("--emad-report", "out")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (line,) = [line for line in unwrapped(result).lines if line.startswith("emad: FAILED: ")]
    assert line.startswith("emad: FAILED: GITHUB_STEP_SUMMARY=")
    assert report_of(project.path / "out")["state"] == "complete"


def test_a_run_of_others_tests_adds_nothing_to_the_job_summary(
    project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyfile("def test(): pass")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "step.md"))
    assert run().ret == pytest.ExitCode.OK
    assert not (project.path / "step.md").exists()


def test_a_model_that_has_been_walked_stays_one_row():
    """Its backend is known once a test has run it layer by layer, and may be removed again."""
    models, asked = [], {"name": "m", "backend": "fast"}
    captured, refused = (asked | {"ran": f"fast, {said}"} for said in ("captured graphs", "nothing captured: no"))
    for facts in (asked, captured, asked, asked | {"backend": "eager"}):
        upsert_model_row(models, facts)
    assert models == [captured, asked | {"backend": "eager"}]
    upsert_model_row(models, refused)
    assert models[0] == refused
