"""Results of a run on the process that reports: gathered, laid out as ``report.json``, shown, and failed.

``report.json`` is begun before the first test and says ``running`` until the run is over: a process that ends itself,
by ``os._exit`` or by a signal, leaves that word behind. A run that could not start replaces no finished report.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emad_ref.files import BadFile, append_text, read_bytes, write_atomically
from emad_ref.report.deselection import PREFIX, deselection_lines
from emad_ref.report.provenance import ANSWERED, DECLINED, decoder_names, merge_providers, project_facts, provenance
from emad_ref.report.schema import REPORT_FILE, SCHEMA, TEST_OUTCOMES, Outcome, State
from pytest_emad import collection_log, decoder_providers, environment, junit
from pytest_emad.collection_log import FEATURES, KIND, SHIPPED
from pytest_emad.options import RunSettings, claims_register, settings
from pytest_emad.recorder import (
    ATTEMPT,
    AUDIT,
    CLAIM,
    GOLDEN,
    KNOWN,
    MODEL,
    NOTE,
    POINT,
    RAISED,
    REPLACED,
    TABLE,
    read_properties,
)
from pytest_emad.run_stop import STOP_ATTRIBUTE
from pytest_emad.terminal import claim_lines, drop_own_warnings, verdict_colour, write_summary

if TYPE_CHECKING:
    from emad_ref.report.page import WrittenPages


NOT_REPORTED: Outcome = "not reported"  # a test whose body did not run, or not to its end
SHOWN_KINDS = (TABLE, POINT, NOTE)  # facts that a test may be there to show
MAX_REASON_LENGTH = 1000  # letters; the whole of it stands in the log


@dataclass
class RunResults:
    """Lists in the order in which the tests finished; ``pages``: what shows them, once written.

    A claim has one verdict a model and run: that of the first attempt of the first test that gives one. What else is
    said of it goes to ``repeats``, and so do all later attempts: they are counted, and decide nothing.

    ``tests``: node id → its entry of ``report.json``.
    """

    claims: list[dict[str, Any]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    goldens: list[dict[str, Any]] = field(default_factory=list)
    known: list[dict[str, Any]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    audits: list[dict[str, Any]] = field(default_factory=list)
    repeats: list[dict[str, Any]] = field(default_factory=list)
    replaced: list[dict[str, Any]] = field(default_factory=list)
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    torch_threads: int | None = None
    pages: WrittenPages | None = None
    _taken: dict[tuple[str, str], int] = field(default_factory=dict)  # by test and worker: how many of its records

    def __bool__(self) -> bool:
        return any(
            (self.claims, self.points, self.notes, self.models, self.goldens, self.known, self.tables, self.audits)
        )

    def take(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Add how a phase of a test went, and what the test has put on record since the phase before."""
        outcome, reason = _phase_outcome(report)
        entry = self.tests.setdefault(
            report.nodeid,
            {
                "nodeid": report.nodeid,
                "shipped": None,
                "outcome": NOT_REPORTED,
                "kind": "",
                "reason": "",
                "duration_s": 0.0,
            },
        )
        entry["shipped"] = getattr(report, SHIPPED, entry["shipped"])
        entry["duration_s"] = round(entry["duration_s"] + getattr(report, "duration", 0.0), 6)
        if TEST_OUTCOMES.index(outcome) > TEST_OUTCOMES.index(entry["outcome"]):
            entry |= {"outcome": outcome, "kind": getattr(report, KIND, ""), "reason": reason[:MAX_REASON_LENGTH]}
            if (declined := getattr(report, FEATURES, None)) is not None:
                entry["features"] = declined
        if isinstance(report, pytest.TestReport):
            self._take_records(entry, report)

    def _take_records(self, entry: dict[str, Any], report: pytest.TestReport) -> None:
        """Every phase carries the records of those before it; facts that several tests record alike are kept once."""
        worker = report.nodeid, str(getattr(report, "worker_id", ""))
        found = list(read_properties(report.user_properties))
        known, self._taken[worker] = self._taken.get(worker, 0), max(len(found), self._taken.get(worker, 0))
        attempts, repeated = entry.get("attempts", []), False
        for kind, value in found[known:]:
            if kind == ATTEMPT:
                times = max(value, len(attempts) + 1) - len(attempts)  # more than one where others were kept from us
                attempts = [*attempts, *({"outcome": NOT_REPORTED, "reason": ""} for _ in range(times))]
                entry["attempts"] = attempts
            elif kind == RAISED:
                _keep_worst(attempts[-1], value)
            elif kind == REPLACED:
                if value not in self.replaced:
                    self.replaced.append(value)
            elif kind == AUDIT:
                later = {"attempt": len(attempts)} if len(attempts) > 1 else {}
                self.audits.append({"test": report.nodeid} | value | later)
            elif kind == CLAIM:
                repeated = self._take_claim(report.nodeid, len(attempts), value)
            elif len(attempts) < 2 and not (kind == KNOWN and repeated):
                self._take_fact(kind, value)
                if kind in SHOWN_KINDS:
                    entry["shown"] = entry.get("shown", 0) + 1

    def _take_claim(self, nodeid: str, attempt: int, value: dict[str, Any]) -> bool:
        """Whether it is a further verdict of a claim that has one."""
        first = next((c for c in self.claims if (c["id"], c["model"]) == (value["id"], value["model"])), None)
        if first is None and attempt < 2:
            self.claims.append(value | {"test": nodeid})
            return False
        alike = first is not None and {name: each for name, each in first.items() if name != "test"} == value
        self.repeats.append(
            {name: value[name] for name in ("id", "model", "verdict", "gate", "fails")}
            | {"test": nodeid, "attempt": max(attempt, 1), "alike": alike}
        )
        return True

    def _take_fact(self, kind: str, value: Any) -> None:
        kinds: dict[str, list[Any]] = {
            NOTE: self.notes,
            GOLDEN: self.goldens,
            KNOWN: self.known,
            TABLE: self.tables,
        }
        if kind == POINT:
            from emad_ref.report.parts import add_point  # not at the start of every run

            add_point(self.points, value)
        elif kind == MODEL:
            from emad_ref.report.parts import add_model

            add_model(self.models, value)
        elif value not in kinds[kind]:
            kinds[kind].append(value)

    def report(self, settings: RunSettings, provenance: dict[str, Any], around: Mapping[str, Any]) -> dict[str, Any]:
        """``report.json`` as data (``report.schema``). Models nothing was recorded about are listed by name.

        ``around``: the parts that tell of the run and not of what its tests found.
        """
        described = {facts["name"] for facts in self.models}
        bare = [{"name": name} for name in settings.models if name not in described]
        threads = provenance["torch_threads"] if self.torch_threads is None else self.torch_threads
        return {
            "schema": SCHEMA,
            **around,
            "models": [*self.models, *bare],
            "settings": settings.to_json(),
            "points": self.points,
            "claims": self.claims,
            "tables": self.tables,
            "goldens": self.goldens,
            "notes": self.notes,
            "known": self.known,
            "tests": list(self.tests.values()),
            "audits": self.audits,
            "repeats": self.repeats,
            "replaced": self.replaced,
            "provenance": provenance | {"torch_threads": threads},
        }

    def write(self, folder: Path, report: Mapping[str, Any]) -> None:
        """Write ``report`` into ``folder``, then what shows it, each file whole or not at all. Raises OSError."""
        from emad_ref.report.page import write_pages  # tabulate: not at the start of every run

        write_report(folder, report)
        self.pages = write_pages([report], folder)


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """``report.json`` alone. Raises OSError."""
    write_atomically(folder / REPORT_FILE, json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def _keep_worst(attempt: dict[str, Any], raised: Mapping[str, Any]) -> None:
    """The worst of what body, setup and teardown came to."""
    if TEST_OUTCOMES.index(raised["outcome"]) > TEST_OUTCOMES.index(attempt["outcome"]):
        attempt |= raised


def _phase_outcome(report: pytest.TestReport | pytest.CollectReport) -> tuple[Outcome, str]:
    """The outcome of one phase, and why it did not simply pass."""
    expected = getattr(report, "wasxfail", None)
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        return "failed" if report.when == "call" else "error", str(report.longrepr if crash is None else crash.message)
    if report.skipped and expected is not None:
        return "xfailed", str(expected)
    if report.skipped:
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        return "skipped", said.removeprefix("Skipped: ")
    if report.when != "call" or not report.passed:  # of another plugin's outcome, say a rerun, another report follows
        return NOT_REPORTED, ""
    return ("xpassed", str(expected)) if expected is not None else ("passed", "")


class RunRecord:
    """One run, on the process that reports.

    ``results``   what its tests found. ``state``: how far it came.
    ``failures``  why it fails as a whole although no test may. ``waivers``: what may stay undecided, and was it needed.
    ``workers``   what each worker of xdist sent home when it ended.
    """

    def __init__(self, config: pytest.Config, attended: collection_log.CollectionLog) -> None:
        self.config, self.settings = config, settings(config)
        self.results = RunResults()
        self.state: State = "running"
        self.failures: list[str] = []
        self.waivers: list[dict[str, Any]] = [
            {"of": of, "reason": reason, "needed": False} for of, reason in self.settings.waive
        ]
        self.workers: list[dict[str, Any]] = []
        self._attended = attended
        self._began, self._clock = datetime.now(UTC), time.monotonic()

    @property
    def judging(self) -> bool:
        """Whether this run judges anything with us: other test runs are none of our business."""
        return bool(self.results or self._decoding or self.settings.expect_decoder)

    @property
    def _decoding(self) -> bool:
        """Whether it judges a decoder: one was asked for, or a test of ours was."""
        return bool(self._tests_asked) or any(
            provider[what] for provider in self._asked for what in (ANSWERED, DECLINED)
        )

    @property
    def _tests_asked(self) -> list[str]:
        """Which of our tests were asked for; all of them where a folder around ours was."""
        return environment.requested_tests(self.config) or ([PREFIX] if self._collected else [])

    @property
    def _asked(self) -> list[dict[str, Any]]:
        """Who was asked for decoders, here and on workers."""
        return merge_providers(part["providers"] for part in self._attended_by())

    @property
    def _collected(self) -> dict[str, str]:
        return {nodeid: name for part in self._attended_by() for nodeid, name in part["collected"].items()}

    def _attended_by(self) -> list[dict[str, Any]]:
        """What each process of the run saw, this one first."""
        return [self._attended.to_json(), *self.workers]

    def require_consistency(self, exit_status: int) -> None:
        """Verdicts, audits and reported outcomes must agree, however far the run came."""
        from emad_ref.report.verification import contradictions  # not at the start of every run

        self.failures += contradictions(self.described(exit_status))

    def require_decisions(self, exit_status: int) -> None:
        """Not decided is not green: what of the tests that were asked for the decoder under test left open."""
        from emad_ref.report.gaps import (
            is_waived,
            undecided_reasons,  # not at the start of every run
        )

        reasons, gaps = undecided_reasons(self.described(exit_status), environment.shipped_tests())
        self.failures += reasons
        for waiver in self.waivers:
            waiver["needed"] = any(is_waived(gap, [waiver["of"]]) for gap in gaps)

    def described(self, exit_status: int | None) -> dict[str, Any]:
        """The report so far."""
        done = exit_status is not None
        around: dict[str, Any] = {
            "state": self.state,
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
            "deselected": self.deselected(),
            "waivers": self.waivers,
        }
        report = self.results.report(self.settings, self._provenance, around)
        report["notes"] = [*report["notes"], *deselection_lines(around["deselected"])]
        unseen = {} if not done else {n: name for n, name in self._collected.items() if n not in self.results.tests}
        left_out = {entry["nodeid"] for entry in around["deselected"]}
        report["tests"] += [
            {"nodeid": n, "shipped": name, "outcome": NOT_REPORTED, "kind": "", "reason": "", "duration_s": 0.0}
            for n, name in unseen.items()
            if n not in left_out
        ]
        return report

    def _decoder(self) -> dict[str, Any]:
        asked = self._asked
        return {
            "name": decoder_names(asked),
            "foreign": any(provider["foreign"] for provider in asked),
            "providers": asked,
            "overlooked": self._overlooked if self._tests_asked else [],
        }

    def deselected(self) -> list[dict[str, Any]]:
        """Workers deselect alike: each test once."""
        return list({entry["nodeid"]: entry for part in self._attended_by() for entry in part["deselected"]}.values())

    @cached_property
    def _provenance(self) -> dict[str, Any]:
        return provenance(self.settings.study)

    @cached_property
    def _project(self) -> dict[str, Any]:
        return project_facts(self.config.rootpath)

    @cached_property
    def _claims_file(self) -> dict[str, str] | None:
        """The user's register as it was when the run began: what is changed since judged nothing."""
        path = self.settings.claims
        if path is None:
            return None
        return {"path": str(path), "sha256": hashlib.sha256(read_bytes(path, "--emad-claims")).hexdigest()}

    @cached_property
    def _overlooked(self) -> list[str]:
        return decoder_providers.unloaded_providers(self.config)


JOB_SUMMARY = "GITHUB_STEP_SUMMARY"  # names the file that a step of GitHub's appends Markdown to
USAGE_ERROR_NODE = "emad usage error"  # node id of a worker's usage error
# options under which pytest runs no test's body, by the name of their value; those of ``FIXTURES_ONLY`` run its
# fixtures
FIXTURES_ONLY = {"setupplan": "--setup-plan", "setuponly": "--setup-only"}
NO_TEST_OPTIONS = FIXTURES_ONLY | {
    "collectonly": "--collect-only",
    "showfixtures": "--fixtures",
    "show_fixtures_per_test": "--fixtures-per-test",
    "cacheshow": "--cache-show",
}


class ReportPlugin:
    """Gathers results where reports end up, prints the summary, writes ``report.json``. Not registered on workers."""

    def __init__(self, config: pytest.Config, attended: collection_log.CollectionLog) -> None:
        self.config, self.settings = config, settings(config)
        self.run = RunRecord(config, attended)
        self.report: Path | None = None
        self._started = self._stopped = self._stays = False
        self._without_tests = next((name for name in NO_TEST_OPTIONS if config.getoption(name, False)), None)
        self._session: pytest.Session | None = None  # once it is over
        self._status = 0  # as this run found it
        self._kept: str | None = None  # a finished report that stood where this run writes
        self._last: dict[str, Any] | None = None  # the run at its end, as the summary shows it

    # ------------------------------------------------------------ while it runs

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.nodeid == USAGE_ERROR_NODE:
            pytest.exit(str(report.longrepr), returncode=int(pytest.ExitCode.USAGE_ERROR))
        if report.skipped and isinstance(getattr(report, collection_log.SHIPPED, None), str):
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
            self._kept = _finished_report(self.settings.report)
            write_report(self.settings.report, self.run.described(None))
        except OSError as error:
            self.run.failures.append(f"--emad-report: {error}")

    @pytest.hookimpl(tryfirst=True)  # before JUnit writes the properties
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, STOP_ATTRIBUTE):  # no test's failure: ``stopping`` ends the run for it
            return
        self.run.results.take(report)
        if report.when == "teardown":
            junit.shorten_properties(report)
            junit.set_class_name(self.config, report, getattr(report, collection_log.SHIPPED, None))

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
        said = claim_lines(claims, writer.fullwidth)
        if not said:
            return None
        start = "\n" if writer.width_of_current_line else ""
        return report.outcome, f"{start}{said}\n", (report.outcome.upper(), verdict_colour(claims))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        output = getattr(node, "workeroutput", {})
        threads = output.get("emad.torch_threads")
        self.run.results.torch_threads = (
            threads if self.run.results.torch_threads is None else self.run.results.torch_threads
        )
        if collection_log.WORKER_OUTPUT_KEY in output:
            self.run.workers.append(output[collection_log.WORKER_OUTPUT_KEY])

    def pytest_keyboard_interrupt(self) -> None:
        """A person's, or ``pytest.exit`` from anywhere: a decoder's own code among it."""
        self._stopped = True

    # ------------------------------------------------------------ when it is over

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._without_tests:
            if self._without_tests in FIXTURES_ONLY and session.exitstatus == pytest.ExitCode.OK and self.run.judging:
                session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED  # pytest's word for a run without tests
            return
        self.run.state = self._ended(session)
        if self.run.state == "interrupted" and session.exitstatus == pytest.ExitCode.OK and self.run.judging:
            # pytest.exit(returncode=0), from anywhere: what was stopped did not pass
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        gate = self.settings.gating
        if (self.run.results or gate.require) and self.run.state != "usage error":
            from emad_ref.report.gaps import unmet_requirements  # not at the start of every run

            self.run.failures += unmet_requirements(
                self.run.described(int(session.exitstatus)), claims_register(self.config)
            )
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
            drop_own_warnings(terminal)

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
                write_atomically(folder / REPORT_FILE, self._kept)
                self._stays = True
            elif not self._started and _finished_report(folder) is not None:
                self._stays = True
            else:
                self._last = self._last or self.run.described(int(session.exitstatus))
                self.run.results.write(folder, self._last)
                self.report = folder / REPORT_FILE
        except OSError as error:
            self.run.failures.append(f"--emad-report: {error}")
            session.exitstatus = int(session.exitstatus) or pytest.ExitCode.TESTS_FAILED

    def _append_job_summary(self, session: pytest.Session) -> None:
        """Where a job of continuous integration says where: the same lines as Markdown. Nothing else is lost for it."""
        path = os.environ.get(JOB_SUMMARY)
        if not path or not self._last or not self.run.judging:
            return
        from emad_ref.report.summary import job_summary, run_summary

        try:
            append_text(Path(path), job_summary(run_summary(self._last), list(self._places())), JOB_SUMMARY)
        except BadFile as error:
            self.run.failures.append(str(error))
            session.exitstatus = int(session.exitstatus) or pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, None, None]:
        """After pytest's own failures, so that the verdicts are the last thing on the screen."""
        yield
        if self._without_tests:
            if self.run.judging and (self._without_tests in FIXTURES_ONLY or self.config.get_verbosity() >= 0):
                said = f"emad: {NO_TEST_OPTIONS[self._without_tests]} runs no test: nothing was decided"
                terminalreporter.line(f"{said}, and no report is written")
        elif self._last is None:
            for place in self._places():
                terminalreporter.line(f"emad: {place}")
        else:
            write_summary(terminalreporter, self._last, list(self._places()), self.config.get_verbosity())

    def _places(self) -> Iterator[str]:
        """Where the report lies; a path below the folder of the call from there, as a person would type it."""
        if self.report is not None:
            yield f"report written to {_display_path(self.report, self.config)}"
        elif self._stays and self.settings.report is not None:
            folder = _display_path(self.settings.report, self.config)
            yield f"the finished report in {folder} stays: this run did not start"
        if self.run.results.pages is not None:
            yield f"beside it {self.run.results.pages}"


def _display_path(path: Path, config: pytest.Config) -> Path:
    start = config.invocation_params.dir
    return path.relative_to(start) if path.is_relative_to(start) else path


def _finished_report(folder: Path) -> str | None:
    """The report in ``folder`` if its run came to an end; schema 1 was written by no other. Raises OSError."""
    path = folder / REPORT_FILE
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    with suppress(ValueError):
        report = json.loads(text)
        if isinstance(report, dict) and report.get("state", "complete") == "complete":
            return text
    return None
