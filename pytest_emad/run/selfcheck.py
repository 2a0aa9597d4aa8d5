"""``--emad-selfcheck``: judge the suites with mutants, decoders with one known defect, in place of a decoder.

For every mutant of ``pytest_emad.mutants`` a separate pytest runs the test that must catch it, with the options of this
run, and writes its report. A defect is caught if that test complains in the expected words
(``pytest_emad.report.mutation_results``). ``all`` also runs the invariants and fidelity suites; honest decoders must
always pass them.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import write_atomically
from pytest_emad.mutants.catalogue import CATALOGUE, select_mutants, select_one_of_each_kind
from pytest_emad.mutants.mutant import Mutant
from pytest_emad.report.deselection import SUITES
from pytest_emad.report.mutation_results import (
    LOG_FILE,
    UNFINISHED,
    MutationResult,
    are_results_as_expected,
    classify_mutant_run,
    format_mutation_counts,
    format_mutation_result,
    format_mutation_table,
    iterate_run_complaints,
)
from pytest_emad.run.options import OPTIONS, SELFCHECK, get_run_settings

IMPORTED = ("torch._dynamo", "transformers", "hypothesis.stateful", "scipy.stats", "pytest_emad.mutants.catalogue")
LIMIT_S = 1800.0  # seconds for one planted decoder; a decoder that hangs is not caught


def can_run_pytest_within_limit(arguments: list[str], log: Path) -> bool:
    """Run pytest with ``arguments``, its output in ``log``; returns whether it ended within ``LIMIT_S``."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)  # either kind of context; typeshed's base class has no Process
    if method == "forkserver":
        context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=_pytest, args=(arguments, str(log)))
    process.start()
    process.join(LIMIT_S)
    ended = not process.is_alive()
    if not ended:
        process.kill()
        process.join()
    return ended


def _pytest(arguments: list[str], log: str) -> None:
    """Run pytest with all output in ``log``."""
    gc.freeze()  # exempts the parent's imports from garbage collection, which would take longer than a small test
    with open(log, "wb") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    raise SystemExit(int(pytest.main(arguments)))


PASSED_ON = ("model", "corpus", "device", "dtype", "profile", "budget", "seed", "data", "inconclusive")
PROVIDER = "pytest_emad.run.mutants"


def run_selfcheck_for_status(config: pytest.Config) -> int:
    """Run the catalogue, print a line for each entry and the table; the exit status.

    Raises:
        pytest.UsageError: an unknown name, several models, a report that cannot be written.
    """
    try:
        planted = _selected_mutants(config.getoption(SELFCHECK))
        asked = get_run_settings(config)
        if len(asked.models) > 1:
            raise BadArgument("--emad-model", asked.models, f"one model beside {SELFCHECK}", "run it for each")
    except BadArgument as error:
        raise pytest.UsageError(str(error)) from error
    results: list[MutationResult] = []
    everything = config.getoption(SELFCHECK) == "all"
    print(f"emad selfcheck: {len(planted)} planted decoders on {asked.models[0]}", flush=True)
    with tempfile.TemporaryDirectory(prefix="emad-selfcheck-") as folder:
        for number, one in enumerate(planted, start=1):
            results.append(_check_mutant(config, one, Path(folder, str(number)), everything))
            print(f"{number}/{len(planted)} {format_mutation_result(results[-1])}", flush=True)
    said = format_mutation_counts(results)
    print(f"\n{format_mutation_table(results)}\n{said}")
    if asked.report is not None:
        written = {"model": asked.models[0], "summary": said, "results": [asdict(result) for result in results]}
        try:
            asked.report.mkdir(parents=True, exist_ok=True)
            write_atomically(asked.report / "selfcheck.json", json.dumps(written, indent=1, ensure_ascii=False) + "\n")
            write_atomically(asked.report / "selfcheck.txt", f"{format_mutation_table(results)}\n{said}\n")
        except (OSError, EmadError) as error:
            raise pytest.UsageError(f"--emad-report: {error}") from error
    return int(pytest.ExitCode.OK if are_results_as_expected(results) else pytest.ExitCode.TESTS_FAILED)


def _selected_mutants(names: str) -> list[Mutant]:
    if names == "kinds":
        return select_one_of_each_kind()
    return list(CATALOGUE.values()) if names in ("meant", "all") else select_mutants(names.split(","))


# ---------------------------------------------------------------- one of them


def _check_mutant(config: pytest.Config, planted: Mutant, folder: Path, everything: bool) -> MutationResult:
    began = time.monotonic()
    folder.mkdir()
    if can_run_pytest_within_limit(_arguments(config, planted, folder, everything), folder / LOG_FILE):
        found, by, message = classify_mutant_run(planted, list(iterate_run_complaints(folder)), folder)
    else:
        found, by, message = UNFINISHED, "", f"stopped after {LIMIT_S:g} s; is the machine busy, or the model large?"
    seconds, plain = round(time.monotonic() - began, 1), " ".join(message.removeprefix("Failed: ").split())
    return MutationResult(
        planted.name, planted.kind, planted.does, planted.expected_detector, found, by, plain, seconds
    )


def _arguments(config: pytest.Config, planted: Mutant, folder: Path, everything: bool) -> list[str]:
    """A command line for pytest: the options of this run, the planted provider, and the tests to run."""
    suites = next(folder for folder in SUITES if folder.is_dir())
    names = planted.test.split()
    if everything:
        names = list(dict.fromkeys(["invariants", "fidelity", *names]))
        names = [name for name in names if "::" not in name or name.split("/")[0] not in names]
    model = get_run_settings(config).models[0]
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
    provider += ["--emad-expect-decoder", PROVIDER]  # a run of part of the suites that still counts as proof
    paths = [f"{suites / name}{case}" for name in names]
    return [*around, *provider, *given, "-pno:cacheprovider", "--emad-report", str(folder), *paths]
