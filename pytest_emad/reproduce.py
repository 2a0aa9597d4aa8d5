"""The papers' whole plan for a list of models in one command: one run per model, resumable, one report folder.

    python -m pytest_emad.reproduce --out DIR [--budget full] [--data DIR] [--suites PATH] [--executor WHERE] MODEL …

Each model is judged by a pytest of its own, so that one that cannot be loaded takes no other down. A model whose report
was written for the same version, budget and options is not judged again: an interrupted command goes on where it was.
A falsified claim is a result, not a failure of the command; what could not run is.

``--executor`` gives models to machines, each to one that it has to itself, because verdicts measure time; DIR, data and
suites are files that all of them see.

    DIR/<model>/report.json   as every run writes it, with its pages   DIR/<model>/log.txt   what the run said
    DIR/summary.json          all models' claims, statuses             DIR/summary.txt       the claims as one table
    DIR/index.html            one page over all models, beside it report.md and the figures

Exit status: 0 all claims decided as the gates ask, 1 some gate says no, 4 some model could not be judged.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emad_ref import __version__
from emad_ref.cli.parsing import executor_argument
from emad_ref.errors import BadArgument
from emad_ref.evidence.study import BUDGETS
from emad_ref.files import BadFile, read_json, require_writable, write_atomically
from emad_ref.report.reading import BadReport, Report, read_report
from emad_ref.workers.address import workers_at
from emad_ref.workers.handing import WorkersLost, handed_out
from pytest_emad import apart
from pytest_emad.apart import JUDGED

DONE = "done.json"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_emad.reproduce", description="Judge models one by one.")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True, help="folder of all reports")
    parser.add_argument("--budget", choices=tuple(BUDGETS), default="full")
    parser.add_argument("--suites", default="pytest_emad.suites", help="package or path of the suites")
    parser.add_argument("--data", type=Path, help="folder with data sets, as --emad-data")
    parser.add_argument("--device", default="cpu")
    executor_argument(parser)
    return parser


def command(model: str, folder: Path, chosen: argparse.Namespace) -> list[str]:
    """The pytest command line that judges ``model`` into ``folder``."""
    options = {"model": model, "budget": chosen.budget, "device": chosen.device, "report": folder}
    data = {"data": chosen.data} if chosen.data else {}
    return apart.command(apart.places(chosen.suites), options | data)


def identity(model: str, chosen: argparse.Namespace) -> dict[str, str]:
    """What a finished run must have been asked for to stand for this one."""
    asked = {name: str(getattr(chosen, name)) for name in ("budget", "suites", "data", "device")}
    return asked | {"model": model, "version": __version__}


def judged(model: str, folder: Path, chosen: argparse.Namespace) -> int:
    """Run the suites on one model, or find that they did; pytest's exit status."""
    mark, wanted = folder / DONE, identity(model, chosen)
    if (before := finished(mark, wanted)) is not None and is_readable(folder):
        print(f"{model}: judged before, status {before}", flush=True)
        return before
    print(f"{model}: judging; see {folder / 'log.txt'}", flush=True)
    status = apart.status(command(model, folder, chosen), folder / "log.txt")
    if status in JUDGED:
        write_atomically(mark, json.dumps({"identity": wanted, "status": status}) + "\n")
    return status


@dataclass(frozen=True)
class Unit:
    """One model to judge."""

    model: str
    folder: Path
    chosen: argparse.Namespace

    def judged(self) -> int:
        return judged(self.model, self.folder, self.chosen)


def everywhere(units: Sequence[Unit], executor: str) -> Iterator[tuple[Unit, int]]:
    """Each unit and its status, in order.

    Raises:
        BadArgument: no such executor, or one whose workers would disturb each other's clocks.
    """
    with workers_at(executor) as crew:
        if crew is None:
            yield from ((unit, unit.judged()) for unit in units)
            return
        if crew.crowded:
            remedy = f"verdicts measure time, and {crew.crowded}"
            raise BadArgument("executor", executor, "one worker a machine", remedy)
        yield from handed_out(crew, Unit.judged, units)


def finished(mark: Path, wanted: Mapping[str, str]) -> int | None:
    """The status of a finished run that was asked for the same; None where there is none."""
    if not mark.exists():
        return None
    try:
        done = read_json(mark, DONE, dict, remedy="the model is judged again")
    except BadFile as error:
        print(error, flush=True)
        return None
    return done["status"] if done.get("identity") == wanted and done.get("status") in JUDGED else None


def is_readable(folder: Path) -> bool:
    """Whether the folder holds a report: one that was lost or damaged since says nothing about its model."""
    try:
        read_report(folder)
    except BadReport:
        return False
    return True


def summary(statuses: Mapping[str, int], reports: Sequence[Report]) -> dict[str, Any]:
    """Claims of every model that has a report, and the status of each run."""
    claims = [claim for report in reports for claim in report["claims"]]
    return {"schema": 1, "version": __version__, "status": dict(statuses), "claims": claims}


def folder_name(model: str) -> str:
    """A model's name as one folder's."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", model).strip("-.") or "model"


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    chosen = parser.parse_args(argv)
    names = [folder_name(model) for model in chosen.models]
    if len(set(names)) != len(names):
        parser.error(f"MODEL={chosen.models}, but expected names that differ as folders do; got {names}")
    try:
        for name in names:
            require_writable(chosen.out / name / "log.txt", "--out")
    except BadFile as error:
        parser.error(str(error))
    units = [Unit(model, chosen.out / name, chosen) for model, name in zip(chosen.models, names, strict=True)]
    try:
        statuses = {unit.model: status for unit, status in everywhere(units, chosen.executor)}
    except BadArgument as error:
        parser.error(str(error))
    except WorkersLost as error:  # what was judged is kept, and found again by the next command
        print(error)
        return 4
    from emad_ref.report.folder import write_pages
    from emad_ref.report.tables import claims_table

    reports = [read_report(chosen.out / folder_name(model)) for model, status in statuses.items() if status in JUDGED]
    found = summary(statuses, reports)
    write_atomically(chosen.out / "summary.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    text = claims_table(found["claims"])
    failed = [f"{model}: status {status}, see log.txt" for model, status in statuses.items() if status not in JUDGED]
    write_atomically(chosen.out / "summary.txt", "\n".join([text, *failed]) + "\n")
    print("\n".join([text, *failed]))
    if reports:
        print(f"{chosen.out}: {write_pages(reports, chosen.out)}")
    return 4 if failed else max(statuses.values())


if __name__ == "__main__":
    sys.exit(main())
