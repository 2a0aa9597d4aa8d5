"""Where reports of tests end up: the one process that prints the summary, writes ``report.json`` and fails the run.

``report.json`` is begun before the first test and says ``running`` until the run is over: a process that ends itself,
by ``os._exit`` or by a signal, leaves that word behind. A run that could not start replaces no finished report.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from emad_ref.files import BadFile, append, write_atomically
from emad_ref.report.reading import REPORT, State
from pytest_emad import attendance
from pytest_emad.options import register, settings
from pytest_emad.recording import ATTEMPT, CLAIM, read_properties
from pytest_emad.reporting import junit
from pytest_emad.reporting.results import write_report
from pytest_emad.reporting.run import Run
from pytest_emad.reporting.terminal import colour, decided, leave_out_repeated, write_summary
from pytest_emad.stopping import STOP

JOB_SUMMARY = "GITHUB_STEP_SUMMARY"  # names the file that a step of GitHub's appends Markdown to
REFUSAL = "emad usage error"  # node id of a worker's usage error
# options under which pytest runs no test's body, by the name of their value; those of ``SET_UP`` run its fixtures
SET_UP = {"setupplan": "--setup-plan", "setuponly": "--setup-only"}
WITHOUT_TESTS = SET_UP | {
    "collectonly": "--collect-only",
    "showfixtures": "--fixtures",
    "show_fixtures_per_test": "--fixtures-per-test",
    "cacheshow": "--cache-show",
}


class Reporting:
    """Gathers results where reports end up, prints the summary, writes ``report.json``. Not registered on workers."""

    def __init__(self, config: pytest.Config, attended: attendance.Attendance) -> None:
        self.config, self.settings = config, settings(config)
        self.run = Run(config, attended)
        self.report: Path | None = None
        self._started = self._stopped = self._stays = False
        self._without_tests = next((name for name in WITHOUT_TESTS if config.getoption(name, False)), None)
        self._session: pytest.Session | None = None  # once it is over
        self._status = 0  # as this run found it
        self._kept: str | None = None  # a finished report that stood where this run writes
        self._last: dict[str, Any] | None = None  # the run at its end, as the summary shows it

    # ------------------------------------------------------------ while it runs

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.nodeid == REFUSAL:
            pytest.exit(str(report.longrepr), returncode=int(pytest.ExitCode.USAGE_ERROR))
        if report.skipped and isinstance(getattr(report, attendance.SHIPPED, None), str):
            self.run.results.take(report)

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
        if self._started or self._without_tests:
            return
        self._started = True
        if self.settings.report is None:
            return
        try:
            self._kept = _finished(self.settings.report)
            write_report(self.settings.report, self.run.described(None))
        except OSError as error:
            self.run.failures.append(f"--emad-report: {error}")

    @pytest.hookimpl(tryfirst=True)  # before JUnit writes the properties
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, STOP):  # no test's failure: ``stopping`` ends the run for it
            return
        self.run.results.take(report)
        if report.when == "teardown":
            junit.flatten(report)
            junit.name_class(self.config, report, getattr(report, attendance.SHIPPED, None))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """In place of its dot, what a test decided: the first verdict is seen when it is reached, in a log as well."""
        if report.when != "call" or report.skipped or hasattr(report, "wasxfail") or self.config.get_verbosity() != 0:
            return None
        records = list(read_properties(report.user_properties))
        if (ATTEMPT, 2) in records:
            return None
        claims = [value for kind, value in records if kind == CLAIM]
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
        self.run.results.torch_threads = (
            threads if self.run.results.torch_threads is None else self.run.results.torch_threads
        )
        if attendance.HOME in output:
            self.run.workers.append(output[attendance.HOME])

    def pytest_keyboard_interrupt(self) -> None:
        """A person's, or ``pytest.exit`` from anywhere: a decoder's own code among it."""
        self._stopped = True

    # ------------------------------------------------------------ when it is over

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._without_tests:
            if self._without_tests in SET_UP and session.exitstatus == pytest.ExitCode.OK and self.run.judging:
                session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED  # pytest's word for a run without tests
            return
        self.run.state = self._ended(session)
        if self.run.state == "interrupted" and session.exitstatus == pytest.ExitCode.OK and self.run.judging:
            # pytest.exit(returncode=0), from anywhere: what was stopped did not pass
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        gate = self.settings.gating
        if (self.run.results or gate.require) and self.run.state != "usage error":
            from emad_ref.report.failing import demanded  # not at the start of every run

            self.run.failures += demanded(self.run.described(int(session.exitstatus)), register(self.config))
        if self.run.state != "usage error" and self.run.judging:
            self.run.require_consistency(int(session.exitstatus))
        if self.run.state == "complete" and self.run.judging:
            self.run.require_decisions(int(session.exitstatus))
        status = int(session.exitstatus)
        if self.run.failures and status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.run.judging or self.run.failures or self.run.waivers:
            self._last = self.run.described(int(session.exitstatus))
        self._write(session)
        self._append_job_summary(session)
        self._session, self._status = session, int(session.exitstatus)
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None and self.config.get_verbosity() < 1:
            leave_out_repeated(terminal)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """After every ``pytest_sessionfinish``: one of them may have changed the exit status of a run that failed."""
        session, status = self._session, self._status
        if session is not None and status and session.exitstatus == pytest.ExitCode.OK and self.run.judging:
            session.exitstatus = status
            said = f"emad: a hook set the exit status to 0 after this run had ended with {status}; it stays {status}"
            print(said, file=sys.stderr)

    def _ended(self, session: pytest.Session) -> State:
        if session.exitstatus == pytest.ExitCode.USAGE_ERROR:
            return "usage error"
        broken = session.exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
        return "interrupted" if self._stopped or broken or session.shouldfail or session.shouldstop else "complete"

    def _write(self, session: pytest.Session) -> None:
        """Where the run did not start, a finished report stays, or comes back."""
        folder = self.settings.report
        if folder is None:
            return
        try:
            if self.run.state == "usage error" and self._kept is not None and not self.run.results.tests:
                write_atomically(folder / REPORT, self._kept)
                self._stays = True
            elif not self._started and _finished(folder) is not None:
                self._stays = True
            else:
                self._last = self._last or self.run.described(int(session.exitstatus))
                self.run.results.write(folder, self._last)
                self.report = folder / REPORT
        except OSError as error:
            self.run.failures.append(f"--emad-report: {error}")
            session.exitstatus = int(session.exitstatus) or pytest.ExitCode.TESTS_FAILED

    def _append_job_summary(self, session: pytest.Session) -> None:
        """Where a job of continuous integration says where: the same lines as Markdown. Nothing else is lost for it."""
        path = os.environ.get(JOB_SUMMARY)
        if not path or not self._last or not self.run.judging:
            return
        from emad_ref.report.brief import brief
        from emad_ref.report.jobsummary import job_summary

        try:
            append(Path(path), job_summary(brief(self._last), list(self._places())), JOB_SUMMARY)
        except BadFile as error:
            self.run.failures.append(str(error))
            session.exitstatus = int(session.exitstatus) or pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, None, None]:
        """After pytest's own failures, so that the verdicts are the last thing on the screen."""
        yield
        if self._without_tests:
            if self.run.judging and (self._without_tests in SET_UP or self.config.get_verbosity() >= 0):
                said = f"emad: {WITHOUT_TESTS[self._without_tests]} runs no test: nothing was decided"
                terminalreporter.line(f"{said}, and no report is written")
        elif self._last is None:
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
        if self.run.results.pages is not None:
            yield f"beside it {self.run.results.pages}"


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
