"""Models judged part by part: a unit is one of them and one part of the suites, kept where it was judged before.

    DIR/<model>/<part>/       done.json, report, pages and log.txt of a unit
    DIR/<model>/parts.json    what was cut: the units of one run, what it would leave out
    DIR/<model>/report.json   the report of that one run, put together, with its pages
    DIR/summary.json, .txt    all models' claims, statuses         DIR/index.html, …    one page over all models

A unit is a run of its own in a process of its own, so that one that cannot be made takes no other down. Which units
there are, and how each is asked for, is for others to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emad_ref import __version__
from emad_ref.files import BadFile, read_json, remove, write_atomically
from emad_ref.report import begun
from emad_ref.report.parts import Asked, put_together
from emad_ref.report.reading import REPORT, BadReport, Report, read_report
from emad_ref.report.shipped import shipped_tests
from emad_ref.workers import held
from emad_ref.workers.handing import Crew, with_room

DONE, CUT, LOG = "done.json", "parts.json", "log.txt"
JUDGED = (0, 1)  # statuses of a run that reached its verdicts


@dataclass(frozen=True)
class Unit:
    """``words`` of a pytest that is started in ``start`` and reports into ``folder``; whether it ``measures``.

    ``identity``: what a finished unit must have been asked for to stand for this one.
    """

    model: str
    part: str
    measures: bool
    words: tuple[str, ...]
    folder: Path
    start: Path
    identity: Mapping[str, str]

    def judged(self) -> int:
        """Run it, or find that it was run; its exit status."""
        if (before := self.before()) is not None:
            return before
        self.folder.mkdir(parents=True, exist_ok=True)
        remove(self.folder / DONE, DONE)  # what is begun again is not done, and may be killed half way
        status = held.status("pytest", self.words, self.folder / LOG, folder=self.start)
        if status in JUDGED:
            mark = {"identity": self.identity, "status": status}
            write_atomically(self.folder / DONE, json.dumps(mark) + "\n")
        return status

    def before(self) -> int | None:
        """The status with which it was judged before, if its report is there: one that was lost says nothing."""
        status = finished(self.folder / DONE, self.identity)
        try:
            return status if status is None or read_report(self.folder) else None
        except BadReport:
            return None


def finished(mark: Path, wanted: Mapping[str, str]) -> int | None:
    """The status of a finished unit that was asked for the same; None where there is none."""
    if not mark.exists():
        return None
    try:
        done = read_json(mark, DONE, dict, remedy="it is judged again")
    except BadFile as error:
        print(error, flush=True)
        return None
    return done["status"] if done.get("identity") == wanted and done.get("status") in JUDGED else None


def everywhere(crew: Crew | None, units: Sequence[Unit]) -> Iterator[tuple[Unit, int]]:
    """Each unit and its status: judged here, or by ``crew``. What measures has no other unit beside it.

    Raises:
        WorkersLost: what was judged is kept.
    """
    if crew is None:
        yield from ((unit, unit.judged()) for unit in units)
    else:
        yield from with_room(crew, Unit.judged, units, lambda unit: unit.measures)


def what_was_cut(folder: Path) -> dict[str, Any]:
    """``parts`` of one run of all suites, the ``tests`` it would be asked and the ``deselected``. Raises BadFile."""
    found: dict[str, Any] = read_json(folder / CUT, CUT, dict)
    return found


def whole(units: Sequence[Unit], folder: Path, command: Sequence[str]) -> Report:
    """The report of a model, put together from all its ``units``, and written with its pages.

    Raises:
        PartsDisagree: they are no parts of one.
        BadReport, BadFile: what is there cannot be read.
    """
    from emad_ref.report.folder import write_pages  # it brings tabulate

    was = what_was_cut(folder)
    parts = {unit.part: read_report(unit.folder) for unit in units}
    found = put_together(parts, Asked(was["tests"], was["deselected"], command), shipped_tests())
    write_atomically(folder / REPORT, json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    write_pages([found], folder)
    begun.settle(folder)
    return found


def summed_up(statuses: Mapping[str, int], reports: Sequence[Report], out: Path) -> str:
    """What all models came to, in words: their claims as a table, who could not be judged. Written, with the pages.

    ``statuses``: of each model; ``reports``: of those that have one.
    """
    from emad_ref.report.folder import write_pages  # they bring tabulate
    from emad_ref.report.tables import claims_table

    claims = [claim for report in reports for claim in report["claims"]]
    found = {"schema": 1, "version": __version__, "status": dict(statuses), "claims": claims}
    write_atomically(out / "summary.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    failed = [f"{model}: status {status}, see {LOG}" for model, status in statuses.items() if status not in JUDGED]
    text = "\n".join([claims_table(claims), *failed])
    write_atomically(out / "summary.txt", text + "\n")
    return f"{text}\n{out}: {write_pages(reports, out)}" if reports else text


def folder_name(model: str) -> str:
    """A model's name as one folder's."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", model).strip("-.") or "model"
