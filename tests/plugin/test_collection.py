"""Collection of tests: budgets, markers, models, the error for an empty run, the Hypothesis profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_emad.run import environment
from tests.plugin.conftest import RECORDED, Run

USAGE = pytest.ExitCode.USAGE_ERROR

BUDGETED = """
import pytest
def test_unmarked(): pass
@pytest.mark.emad(claim="EMAD-F1")
def test_smoke(): pass
@pytest.mark.emad(budget="standard")
def test_standard(): pass
@pytest.mark.emad(budget="full")
def test_full(): pass
"""


@pytest.mark.parametrize(("budget", "runs"), [("smoke", 2), ("standard", 3), ("full", 4)])
def test_tests_above_the_budget_are_deselected(project: pytest.Pytester, run: Run, budget: str, runs: int) -> None:
    project.makepyfile(BUDGETED)
    run("--emad-budget", budget, "--strict-markers").assert_outcomes(passed=runs, deselected=4 - runs)


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("budget='huge'", "budget='huge', but expected one of smoke, standard, full"),
        ("claim='EMAD-X'", "claim='EMAD-X', but the register has EMAD-F1"),
        ("'EMAD-F1'", "takes the keywords claim, budget and measures"),
        ("claims='EMAD-F1'", "takes the keywords claim, budget and measures"),
    ],
)
def test_wrong_markers_are_usage_errors(project: pytest.Pytester, run: Run, marker: str, said: str) -> None:
    project.makepyfile(f"import pytest\n@pytest.mark.emad({marker})\ndef test(): pass")
    result = run()
    assert result.ret == USAGE
    assert said in result.stderr.str()


def test_models_are_loaded_one_after_the_other(project: pytest.Pytester, run: Run) -> None:
    project.makeconftest(
        """
        import pytest
        @pytest.fixture(scope="session")
        def emad_model(request):
            print("load", request.param)
            yield request.param
            print("free", request.param)
        """
    )
    project.makepyfile("def test_a(emad_model): print('a', emad_model)\ndef test_b(emad_model): print('b', emad_model)")
    result = run("--emad-model", "org/one", "--emad-model", "two", "-s", "-v")
    result.assert_outcomes(passed=4)
    printed = "\n".join(result.outlines)
    steps = ["load org/one", "a org/one", "b org/one", "free org/one", "load two", "a two", "b two", "free two"]
    positions = [printed.index(step) for step in steps]
    assert positions == sorted(positions)
    assert "test_a[one]" in printed


@pytest.mark.parametrize(
    ("names", "ids"), [(["/long/way/to/llama", "org/one"], ["llama", "one"]), (["a/one", "b/one"], ["a|one", "b|one"])]
)
def test_ids_name_a_model_as_shortly_as_they_can(
    project: pytest.Pytester, run: Run, names: list[str], ids: list[str]
) -> None:
    project.makepyfile("def test_a(emad_model): pass")
    models = [word for name in names for word in ("--emad-model", name)]
    result = run(*models, "--collect-only", "-q")
    result.stdout.fnmatch_lines([f"*::test_a[[]{one}]" for one in ids])


@pytest.fixture
def suites(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that the plugin takes for its own suites."""
    folder = project.path / "suites" / "claims"
    folder.mkdir(parents=True)
    (folder.parent / "conftest.py").write_text(RECORDED)
    (folder / "test_one.py").write_text("def test_one(): pass\n")
    monkeypatch.setattr(environment, "SUITES", (project.path / "suites",))
    return project.path / "suites"


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ("python_files=check_*.py", "suites"),
        ("python_functions=check_*", "suites"),
        ("python_files=check_*.py", "suites/claims/"),
    ],
)
def test_an_empty_collection_of_our_suites_is_a_usage_error(
    suites: Path, project: pytest.Pytester, run: Run, option: str, argument: str
) -> None:
    """pytest finds the user's own tests and alone would exit 0."""
    project.makepyfile(check_own="def check_own(): pass\ndef test_own(): pass")
    result = run("-o", option, argument, "check_own.py")
    assert result.ret == USAGE
    assert f"{argument}: pytest collected none of its tests" in result.stderr.str()


def test_deselection_by_the_user_is_no_usage_error(suites: Path, run: Run) -> None:
    assert run("suites", "-k", "nothing").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run("suites", "-k", "one").ret == pytest.ExitCode.OK


def test_a_suite_that_cannot_be_imported_is_reported_as_such(suites: Path, run: Run) -> None:
    (suites / "claims" / "test_one.py").write_text("import no_such_module\n")
    result = run("suites")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*No module named 'no_such_module'*"])


PROPERTY = """
from hypothesis import given, settings, strategies as st
seen = []
@given(st.integers())
def test_property(number): seen.append(number)
def test_count():
    assert settings.default.deadline is None or not {expected}
    assert (settings.get_current_profile_name() == "emad") == {expected}
    assert len(seen) <= {examples} or not {expected}
"""


@pytest.mark.parametrize(("budget", "examples"), [("smoke", 10), ("standard", 50)])
def test_hypothesis_profile_follows_the_budget(suites: Path, run: Run, budget: str, examples: int) -> None:
    from hypothesis import settings

    before = settings.get_current_profile_name()
    (suites / "claims" / "test_one.py").write_text(PROPERTY.format(expected=True, examples=examples))
    run("suites", "--emad-budget", budget).assert_outcomes(passed=2)
    assert settings.get_current_profile_name() == before


def test_hypothesis_settings_of_other_tests_are_left_alone(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(PROPERTY.format(expected=False, examples=0))
    run().assert_outcomes(passed=2)


@pytest.mark.usefixtures("own_profile")
def test_a_slow_machine_is_no_fault() -> None:
    """Even under a profile of the user that has limits of time; its other settings stay."""
    from hypothesis import HealthCheck, settings

    from pytest_emad.measurements.study import BUDGETS
    from pytest_emad.run.hypothesis_profile import property_test_settings

    limits = settings(deadline=200, suppress_health_check=[HealthCheck.filter_too_much])
    settings.register_profile("mine", limits)
    settings.load_profile("mine")
    asked = property_test_settings(BUDGETS["smoke"])
    assert asked.deadline is None
    assert set(asked.suppress_health_check) == {HealthCheck.filter_too_much, HealthCheck.too_slow}


def test_the_properties_of_these_tests_have_no_limit_of_time() -> None:
    from hypothesis import HealthCheck, settings

    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


PROFILED = """
from hypothesis import Phase, given, settings, strategies as st
from pytest_emad.run.hypothesis_profile import property_test_settings
from pytest_emad.measurements.study import BUDGETS
drawn = []
@given(st.integers())
def test_property(number): drawn.append(number)
def test_count(): assert len(drawn) >= {least}
def test_later():
    settings.load_profile("mine")  # as a fixture of the user's may
    asked = property_test_settings(BUDGETS["smoke"], steps=7)
    assert asked.max_examples == {least} and asked.deadline is None and set(asked.phases) == set(Phase)
    assert asked.stateful_step_count == {steps}
    settings.load_profile("emad")
"""


@pytest.fixture
def own_profile() -> Iterator[None]:
    """Restore the active Hypothesis profile, which is global to the process."""
    from hypothesis import settings

    before = settings.get_current_profile_name()
    settings.load_profile("default")
    yield
    settings.load_profile(before)


@pytest.mark.usefixtures("own_profile")
@pytest.mark.parametrize(
    ("profile", "least", "steps", "said"),
    [
        ("max_examples=1", 10, 50, "Hypothesis profile 'mine' has max_examples=1; our suites run at least the 10"),
        ("phases=[]", 100, 50, "Hypothesis profile 'mine' has phases without explicit, generate"),
        ("max_examples=2, phases=['explicit'], stateful_step_count=1", 10, 7, "has max_examples=2 and phases without"),
        ("max_examples=30, stateful_step_count=90", 30, 90, ""),
    ],
)
def test_a_hypothesis_profile_of_the_user_strengthens_a_gate_and_never_weakens_it(
    suites: Path, project: pytest.Pytester, run: Run, profile: str, least: int, steps: int, said: str
) -> None:
    (suites / "claims" / "test_one.py").write_text(PROFILED.format(least=least, steps=steps))
    profile = profile.replace("'explicit'", "hypothesis.Phase.explicit")
    project.makeconftest(
        f"""
        import hypothesis
        hypothesis.settings.register_profile("mine", {profile})
        hypothesis.settings.load_profile("mine")
        """
    )
    result = run("suites")
    result.assert_outcomes(passed=3, warnings=int(bool(said)))
    if said:
        result.stdout.fnmatch_lines([f"*{said}*"])
        result = run("suites", "-W", "error")
        assert result.ret == USAGE
        result.stderr.fnmatch_lines([f"*{said}*load another, or -W ignore*"])


def test_packages_from_two_places_are_a_usage_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SOURCE_ROOT", Path("elsewhere"))
    result = run()
    assert result.ret == USAGE
    result.stderr.fnmatch_lines(["*pytest_emad comes from elsewhere, but emad_ref from*"])


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        ("numpy>=999", "numpy=*, but pytest-emad needs numpy>=999*"),
        ("no-such-package", "no-such-package=None*"),
        (
            "no-such-package>=1 ; extra == 'suites'",
            "no-such-package=None, but pytest-emad?suites?, which the suites need, needs no-such-package>=1; "
            "pip install 'no-such-package>=1'",
        ),
    ],
)
def test_dependencies_outside_their_bounds_are_a_usage_error(
    suites: Path, run: Run, monkeypatch: pytest.MonkeyPatch, requirement: str, said: str
) -> None:
    monkeypatch.setattr(environment.metadata, "requires", lambda name: [requirement, "never>=9; extra == 'tasks'"])
    monkeypatch.setattr(environment.metadata, "version", versions(environment.metadata.version))
    result = run("suites")
    assert result.ret == USAGE
    result.stderr.fnmatch_lines([f"*{said}"])


def test_stale_metadata_is_a_usage_error(suites: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.metadata, "requires", lambda name: [])
    monkeypatch.setattr(environment.metadata, "version", versions(environment.metadata.version, "0.0.1"))
    result = run("suites")
    assert result.ret == USAGE
    result.stderr.fnmatch_lines(["*pytest-emad=0.0.1 is installed, but the code in*reinstall*"])


def versions(real, ours: str = environment.emad_ref.__version__):  # type: ignore[no-untyped-def]  # a stand-in
    """Patch ``importlib.metadata.version`` for our own distribution, installed or not."""
    return lambda name: ours if name == environment.DISTRIBUTION else real(name)


def test_of_each_models_tests_the_cheap_gates_come_first_and_our_benchmarks_print_no_table(
    project: pytest.Pytester, run_apart: Run
) -> None:
    """No model first, then exact identities, then tests that need a sweep; slow tests keep their place."""
    project.makepyfile(saying="def pytest_unconfigure(config): print('quiet:', config.option.benchmark_quiet)")
    chosen = [environment.SUITES[0] / name for name in ("claims", "cost", "invariants/test_kv_consistency.py")]
    begun = ["-p", "saying", "-p", "pytest_benchmark.plugin", "--collect-only", "-q"]
    models = ["--emad-model", "emad-nano", "--emad-model", "emad-tiny", "--emad-pair", "emad-nano,emad-tiny"]
    result = run_apart(*begun, *chosen, *models)
    names = [line.rpartition("::")[2] for line in result.outlines if "::" in line]
    exact = "test_logits_at_any_admissible_depth_are_the_full_models"
    assert names[0] == "test_claim_of_names[EAD-H1]"
    assert set(names[1:3]) == {f"{exact}[emad-nano]", "test_claim[emad-nano-EMAD-E5]"}
    assert names[3] == "test_claim[emad-nano-EMAD-F1]"
    assert names.index("test_claim[emad-tiny-EMAD-F1]") < names.index("test_claim[emad-tiny-EMAD-E1]")
    assert names.index("test_claim[emad-nano-EMAD-E1]") < names.index("test_claim[emad-tiny-EMAD-F1]"), (
        "models keep their order"
    )
    assert "quiet: True" in result.outlines
    assert "quiet: False" in run_apart(*begun).outlines


@pytest.mark.slow
def test_the_suites_run_without_pytest_benchmark(run_apart: Run) -> None:
    """Its marker is still registered; only its table is missing."""
    result = run_apart("--collect-only", "-q", environment.SUITES[0] / "cost", "--emad-model", "emad-nano")
    assert result.ret == pytest.ExitCode.OK
    assert any("test_samples_are_recorded_as_benchmarks[emad-nano-full]" in line for line in result.outlines)


def test_two_tests_of_one_name_are_a_usage_error(project: pytest.Pytester, run: Run) -> None:
    """Outside the root folder pytest names a test without its file, so one deselected the other silently."""
    files = [environment.SOURCE_ROOT / "suites" / "fidelity" / f"test_{name}.py" for name in ("bridge", "exit")]
    result = run("--co", "--rootdir", project.path, "--emad-model", "emad-nano", *files)
    assert result.ret == USAGE
    said = result.stderr.str()
    assert f"{files[0]} and {files[1]} both hold the test ::test_teacher_forced_depths_and_losses_are_replays[" in said
    assert "name their folder and choose by -k, or run one file at a time" in said
    chosen = [files[0].parent, "-k", "bridge or exit"]
    folder = run("--co", "--rootdir", project.path, "--emad-model", "emad-nano", *chosen)
    assert folder.ret == 0
    assert "<Function test_teacher_forced_depths_and_losses_are_replays[emad-nano]>" in folder.stdout.str()
