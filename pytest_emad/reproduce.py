"""Judge a list of models in one command, which can resume and can use workers.

    python -m pytest_emad.reproduce --out DIR [--budget full] [--data DIR] [--suites PATH] [--executor WHERE] MODEL …

A unit is one model in one pytest, a process of its own: a crash stops no other unit. A unit whose finished report is in
its folder, from the same command line and version, is not judged again. So the same command continues after any
interruption. A falsified claim is a result, not a failure of the command.

    DIR/<model>/                 report.json, pages and log.txt of a model
    DIR/<model>/measuring/       the same of its tests that take time or energy, if ``--executor`` names workers
    DIR/summary.json, .txt       all models' claims, statuses        DIR/index.html, …    one page over all models

All workers must see DIR, data, suites and the current folder. With workers each model is two units, because a
measurement needs the machine to itself: the tests that measure nothing run first, several models at once, and those
that measure run last, one model at a time.

Exit status: 0 if no gate failed, 1 if a gate failed, 4 if a model could not be judged.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from emad_ref import __version__
from emad_ref.console import run_cli_command
from emad_ref.errors import BadArgument
from emad_ref.files import BadFile, require_replaceable_file, require_writable, write_atomically
from emad_ref.workers import child_process
from emad_ref.workers.dispatch import WorkerPool, WorkersLost, dispatch_timed_units_after_others, open_workers
from pytest_emad.cli.arguments import add_worker_executor_argument
from pytest_emad.measurements import option_values
from pytest_emad.measurements.study import BUDGETS
from pytest_emad.report import schema
from pytest_emad.report.provenance import DISTRIBUTION, installed_version, package_git_commit
from pytest_emad.report.schema import BadReport, Report, read_report
from pytest_emad.run import subprocesses

LOG_FILE, SUMMARY_FILE, MEASURING_FOLDER = "log.txt", "summary.json", "measuring"
SUMMARY_START = rb'^\{\s*"version"'
MEASURING, REST = "emad(measures=True)", "not emad(measures=True)"  # expressions of pytest's -m
DECIDED_STATUSES = (0, 1)  # statuses of a run that reached its verdicts
NO_TESTS = 5  # status of a pytest that selected no test
COULD_NOT_RUN = 4


@dataclass(frozen=True)
class JudgedModel:
    """One model in one pytest, which starts in ``start`` with the arguments ``words`` and reports into ``folder``.

    ``measures``: whether it needs the machine to itself. ``origin``: version and commit that a report must come from.
    """

    model: str
    measures: bool
    words: tuple[str, ...]
    folder: Path
    start: Path
    origin: tuple[str | None, str | None]

    def run_or_reuse(self) -> int:
        """Judge the model, or find it judged; returns the exit status of pytest."""
        if (before := self.finished_report()) is not None:
            return int(before["run"]["exit_status"])
        self.folder.mkdir(parents=True, exist_ok=True)
        return child_process.run_module_for_status("pytest", self.words, self.folder / LOG_FILE, folder=self.start)

    def finished_report(self) -> Report | None:
        """The report of a finished run of this unit; None without one."""
        if not (self.folder / schema.REPORT_FILE).is_file() or schema.unfinished_run_start_time(self.folder):
            return None
        try:
            report = read_report(self.folder)
        except BadReport as error:
            print(f"{error}; it is judged again", flush=True)
            return None
        run, origin = report["run"], report["provenance"]
        same = run["command"] == ["pytest", *self.words] and self.origin == (
            origin["versions"][DISTRIBUTION],
            origin["commit"],
        )
        ended = report["state"] == "complete" and run["exit_status"] in DECIDED_STATUSES
        return report if same and ended else None


def build_argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_emad.reproduce", description="Judge models one by one.")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--out", type=_absolute, required=True, help="folder of all reports")
    parser.add_argument("--budget", choices=tuple(BUDGETS), default="full")
    parser.add_argument(
        "--suites", type=_package_or_path, default="pytest_emad.suites", help="package or path of the suites"
    )
    parser.add_argument("--data", type=_absolute, help="folder with data sets, as --emad-data")
    parser.add_argument("--device", default="cpu")
    add_worker_executor_argument(parser)
    return parser


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _package_or_path(text: str) -> str:
    return str(_absolute(text)) if Path(text).exists() else text


def model_folder_name(model: str) -> str:
    """A model's name as the name of one folder."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", model).strip("-.") or "model"


def plan_units(folders: Mapping[str, Path], chosen: argparse.Namespace, *, with_workers: bool) -> list[JudgedModel]:
    """The units of all models; with workers, two of each model."""
    origin = installed_version(DISTRIBUTION), package_git_commit()
    units = []
    for marked in (REST, MEASURING) if with_workers else (None,):
        for model, whole in folders.items():
            folder = whole / MEASURING_FOLDER if marked == MEASURING else whole
            words = build_unit_arguments(model, folder, marked, chosen)
            units.append(JudgedModel(model, marked == MEASURING, words, folder, Path.cwd(), origin))
    return units


def build_unit_arguments(model: str, folder: Path, marked: str | None, chosen: argparse.Namespace) -> tuple[str, ...]:
    """Arguments of the pytest of one unit; ``marked``: the expression of its ``-m``, if it has one."""
    options: dict[str, object] = {"model": model, "budget": chosen.budget, "device": chosen.device}
    options |= ({"data": chosen.data} if chosen.data else {}) | {"report": folder}
    selection = [] if marked is None else ["-m", marked]
    asked = [*selection, *subprocesses.build_suite_path_arguments(chosen.suites)]
    return tuple(subprocesses.build_pytest_arguments(asked, options))


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_argument_parser()
    chosen = parser.parse_args(argv)
    names = [model_folder_name(model) for model in chosen.models]
    if len(set(names)) != len(names):
        parser.error(f"MODEL={chosen.models}, but expected names that differ as folders do; got {names}")
    folders = {model: chosen.out / name for model, name in zip(chosen.models, names, strict=True)}
    try:
        for folder in folders.values():
            require_writable(folder / LOG_FILE, "--out")
        for folder in (chosen.out, *folders.values()):
            option_values.prepare_report_folder(str(folder), Path(), "--out")
        require_replaceable_file(chosen.out / SUMMARY_FILE, "--out", "a summary", SUMMARY_START)
        with open_workers(chosen.executor) as crew:
            units = plan_units(folders, chosen, with_workers=crew is not None)
            ended = judge_units(units, crew)
    except (BadArgument, BadFile) as error:
        parser.error(str(error))
    except WorkersLost as error:  # the next command reuses judged units
        print(error)
        return COULD_NOT_RUN
    statuses = {model: model_status([ended[unit] for unit in units if unit.model == model]) for model in folders}
    reports = [report for unit in units if (report := unit.finished_report()) is not None]
    print(write_models_summary(statuses, reports, chosen.out))
    return max(statuses.values()) if set(statuses.values()) <= set(DECIDED_STATUSES) else COULD_NOT_RUN


def judge_units(units: Sequence[JudgedModel], crew: WorkerPool | None) -> dict[JudgedModel, int]:
    """Unit → exit status of its pytest. Judged here, or by ``crew``; units that measure run alone, after all others.

    Raises:
        WorkersLost: the units judged so far are kept.
    """
    ended = {unit: int(report["run"]["exit_status"]) for unit in units if (report := unit.finished_report())}
    left = [unit for unit in units if unit not in ended]
    with tqdm(total=len(units), initial=len(ended), desc="judged", unit="unit", disable=None) as bar:
        for unit, status in ended.items():
            bar.write(f"{_unit_name(unit)}: judged before, status {status}")
        for unit, status in _statuses(left, crew):
            bar.write(f"{_unit_name(unit)}: status {status}, see {unit.folder / LOG_FILE}")
            bar.update()
            ended[unit] = COULD_NOT_RUN if status in DECIDED_STATUSES and unit.finished_report() is None else status
    return ended


def _unit_name(unit: JudgedModel) -> str:
    return f"{unit.model}, time and energy" if unit.measures else unit.model


def _statuses(units: Sequence[JudgedModel], crew: WorkerPool | None) -> Iterator[tuple[JudgedModel, int]]:
    if crew is None:
        yield from ((unit, unit.run_or_reuse()) for unit in units)
    else:
        yield from dispatch_timed_units_after_others(crew, JudgedModel.run_or_reuse, units, lambda unit: unit.measures)


def model_status(statuses: Sequence[int]) -> int:
    """The worst status of a model's units. A unit without tests counts only if no unit has one."""
    with_tests = [status for status in statuses if status != NO_TESTS] or [NO_TESTS]
    return next((status for status in with_tests if status not in DECIDED_STATUSES), max(with_tests))


def write_models_summary(statuses: Mapping[str, int], reports: Sequence[Report], out: Path) -> str:
    """Write ``summary.json``, its text and the pages over all models; returns the text.

    The text has a table of claims and names the models that could not be judged. ``statuses``: of each model;
    ``reports``: of the models that have one.
    """
    from pytest_emad.report.page import write_pages  # imports tabulate and Jinja2
    from pytest_emad.report.tables import format_claims_table

    claims = [claim for report in reports for claim in report["claims"]]
    summary = {"version": __version__, "status": dict(statuses), "claims": claims}
    write_atomically(out / SUMMARY_FILE, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    failed = [
        f"{model}: status {status}, see {LOG_FILE}"
        for model, status in statuses.items()
        if status not in DECIDED_STATUSES
    ]
    text = "\n".join([format_claims_table(claims), *failed])
    write_atomically(out / "summary.txt", text + "\n")
    return f"{text}\n{out}: {write_pages(reports, out)}" if reports else text


if __name__ == "__main__":
    from pytest_emad import reproduce  # workers cannot import a class of __main__

    sys.exit(run_cli_command(reproduce.main))
