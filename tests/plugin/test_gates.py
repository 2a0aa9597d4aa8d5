"""Gates: which verdict fails a test under which option, one test for each rule."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_emad.claims.base import find_questions_by_claim
from pytest_emad.statistics.goldens import MACHINE_BOUND, SCHEMA, VERDICTS, summarise_seed_outcomes
from pytest_emad.statistics.verdicts import load_register
from tests.plugin.conftest import Run, report_of, unwrapped

FAILS, PASSES = pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.OK


def one_verdict(project: pytest.Pytester, outcome: str, claim: str = "EMAD-F1", call: str = "") -> None:
    project.makepyfile(
        f"""
        from verdicts import verdict
        def test_claim(emad_record):
            emad_record.record_claim(verdict({outcome!r}, {claim!r}){call})
        """
    )


@pytest.mark.parametrize(
    ("outcome", "claim", "options", "status"),
    [
        ("falsified", "EMAD-F1", [], FAILS),
        ("falsified", "EMAD-F1-literal", [], PASSES),
        ("falsified", "EMAD-E1", [], PASSES),
        ("falsified", "EMAD-E1", ["--emad-gate-claims", "EMAD-E1"], FAILS),
        ("falsified", "EMAD-E1", ["--emad-gate-claims", "EMAD-E3"], PASSES),
        ("survived", "EMAD-F1", ["--emad-inconclusive", "fail"], PASSES),
        ("measured", "EMAD-F1", [], PASSES),
        ("inconclusive", "EMAD-F1", [], PASSES),
        ("inconclusive", "EMAD-F1", ["--emad-inconclusive", "fail"], FAILS),
        ("inconclusive", "EMAD-E1", ["--emad-inconclusive", "fail"], PASSES),
        ("inconclusive", "EMAD-E1", ["--emad-inconclusive", "fail", "--emad-gate-claims", "EMAD-E1"], FAILS),
        ("not applicable", "EMAD-F1", [], PASSES),
        ("not applicable", "EMAD-F1", ["--emad-require", "quality"], FAILS),
        ("unmeasured", "EMAD-F2", ["--emad-require", "speed"], FAILS),
        ("unmeasured", "EMAD-F2", [], PASSES),
        ("survived", "EMAD-F2", ["--emad-require", "speed"], PASSES),
        ("inconclusive", "EMAD-F2", ["--emad-require", "speed"], PASSES),
    ],
)
def test_gate_paper(
    project: pytest.Pytester, run: Run, outcome: str, claim: str, options: list[str], status: pytest.ExitCode
) -> None:
    one_verdict(project, outcome, claim)
    result = run(*options)
    assert result.ret == status
    result.assert_outcomes(**{"failed" if status == FAILS else "passed": 1})


@pytest.mark.parametrize(("models", "legs"), [(["emad-nano"], 5), (["emad-nano", "emad-tiny"], 14)])
def test_holms_family_counts_every_model_of_the_run(
    project: pytest.Pytester, run: Run, models: list[str], legs: int
) -> None:
    project.makepyfile(f"def test(emad_docket): assert emad_docket.count_other_legs('EMAD-F1', 12) == {legs}")
    run(*(f"--emad-model={model}" for model in models)).assert_outcomes(passed=1)


def test_a_users_register_can_take_a_gate_away(project: pytest.Pytester, run: Run) -> None:
    project.path.joinpath("claims.toml").write_text("[EMAD-F1]\ngate = false\n")
    one_verdict(project, "falsified")
    assert run("--emad-register", "claims.toml").ret == PASSES


def test_the_message_is_the_line_of_the_summary_and_why(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(
        """
        from verdicts import Leg, verdict
        def test_claim(emad_record):
            legs = (Leg("world:premise", "falsified", .03, (.02, .04), 200, .01, "relative rise"),
                    Leg("copy", "inconclusive", None, None, 12, .01, "accuracy", "n = 12, but 100 are needed"))
            emad_record.record_claim(verdict("falsified", reason="the upper layers matter", legs=legs))
        """
    )
    result = run()
    result.stdout.fnmatch_lines(
        [
            'EMAD-F1, "Saving 15 % of FLOPs leaves quality as it was": falsified on emad-tiny',
            "found +3.0 % [[]+2.0 %, +4.0 %] relative rise; needs at most +1.00 %.",
            "the upper layers matter.",
            "This row gates.",
        ]
    )
    text = result.stdout.str()
    assert "Traceback" not in text
    assert "Verdict(" not in text


def test_an_inconclusive_gate_warns(project: pytest.Pytester, run: Run) -> None:
    one_verdict(project, "inconclusive")
    run("-v").stdout.fnmatch_lines(["*EmadWarning: EMAD-F1, *: inconclusive on*"])


def test_a_warning_that_the_summary_repeats_is_printed_once(project: pytest.Pytester, run: Run) -> None:
    """Warnings of others are kept."""
    project.makepyfile(
        """
        import warnings
        from verdicts import verdict
        def test_claim(emad_record):
            warnings.warn(UserWarning("of somebody else"))
            emad_record.record_claim(verdict("inconclusive"))
        """
    )
    result = run()
    result.stdout.fnmatch_lines(["*UserWarning: of somebody else", "gates: 0 of 1 hold, 1 inconclusive"])
    assert "EmadWarning" not in result.stdout.str()
    assert result.parseoutcomes() == {"passed": 1, "warnings": 1}


def on_record(*seeds: str, claim: str = "EMAD-F1", model: str = "emad-tiny", **key: str) -> dict[str, Any]:
    """Return an entry with the verdicts ``seeds`` for the seeds 0, 1, …."""
    given = {str(number): outcome for number, outcome in enumerate(seeds)}
    entry = {"claim": claim, "model": model, "corpus": "world:premise", "budget": "smoke", "options": ""} | key
    return entry | {"name": "emad-tiny", "seeds": given, "verdict": summarise_seed_outcomes(given)}


KNOWN = on_record("survived", "survived", "survived")


def golden(project: pytest.Pytester, *entries: dict[str, Any]) -> None:
    folder = project.path / "goldens"
    folder.mkdir()
    (folder / VERDICTS).write_text(json.dumps({"schema": SCHEMA, "verdicts": entries or [KNOWN]}))


@pytest.mark.parametrize(
    ("outcome", "call", "status"),
    [
        ("survived", ", 'world:premise'", PASSES),
        ("falsified", ", 'world:premise'", FAILS),
        ("inconclusive", ", 'world:premise'", FAILS),
        ("not applicable", ", 'world:premise'", FAILS),
    ],
)
def test_gate_known_fails_on_any_change(
    project: pytest.Pytester, run: Run, outcome: str, call: str, status: pytest.ExitCode
) -> None:
    golden(project)
    one_verdict(project, outcome, call=call)
    result = run("--emad-gate", "known", "--emad-golden", "goldens")
    assert result.ret == status
    if status == FAILS:
        result.stdout.fnmatch_lines(["*The verdict on record is survived*"])


def test_gate_known_accepts_a_falsified_row_that_is_known_to_be(project: pytest.Pytester, run: Run) -> None:
    golden(project, on_record("falsified", "falsified", "falsified"))
    one_verdict(project, "falsified", call=", 'world:premise'")
    assert run("--emad-gate", "known", "--emad-golden", "goldens", "--emad-report", "out").ret == PASSES
    assert report_of(project.path / "out")["claims"][0]["gate"] is True


def test_gate_known_follows_the_weights_and_not_the_name(project: pytest.Pytester, run: Run) -> None:
    golden(project, KNOWN, on_record("falsified", "falsified", "falsified", model="sha-1"))
    one_verdict(project, "survived", call=", 'world:premise', fingerprint='sha-1'")
    result = run("--emad-gate", "known", "--emad-golden", "goldens")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*The verdict on record is falsified*", "1 verdicts compared*: 0 as recorded, 1 changed*"]
    )


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (", 'world:mixed'", []),
        (", 'world:premise', fingerprint='sha-1'", []),
        (", 'world:premise'", ["--emad-budget", "standard"]),
        (", 'world:premise'", ["--emad-margin", "0.3"]),
        (", 'world:premise'", ["--emad-limit", "7"]),
        (", 'world:premise'", ["--emad-gate-claims", "EMAD-R1"]),
        (", 'world:premise'", ["--emad-register", "claims.toml"]),
    ],
)
def test_gate_known_compares_like_with_like_and_fails_where_it_compares_nothing(
    project: pytest.Pytester, run: Run, call: str, options: list[str]
) -> None:
    """With another text, weights, budget, option or threshold, the record does not apply."""
    golden(project)
    (project.path / "claims.toml").write_text("[EMAD-F1]\nthresholds = { accuracy_drop = 0.02 }\n")
    one_verdict(project, "falsified", call=call)
    result = run("--emad-gate", "known", "--emad-golden", "goldens", *options)
    assert result.ret == FAILS
    unwrapped(result).fnmatch_lines(
        ["*emad: FAILED: gate known: nothing was compared*", "1 not compared, none on record*(EMAD-F1)", "*1 passed*"]
    )


@pytest.mark.parametrize("stored", [{"schema": SCHEMA - 1, "verdicts": [KNOWN]}, "damaged"])
def test_a_record_that_cannot_be_read_ends_the_runs_that_compare_with_it_and_no_other(
    project: pytest.Pytester, run: Run, stored: object
) -> None:
    golden(project)
    (project.path / "goldens" / VERDICTS).write_text(json.dumps(stored))
    one_verdict(project, "survived", call=", 'world:premise'")
    assert run("--emad-golden", "goldens", "--emad-report", "out").ret == PASSES
    assert report_of(project.path / "out")["known"] == []
    result = run("--emad-gate", "known", "--emad-golden", "goldens")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = f"schema={SCHEMA - 1}, but this version reads" if isinstance(stored, dict) else "expected a table of schema"
    assert f"{VERDICTS}: {said}" in unwrapped(result).str()


@pytest.mark.parametrize(
    ("seeds", "seed", "outcome", "status"),
    [
        (("survived", "survived", "survived"), 7, "survived", PASSES),
        (("survived", "survived", "survived"), 7, "inconclusive", FAILS),
        (("survived", "inconclusive", "survived"), 0, "inconclusive", PASSES),
        (("survived", "inconclusive", "survived"), 7, "inconclusive", PASSES),
        (("survived", "inconclusive", "survived"), 0, "falsified", FAILS),
        (("survived", "survived"), 1, "falsified", FAILS),
    ],
)
def test_three_seeds_that_agree_speak_for_all_and_else_what_was_seen_passes(
    project: pytest.Pytester, run: Run, seeds: tuple[str, ...], seed: int, outcome: str, status: pytest.ExitCode
) -> None:
    golden(project, on_record(*seeds))
    one_verdict(project, outcome, call=", 'world:premise'")
    result = run("--emad-gate", "known", "--emad-golden", "goldens", "--emad-seed", seed)
    assert result.ret == status
    if "inconclusive" in seeds:
        unwrapped(result).fnmatch_lines(["1 of them seed-dependent, any outcome seen passes: *(EMAD-F1)"])


def test_a_verdict_on_time_is_not_compared_and_that_is_said(project: pytest.Pytester, run: Run) -> None:
    """It depends on the machine: on record or not, it neither fails nor passes, and needs no golden."""
    golden(project)
    project.makepyfile(
        """
        from verdicts import verdict
        def test_known(emad_record): emad_record.record_claim(verdict("survived"), "world:premise")
        def test_timed(emad_record): emad_record.record_claim(verdict("falsified", "EMAD-F2"), "world:premise")
        """
    )
    result = run("--emad-gate", "known", "--emad-golden", "goldens", "--emad-require", "golden")
    assert result.ret == PASSES
    unwrapped(result).fnmatch_lines(
        [
            "1 verdicts compared with the record: 1 as recorded",
            "1 not compared, a verdict on time or energy belongs to the machine it was measured on: *(EMAD-F2)",
        ]
    )


@pytest.mark.parametrize("machine_bound", MACHINE_BOUND)
def test_rows_bound_to_the_machine_are_those_that_measure(machine_bound: str) -> None:
    register = load_register()
    bound = {name for name, row in register.items() if row.requires == machine_bound}
    measuring = {name for name, question in find_questions_by_claim(register).items() if question.measures}
    assert bound
    assert bound <= measuring
    assert {register[name].requires for name in measuring} <= set(MACHINE_BOUND)


def test_require_golden_wants_each_verdict_on_record(project: pytest.Pytester, run: Run) -> None:
    golden(project)
    project.makepyfile(
        """
        from verdicts import verdict
        def test_known(emad_record): emad_record.record_claim(verdict("survived"), "world:premise")
        def test_new(emad_record): emad_record.record_claim(verdict("survived", "EMAD-E1"), "world:premise")
        """
    )
    assert run("--emad-gate", "known", "--emad-golden", "goldens").ret == PASSES
    run("--emad-gate", "known", "--emad-golden", "goldens", "--emad-require", "golden").assert_outcomes(1, failed=1)


def test_a_requirement_that_no_test_answered_fails_the_run(project: pytest.Pytester, run: Run) -> None:
    """An all-skipped run exits 0 in pytest."""
    project.makepyfile("import pytest\ndef test_speed(): pytest.skip('no clock')")
    assert run().ret == PASSES
    result = run("--emad-require", "speed")
    assert result.ret == FAILS
    result.stdout.fnmatch_lines(["*emad: FAILED: --emad-require speed: no claim*"])


def test_what_a_decoder_declines_outside_a_claim_is_skipped_with_its_reason(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(
        """
        from emad_ref.protocol import Unsupported
        def test_audit():
            raise Unsupported("only lowers depth")
        """
    )
    result = run("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*not applicable (only lowers depth)"])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("record_claim(verdict('survived', 'EMAD-X'))", "claim='EMAD-X', but expected a row of the register"),
        ("record_point({'name': 'p'})", "point['model']"),
        (
            "record_point({'name': 'p', 'digest': 'd', 'model': 'm', 'mean_depth': float('nan')})",
            "leave absent numbers out",
        ),
        (
            "record_point({'name': 'p', 'digest': 'd', 'model': 'm', 'mean_depth': numpy.float32(1)})",
            "built-in JSON values",
        ),
        ("record_model({})", "model['name']"),
    ],
)
def test_misuse_of_the_recorder_is_an_error(project: pytest.Pytester, run: Run, call: str, said: str) -> None:
    project.makepyfile(f"import numpy\nfrom verdicts import verdict\ndef test(emad_record): emad_record.{call}")
    result = run()
    assert result.ret == FAILS
    assert said in result.stdout.str()
