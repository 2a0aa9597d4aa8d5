"""``--emad-selfcheck``: do the shipped suites, in this user's configuration, catch what is planted?

For every planted decoder of ``emad_ref.planted`` a pytest of its own runs the test that is meant for it, with the
options of this run, and writes its report; a defect is caught where that test complains of it in the words it is meant
to. ``all`` runs the invariants and fidelity suites beside it. Honest decoders must pass all of them in any case. The
processes are forked from one that has imported what takes seconds (where the system can fork): a defect may change or
end its process as it likes.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import write_atomically
from emad_ref.report.shipped import SUITES, shipped_tests
from pytest_emad.options import OPTIONS, settings

if TYPE_CHECKING:
    from emad_ref.planted.entry import Planted

FLAG = "--emad-selfcheck"
MEANT, ALL, KINDS = "meant", "all", "kinds"  # whole catalogue, against the tests meant; against more; one of each kind
PASSED_ON = ("model", "corpus", "device", "dtype", "profile", "budget", "seed", "data", "inconclusive")
PROVIDER = "pytest_emad.planted"
IMPORTED = ("torch._dynamo", "transformers", "hypothesis.stateful", "scipy.stats", "emad_ref.planted.catalogue")
LIMIT_S = 1800.0  # of one planted decoder: one that hangs is not caught by anybody
CAUGHT, GREEN, ABSENT = "caught", "green", "not applicable"
AS_IT_SHOULD = (CAUGHT, GREEN, ABSENT)
ELSEWHERE, PASSED, ACCUSED = "caught by another check only", "NOT CAUGHT", "HONEST, BUT NOT GREEN"
GOLDEN = "test_golden.py"  # what it catches needs a record of this very model
NOT_PLANTABLE = re.compile(r"NotPlantable: (.*)")
LONGEST = 160  # letters of a message in the table


@dataclass(frozen=True)
class Result:
    """What became of one planted decoder; ``by``: who complained, ``message``: of what."""

    name: str
    kind: str
    does: str
    meant: str
    outcome: str
    by: str
    message: str
    seconds: float

    @property
    def right(self) -> bool:
        return self.outcome in AS_IT_SHOULD


@dataclass(frozen=True)
class Complaint:
    """``by``: the name of a shipped test, or who else; ``nodeid`` "" where it is no test's."""

    by: str
    nodeid: str
    message: str


def add_option(parser: pytest.Parser) -> None:
    parser.getgroup("emad").addoption(
        FLAG,
        nargs="?",
        const=MEANT,
        metavar="NAMES",
        help=f"judge the suites in place of a decoder, by planted ones; ={ALL}, ={KINDS}, or ={'NAME,NAME'} "
        "(docs/selfcheck.md)",
    )


def asked(config: pytest.Config) -> bool:
    return config.getoption(FLAG) is not None


def prove(config: pytest.Config) -> int:
    """Run the catalogue, print a line for each entry and the table; the exit status.

    Raises:
        pytest.UsageError: an unknown name, several models, a report that cannot be written.
    """
    try:
        planted = _chosen(config.getoption(FLAG))
        chosen = settings(config)
        if len(chosen.models) > 1:
            raise BadArgument("--emad-model", chosen.models, f"one model beside {FLAG}", "run it for each")
    except BadArgument as error:
        raise pytest.UsageError(str(error)) from error
    results: list[Result] = []
    everything = config.getoption(FLAG) == ALL
    print(f"emad selfcheck: {len(planted)} planted decoders on {chosen.models[0]}", flush=True)
    with tempfile.TemporaryDirectory(prefix="emad-selfcheck-") as folder:
        for number, one in enumerate(planted, start=1):
            results.append(_judged(config, one, Path(folder, str(number)), everything))
            print(_line(results[-1], f"{number}/{len(planted)}"), flush=True)
    said = summary(results)
    print(f"\n{table(results)}\n{said}")
    if chosen.report is not None:
        written = {"model": chosen.models[0], "summary": said, "results": [asdict(result) for result in results]}
        try:
            chosen.report.mkdir(parents=True, exist_ok=True)
            write_atomically(chosen.report / "selfcheck.json", json.dumps(written, indent=1, ensure_ascii=False) + "\n")
            write_atomically(chosen.report / "selfcheck.txt", f"{table(results)}\n{said}\n")
        except (OSError, EmadError) as error:
            raise pytest.UsageError(f"--emad-report: {error}") from error
    return int(pytest.ExitCode.OK if proved(results) else pytest.ExitCode.TESTS_FAILED)


def proved(results: Sequence[Result]) -> bool:
    """Nothing is other than it should be, and something was there to be caught or passed."""
    return all(result.right for result in results) and any(result.outcome != ABSENT for result in results)


def summary(results: Sequence[Result]) -> str:
    """How many of which outcome."""
    counts = Counter(result.outcome for result in results)
    return "emad selfcheck: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def table(results: Sequence[Result]) -> str:
    """Which check caught which."""
    from tabulate import tabulate

    rows = [
        {
            "planted": result.name,
            "kind": result.kind,
            "check meant": _short(result.meant),
            "outcome": result.outcome,
            "caught by": _short(result.by),
            "message": result.message[:LONGEST],
        }
        for result in results
    ]
    return str(tabulate(rows, headers="keys", disable_numparse=True))


def _chosen(names: str) -> list[Planted]:
    from emad_ref.planted.catalogue import CATALOGUE, chosen, one_of_each_kind

    if names == KINDS:
        return one_of_each_kind()
    return list(CATALOGUE.values()) if names in (MEANT, ALL) else chosen(names.split(","))


def _line(result: Result, number: str) -> str:
    by = f" by {_short(result.by)}" if result.by else ""
    return f"{number} {result.name}: {result.outcome}{by} ({result.seconds:.1f} s): {result.message[:LONGEST]}"


def _short(test: str) -> str:
    return test.removeprefix("suites/")


# ---------------------------------------------------------------- one of them


def _judged(config: pytest.Config, planted: Planted, folder: Path, everything: bool) -> Result:
    began = time.monotonic()
    _run(_arguments(config, planted, folder, everything), folder)
    complaints = list(_complaints(folder))
    outcome, by, message = _outcome(planted, complaints, folder)
    seconds, plain = round(time.monotonic() - began, 1), " ".join(message.removeprefix("Failed: ").split())
    return Result(planted.name, planted.kind, planted.does, planted.meant, outcome, by, plain, seconds)


def _outcome(planted: Planted, complaints: Sequence[Complaint], folder: Path) -> tuple[str, str, str]:
    """(outcome, who complained, message)."""
    for complaint in complaints:
        if found := NOT_PLANTABLE.search(complaint.message):
            return ABSENT, "", found[1]
    if planted.honest:
        if not complaints:
            return GREEN, "", ""
        return ACCUSED, complaints[0].by, complaints[0].message
    for complaint in complaints:
        if _is_meant(planted, complaint):
            return CAUGHT, complaint.by, complaint.message
    if complaints:
        return ELSEWHERE, complaints[0].by, complaints[0].message
    if GOLDEN in planted.test and (reason := _without_golden(folder)):
        return ABSENT, "", reason
    return PASSED, "", planted.does


def _is_meant(planted: Planted, complaint: Complaint) -> bool:
    named = not complaint.nodeid or planted.case in complaint.nodeid  # what is no test's has no parameters
    said = " ".join(complaint.message.split())  # a gate's message is wrapped as wide as a terminal
    return complaint.by == planted.meant and named and re.search(planted.says, said) is not None


def _without_golden(folder: Path) -> str:
    """Why a golden could not catch anything; "" where there was one."""
    from emad_ref.report.reading import read_report

    return next((note for note in read_report(folder)["notes"] if "no golden recorded" in note), "")


def _complaints(folder: Path) -> Iterator[Complaint]:
    """Of the tests of a run, then of the run, then of ``emad verify`` when it reads the report."""
    from emad_ref.cli.verifying import faults
    from emad_ref.planted.entry import RUN, VERIFY
    from emad_ref.report.reading import read_report

    try:
        report = read_report(folder)
    except EmadError as error:
        log = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        yield Complaint(VERIFY, "", f"{error}: {' '.join(log[-3:])}")
        return
    for entry in report["tests"]:
        if entry["outcome"] in ("failed", "error"):
            yield Complaint(str(entry["shipped"]), entry["nodeid"], entry["reason"])
    for failure in report["run"]["failures"]:
        yield Complaint(RUN, "", failure)
    for fault in faults(report, [], shipped_tests(), None):
        yield Complaint(VERIFY, "", fault)


def _arguments(config: pytest.Config, planted: Planted, folder: Path, everything: bool) -> list[str]:
    """A command line of pytest's: the options of this run, the planted provider, and what is to be run."""
    suites = next(folder for folder in SUITES if folder.is_dir())
    names = planted.test.split()
    if everything:
        names = list(dict.fromkeys(["invariants", "fidelity", *names]))
        names = [name for name in names if "::" not in name or name.split("/")[0] not in names]
    model = settings(config).models[0]
    case = f"[{model.replace('/', '|')}-{planted.case}]" if planted.case.startswith("EMAD") else ""
    given = [
        part
        for option in OPTIONS
        if option.name in PASSED_ON and (value := config.getoption(option.flag)) not in (None, [])
        for part in (option.flag, str(value[0] if option.many else value))
    ]
    around = [f"--rootdir={config.rootpath}", *([f"-c{config.inipath}"] if config.inipath else [])]
    around += [part for name in config.getoption("plugins") for part in ("-p", name)]
    around += ["-n0"] if config.pluginmanager.hasplugin("xdist") else []
    provider = ["-p", PROVIDER, "--emad-planted", planted.name, "--emad-backend", PROVIDER, "-o", "emad_decoder="]
    paths = [f"{suites / name}{case}" for name in names]
    return [*around, *provider, *given, "-pno:cacheprovider", "--emad-report", str(folder), *paths]


def _run(arguments: list[str], folder: Path) -> None:
    """In a process of its own, which is ended when it takes too long."""
    folder.mkdir()
    import multiprocessing  # not at the start of every run

    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)  # of either kind; typeshed's base class has no Process
    if method == "forkserver":
        context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=_pytest, args=(arguments, str(folder / "log")))
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()


def _pytest(arguments: list[str], log: str) -> None:
    """All that it says goes to ``log``."""
    with open(log, "wb") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    raise SystemExit(int(pytest.main(arguments)))
