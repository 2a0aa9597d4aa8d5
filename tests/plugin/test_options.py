"""Every option, on the command line and as ini value: parsed, validated, refused with a remedy.

Among them: the published tasks to score, the number of documents of each, and whether generated programs may run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from pytest_emad.measurements.acceptance_record import AcceptanceRecord
from pytest_emad.measurements.study import BUDGETS
from pytest_emad.remote.address import ProgramAddress, ServerAddress, UrlAddress
from pytest_emad.report import provenance
from pytest_emad.run.option_table import OPTIONS
from pytest_emad.run.options import RunSettings, get_run_settings
from tests.plugin.conftest import Run

ROOT = Path(__file__).resolve().parents[2]
VALUES: dict[str, tuple[str, Any]] = {
    "model": ("emad-nano", ("emad-nano",)),
    "corpus": ("world:mixed", "world:mixed"),
    "corpus-group": ("author", "author"),
    "device": ("cuda:1", "cuda:1"),
    "dtype": ("bfloat16", "bfloat16"),
    "backend": ("emad-walked", "emad-walked"),
    "expect-decoder": ("foreign", "foreign"),
    "waive": ("EMAD-F2=slow", (("EMAD-F2", "slow"),)),
    "acceptance-record": ("curve.yaml", AcceptanceRecord(2.5, 3, "m, thinking_off, 3")),
    "known-gaps": ("gaps.toml", {"suites/a.py::test_b": "later"}),
    "decoder": ("tcp:127.0.0.1:7007", ServerAddress("tcp:127.0.0.1:7007", "127.0.0.1", 7007)),
    "decoder-timeout": ("2.5", 2.5),
    "decoder-dtype": ("bfloat16", "bfloat16"),
    "tier": ("tokens", "tokens"),
    "process-timeout": ("30", 30.0),
    "profile": ("profile.json", "profile.json"),
    "margin": ("0.25", 0.25),
    "exit": ("found.exit", "found.exit"),
    "report": ("new/report", "new/report"),
    "gate": ("known", "known"),
    "gate-claims": ("EMAD-E1,EMAD-E3", frozenset({"EMAD-E1", "EMAD-E3"})),
    "register": ("claims.toml", "claims.toml"),
    "inconclusive": ("fail", "fail"),
    "require": ("energy,golden", frozenset({"energy", "golden"})),
    "evidence": ("timed", "timed"),
    "budget": ("standard", BUDGETS["standard"]),
    "seed": ("7", 7),
    "golden": ("goldens", "goldens"),
    "data": ("data", "data"),
    "only": ("emad-f1,EMAD−R*", frozenset({"EMAD-F1", *(f"EMAD-R{n}" for n in range(1, 6))})),
    "pair": ("emad-nano, emad-tiny-plain", ("emad-nano", "emad-tiny-plain")),
    "tasks": ("wikitext,gsm8k", frozenset({"wikitext", "gsm8k"})),
    "task-path": ("data", "data"),
    "limit": ("50", 50),
    "allow-code-execution": ("unconfined", "unconfined"),
}
FIELDS = {"model": "models"}
PATHS = ("profile", "exit", "report", "register", "golden", "data", "task-path")


@pytest.fixture(autouse=True)
def files(project: pytest.Pytester) -> None:
    project.path.joinpath("profile.json").write_text("{}")
    project.path.joinpath("found.exit").write_text("{}")
    project.path.joinpath("claims.toml").write_text("[EMAD-F1]\nthresholds = { perplexity_rise = 0.02 }\n")
    project.path.joinpath("gaps.toml").write_text('[[gap]]\ntest = "suites/a.py::test_b"\nreason = "later"\n')
    project.path.joinpath("curve.yaml").write_text("m: {thinking_off: {3: 2.5}}")
    for folder in ("data", "goldens", "blocked/report.json", "site"):
        project.path.joinpath(folder).mkdir(parents=True)
    project.path.joinpath("site/index.html").write_text("<h1>My page</h1>")


def parsed(project: pytest.Pytester, *arguments: str) -> RunSettings:
    return get_run_settings(project.parseconfig("-p", "no:cacheprovider", *arguments))


def field_of(found: RunSettings, name: str) -> Any:
    """Return the value of an option in the settings, their study or their gating."""
    field = FIELDS.get(name, name.replace("-", "_"))
    (held,) = [part for part in (found, found.study, found.gating) if field in part.__dataclass_fields__]
    return getattr(held, field)


def expected(project: pytest.Pytester, name: str) -> Any:
    value = VALUES[name][1]
    return project.path / value if name in PATHS else value


def test_the_table_of_values_has_every_option_but_the_switch() -> None:
    tried_apart = {"all-claims", "update-golden", "small-model", "large-model", "decoder-baseline"}
    assert set(VALUES) | tried_apart == {option.name for option in OPTIONS}


@pytest.mark.parametrize("name", VALUES)
def test_command_line(project: pytest.Pytester, name: str) -> None:
    found = parsed(project, f"--emad-{name}", VALUES[name][0])
    assert field_of(found, name) == expected(project, name)


@pytest.mark.parametrize("name", VALUES)
def test_ini_twin(project: pytest.Pytester, name: str) -> None:
    project.makeini(f"[pytest]\nemad_{name.replace('-', '_')} = {VALUES[name][0]}\n")
    found = parsed(project)
    assert field_of(found, name) == expected(project, name)


@pytest.mark.parametrize("name", VALUES)
def test_every_option_has_a_default_that_differs_from_the_tried_value(project: pytest.Pytester, name: str) -> None:
    assert field_of(parsed(project), name) != expected(project, name)


def test_command_line_wins_over_ini(project: pytest.Pytester) -> None:
    project.makeini("[pytest]\nemad_seed = 3\nemad_model = emad-nano emad-tiny\n")
    assert parsed(project).models == ("emad-nano", "emad-tiny")
    assert parsed(project, "--emad-seed", "4", "--emad-model", "a/b").study.seed == 4
    assert parsed(project, "--emad-model", "a/b", "--emad-model", "a/b@c").models == ("a/b", "a/b@c")


def test_paths_start_where_they_are_written(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line relative to the current folder, in an ini file to that file's folder."""
    below = project.path / "below"
    (below / "data").mkdir(parents=True)
    project.makeini("[pytest]\nemad_data = data\n")
    monkeypatch.chdir(below)
    assert parsed(project, "--rootdir", str(project.path), "-c", "../tox.ini").study.data == project.path / "data"
    assert parsed(project, "--emad-data", "data", "-c", "../tox.ini").study.data == below / "data"


def test_a_corpus_may_be_a_file(project: pytest.Pytester) -> None:
    assert parsed(project, "--emad-corpus", "profile.json").study.corpus == str(project.path / "profile.json")


@pytest.mark.parametrize(
    ("arguments", "pair"),
    [
        ([], ("emad-nano", "emad-tiny")),
        (["--emad-model=emad-nano", "--emad-model=emad-t5-tiny"], ("emad-nano", "emad-tiny")),
        (["--emad-model=emad-nano", "--emad-model=org/mine"], None),
        (["--emad-model=./mine"], None),
        (["--emad-model=./mine", "--emad-pair=a,./mine"], ("a", "./mine")),
        (["--emad-model=./mine", "--emad-small-model=a,b", "--emad-large-model=c"], ("a,b", "c")),
    ],
)
def test_our_pair_is_judged_beside_our_models_alone(
    project: pytest.Pytester, arguments: list[str], pair: tuple[str, str] | None
) -> None:
    assert parsed(project, *arguments).pair == pair


@pytest.mark.parametrize("pasted", ["−0.25", "-0.25"])
def test_a_margin_may_be_pasted_with_the_minus_sign_of_typeset_text(project: pytest.Pytester, pasted: str) -> None:
    assert parsed(project, f"--emad-margin={pasted}").study.margin == -0.25


def test_update_golden_from_command_line_and_ini(project: pytest.Pytester) -> None:
    assert not parsed(project).update_golden
    assert parsed(project, "--emad-update-golden", "--emad-golden", "goldens").update_golden
    project.makeini("[pytest]\nemad_update_golden = true\nemad_golden = goldens\n")
    assert parsed(project).update_golden


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--emad-model", " "], "--emad-model=' ', but expected a name"),
        (["--emad-model", "a", "--emad-model", "a"], "each model once"),
        (["--emad-model", "pythia-410m@"], "--emad-model='pythia-410m@', but expected NAME or NAME@REVISION"),
        (["--emad-small-model=@main"], "--emad-small-model='@main', but expected NAME or NAME@REVISION"),
        (["--emad-large-model=a"], "--emad-large-model='a', but expected --emad-small-model beside it; or name both"),
        (["--emad-pair=a,b", "--emad-small-model=a"], "--emad-pair='a,b', but expected no other option that names"),
        (["--emad-pair=a,b,c"], "--emad-pair='a,b,c', but expected SMALL,LARGE: two models"),
        (["--emad-only=EMAD-F3"], "--emad-only='EMAD-F3', but expected an id of the register, or a pattern such as"),
        (["--emad-only=EMAD-F1", "--emad-only=EMAD-F3"], "nearest: EMAD-F1, EMAD-F2, EMAD-E3"),
        (["--emad-only=EMAD-Z*"], "--emad-only='EMAD-Z*', but expected an id"),
        (["--emad-only=,"], "--emad-only=',', but expected claims by id or pattern"),
        (["--emad-gate-claims="], "--emad-gate-claims='', but expected a comma list of claims; leave the option out"),
        (
            ["--emad-require= "],
            "--emad-require=' ', but expected a comma list of energy, speed, quality, golden; leave",
        ),
        (["--emad-margin=1_0"], "--emad-margin='1_0', but expected a number of nats"),
        (["--emad-gate-claims=EMAD-E33"], "nearest: EMAD-E3"),
        (["--emad-dtype=bfloat"], "nearest: bfloat16"),
        (["--emad-require=qualty"], "nearest: quality"),
        (["--emad-corpus", "nowhere.txt"], "an existing file; looked at"),
        (["--emad-device", "cuda:x"], "--emad-device='cuda:x', but expected a torch device"),
        (["--emad-device", "meta"], "--emad-device='meta', but expected a torch device that computes"),
        (["--emad-device", "cpu:99"], "--emad-device='cpu:99', but expected a torch device that computes"),
        (["--emad-dtype", "float8"], "--emad-dtype='float8', but expected one of float32"),
        (
            ["--emad-decoder", "udp:1"],
            "--emad-decoder='udp:1', but expected exec:COMMAND, tcp:HOST:PORT or http(s)://HOST:PORT",
        ),
        (["--emad-decoder", "exec:"], "--emad-decoder='exec:', but expected a command behind exec:"),
        (["--emad-decoder", "exec:./nowhere --fast"], "a program that is there and can be run; looked at"),
        (["--emad-decoder", "exec:./profile.json"], "a program that is there and can be run; looked at"),
        (["--emad-decoder", "exec:no-such-decoder"], "looked along PATH"),
        (["--emad-decoder", "tcp:127.0.0.1:http"], "a port in 1–65535"),
        (["--emad-decoder-timeout", "0"], "--emad-decoder-timeout='0', but expected a number of seconds above"),
        (["--emad-decoder-timeout", "soon"], "a number of seconds"),
        (
            ["--emad-decoder", "tcp:127.0.0.1:7007", "--emad-backend", "emad-walked"],
            "--emad-backend='emad-walked', but expected no --emad-backend beside --emad-decoder; leave one of them out",
        ),
        (["-o", "emad_decoder=exec:"], "ini emad_decoder='exec:', but expected a command"),
        (["--emad-profile", "nowhere.json"], "--emad-profile='nowhere.json', but expected an existing file"),
        (["--emad-margin", "wide"], "--emad-margin='wide', but expected a number of nats"),
        (["--emad-margin", "nan"], "a finite number of nats"),
        (["--emad-report", "profile.json"], "--emad-report='profile.json', but expected a folder that can be written"),
        (["--emad-report", "profile.json/below"], "a folder that can be written"),
        (["--emad-report="], "--emad-report='', but expected a name; leave the option out"),
        (["--emad-report", "blocked"], "report.json', but expected a regular file, or none yet"),
        (["--emad-report", "site"], "index.html', but expected a new file, or one of a report to replace"),
        (["--emad-margin", "1e9"], "a finite number of nats, at most 1,000,000 in size"),
        (["--emad-seed", "4294967296"], "--emad-seed='4294967296', but expected a whole number ≥ 0, and at most"),
        (["--emad-seed", "9" * 5000], "but expected a whole number ≥ 0, and at most 4294967295"),
        (["--emad-limit", "0"], "--emad-limit='0', but expected a whole number ≥ 1"),
        (["--emad-limit", "²"], "--emad-limit='²', but expected a whole number"),
        (["--emad-corpus", "x" * 300], "or an existing file; looked at"),
        (["--emad-profile="], "--emad-profile='', but expected a name"),
        (["--emad-gate", "papers"], "--emad-gate='papers', but expected one of paper, decoder, known"),
        (["--emad-gate-claims", "EMAD-X9"], "--emad-gate-claims='EMAD-X9', but expected ids of the register: EMAD-F1"),
        (["--emad-register", "nowhere.toml"], "--emad-register='nowhere.toml', but expected an existing file"),
        (["--emad-register", "profile.json"], "valid TOML"),
        (["--emad-inconclusive", "pass"], "one of warn, fail"),
        (["--emad-require", "energy,sped"], "--emad-require='sped', but expected a comma list of energy, speed"),
        (["--emad-budget", "huge"], "--emad-budget='huge', but expected one of smoke, standard, full"),
        (["--emad-seed", "-1"], "--emad-seed='-1', but expected a whole number"),
        (["--emad-golden", "nowhere"], "--emad-golden='nowhere', but expected an existing folder"),
        (["--emad-data", "nowhere"], "--emad-data='nowhere', but expected an existing folder"),
        (["--emad-update-golden"], "a folder to write to; add --emad-golden DIR"),
        (["-o", "emad_budget=huge"], "ini emad_budget='huge', but expected one of smoke"),
        (["-o", "emad_update_golden=perhaps"], "ini emad_update_golden='perhaps', but expected true or false"),
    ],
)
def test_bad_values_are_usage_errors_that_name_the_remedy(run: Run, arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in "\n".join(result.errlines + result.outlines)


def test_all_bad_values_are_told_at_once(run: Run) -> None:
    result = run("--emad-seed", "-1", "--emad-budget", "huge", "-o", "emad_limit=0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    told = [line for line in result.errlines if "but expected" in line]
    names = ("ERROR: --emad-budget=", "--emad-seed=", "ini emad_limit=")
    assert [any(line.startswith(name) for line in told) for name in names] == [True] * 3
    result = run("--emad-gate-claims", "EMAD-X9", "--emad-model", "a", "--emad-model", "a", "--emad-only", "EMAD-X9")
    told = [line.removeprefix("ERROR: ").partition("=")[0] for line in result.errlines if "but expected" in line]
    assert told == ["--emad-only", "--emad-model", "--emad-gate-claims"]


def test_updates_are_refused_in_ci(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    result = run("--emad-update-golden", "--emad-golden", "goldens")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*a run outside CI*"])


def test_help_lists_every_flag_and_ini_twin(run: Run) -> None:
    text = run("--help").stdout.str()
    for option in OPTIONS:
        assert option.flag in text
        assert option.ini in text


def test_header_names_what_a_reader_of_the_log_needs(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test(emad_settings): pass")
    run().stdout.fnmatch_lines(
        ["emad: model emad-tiny; corpus by model; device cpu; dtype float32; budget smoke; gate paper"]
    )
    run(
        "--emad-model", "a", "--emad-model", "b", "--emad-corpus", "self", "--emad-require", "speed", "--emad-seed", "3"
    ).stdout.fnmatch_lines(["emad: models a, b; corpus self; *; seed 3; require speed"])
    elsewhere = run("--emad-decoder", "tcp:127.0.0.1:7007")
    elsewhere.stdout.fnmatch_lines(["emad: *; gate paper; decoder tcp:127.0.0.1:7007"])


def test_the_header_says_how_groups_are_dealt(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test(emad_settings): pass")
    lines = [f'{{"text": "{word} by somebody", "author": "{word[0]}"}}\n' for word in ("aa", "bb", "ab", "cc", "ca")]
    project.path.joinpath("letters.jsonl").write_text("".join(lines))
    grouped = "--emad-corpus-group", "author"
    dealt = "documents (groups): calibrate 2 (1), validate 1 (1), evaluate 2 (1)"
    run("--emad-corpus", "letters.jsonl", *grouped).stdout.fnmatch_lines([f"emad: *letters.jsonl by author, {dealt}"])
    for corpus in ((), ("--emad-corpus", "self")):
        refused = run(*corpus, *grouped)
        assert refused.ret == pytest.ExitCode.USAGE_ERROR
        refused.stderr.fnmatch_lines(["*corpus_group='author', but expected a corpus that is a .jsonl file*"])
    project.path.joinpath("letters.jsonl").write_text('{"text": "nobody"}\n')
    refused = run("--emad-corpus", "letters.jsonl", *grouped)
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["*letters.jsonl, line 1: author=None, but expected a string*"])


def test_a_library_newer_than_tested_is_a_line_and_no_failure(
    project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyfile("def test(emad_settings): pass")
    assert "newer than tested" not in run().stdout.str()
    monkeypatch.setitem(provenance.NEWEST_TESTED, "pytest", "8.9")
    newer = run()
    assert newer.ret == 0
    newer.stdout.fnmatch_lines([f"emad: newer than tested: pytest {pytest.__version__} (tested up to 8.9)"])


def test_the_newest_tested_versions_are_no_older_than_those_of_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", constraints, flags=re.MULTILINE))
    for name, newest in provenance.NEWEST_TESTED.items():
        assert Version(newest) >= Version(pinned[name]), name


def test_a_program_runs_in_the_folder_that_names_it(project: pytest.Pytester) -> None:
    """The report quotes it as written."""
    program = project.path / "decoder"
    program.write_text("")
    program.chmod(0o755)
    found = parsed(project, "--emad-decoder", "exec:./decoder --threads 1")
    assert isinstance(found.decoder, ProgramAddress)
    assert (found.decoder.words, found.decoder.folder) == ((str(program), "--threads", "1"), project.path)
    assert found.to_json()["decoder"] == "exec:./decoder --threads 1"


def test_settings_are_plain_data() -> None:
    """An unhashable or mutable field would let one test change another's settings."""
    assert RunSettings.__dataclass_params__.frozen  # type: ignore[attr-defined]  # set by @dataclass
    assert [budget.rank for budget in BUDGETS.values()] == [0, 1, 2]


ASKED: list[tuple[str, str, Any, Any]] = [  # option, written value, parsed value, default
    ("tasks", "wikitext, gsm8k", frozenset({"wikitext", "gsm8k"}), frozenset()),
    ("limit", "50", 50, None),
]


@pytest.mark.parametrize(("name", "written", "read", "default"), ASKED, ids=[row[0] for row in ASKED])
def test_from_the_command_line_and_from_ini(
    project: pytest.Pytester, name: str, written: str, read: Any, default: Any
) -> None:
    assert getattr(parsed(project).study, name) == default
    assert getattr(parsed(project, f"--emad-{name}", written).study, name) == read
    project.makeini(f"[pytest]\nemad_{name} = {written}\n")
    assert getattr(parsed(project).study, name) == read


def test_programs_run_only_where_it_is_said(project: pytest.Pytester) -> None:
    assert parsed(project).study.allow_code_execution is None
    assert parsed(project, "--emad-allow-code-execution").study.allow_code_execution == "confined"
    assert parsed(project, "--emad-allow-code-execution", "--emad-seed=1").study.allow_code_execution == "confined"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--emad-tasks", " , "], "--emad-tasks=' , ', but expected a comma list of task names"),
        (["--emad-limit", "0"], "--emad-limit='0', but expected a whole number ≥ 1"),
        (["--emad-limit", "all"], "--emad-limit='all', but expected a whole number ≥ 1"),
        (["-o", "emad_allow_code_execution=true"], "ini emad_allow_code_execution='true', but expected one of conf"),
        (["--emad-allow-code-execution", "a/"], "--emad-allow-code-execution='a/', but expected one of confined, un"),
    ],
)
def test_bad_values_are_usage_errors(run: Run, arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in "\n".join(result.errlines + result.outlines)


def test_a_baseline_is_another_server_than_the_one_with_the_rule(project: pytest.Pytester) -> None:
    with_rule, without = "--emad-decoder=http://127.0.0.1:8000", "--emad-decoder-baseline=http://127.0.0.1:8001/v1"
    found = parsed(project, with_rule, without)
    assert found.decoder_baseline == UrlAddress("http://127.0.0.1:8001/v1", "127.0.0.1", 8001, "", False)
    assert found.to_json()["decoder_baseline"] == "http://127.0.0.1:8001/v1"
    same = without.replace("8001/v1", "8000")
    for arguments in ([without], [without, "--emad-decoder=tcp:127.0.0.1:7007"], [same, with_rule]):
        with pytest.raises(pytest.UsageError, match="expected another URL than that of --emad-decoder"):
            parsed(project, *arguments)
    with pytest.raises(pytest.UsageError, match=r"--emad-decoder-baseline='tcp:.*expected http"):
        parsed(project, with_rule, "--emad-decoder-baseline=tcp:127.0.0.1:7007")
