"""README and docs/ are correct: commands and snippets run, outputs are real, verdicts are those on record."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise, takewhile
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch

import emad_ref
import pytest_emad.run.fixtures
from emad_ref.decoding.reference import Sampler, WalkedDecoder
from emad_ref.exit_rules import calibrated_entropy_point, default_probes
from emad_ref.models.bundled import BUNDLED_PAIR, bundled_model_names
from emad_ref.models.loading import load
from emad_ref.protocol import Prompt
from emad_ref.record import DECODE, TokenLog
from pytest_emad import hardware, reproduce
from pytest_emad.claims.engines import QUESTIONS as ENGINE_QUESTIONS
from pytest_emad.cli import VERBS, build_parser
from pytest_emad.run.option_table import OPTIONS
from pytest_emad.run.options import get_run_settings
from pytest_emad.statistics.goldens import (
    MACHINE_BOUND,
    SEED_DEPENDENT,
    VerdictConditions,
    find_golden_folder,
    load_known_verdicts_from_folders,
    verdict_key_fields,
)
from pytest_emad.statistics.verdicts import OUTCOMES, PAPERS, load_register
from tests.mutants.catalogue import CATALOGUE
from tests.pages import claims
from tests.pages.blocks import ROOT, RUN, Block, blocks, pages, shown
from tests.pages.runner import alike, checkout, lay_down, run

DOCS = ROOT / "docs"
if not DOCS.is_dir():
    pytest.skip("docs/ is not part of an installed package", allow_module_level=True)
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in pages()}
LISTED = [(name, block) for name, page in PAGES.items() for block in blocks(page)]
SHOWN = [(name, before, after) for name, page in PAGES.items() for before, after in shown(page)]
SUITES = [(name, after) for name, _, after in SHOWN if after.mark.startswith("output: ")]
CLAIMS = DOCS / "claims.md"

SHAPES = ("run: ", "file: ", "output")
ROW = re.compile(rf"^\W*((?:EMAD|EAD|EE)-[A-Z]?\d+(?:-literal)?)\*?\s.*?\b({'|'.join(OUTCOMES)})\b", re.MULTILINE)


def ident(value: object) -> str:
    return f"line {value.line}" if isinstance(value, Block) else str(value)


# ---------------------------------------------------------------- names in the pages


PATHS = {  # page → least number of places that its way through the code names, and most files that a reader opens
    "CONTRIBUTING.md": (20, None),
    "docs/layout.md": (12, None),
    "docs/life-of-a-request.md": (8, 20),
    "docs/life-of-a-token.md": (8, 11),  # the ten that run, and the profile
    "docs/life-of-a-screening.md": (8, 15),
}


@pytest.mark.parametrize("page", PATHS)
def test_a_way_through_the_code_names_what_is_there(page: str) -> None:
    """Its files exist, and each contains the function, class or method that a step names."""
    chapter = PAGES[page].partition("## Map")[2].partition("\n## ")[0] or PAGES[page]
    steps = [line for line in chapter.splitlines() if line.startswith(("| ", *"12345678", "   "))]
    places = re.findall(r"`((?:emad_ref|pytest_emad|suites)/[\w/]+\.\w+)(?::([\w.]+))?`", "\n".join(steps))
    least, most = PATHS[page]
    assert len(places) >= least, "the way was not found"
    files = {file for file, _ in places}
    assert most is None or len(files) <= most, files
    for file, name in places:
        source = (ROOT / file).read_text(encoding="utf-8")
        for part in filter(None, name.split(".")):
            assert re.search(rf"^ *(?:def|class) {part}\b", source, re.MULTILINE), f"{file}:{name}"


def test_each_audit_and_engine_row_has_a_sample_of_its_failure() -> None:
    """A sample is a complaint that the named planted defect draws from its check, as the catalogue expects it."""
    page = PAGES["docs/failures.md"]
    rows = re.findall(r"^\| ([^|]*) \| (.*) \| [^|]+ \|$", page, re.MULTILINE)
    told, samples, audit = set[str](), 0, ""
    for named, failure in rows:
        audit = named or audit
        told |= {*audit.split(", ")}
        for defect, sample in re.findall(r"<!-- ([\w-]+) --> `([^`]+)`", failure):
            said = CATALOGUE[defect].says
            assert re.search(said, f"audit {audit}: {sample}"), f"{defect} says {said!r}"
            samples += 1
    audits = PAGES["docs/decoder.md"].partition("## Audits")[2].partition("\n## ")[0]
    listed = {name for cell in re.findall(r"^\| ([^|]+) \|", audits, re.MULTILINE) for name in cell.split(", ")}
    engines = {question.claim for question in ENGINE_QUESTIONS}
    assert (listed - {"audit", "---"}) | engines <= told
    assert samples > 15, "the samples were not found"


def test_a_step_runs_the_ten_files_that_the_map_names() -> None:
    """From the fed token to the emitted one, in the reference: no other file of ours is entered, and none in vain."""
    chapter = PAGES["CONTRIBUTING.md"].partition("### One decoding step")[2].partition("\n### ")[0]
    table = "\n".join(line for line in chapter.splitlines() if line.startswith("| "))
    named = set(re.findall(r"`emad_ref/([\w/]+\.py)", table))
    model, prompts = load(BUNDLED_PAIR[0]), [Prompt(np.arange(5, 9)), Prompt(np.arange(20, 22))]
    probes = default_probes(model.stepper.layers)
    point = calibrated_entropy_point(model.stepper.layers, probes, [[0.3] * len(probes)])
    session, output = WalkedDecoder(model.stepper, point, max_rows=2).start_with_room(prompts, 12)
    sampler, log, depths, entered = Sampler(2), TokenLog(), set(), set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        entered.add(Path(frame.f_code.co_filename))

    with torch.inference_mode():
        for _ in range(12):
            sys.setprofile(note)
            tokens = sampler.pick_next_tokens(output.logits[:, -1], [0, 1])
            for row, token in enumerate(tokens.tolist()):
                depth, cap = int(output.depth[row, -1]), int(output.cap[row])
                log.append(row, 0, token, depth, cap, DECODE, output.signal[row, -1])
            session.commit_all()
            output = session.process_tokens(tokens[:, None], None)
            sys.setprofile(None)
            depths |= {*output.depth[:, -1].tolist()}
    assert len(depths) > 1, "no row stopped early, or none ran on"
    package = Path(emad_ref.__file__).parent
    assert {path.relative_to(package).as_posix() for path in entered if package in path.parents} == named
    assert len(named) == 10


# ---------------------------------------------------------------- commands that run


@pytest.mark.parametrize(
    "name", [name for name, page in PAGES.items() if any(b.runs and not b.slow for b in blocks(page))]
)
def test_a_page_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    follow(PAGES[name], tmp_path, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if any(b.runs and b.slow for b in blocks(page))])
def test_a_page_runs_with_its_suites(name: str, tmp_path: Path) -> None:
    follow(PAGES[name], tmp_path, slow=True)


def follow(page: str, folder: Path, slow: bool) -> None:
    """Do what a reader of the page does; the outputs must be those shown."""
    checkout(folder)
    outputs = dict(shown(page))
    for block in blocks(page):
        if block.mark.startswith("file: "):
            lay_down(block, folder)
        if not block.runs or (block.slow and not slow):
            continue
        status, printed = run(block, folder)
        assert status == block.status, f"line {block.line}, exit status {status}:\n{printed[-6000:]}"
        if block in outputs and outputs[block].mark == "output":
            assert alike(outputs[block].text, printed), f"line {block.line} printed:\n{printed}"


@pytest.mark.parametrize(("name", "block"), LISTED, ids=ident)
def test_every_command_and_snippet_is_run_somewhere(name: str, block: Block) -> None:
    """By the page, by CI, or by an existing test; at least its parser reads a command that cannot run offline."""
    if block.language not in RUN:
        return
    assert block.mark.startswith(SHAPES) or block.mark in ("", "main-job", "tests"), block.mark
    if block.by:
        assert (ROOT / block.by).exists()
    if "checked" in block.words:
        assert block.language == "sh"


COMMANDS = {module.__name__: module for module in (hardware, reproduce)}
CHECKED = [(name, block) for name, block in LISTED if "checked" in block.words]


def commands(block: Block) -> list[list[str]]:
    """Return the words of each line up to its redirection, without comments, with continuation lines joined."""
    lines = block.text.replace("\\\n", " ").splitlines()
    split = (shlex.split(line, comments=True) for line in lines)
    return [list(takewhile(lambda word: word not in ("|", ">", ">>", "2>"), words)) for words in split if words]


@pytest.mark.parametrize(("name", "block"), LISTED, ids=ident)
def test_every_emad_command_parses(name: str, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()  # ``--data ./data`` has to be a folder
    monkeypatch.chdir(tmp_path)
    for words in commands(block) if block.language == "sh" else []:
        for option, value in pairwise(words):
            if option in ("--exit", "--profile", "--register") or value.endswith(".jsonl"):  # of earlier blocks
                (tmp_path / value).touch()
        if Path(words[0]).name == "emad" and words[1][:2] != "--":
            build_parser().parse_args(words[1:])
        elif words[1:3] == ["-m", "pytest_emad"]:
            build_parser().parse_args(words[3:])


def test_what_is_only_checked_is_known_to_whoever_would_read_it(pytester: pytest.Pytester) -> None:
    """pytest with the plugin knows the options and their values, tox.ini the environments."""
    checkout(pytester.path)
    sections = re.findall(r"^\[testenv:{?([\w,]+)}?\]", (ROOT / "tox.ini").read_text(encoding="utf-8"), re.MULTILINE)
    environments = [name for section in sections for name in section.split(",")]
    for words in (words for _, block in CHECKED for words in commands(block)):
        match Path(words[0]).name:
            case "tox":
                assert set(words[2:]) <= {*environments, "--"}, words
            case "pytest":
                pytester.parseconfig("-p", "no:cacheprovider", *words[1:])
            case "python" if words[2] in COMMANDS:
                COMMANDS[words[2]].build_argument_parser().parse_args(words[3:])
            case "python":
                assert words[1:3] == ["-m", "pytest_emad.lm_eval"], words
                cli = pytest.importorskip("lm_eval._cli", reason="the extra `tasks` is not installed")
                cli.HarnessCLI()._parser.parse_args(["run", *words[3:]])
            case other:  # verbs of emad are parsed above
                assert other == "emad", f"{other} is not checked here: run it, or name the test that does"


def test_contributings_loop_over_goldens_judges_everything_on_record(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bundled model and the pair, with each seed and on each text of the record; pytest knows all options."""
    monkeypatch.delenv("CI", raising=False)  # the loop is for a person: in CI, an update is refused
    (loop,) = (block for block in blocks(PAGES["CONTRIBUTING.md"]) if block.text.startswith("judge()"))
    for name in ("suites", "golden"):
        (pytester.path / name).symlink_to(ROOT / name)
    program = pytester.path / ".venv" / "bin" / "pytest"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nprintf '%s\\t' \"$@\" >> calls; echo >> calls\n")
    program.chmod(0o755)
    environment = os.environ | {"record": "--emad-update-golden"}
    subprocess.run(["bash", "-c", loop.text], cwd=pytester.path, env=environment, check=True)
    judged = set()
    for line in (pytester.path / "calls").read_text(encoding="utf-8").splitlines():
        words = line.strip("\t").split("\t")
        config = pytester.parseconfig("-p", "no:cacheprovider", *words)
        settings = get_run_settings(config)
        assert settings.update_golden
        assert all((pytester.path / path).exists() for path in config.args)
        name = settings.models[0] if "--emad-model" in words else " + ".join(BUNDLED_PAIR)
        judged.add((name, settings.study.corpus if "--emad-corpus" in words else "", settings.study.seed))
    known, wanted = load_known_verdicts_from_folders([ROOT / "golden"]).entries, set()
    for name in (*bundled_model_names(), " + ".join(BUNDLED_PAIR)):
        entries = [entry for entry in known if entry["name"] == name]
        corpora = {entry["corpus"] for entry in entries} & {"world:premise", "world:mixed"} or {""}
        wanted |= {(name, corpus, int(seed)) for corpus in corpora for entry in entries for seed in entry["seeds"]}
    assert judged == wanted


def test_every_option_named_exists() -> None:
    flags = {option.flag for option in OPTIONS}
    named = {(name, flag) for name, page in PAGES.items() for flag in re.findall(r"--emad-[a-z-]*[a-z]", page)}
    assert not {(name, flag) for name, flag in named if flag not in flags}


def test_the_ten_lines_that_readme_promises_are_ten() -> None:
    assert "in ten lines: [Python](docs/python.md)" in PAGES["README.md"]
    first = next(block for block in blocks(PAGES["docs/python.md"]) if block.language == "python")
    assert len([line for line in first.text.splitlines() if line]) <= 10
    assert first.runs


def test_a_file_shown_on_two_pages_is_one_file() -> None:
    """The page whose commands use it is tested for the other one."""
    files = [(block.mark, block.text) for _, block in LISTED if block.mark.startswith("file: ")]
    assert len(dict(files)) == len(set(files)) > 5


# ---------------------------------------------------------------- shown outputs


@pytest.mark.parametrize("name", ["README.md", "docs/claims.md", "CITATION.cff"])
def test_every_paper_is_named_with_its_address(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [address for _, address in PAPERS.values() if address not in text] == []
    assert name != "CITATION.cff" or f"\nversion: {emad_ref.__version__}\n" in text


@pytest.mark.parametrize("name", PAGES)
def test_a_fence_has_a_line_of_its_own(name: str) -> None:
    """A fence at the end of a line closes nothing: the following text is shown as code, and its block is not read."""
    assert [line for line in PAGES[name].splitlines() if "```" in line.lstrip("` ")] == []


def test_outputs_of_suites_are_shown() -> None:
    assert [block.mark for _, block in SUITES] == [
        "output: emad-tiny",
        "output: emad-tiny-plain",
        "output: emad-tiny on world:mixed",
    ]


@pytest.mark.parametrize(("name", "block"), SUITES, ids=ident)
def test_shown_verdicts_are_those_on_record(name: str, block: Block) -> None:
    model, _, corpus = block.mark.removeprefix("output: ").partition(" on ")
    shown_verdicts = dict(ROW.findall(block.text))
    assert {"EMAD-F1", "EMAD-F2", "EMAD-E2", "EMAD-E5"} <= set(shown_verdicts)
    compared = 0
    for claim, verdict in shown_verdicts.items():
        compared += held(claim, verdict, model, corpus or "world:premise")
    assert compared >= 3


def held(claim: str, verdict: str, model: str, corpus: str) -> int:
    """Return 1 if the record has the verdict, 0 if it depends on the machine."""
    if load_register()[claim].requires in MACHINE_BOUND:
        return 0
    known, circumstances = load_known_verdicts_from_folders([find_golden_folder()]), VerdictConditions(0, "smoke")
    pair = "+".join(load(name).fingerprint for name in ("emad-nano", "emad-tiny"))
    keys = [
        verdict_key_fields(claim, name, read, circumstances)
        for name in (load(model).fingerprint, model, pair, "emad-nano + emad-tiny")
        for read in (corpus, "world tasks", "")
    ]
    on_record = [found for key in keys if (found := known.find_outcome(key, 0)) is not None]
    assert any(verdict in found.outcomes for found in on_record), (claim, verdict)
    return 1


# ---------------------------------------------------------------- the claims page


def test_rows_are_as_register_and_record_have_them() -> None:
    page = PAGES["docs/claims.md"]
    assert page == claims.written(page), "python -m tests.pages.record docs/claims.md writes them anew"


def test_every_row_has_its_section() -> None:
    sections = [found["claim"] for found in claims.SECTION.finditer(PAGES["docs/claims.md"])]
    assert sorted(sections) == sorted(load_register())
    assert sections == [found["claim"] for found in claims.MARKED.finditer(PAGES["docs/claims.md"])]


@pytest.mark.parametrize("claim", [next(iter(load_register())), "EMAD-F2", list(load_register())[-1]])
def test_a_claim_without_a_section_gets_one_in_its_place(claim: str) -> None:
    page = PAGES["docs/claims.md"]
    (section,) = (found for found in claims.SECTION.finditer(page) if found["claim"] == claim)
    added = claims.written(page[: section.start()] + page[section.end() :])
    order = [found["claim"] for found in claims.SECTION.finditer(added)]
    first = claim == next(iter(load_register()))  # no claim precedes it: the end of the page
    assert order == [name for name in _order(page) if not first or name != claim] + [claim] * first
    assert claims.written(added) == added


def test_a_page_about_something_else_gets_no_claims() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "[EMAD-F1]" not in page
    assert claims.written(page) == page


def _order(page: str) -> list[str]:
    return [found["claim"] for found in claims.SECTION.finditer(page)]


def test_what_was_found_is_what_is_on_record() -> None:
    """A verdict in a section is the record's for that model and text."""
    record, told = claims.recorded(), 0
    for section in claims.SECTION.finditer(PAGES["docs/claims.md"]):
        for found in claims.FOUND.finditer(section["text"]):
            if load_register()[section["claim"]].requires in MACHINE_BOUND:
                continue
            entries = [
                entry
                for entry in record
                if entry["claim"] == section["claim"]
                and entry["name"] == found["model"]
                and (not found["corpus"] or entry["corpus"] == found["corpus"])
            ]
            assert {entry["verdict"] for entry in entries} == {found["verdict"]}, (section["claim"], found[0])
            told += 1
    assert told >= len(load_register()) // 2
    assert SEED_DEPENDENT not in OUTCOMES  # shown as such, never as the verdict of one seed


# ---------------------------------------------------------------- pages form a whole


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", PAGES[name])
    assert not [link for link in links if not (folder / link).exists()]


def test_navigation_has_every_page_once() -> None:
    trees = [block.text for block in blocks(PAGES["docs/index.md"]) if block.language == "{toctree}"]
    named = [line for tree in trees for line in tree.splitlines() if line.endswith(".md")]
    assert sorted(named) == sorted({path.name for path in DOCS.glob("*.md")} - {"index.md"})


def test_the_reference_lists_every_name_option_fixture_and_command() -> None:
    """``docs/api.py`` fills the page when the site is built."""
    spec = importlib.util.spec_from_file_location("api", DOCS / "api.py")
    assert spec is not None
    assert spec.loader is not None
    api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api)
    page = api.filled(PAGES["docs/reference.md"])
    assert "<!-- generated" not in page
    fixtures = re.findall(
        r"^def (emad_\w+)\(", Path(pytest_emad.run.fixtures.__file__).read_text("utf-8"), re.MULTILINE
    )
    verbs = [f"`emad {verb}`" for verb in VERBS]
    exports = [(emad_ref, name) for name in emad_ref.__all__[1:]] + [
        (pytest_emad, name) for name in pytest_emad.__all__
    ]
    wanted = [*(f":: {house.__name__}.{name}\n" for house, name in exports), *(option.flag for option in OPTIONS)]
    assert [name for name in (*wanted, *fixtures, *verbs) if name not in page] == []
    assert len(fixtures) > 10
