"""The catalogue of planted decoders, judged one by one on the model of this run: a line for each, then the table."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import write_atomically
from emad_ref.planted.catalogue import CATALOGUE, chosen, one_of_each_kind
from emad_ref.planted.entry import Planted
from emad_ref.report.caught import LOG, Result, complaints, line, outcome, proved, summary, table
from emad_ref.report.shipped import SUITES
from pytest_emad.options import OPTIONS, settings
from pytest_emad.proving import ALL, FLAG, KINDS, MEANT
from pytest_emad.proving.process import run

PASSED_ON = ("model", "corpus", "device", "dtype", "profile", "budget", "seed", "data", "inconclusive")
PROVIDER = "pytest_emad.planted"


def prove(config: pytest.Config) -> int:
    """Run the catalogue, print a line for each entry and the table; the exit status.

    Raises:
        pytest.UsageError: an unknown name, several models, a report that cannot be written.
    """
    try:
        planted = _chosen(config.getoption(FLAG))
        asked = settings(config)
        if len(asked.models) > 1:
            raise BadArgument("--emad-model", asked.models, f"one model beside {FLAG}", "run it for each")
    except BadArgument as error:
        raise pytest.UsageError(str(error)) from error
    results: list[Result] = []
    everything = config.getoption(FLAG) == ALL
    print(f"emad selfcheck: {len(planted)} planted decoders on {asked.models[0]}", flush=True)
    with tempfile.TemporaryDirectory(prefix="emad-selfcheck-") as folder:
        for number, one in enumerate(planted, start=1):
            results.append(_judged(config, one, Path(folder, str(number)), everything))
            print(f"{number}/{len(planted)} {line(results[-1])}", flush=True)
    said = summary(results)
    print(f"\n{table(results)}\n{said}")
    if asked.report is not None:
        written = {"model": asked.models[0], "summary": said, "results": [asdict(result) for result in results]}
        try:
            asked.report.mkdir(parents=True, exist_ok=True)
            write_atomically(asked.report / "selfcheck.json", json.dumps(written, indent=1, ensure_ascii=False) + "\n")
            write_atomically(asked.report / "selfcheck.txt", f"{table(results)}\n{said}\n")
        except (OSError, EmadError) as error:
            raise pytest.UsageError(f"--emad-report: {error}") from error
    return int(pytest.ExitCode.OK if proved(results) else pytest.ExitCode.TESTS_FAILED)


def _chosen(names: str) -> list[Planted]:
    if names == KINDS:
        return one_of_each_kind()
    return list(CATALOGUE.values()) if names in (MEANT, ALL) else chosen(names.split(","))


# ---------------------------------------------------------------- one of them


def _judged(config: pytest.Config, planted: Planted, folder: Path, everything: bool) -> Result:
    began = time.monotonic()
    folder.mkdir()
    run(_arguments(config, planted, folder, everything), folder / LOG)
    found, by, message = outcome(planted, list(complaints(folder)), folder)
    seconds, plain = round(time.monotonic() - began, 1), " ".join(message.removeprefix("Failed: ").split())
    return Result(planted.name, planted.kind, planted.does, planted.meant, found, by, plain, seconds)


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
