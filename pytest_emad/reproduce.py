"""The papers' whole plan for a list of models in one command: resumable, in parallel where that disturbs no clock.

    python -m pytest_emad.reproduce --out DIR [--budget full] [--data DIR] [--suites PATH] [--executor WHERE] MODEL …

A unit is a model and a folder of the suites (``cutting``), and what DIR holds is told in ``emad_ref.report.units``. One
that was judged for the same version, budget and options is not judged again: an interrupted command goes on where it
was. A falsified claim is a result, not a failure of the command; what could not run is.

``--executor`` gives units to workers; DIR, data, suites and the folder of the call are files that all of them see. What
measures time or energy is judged where nothing of ours is at work beside it: where workers share a machine, when all
the rest is done. Verdicts do not depend on the cut: each is what one run of all suites says (``report.parts``).

Exit status: 0 all claims decided as the gates ask, 1 some gate says no, 4 some model could not be judged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from emad_ref import __version__
from emad_ref.cli.parsing import executor_argument
from emad_ref.console import run_command
from emad_ref.errors import BadArgument, EmadError
from emad_ref.evidence.study import BUDGETS
from emad_ref.files import BadFile, require_writable
from emad_ref.report import begun
from emad_ref.report.provenance import commit
from emad_ref.report.reading import Report
from emad_ref.report.units import CUT, JUDGED, LOG, Unit, everywhere, folder_name, summed_up, what_was_cut, whole
from emad_ref.workers.address import workers_at
from emad_ref.workers.handing import Crew, WorkersLost
from pytest_emad import apart

CUTTING = ("-p", "pytest_emad.cutting")
CAN_BE, UNMADE = 0, 4  # status of a model that can be judged so far, and of one that cannot


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_emad.reproduce", description="Judge models one by one.")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--out", type=_absolute, required=True, help="folder of all reports")
    parser.add_argument("--budget", choices=tuple(BUDGETS), default="full")
    parser.add_argument("--suites", type=_place, default="pytest_emad.suites", help="package or path of the suites")
    parser.add_argument("--data", type=_absolute, help="folder with data sets, as --emad-data")
    parser.add_argument("--device", default="cpu")
    executor_argument(parser)
    return parser


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _place(text: str) -> str:
    return str(_absolute(text)) if Path(text).exists() else text


def options(model: str, chosen: argparse.Namespace) -> dict[str, object]:
    data = {"data": chosen.data} if chosen.data else {}
    return {"model": model, "budget": chosen.budget, "device": chosen.device} | data


def identity(model: str, part: str, chosen: argparse.Namespace) -> dict[str, str]:
    """What a unit is asked, by whom: one that differs in any of it is judged again."""
    asked = {name: str(getattr(chosen, name)) for name in ("budget", "suites", "data", "device")}
    return asked | {"model": model, "part": part, "version": __version__, "commit": str(commit())}


def cut(model: str, folder: Path, chosen: argparse.Namespace) -> int:
    """Have pytest say which parts the suites come in for ``model``; its exit status."""
    words = [*CUTTING, "--collect-only", "-q", *apart.places(chosen.suites)]
    status = apart.status(apart.command(words, options(model, chosen) | {"cut": folder / CUT}), folder / LOG)
    return UNMADE if status == 1 else status  # a collection has no verdicts


def units_of(model: str, folder: Path, chosen: argparse.Namespace) -> list[Unit]:
    """What was cut for ``model``, in the order in which one run of all would ask it."""
    return [_unit(model, part, folder, chosen) for part in what_was_cut(folder)["parts"]]


def _unit(model: str, part: Mapping[str, Any], folder: Path, chosen: argparse.Namespace) -> Unit:
    whole_of_it = Path(chosen.suites).stem if Path(chosen.suites).exists() else chosen.suites.rpartition(".")[2]
    name = part["folder"] or whole_of_it
    name = f"{name}-{part['only']}" if part["only"] else name
    only = [*CUTTING, f"--emad-part={part['only']}"] if part["only"] else []
    where = apart.places(chosen.suites, [part["folder"]] if part["folder"] else [])
    words = apart.command([*only, *where], options(model, chosen) | {"report": folder / name})
    known = identity(model, name, chosen)
    return Unit(model, name, part["measures"], tuple(words), folder / name, Path.cwd(), known)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    given = sys.argv[1:] if argv is None else list(argv)
    chosen = parser.parse_args(given)
    names = [folder_name(model) for model in chosen.models]
    if len(set(names)) != len(names):
        parser.error(f"MODEL={chosen.models}, but expected names that differ as folders do; got {names}")
    folders = {model: chosen.out / name for model, name in zip(chosen.models, names, strict=True)}
    try:
        for folder in folders.values():
            require_writable(folder / LOG, "--out")
        with workers_at(chosen.executor) as crew:
            statuses, reports = judged(folders, chosen, crew, ["python", "-m", "pytest_emad.reproduce", *given])
    except (BadArgument, BadFile) as error:
        parser.error(str(error))
    except WorkersLost as error:  # what was judged is kept, and found again by the next command
        print(error)
        return UNMADE
    print(summed_up(statuses, reports, chosen.out))
    return max(statuses.values()) if set(statuses.values()) <= set(JUDGED) else UNMADE


def judged(
    folders: Mapping[str, Path], chosen: argparse.Namespace, crew: Crew | None, command: Sequence[str]
) -> tuple[dict[str, int], list[Report]]:
    """Each model's status, and the reports of those that could be judged."""
    statuses: dict[str, int] = {}
    units: list[Unit] = []
    for model, folder in folders.items():
        begun.announce(folder)
        statuses[model] = cut(model, folder, chosen)
        units += units_of(model, folder, chosen) if statuses[model] == CAN_BE else []
    before = {id(unit): status for unit in units if (status := unit.before()) is not None}
    left = [unit for unit in units if id(unit) not in before]
    with tqdm(total=len(units), initial=len(before), desc="judged", unit="unit", disable=None) as bar:
        for unit in (unit for unit in units if id(unit) in before):
            bar.write(f"{unit.model} {unit.part}: judged before, status {before[id(unit)]}")
        for unit, status in everywhere(crew, left):
            bar.write(f"{unit.model} {unit.part}: status {status}, see {unit.folder / LOG}")
            bar.update()
            statuses[unit.model] = statuses[unit.model] if status in JUDGED else status
    reports = []
    for model, folder in folders.items():
        if statuses[model] == CAN_BE:
            try:
                reports.append(whole([unit for unit in units if unit.model == model], folder, command))
                statuses[model] = reports[-1]["run"]["exit_status"]
            except EmadError as error:
                print(f"{model}: {error}")
                statuses[model] = UNMADE
    return statuses, reports


if __name__ == "__main__":
    sys.exit(run_command(main))
