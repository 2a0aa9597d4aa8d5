"""The run as a whole, on the one process that reports: summary, ``report.json``, and why it fails although no test did.

``report.json`` is begun before the first test and says ``running`` until the run is over: a process that ends itself,
by ``os._exit`` or by a signal, leaves that word behind. A run that could not start replaces no finished report.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from emad_ref.files import BadFile, append, read_bytes, write_atomically
from emad_ref.report.missing import another, missing, waived
from emad_ref.report.provenance import project, provenance
from emad_ref.report.reading import REPORT, State
from emad_ref.report.shipped import PREFIX
from emad_ref.report.unasked import told
from pytest_emad import attendance, backends, choosing, installed, junit, origins
from pytest_emad.options import register, settings
from pytest_emad.recording import CLAIM, read_properties
from pytest_emad.results import NEVER, SHIPPED, Results, write_report
from pytest_emad.stopping import STOP
from pytest_emad.terminal import colour, decided, leave_out_repeated, write_summary

JOB_SUMMARY = "GITHUB_STEP_SUMMARY"  # names the file that a step of GitHub's appends Markdown to
REFUSAL = "emad usage error"  # node id of a worker's usage error


class Reporting:
    """Gathers results where reports end up, prints the summary, writes ``report.json``. Not registered on workers."""

    def __init__(self, config: pytest.Config, attended: attendance.Attendance) -> None:
        self.config, self.settings = config, settings(config)
        self.results = Results()
        self.failures: list[str] = []
        self.waivers: list[dict[str, Any]] = [
            {"of": of, "reason": reason, "needed": False} for of, reason in self.settings.waive
        ]
        self.report: Path | None = None
        self._attended = attended
        self._workers: list[dict[str, Any]] = []
        self._began, self._clock = datetime.now(UTC), time.monotonic()
        self._state: State = "running"
        self._started = self._stopped = self._stays = False
        self._kept: str | None = None  # a finished report that stood where this run writes
        self._last: dict[str, Any] | None = None  # the run at its end, as the summary shows it

    # ------------------------------------------------------------ while it runs

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.nodeid == REFUSAL:
            pytest.exit(str(report.longrepr), returncode=int(pytest.ExitCode.USAGE_ERROR))
        if report.skipped and isinstance(getattr(report, attendance.SHIPPED, None), str):
            self.results.take(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """The first test is about to begin."""
        self._begin()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """The same under xdist, whose controller hears of a test when a worker has begun it."""
        if ids:
            self._begin()

    def _begin(self) -> None:
        if self._started:
            return
        self._started = True
        if self.settings.report is None:
            return
        try:
            self._kept = _finished(self.settings.report)
            write_report(self.settings.report, self._described(None))
        except OSError as error:
            self.failures.append(f"--emad-report: {error}")

    @pytest.hookimpl(tryfirst=True)  # before JUnit writes the properties
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, STOP):  # no test's failure: ``stopping`` ends the run for it
            return
        self.results.take(report)
        if report.when == "teardown":
            junit.flatten(report)
            junit.name_class(self.config, report, getattr(report, SHIPPED, None))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """In place of its dot, what a test decided: the first verdict is seen when it is reached, in a log as well."""
        if report.when != "call" or report.skipped or hasattr(report, "wasxfail") or self.config.get_verbosity() != 0:
            return None
        claims = [value for kind, value in read_properties(report.user_properties) if kind == CLAIM]
        writer = self.config.get_terminal_writer()
        said = decided(claims, writer.fullwidth)
        if not said:
            return None
        start = "\n" if writer.width_of_current_line else ""
        return report.outcome, f"{start}{said}\n", (report.outcome.upper(), colour(claims))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        output = getattr(node, "workeroutput", {})
        threads = output.get("emad.torch_threads")
        self.results.torch_threads = threads if self.results.torch_threads is None else self.results.torch_threads
        if attendance.HOME in output:
            self._workers.append(output[attendance.HOME])

    def pytest_keyboard_interrupt(self) -> None:
        """A person's, or ``pytest.exit`` from anywhere: a decoder's own code among it."""
        self._stopped = True

    # ------------------------------------------------------------ when it is over

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            return
        self._state = self._ended(session)
        if self._stopped and session.exitstatus == pytest.ExitCode.OK and self._judging:
            # pytest.exit(returncode=0), from anywhere: what was stopped did not pass
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        gate = self.settings.gating
        if (self.results or gate.require) and self._state != "usage error":
            requires = {name: claim.requires for name, claim in register(self.config).items()}
            self.failures += self.results.failures(self.settings, requires)
            self.failures += choosing.gates_left_out(self._deselected(), register(self.config), self.settings)
        if self._state == "complete" and self._judging:
            self._require_decisions(int(session.exitstatus))
        status = int(session.exitstatus)
        if self.failures and status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._judging or self.failures or self.waivers:
            self._last = self._described(int(session.exitstatus))
        self._write(session)
        self._append_job_summary(session)
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None and self.config.get_verbosity() < 1:
            leave_out_repeated(terminal)

    def _require_decisions(self, exit_status: int) -> None:
        """Not decided is not green: what of the tests that were asked for the decoder under test left open."""
        report, waivers = self._described(exit_status), [waiver["of"] for waiver in self.waivers]
        gaps = missing(report, report["run"]["asked"], installed.shipped_tests())
        self.failures += [str(gap) for gap in gaps if not waived(gap, waivers)]
        for waiver in self.waivers:
            waiver["needed"] = any(waived(gap, [waiver["of"]]) for gap in gaps)
        wanted = self.settings.expect_decoder
        if wanted is not None and (found := another(report, wanted)):
            self.failures.append(f"--emad-expect-decoder {wanted}: {found}")

    def _ended(self, session: pytest.Session) -> State:
        if session.exitstatus == pytest.ExitCode.USAGE_ERROR:
            return "usage error"
        broken = session.exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
        return "interrupted" if self._stopped or broken or session.shouldfail or session.shouldstop else "complete"

    @property
    def _judging(self) -> bool:
        """Whether this run judges anything with us: other test runs are none of our business."""
        return bool(self.results or self._decoding or self.settings.expect_decoder)

    @property
    def _decoding(self) -> bool:
        """Whether it judges a decoder: one was asked for, or a test of ours was."""
        return bool(self._tests_asked) or any(
            provider[what] for provider in self._asked for what in (backends.ANSWERED, backends.DECLINED)
        )

    @property
    def _tests_asked(self) -> list[str]:
        """Which of our tests were asked for; all of them where a folder around ours was."""
        return installed.asked_tests(self.config) or ([PREFIX] if self._collected else [])

    @property
    def _asked(self) -> list[dict[str, Any]]:
        """Who was asked for decoders, here and on workers."""
        parts = [self._attended.to_json(), *self._workers]
        return origins.together(part["providers"] for part in parts)

    @property
    def _collected(self) -> dict[str, str]:
        parts = [self._attended.to_json(), *self._workers]
        return {nodeid: name for part in parts for nodeid, name in part["collected"].items()}

    def _write(self, session: pytest.Session) -> None:
        """Where the run did not start, a finished report stays, or comes back."""
        folder = self.settings.report
        if folder is None:
            return
        try:
            if self._state == "usage error" and self._kept is not None and not self.results.tests:
                write_atomically(folder / REPORT, self._kept)
                self._stays = True
            elif not self._started and _finished(folder) is not None:
                self._stays = True
            else:
                self._last = self._last or self._described(int(session.exitstatus))
                self.results.write(folder, self._last)
                self.report = folder / REPORT
        except OSError as error:
            self.failures.append(f"--emad-report: {error}")
            session.exitstatus = int(session.exitstatus) or pytest.ExitCode.TESTS_FAILED

    @cached_property
    def _provenance(self) -> dict[str, Any]:
        return provenance(self.settings.study)

    @cached_property
    def _project(self) -> dict[str, Any]:
        return project(self.config.rootpath)

    @cached_property
    def _claims_file(self) -> dict[str, str] | None:
        """The user's register as it was when the run began: what is changed since judged nothing."""
        path = self.settings.claims
        if path is None:
            return None
        return {"path": str(path), "sha256": hashlib.sha256(read_bytes(path, "--emad-claims")).hexdigest()}

    @cached_property
    def _overlooked(self) -> list[str]:
        return origins.overlooked(self.config)

    def _append_job_summary(self, session: pytest.Session) -> None:
        """Where a job of continuous integration says where: the same lines as Markdown. Nothing else is lost for it."""
        path = os.environ.get(JOB_SUMMARY)
        if not path or not self._last or not self._judging:
            return
        from emad_ref.report.brief import brief
        from emad_ref.report.jobsummary import job_summary

        try:
            append(Path(path), job_summary(brief(self._last), list(self._places())), JOB_SUMMARY)
        except BadFile as error:
            self.failures.append(str(error))
            session.exitstatus = int(session.exitstatus) or pytest.ExitCode.TESTS_FAILED

    def _described(self, exit_status: int | None) -> dict[str, Any]:
        """The report so far."""
        done = exit_status is not None
        around: dict[str, Any] = {
            "state": self._state,
            "run": {
                "started": self._began.isoformat(timespec="seconds"),
                "duration_s": round(time.monotonic() - self._clock, 3) if done else None,
                "command": ["pytest", *map(str, self.config.invocation_params.args)],
                "addopts": os.environ.get("PYTEST_ADDOPTS", ""),
                "exit_status": exit_status,
                "failures": self.failures,
                "asked": self._tests_asked,
                "claims_file": self._claims_file,
                "project": self._project,
            },
            "decoder": self._decoder(),
            "deselected": self._deselected(),
            "waivers": self.waivers,
        }
        report = self.results.report(self.settings, self._provenance, around)
        report["notes"] = [*report["notes"], *told(around["deselected"])]
        unseen = {} if not done else {n: name for n, name in self._collected.items() if n not in self.results.tests}
        left_out = {entry["nodeid"] for entry in around["deselected"]}
        report["tests"] += [
            {"nodeid": n, "shipped": name, "outcome": NEVER, "kind": "", "reason": "", "duration_s": 0.0}
            for n, name in unseen.items()
            if n not in left_out
        ]
        return report

    def _decoder(self) -> dict[str, Any]:
        asked = self._asked
        return {
            "name": origins.whose(asked),
            "foreign": any(provider["foreign"] for provider in asked),
            "providers": asked,
            "overlooked": self._overlooked if self._tests_asked else [],
        }

    def _deselected(self) -> list[dict[str, Any]]:
        """Workers deselect alike: each test once."""
        parts = [self._attended.to_json(), *self._workers]
        return list({entry["nodeid"]: entry for part in parts for entry in part["deselected"]}.values())

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, None, None]:
        """After pytest's own failures, so that the verdicts are the last thing on the screen."""
        yield
        if self._last is None:
            for place in self._places():
                terminalreporter.line(f"emad: {place}")
        else:
            write_summary(terminalreporter, self._last, list(self._places()), self.config.get_verbosity())

    def _places(self) -> Iterator[str]:
        """Where the report lies; a path below the folder of the call from there, as a person would type it."""
        if self.report is not None:
            yield f"report written to {_nearby(self.report, self.config)}"
        elif self._stays and self.settings.report is not None:
            yield f"the finished report in {_nearby(self.settings.report, self.config)} stays: this run did not start"
        if self.results.pages is not None:
            yield f"beside it {self.results.pages}"


def _nearby(path: Path, config: pytest.Config) -> Path:
    start = config.invocation_params.dir
    return path.relative_to(start) if path.is_relative_to(start) else path


def _finished(folder: Path) -> str | None:
    """The report in ``folder`` if its run came to an end; schema 1 was written by no other. Raises OSError."""
    path = folder / REPORT
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    with suppress(ValueError):
        report = json.loads(text)
        if isinstance(report, dict) and report.get("state", "complete") == "complete":
            return text
    return None
