"""Judge every claim on a list of models in one command, which can resume, and runs untimed parts in parallel.

    python -m pytest_emad.reproduce --out DIR [--budget full] [--data DIR] [--suites PATH] [--executor WHERE] MODEL …

A unit of work is a model and a folder of the suites; ``pytest_emad.report.suite_parts`` describes DIR. A folder with
measuring and other tests is split in two. The command skips a unit already judged for the same version, budget and
options, so it continues after an interruption. A falsified claim is a result, not a failure of the command.

``--executor`` gives units to workers; all of them must see DIR, data, suites and the current folder. Units that measure
time or energy run alone. Verdicts do not depend on the partition: they equal those of one run of all suites
(``report.suite_parts``).

Its child processes load this module as a plugin (``-p pytest_emad.reproduce``), which adds two options:

    --emad-cut FILE                  write the parts of this run as JSON and run nothing (with --collect-only)
    --emad-part measuring | rest     run only the tests that take time or energy, or all but those

Exit status: 0 if no gate failed, 1 if a gate failed, 4 if a model could not be judged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
from tqdm import tqdm

from emad_ref import __version__
from emad_ref.console import run_cli_command
from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import BadFile, require_replaceable_file, require_writable, write_atomically
from emad_ref.workers.dispatch import WorkerPool, WorkersLost, open_workers
from pytest_emad.cli.arguments import add_worker_executor_argument
from pytest_emad.measurements import option_values
from pytest_emad.measurements.study import BUDGETS
from pytest_emad.report import schema
from pytest_emad.report.deselection import PREFIX
from pytest_emad.report.provenance import package_git_commit
from pytest_emad.report.schema import Report
from pytest_emad.report.suite_parts import (
    DECIDED_STATUSES,
    LOG_FILE,
    PARTS_FILE,
    SUMMARY_FILE,
    SuitePart,
    model_folder_name,
    read_part_plan_json,
    run_and_yield_part_statuses,
    write_merged_report,
    write_models_summary,
)
from pytest_emad.run import environment, selection, subprocesses
from pytest_emad.run.collection_log import CollectionLog

PARTITION_PLUGIN = ("-p", "pytest_emad.reproduce")
RUNNABLE, COULD_NOT_RUN = 0, 4  # status of a model that can be judged, and of one that cannot


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


def emad_option_values_by_name(model: str, chosen: argparse.Namespace) -> dict[str, object]:
    data = {"data": chosen.data} if chosen.data else {}
    return {"model": model, "budget": chosen.budget, "device": chosen.device} | data


def suite_part_reuse_key(model: str, part: str, chosen: argparse.Namespace) -> dict[str, str]:
    """Key of a run (model, part, options, version); an earlier run is reused only with an equal key."""
    asked = {name: str(getattr(chosen, name)) for name in ("budget", "suites", "data", "device")}
    return asked | {"model": model, "part": part, "version": __version__, "commit": str(package_git_commit())}


def run_pytest_writing_part_plan(model: str, folder: Path, chosen: argparse.Namespace) -> int:
    """Run a pytest that writes the parts of the suites for ``model`` into ``folder``; returns its exit status."""
    words = [*PARTITION_PLUGIN, "--collect-only", "-q", *subprocesses.build_suite_path_arguments(chosen.suites)]
    status = subprocesses.run_pytest(
        subprocesses.build_pytest_arguments(
            words, emad_option_values_by_name(model, chosen) | {"cut": folder / PARTS_FILE}
        ),
        folder / LOG_FILE,
    )
    return COULD_NOT_RUN if status == 1 else status  # a collection run has no verdicts


def plan_suite_parts(model: str, folder: Path, chosen: argparse.Namespace) -> list[SuitePart]:
    """Parts of the suites for ``model``, in the order of a single run of all."""
    return [_work_unit(model, part, folder, chosen) for part in read_part_plan_json(folder)["parts"]]


def _work_unit(model: str, part: Mapping[str, Any], folder: Path, chosen: argparse.Namespace) -> SuitePart:
    whole_of_it = Path(chosen.suites).stem if Path(chosen.suites).exists() else chosen.suites.rpartition(".")[2]
    name = part["folder"] or whole_of_it
    name = f"{name}-{part['only']}" if part["only"] else name
    only = [*PARTITION_PLUGIN, f"--emad-part={part['only']}"] if part["only"] else []
    where = subprocesses.build_suite_path_arguments(chosen.suites, [part["folder"]] if part["folder"] else [])
    words = subprocesses.build_pytest_arguments(
        [*only, *where], emad_option_values_by_name(model, chosen) | {"report": folder / name}
    )
    known = suite_part_reuse_key(model, name, chosen)
    return SuitePart(model, name, part["measures"], tuple(words), folder / name, Path.cwd(), known)


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_argument_parser()
    given = sys.argv[1:] if argv is None else list(argv)
    chosen = parser.parse_args(given)
    names = [model_folder_name(model) for model in chosen.models]
    if len(set(names)) != len(names):
        parser.error(f"MODEL={chosen.models}, but expected names that differ as folders do; got {names}")
    folders = {model: chosen.out / name for model, name in zip(chosen.models, names, strict=True)}
    try:
        for folder in folders.values():
            require_writable(folder / LOG_FILE, "--out")
        for folder in (chosen.out, *folders.values()):
            option_values.prepare_report_folder(str(folder), Path(), "--out")
        # a summary begins as a report does
        require_replaceable_file(chosen.out / SUMMARY_FILE, "--out", "a summary", option_values.REPORTED["report.json"])
        with open_workers(chosen.executor) as crew:
            statuses, reports = run_and_merge_parts(
                folders, chosen, crew, ["python", "-m", "pytest_emad.reproduce", *given]
            )
    except (BadArgument, BadFile) as error:
        parser.error(str(error))
    except WorkersLost as error:  # the next command reuses judged units
        print(error)
        return COULD_NOT_RUN
    print(write_models_summary(statuses, reports, chosen.out))
    return max(statuses.values()) if set(statuses.values()) <= set(DECIDED_STATUSES) else COULD_NOT_RUN


def run_and_merge_parts(
    folders: Mapping[str, Path], chosen: argparse.Namespace, crew: WorkerPool | None, command: Sequence[str]
) -> tuple[dict[str, int], list[Report]]:
    """(Status of each model, reports of the judged ones)."""
    statuses: dict[str, int] = {}
    units: list[SuitePart] = []
    for model, folder in folders.items():
        schema.mark_run_started(folder)
        statuses[model] = run_pytest_writing_part_plan(model, folder, chosen)
        units += plan_suite_parts(model, folder, chosen) if statuses[model] == RUNNABLE else []
    before = {id(unit): status for unit in units if (status := unit.earlier_exit_status()) is not None}
    left = [unit for unit in units if id(unit) not in before]
    with tqdm(total=len(units), initial=len(before), desc="judged", unit="unit", disable=None) as bar:
        for unit in (unit for unit in units if id(unit) in before):
            bar.write(f"{unit.model} {unit.part}: judged before, status {before[id(unit)]}")
        for unit, status in run_and_yield_part_statuses(crew, left):
            bar.write(f"{unit.model} {unit.part}: status {status}, see {unit.folder / LOG_FILE}")
            bar.update()
            statuses[unit.model] = statuses[unit.model] if status in DECIDED_STATUSES else status
    reports = []
    for model, folder in folders.items():
        if statuses[model] == RUNNABLE:
            try:
                reports.append(write_merged_report([unit for unit in units if unit.model == model], folder, command))
                statuses[model] = reports[-1]["run"]["exit_status"]
            except EmadError as error:
                print(f"{model}: {error}")
                statuses[model] = COULD_NOT_RUN
    return statuses, reports


if __name__ == "__main__":
    sys.exit(run_cli_command(main))


MEASURING, REST = "measuring", "rest"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emad")
    group.addoption("--emad-cut", metavar="FILE", type=Path)
    group.addoption("--emad-part", choices=(MEASURING, REST))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--emad-part")
    if part is not None:
        left = [item for item in items if selection.is_timing_or_energy_test(item) is (part == REST)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def pytest_collection_finish(session: pytest.Session) -> None:
    file = session.config.getoption("--emad-cut")
    if file is None:
        return
    attended = cast(CollectionLog, session.config.pluginmanager.get_plugin("emad-attendance"))
    measuring: dict[str, set[bool]] = {}  # folder → whether it has measuring tests
    for item, folder in zip(session.items, _suite_folders(session), strict=True):
        measuring.setdefault(folder, set()).add(selection.is_timing_or_energy_test(item))
    found = {
        "tests": environment.requested_suite_parts(session.config) or ([PREFIX] if attended.collected else []),
        "deselected": attended.deselected,
        "parts": [
            {"folder": folder, "measures": each, "only": [REST, MEASURING][each] if len(kinds) > 1 else None}
            for folder, kinds in sorted(measuring.items(), key=lambda each: selection.suite_folder_rank(each[0]))
            for each in sorted(kinds)
        ],
    }
    write_atomically(file, json.dumps(found, indent=1) + "\n", "--emad-cut")


def _suite_folders(session: pytest.Session) -> list[str]:
    """Folder of the suites of each test; "" for all if some test is in none."""
    config, (suites, *_) = session.config, session.config.args
    spec = find_spec(suites) if config.getoption("pyargs") else None
    root = Path(spec.origin).parent if spec and spec.origin else config.invocation_params.dir / suites
    inside = [item.path.resolve().relative_to(root.resolve()).parts for item in session.items]
    return [parts[0] if all(len(each) > 1 for each in inside) else "" for parts in inside]
