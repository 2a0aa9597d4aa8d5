"""Undecided claims: a run of a foreign decoder fails and names each, unless it is waived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_emad import cli
from pytest_emad.run import environment as installation
from tests.plugin.conftest import RECORDED, Run, report_of, unwrapped

OK, FAILED, USAGE = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.USAGE_ERROR

SUITES = {
    "conftest": RECORDED
    + """
        import pytest
        from types import SimpleNamespace
        from emad_ref.point import full_depth
        from emad_ref.protocol import ModelRef, Request
        from pytest_emad.run.decoder_providers import make_decoder
        REQUEST = Request(ModelRef("m", lambda: SimpleNamespace(stepper="weights")), full_depth(2))
        @pytest.fixture
        def opened(request): return lambda: make_decoder(request.config, REQUEST)
        """,
    "invariants/test_kv_consistency": """
        from verdicts import verdict
        def test_logits_at_any_admissible_depth_are_the_full_models(emad_record, opened):
            opened()
            emad_record.record_claim(verdict("survived", "EMAD-E2"))
        """,
    "fidelity/test_bridge": """
        import pytest
        @pytest.mark.parametrize("seed", [1, 2])
        def test_sampling(opened, seed): opened()
        def test_premise(opened):
            opened()
            pytest.skip("not applicable (no text)")
        """,
    "fidelity/test_extra": """
        import pytest
        pytest.importorskip("no_such_extra", reason="the extra is not installed")
        def test_scores(opened): opened()
        """,
    "claims/test_model": """
        import pytest
        from verdicts import verdict
        @pytest.mark.parametrize("claim", ["EMAD-F1"])
        def test_claim(emad_record, claim): emad_record.record_claim(verdict("survived", claim))
        """,
    "claims/test_tables": """
        import pytest
        from emad_ref.protocol import Unsupported
        def test_table(): raise Unsupported("early-exit rows ask for T5")
        """,
    "cost/test_claims": """
        import pytest
        from verdicts import verdict
        @pytest.mark.parametrize("claim", ["EMAD-E5", "EMAD-F2"])
        def test_claim(emad_record, opened, claim):
            opened()
            emad_record.record_claim(verdict("survived", claim))
        @pytest.mark.emad(budget="full")
        def test_long(): pass
        """,
}
FOREIGN = "def pytest_emad_make_decoder(config, request): return 'mine'\n"
SAMPLING = "suites/fidelity/test_bridge.py::test_sampling"


@pytest.fixture
def suites(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small folder that the plugin takes for its own suites, and a foreign decoder from a conftest."""
    folder = project.path / "suites"
    for name, text in SUITES.items():
        rewritten(folder, name, text)
    project.makeconftest(FOREIGN)
    monkeypatch.setattr(installation, "SUITES", (folder,))
    return folder


def rewritten(folder: Path, name: str, text: str) -> None:
    file = folder / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = text.splitlines()
    file.write_text("\n".join(line.removeprefix("        ") for line in lines) + "\n")


def failures(result: pytest.RunResult) -> list[str]:
    """Return the failures of the run as a whole."""
    return [
        line.removeprefix("emad: FAILED: ") for line in unwrapped(result).lines if line.startswith("emad: FAILED: ")
    ]


def test_a_foreign_decoder_that_is_decided_passes(suites: Path, project: pytest.Pytester, run: Run) -> None:
    """Absent premises, an extra, a larger budget, and a table without the decoder are no gaps."""
    result = run("suites", "--emad-report", "out")
    assert (result.ret, failures(result)) == (OK, [])
    result.stdout.fnmatch_lines(["emad: decoder: hook of conftest.py", "emad: decoder under test: hook of conftest.py"])
    decoder = report_of(project.path / "out")["decoder"]
    assert decoder["foreign"]
    assert [(p["name"], p["answered"], p["declined"], p["none"]) for p in decoder["providers"]] == [
        ("hook of conftest.py", 6, 0, 0),
        ("reference (ours)", 0, 0, 0),
    ]


def test_a_run_without_pytests_terminal_writes_its_report(suites: Path, project: pytest.Pytester, run: Run) -> None:
    result = run("suites", "-p", "no:terminal", "--emad-report", "out")
    assert (result.ret, result.stderr.str()) == (OK, "")
    assert report_of(project.path / "out")["state"] == "complete"


def test_a_test_that_fails_without_pytests_terminal_is_no_internal_error(
    suites: Path, project: pytest.Pytester, run: Run
) -> None:
    """Options such as --tb belong to the terminal plugin."""
    rewritten(suites, "claims/test_model", "def test_claim(emad_record): raise OSError('no disk')")
    result = run("suites/claims", "-p", "no:terminal", "--emad-report", "out")
    assert (result.ret, "INTERNALERROR" in result.stdout.str() + result.stderr.str()) == (FAILED, False)
    (failed,) = [test for test in report_of(project.path / "out")["tests"] if test["outcome"] == "failed"]
    assert "no disk" in failed["reason"]


def test_our_own_decoder_may_leave_open_what_it_likes(suites: Path, project: pytest.Pytester, run: Run) -> None:
    project.makeconftest("")
    result = run("suites/claims", "-k", "nothing", "--emad-report", "out")
    assert (result.ret, failures(result)) == (pytest.ExitCode.NO_TESTS_COLLECTED, [])
    result.stdout.fnmatch_lines(["emad: decoder: reference (ours)"])


GATES = """
        import pytest
        from verdicts import verdict
        def of(claim): return pytest.param(claim, marks=pytest.mark.emad(claim=claim))
        @pytest.mark.parametrize("claim", [of("EMAD-F1"), of("EMAD-E1")])
        def test_claim(emad_record, claim): emad_record.record_claim(verdict("survived", claim))
        """
LEFT_OUT = {  # a conftest that keeps the test of {claim} from running → why it is not decided
    "mark": (
        "    for item in items:\n        if claim in item.nodeid: item.add_marker(pytest.mark.skip('later'))",
        "skipped by a mark, a fixture or a hook (later)",
    ),
    "xfail": (
        "    for item in items:\n        if claim in item.nodeid: item.add_marker(pytest.mark.xfail(run=False))",
        "marked as an expected failure",
    ),
    "dropped": ("    items[:] = [item for item in items if claim not in item.nodeid]", "collected, but never run"),
}


@pytest.mark.parametrize("how", LEFT_OUT)
def test_a_gate_that_was_asked_for_and_left_no_verdict_fails_every_run(
    suites: Path, project: pytest.Pytester, run: Run, how: str
) -> None:
    """Also with the reference decoder, and in a manual selection: nothing shows that the gate holds."""
    rewritten(suites, "claims/test_model", GATES)
    change, why = LEFT_OUT[how]
    hook = f"import pytest\ndef pytest_collection_modifyitems(items):\n    claim = {{claim!r}}\n{change}\n"
    project.makeconftest(hook.format(claim="EMAD-F1"))
    for words in (["suites/claims"], ["suites/claims/test_model.py"]):
        result = run(*words, "--emad-report", "out")
        assert result.ret == FAILED
        (said,) = failures(result)
        assert said.startswith(f"EMAD-F1: EMAD-F1 gates, and is not decided: {why}")
        assert cli.main(["verify", str(project.path / "out")]) == 1
    assert run("suites/claims", "--emad-waive=EMAD-F1=no text yet").ret == OK
    project.makeconftest(hook.format(claim="EMAD-E1"))
    assert run("suites/claims").ret == OK  # gates nothing
    (said,) = failures(run("suites/claims", "--emad-gate-claims", "EMAD-E1"))
    assert said.startswith("suites/claims/test_model.py::test_claim: EMAD-E1 gates, and is not decided")
    project.makeconftest("")
    assert run("suites/claims", "-k", "not EMAD-F1").ret == OK  # deselected by the user


VERDICT = "emad_record.record_claim(verdict({outcome!r}, claim, reason='as it is'){refused})"


@pytest.mark.parametrize(
    ("outcome", "refused", "said"),
    [
        ("falsified", "", None),
        ("inconclusive", "", None),
        ("not applicable", "", None),
        ("not applicable", ", refused='no sessions'", "not applicable (no sessions)"),
        ("unmeasured", "", "unmeasured (as it is)"),
    ],
)
def test_a_row_is_decided_unless_the_decoder_left_it_open(
    suites: Path, project: pytest.Pytester, run: Run, outcome: str, refused: str, said: str | None
) -> None:
    told = SUITES["claims/test_model"].replace(
        'emad_record.record_claim(verdict("survived", claim))',
        VERDICT.format(outcome=outcome, refused=refused),
    )
    rewritten(suites, "claims/test_model", told)
    (project.path / "claims.toml").write_text("[EMAD-F1]\ngate = false\n")
    result = run("suites", "--emad-register", "claims.toml")
    expected = [] if said is None else [f"EMAD-F1: not decided for emad-tiny: {said}; let the decoder answer"]
    assert [line.partition(", or --emad-waive")[0] for line in failures(result)] == expected
    assert result.ret == (OK if said is None else FAILED)


def test_each_model_must_be_decided(suites: Path, run: Run) -> None:
    lines = failures(run("suites/claims", "--emad-model", "emad-tiny", "--emad-model", "emad-nano"))
    assert lines == [
        "EMAD-F1: not decided for emad-nano: no verdict was given; let the decoder answer, "
        "or --emad-waive 'EMAD-F1=REASON'"
    ]


def test_only_what_was_asked_for_is_required(suites: Path, run: Run) -> None:
    for arguments in (["suites/fidelity"], ["suites/invariants"], [SAMPLING], [f"{SAMPLING}[1]"]):
        assert run(*arguments).ret == OK, arguments


# ---------------------------------------------------------------- cheating

EVERYTHING_DECLINED = "from emad_ref.protocol import Unsupported\ndef pytest_emad_make_decoder(config, request): raise "
SKIPS = "import pytest\ndef pytest_emad_make_decoder(config, request): pytest.skip('not today')\n"
MARKED = """
def pytest_collection_modifyitems(items):
    for item in items:
        if "sampling" in item.name: item.add_marker(pytest.mark.{mark}(reason="flaky"))
"""
SILENT = """
def pytest_collection_modifyitems(items): items[:] = [item for item in items if "sampling" not in item.name]
"""
UNRUN = """
def pytest_runtest_protocol(item): return True if "sampling" in item.name else None
"""


@pytest.mark.parametrize(
    ("conftest", "said"),
    [
        (f"import pytest\n{MARKED.format(mark='skip')}", "skipped by a mark, a fixture or a hook (flaky): 1, 2"),
        (f"import pytest\n{MARKED.format(mark='xfail')}", None),  # passes all the same
        (f"import pytest\n{SILENT}", "collected, but never run: 1, 2"),
        (f"import pytest\n{UNRUN}", "collected, but never run: 1, 2"),
    ],
)
def test_a_conftest_cannot_lose_a_test(
    suites: Path, project: pytest.Pytester, run: Run, conftest: str, said: str
) -> None:
    project.makeconftest(FOREIGN + conftest)
    result = run("suites/fidelity")
    expected = [] if said is None else [f"{SAMPLING}: {said}; let it run, or --emad-waive '{SAMPLING}=REASON'"]
    assert failures(result) == expected
    assert result.ret == (OK if said is None else FAILED)


def test_an_expected_failure_is_no_pass(suites: Path, project: pytest.Pytester, run: Run) -> None:
    wrong = "import pytest\ndef pytest_emad_make_decoder(config, request): raise ValueError('wrong')\n"
    project.makeconftest(wrong + MARKED.format(mark="xfail"))
    said = "reported as xfailed, although its body ended as failed (ValueError: wrong); find the mark, hook or plugin"
    for waiver in ([], ["--emad-waive", f"{SAMPLING}=flaky"]):
        result = run(SAMPLING, *waiver)
        assert result.ret == FAILED
        assert [said in line for line in failures(result)] == [True, True]


def test_an_expected_failure_that_never_ran_is_not_decided(suites: Path, project: pytest.Pytester, run: Run) -> None:
    project.makeconftest(FOREIGN + "import pytest" + MARKED.format(mark="xfail").replace("reason", "run=False, reason"))
    line, *_ = failures(run(SAMPLING, "--emad-expect-decoder", "foreign"))
    assert line.startswith(f"{SAMPLING}: marked as an expected failure ([NOTRUN] flaky): 1, 2; let it run")


FORGES = """
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    report = yield
    if report.failed: report.outcome, report.longrepr = "passed", None
    return report
"""
REFUTED = """
from pytest_emad.audit.finding import Finding
from pytest_emad.run.suite_support import AuditFindingGate
def test_sampling(opened, emad_settings, emad_record):
    opened()
    AuditFindingGate(None, 0.0, emad_settings, emad_record)(Finding("rows", False, "row 2 is off", 7, 1))
"""


def test_an_outcome_that_a_conftest_changed_is_named(suites: Path, project: pytest.Pytester, run: Run) -> None:
    rewritten(suites, "fidelity/test_bridge", REFUTED)
    project.makeconftest(FOREIGN + FORGES)
    result = run(SAMPLING)
    result.assert_outcomes(passed=1)
    assert result.ret == FAILED
    (audit,) = failures(result)
    assert audit.startswith(f"{SAMPLING}: passed, although audit rows refuted it (row 2 is off); find the mark, hook")


@pytest.mark.parametrize("style", ["auto", "short"])
def test_an_exception_of_a_decoder_is_shown_from_the_users_own_frame_on(
    suites: Path, project: pytest.Pytester, run: Run, style: str
) -> None:
    """Dozens of the judge's frames per test would hide the user's frame, the only one to fix."""
    rewritten(suites, "fidelity/test_bridge", "def test_sampling(opened, emad_record): opened()")
    project.makeconftest("def pytest_emad_make_decoder(config, request): return int('no number')")
    result = run(SAMPLING, f"--tb={style}")
    shown = result.stdout.str()
    assert "conftest.py:1: in pytest_emad_make_decoder" in shown
    assert ("test_bridge.py:1: in test_sampling" in shown) == (style == "short")
    assert "  1 test: ValueError: invalid literal for int() with base 10: 'no number'" in result.outlines


@pytest.mark.parametrize("arguments", [["-k", "not sampling"], ["--deselect", SAMPLING], ["-m", "nothing"]])
def test_deselection_is_named(suites: Path, run: Run, arguments: list[str]) -> None:
    result = run("suites/fidelity", *arguments, "--emad-expect-decoder", "foreign")
    assert result.ret == FAILED
    assert f"{SAMPLING}: deselected: 1, 2; let it run, or --emad-waive '{SAMPLING}=REASON'" in failures(result)


@pytest.mark.parametrize(
    "arguments",
    [
        ["suites/fidelity", "-k", "premise"],
        ["suites/fidelity", f"--deselect={SAMPLING}"],
        ["suites/fidelity/test_bridge.py"],
    ],
)
def test_a_part_that_was_typed_proves_nothing_and_fails_nothing(
    suites: Path, project: pytest.Pytester, run: Run, arguments: list[str]
) -> None:
    """During development; the report of such a run proves nothing."""
    result = run(*arguments, "--emad-report", "out")
    assert (result.ret, failures(result)) == (OK, [])
    assert "THIS RUN PROVES NOTHING: " in unwrapped(result).str()
    whole = cli.main(["verify", str(project.path / "out"), "--require-suite", "fidelity"])
    assert whole != OK


@pytest.mark.parametrize("where", ["environment", "ini"])
def test_deselection_from_elsewhere_is_named(
    suites: Path, project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "ini":
        project.makeini("[pytest]\naddopts = -k premise\n")
    else:
        monkeypatch.setenv("PYTEST_ADDOPTS", "-k premise")
    result = run("suites/fidelity", "--emad-report", "out")
    assert result.ret == FAILED
    assert any("test_sampling: deselected: 1, 2" in line for line in failures(result))
    report = report_of(project.path / "out")
    assert report["run"]["addopts"] == ("" if where == "ini" else "-k premise")
    assert len(report["run"]["failures"]) == len(failures(result)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["-o", "python_functions=test_premise"],
        ["-o", "python_files=test_model.py"],
        ["--ignore-glob=*bridge*"],
    ],
)
def test_what_was_never_collected_is_named(suites: Path, run: Run, arguments: list[str]) -> None:
    result = run("suites", *arguments)
    assert result.ret == FAILED
    named = [line for line in failures(result) if "was collected" in line]
    assert any(SAMPLING in line or "test functions: no test of them was collected (" in line for line in named)


def test_a_decoder_that_declines_everything_decides_nothing(suites: Path, project: pytest.Pytester, run: Run) -> None:
    project.makeconftest(f"{EVERYTHING_DECLINED}Unsupported('busy')\n")
    result = run("suites/fidelity")
    assert failures(result) == [
        f"{SAMPLING}: the decoder declined (not applicable (busy)): 1, 2; let it run, or --emad-waive "
        f"'{SAMPLING}=REASON'",
        "suites/fidelity/test_bridge.py::test_premise: the decoder declined (not applicable (busy)); let it run, or "
        "--emad-waive 'suites/fidelity/test_bridge.py::test_premise=REASON'",
    ]
    assert result.ret == FAILED


def test_who_declines_without_a_reason_fails(suites: Path, project: pytest.Pytester, run: Run) -> None:
    project.makeconftest(f"{EVERYTHING_DECLINED}Unsupported\n")
    run(SAMPLING).assert_outcomes(failed=2)


@pytest.mark.parametrize(
    "skips",
    [SKIPS, SKIPS.replace("import pytest", "import unittest").replace("pytest.skip(", "raise unittest.SkipTest(")],
)
def test_a_skip_inside_a_decoder_is_a_failure(suites: Path, project: pytest.Pytester, run: Run, skips: str) -> None:
    project.makeconftest(skips)
    result = run("suites/fidelity/test_bridge.py")
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(["*conftest.py skipped this test. Only the test's own file may skip it*Unsupported*"])


# ---------------------------------------------------------------- origin of the decoder


def test_a_hook_that_leaves_some_requests_to_ours_fails(
    suites: Path, project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours_is_a_word(monkeypatch)
    project.makeconftest("def pytest_emad_make_decoder(config, request): return None\n")
    result = run(SAMPLING, "--emad-report", "out")
    said = "decoder: ours answered 2 of 2 requests, for which hook of conftest.py returned None; return a decoder"
    assert result.ret == FAILED
    assert failures(result)[0].startswith(said)
    assert "decoder under test: reference (ours)" in result.stdout.str()
    provider = report_of(project.path / "out")["decoder"]["providers"][0]
    assert (provider["plugin"], provider["none"]) == (str(project.path / "conftest.py"), 2)
    assert run(SAMPLING, "--emad-waive", "decoder=half of it is written").ret == OK


def ours_is_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub replaces the reference decoder: the test asks which provider is called."""
    import sys
    import types

    stand_in = types.ModuleType("pytest_emad.measurements.run_resources")
    stand_in.make_decoder_on_judge_model = lambda request: "ours"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytest_emad.measurements.run_resources", stand_in)


def test_a_conftest_that_was_not_loaded_is_named(
    suites: Path, project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours_is_a_word(monkeypatch)
    result = run(SAMPLING, "--confcutdir=suites", "--emad-report", "out")
    (line,) = failures(result)
    assert line.startswith(f"decoder: ours was judged, although {project.path / 'conftest.py'} offers one and was not")
    assert result.ret == FAILED
    assert report_of(project.path / "out")["decoder"]["overlooked"] == [str(project.path / "conftest.py")]
    assert run(SAMPLING, "--confcutdir=suites", "--emad-backend", "emad-walked").ret == OK


def test_an_installed_plugin_that_was_not_loaded_is_named(
    installed_plugins: None, suites: Path, project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours_is_a_word(monkeypatch)
    project.makeconftest("")
    installed(project)
    assert run(SAMPLING, "-p", "no:mylib").ret == FAILED
    result = run(SAMPLING, "-p", "no:mylib", "--emad-report", "out")
    assert failures(result)[0].startswith("decoder: ours was judged, although plugin mylib offers one and was not")
    result = run(SAMPLING)
    assert result.ret == OK
    result.stdout.fnmatch_lines(["emad: decoder: hook of plugin mylib (mylib.hooks, mylib 1.5)"])


def installed(project: pytest.Pytester) -> None:
    """Install a distribution with a decoder."""
    package, facts = project.path / "mylib", project.path / "mylib-1.5.dist-info"
    for folder in (package, facts):
        folder.mkdir()
    (package / "__init__.py").touch()
    (package / "hooks.py").write_text(FOREIGN)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mylib\nVersion: 1.5\n")
    (facts / "entry_points.txt").write_text("[pytest11]\nmylib = mylib.hooks\n")


@pytest.mark.parametrize(
    ("wanted", "foreign", "said"),
    [
        ("foreign", True, None),
        ("foreign", False, "--emad-expect-decoder foreign: reference (ours) was judged"),
        ("ours", False, None),
        ("ours", True, "--emad-expect-decoder ours: hook of conftest.py was judged"),
        ("emad-walked", False, None),
        ("mylib", True, "--emad-expect-decoder mylib: hook of conftest.py was judged"),
    ],
)
def test_a_run_can_say_whose_decoder_it_expects(
    suites: Path,
    project: pytest.Pytester,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    foreign: bool,
    said: str | None,
) -> None:
    ours_is_a_word(monkeypatch)
    project.makeconftest(FOREIGN if foreign else "")
    result = run(SAMPLING, "--emad-expect-decoder", wanted)
    assert failures(result) == ([] if said is None else [said])
    assert result.ret == (OK if said is None else FAILED)


def test_where_nobody_was_asked_nobody_was_judged(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test(): pass")
    result = run("--emad-expect-decoder", "foreign")
    assert result.ret == FAILED
    assert failures(result) == ["--emad-expect-decoder foreign: no decoder was asked for anything"]


# ---------------------------------------------------------------- waivers


@pytest.mark.parametrize("of", [SAMPLING, "suites/fidelity/test_bridge.py"])
def test_a_waiver_lets_a_gap_stand_and_is_shown(suites: Path, project: pytest.Pytester, run: Run, of: str) -> None:
    waivers = ["--emad-waive", f"{of}=no sampling yet", "--emad-waive", "EMAD-F2=not timed"]
    result = run("suites/fidelity", "-k", "not sampling", *waivers, "--emad-report", "out")
    assert (result.ret, failures(result)) == (OK, [])
    result.stdout.fnmatch_lines(
        [
            f"emad: waived {of}: no sampling yet",
            "emad: decoder under test: hook of conftest.py",
            f"emad: waived {of}: no sampling yet",
            "emad: waiver not needed: EMAD-F2: not timed",
        ]
    )
    assert report_of(project.path / "out")["waivers"] == [
        {"of": of, "reason": "no sampling yet", "needed": True},
        {"of": "EMAD-F2", "reason": "not timed", "needed": False},
    ]


def test_a_row_is_waived_by_its_id(suites: Path, run: Run) -> None:
    arguments = ["suites/claims", "--emad-model", "emad-tiny", "--emad-model", "emad-nano"]
    assert run(*arguments).ret == FAILED
    assert run(*arguments, "--emad-waive", "EMAD-F1=one model is not ours").ret == OK


def test_a_waiver_does_not_save_a_failure(suites: Path, project: pytest.Pytester, run: Run) -> None:
    project.makeconftest("def pytest_emad_make_decoder(config, request): raise ValueError('wrong')\n")
    assert run(SAMPLING, "--emad-waive", f"{SAMPLING}=no").ret == FAILED


@pytest.mark.parametrize(
    ("waiver", "said"),
    [
        ("EMAD-F2", "--emad-waive='EMAD-F2', but expected NAME=REASON"),
        ("EMAD-F2= ", "but expected NAME=REASON"),
        ("EMAD-X=why", "--emad-waive='EMAD-X', but expected one of EMAD-E2, EMAD-E5, EMAD-F1, EMAD-F2, decoder, or"),
        ("EMAD-R1=why", "--emad-waive='EMAD-R1', but expected one of EMAD-E2"),
        ("suites/fidelity/test_bridge.py::test_none=why", "but expected one of EMAD-E2"),
        ("suites/fidelity=why", "but expected one of EMAD-E2"),
    ],
)
def test_a_waiver_names_something_and_a_reason(suites: Path, run: Run, waiver: str, said: str) -> None:
    result = run("suites/fidelity", "--emad-waive", waiver)
    assert result.ret == USAGE
    assert said in result.stderr.str()


def test_a_waiver_is_given_once(suites: Path, run: Run) -> None:
    result = run("suites/fidelity", "--emad-waive", "EMAD-F2=a", "--emad-waive", "EMAD-F2=b")
    assert result.ret == USAGE
    assert "each name once" in result.stderr.str()


# ---------------------------------------------------------------- subprocesses


@pytest.mark.slow
def test_what_workers_left_out_is_named(wheel_layout: Path, project: pytest.Pytester) -> None:
    project.makeconftest(FOREIGN)
    arguments = ["-p", "no:cacheprovider", "--pyargs", "pytest_emad.suites.claims", "-n", "2", "--emad-report", "out"]
    assert project.runpytest_subprocess(*arguments).ret == OK
    result = project.runpytest_subprocess(*arguments, "-k", "nothing", "--emad-expect-decoder", "foreign")
    assert result.ret == FAILED
    assert "suites/claims/test_claim.py::test_claim: deselected" in [
        line.partition(";")[0] for line in failures(result)
    ]
    described: dict[str, Any] = report_of(project.path / "out")
    assert described["run"]["asked"] == ["suites/claims"]


LEAVES = ("pytest.exit('enough', returncode=0)", "os._exit(0)", "sys.exit(0)")


@pytest.mark.parametrize(
    ("leaves", "workers"),
    [
        *((leaves, 0) for leaves in LEAVES),
        # A worker that vanishes is the hardest case; one that reports its end behaves as without workers.
        *(pytest.param(leaves, 2, marks=[] if "_exit" in leaves else [pytest.mark.slow]) for leaves in LEAVES),
    ],
)
def test_a_decoder_that_leaves_does_not_pass(
    wheel_layout: Path, project: pytest.Pytester, leaves: str, workers: int
) -> None:
    """Either by its exit status, or by the report that it leaves."""
    project.makeconftest(FOREIGN)
    (wheel_layout / "claims" / "test_claim.py").write_text(
        f"import os, sys, pytest\ndef test_claim(): {leaves}\ndef test_more(): pass\n"
    )
    arguments = ["--pyargs", "pytest_emad.suites.claims", "-n", str(workers), "--emad-report", "out"]
    result = project.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
    ended = workers == 0 and "_exit" in leaves
    assert (result.ret == 0) == ended
    assert cli.main(["verify", str(project.path / "out")]) == 1
    if ended:
        assert report_of(project.path / "out")["state"] == "running"


def test_a_run_without_the_plugin_leaves_nothing_to_believe(wheel_layout: Path, project: pytest.Pytester) -> None:
    (wheel_layout / "claims" / "test_claim.py").write_text("def test_claim(): pass\n")
    arguments = ["-p", "no:cacheprovider", "--pyargs", "pytest_emad.suites.claims", "-p", "no:pytest_emad.plugin"]
    assert project.runpytest_subprocess(*arguments).ret == 0
    assert cli.main(["verify", str(project.path / "out")]) == 4
