"""Report on the controller: collects records of all tests, writes ``report.json``, prints the summary, fails the run.

``report.json`` is written before the first test with the state ``running``, and again at the end. A process that dies
by ``os._exit`` or a signal leaves that state. A run that could not start does not replace a finished report.

JUnit keeps short flat properties of plugin tests in place of their records: ``emad.claim``, ``emad.model``,
``emad.verdict``, ``emad.gate`` and, if present, ``emad.estimate``, ``emad.low``, ``emad.high``, ``emad.threshold``,
``emad.n``, ``emad.unit``; a further claim of the same test has ``emad.2.claim`` and so on.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Generator, Iterator, Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.junitxml import xml_key  # pytest has no hook for class names

from emad_ref.errors import escape_unsafe
from emad_ref.files import BadFile, append_text, read_bytes
from pytest_emad.report.deselection import PREFIX, describe_deselections
from pytest_emad.report.known_gaps import known_gap_mark
from pytest_emad.report.provenance import (
    ANSWERED,
    DECLINED,
    collect_provenance,
    describe_tested_project,
    format_judged_decoder_names,
    merge_provider_counts,
)
from pytest_emad.report.schema import (
    REPORT_FILE,
    TEST_OUTCOMES,
    BadReport,
    Outcome,
    Report,
    State,
    read_report,
    write_report,
)
from pytest_emad.report.tiers import build_tier_entry
from pytest_emad.run import collection_log, decoder_providers, environment, replayed
from pytest_emad.run.collection_log import FEATURES, KIND, SHIPPED, STOP
from pytest_emad.run.options import get_run_settings, load_claims_register
from pytest_emad.run.recorder import (
    ATTEMPT,
    AUDIT,
    CLAIM,
    GOLDEN,
    KNOWN,
    MODEL,
    NOTE,
    POINT,
    RAISED,
    TABLE,
    first_attempt_records,
    is_record,
    iterate_records,
)
from pytest_emad.run.terminal import COLOURS, drop_own_warnings, format_claims, worst_verdict_markup

if TYPE_CHECKING:
    from pytest_emad.report.page import WrittenPages

NOT_REPORTED: Outcome = "not reported"  # a test with an unfinished body
SHOWN_KINDS = (TABLE, POINT, NOTE)  # facts for tests without a verdict
FACTS = {NOTE: "notes", GOLDEN: "goldens", KNOWN: "known", TABLE: "tables"}  # kept once: kind → key of report.json
RECORDS = ("points", "claims", "tables", "goldens", "notes", "known", "models", "audits")
MAX_REASON_LENGTH = 1000  # characters; the log has the whole text


RAN_KEY = "ran"  # key of a model: the implementation of its steps, if that is more than the backend's name


def upsert_point_row(points: list[dict[str, Any]], values: Mapping[str, Any]) -> None:
    """Add a row of a point, or complete the row of the same model and point, since several tests measure one point."""
    present = {key: value for key, value in values.items() if value is not None}
    for row in points:
        if (row["model"], row["digest"]) == (values["model"], values["digest"]):
            row |= present
            return
    points.append(dict(values))


def upsert_model_row(models: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Add or update a row of a model, since the implementation of its steps is known only after a test ran it."""
    for row in models:
        if _lasting_facts(row) == _lasting_facts(facts):
            row |= facts
            return
    models.append(dict(facts))


def _lasting_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != RAN_KEY}


class RunRecord:
    """The records of one run on the controller, and its report as data.

    A claim has one verdict per model and run: that of the first attempt of the first test that gives one. Further
    verdicts and later attempts go to ``repeats``; they are counted and do not decide.

    ``records``   key of ``report.json`` → its list, in the order in which tests finished.
    ``tests``     node id → its entry of ``report.json``. ``state``: progress of the run.
    ``failures``  reasons why the run fails even if every test passed.
    ``waivers``   the user's waivers, and whether each was needed.
    ``workers``   the logs of the xdist workers that ended.
    ``kept``      the finished report that this run overwrites, None without one.
    """

    def __init__(self, config: pytest.Config, log: collection_log.CollectionLog) -> None:
        self.config, self.settings = config, get_run_settings(config)
        self.records: dict[str, list[Any]] = {key: [] for key in (*RECORDS, "repeats")}
        self.tests: dict[str, dict[str, Any]] = {}
        self.torch_threads: int | None = None
        self.state: State = "running"
        self.failures: list[str] = []
        self.waivers: list[dict[str, Any]] = [
            {"of": of, "reason": reason, "needed": False} for of, reason in self.settings.waive
        ]
        self.workers: list[dict[str, Any]] = []
        self.kept: Report | None = None
        self._log = log
        self._began, self._clock = datetime.now(UTC), time.monotonic()
        self._taken: dict[tuple[str, str], int] = {}  # (test, worker) → number of its records

    # ------------------------------------------------------------ records of tests

    def add_outcome(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Add the outcome of one phase of a test, and the records that the test made since the phase before."""
        outcome, reason = _phase_outcome(report)
        entry = self.tests.setdefault(report.nodeid, _test_entry(report.nodeid, None))
        entry["shipped"] = getattr(report, SHIPPED, entry["shipped"])
        entry["duration_s"] = round(entry["duration_s"] + getattr(report, "duration", 0.0), 6)
        if TEST_OUTCOMES.index(outcome) > TEST_OUTCOMES.index(entry["outcome"]):
            entry |= {"outcome": outcome, "kind": getattr(report, KIND, ""), "reason": reason[:MAX_REASON_LENGTH]}
            entry |= _crash_place(report)
            if (declined := getattr(report, FEATURES, None)) is not None:
                entry["features"] = declined
        if isinstance(report, pytest.TestReport):
            self._take_records(entry, report)

    def _take_records(self, entry: dict[str, Any], report: pytest.TestReport) -> None:
        """Add new records: each phase repeats those of earlier phases, and equal facts of several tests count once."""
        worker = report.nodeid, str(getattr(report, "worker_id", ""))
        found = list(iterate_records(report.user_properties))
        known, self._taken[worker] = self._taken.get(worker, 0), max(len(found), self._taken.get(worker, 0))
        attempts, repeated = entry.get("attempts", []), False
        for kind, value in found[known:]:
            if kind == ATTEMPT:
                times = max(value, len(attempts) + 1) - len(attempts)  # more than one if reports are missing
                attempts = [*attempts, *({"outcome": NOT_REPORTED, "reason": ""} for _ in range(times))]
                entry["attempts"] = attempts
            elif kind == RAISED:
                if TEST_OUTCOMES.index(value["outcome"]) > TEST_OUTCOMES.index(attempts[-1]["outcome"]):
                    attempts[-1] |= value  # the worst outcome of setup, body and teardown
            elif kind == AUDIT:
                later = {"attempt": len(attempts)} if len(attempts) > 1 else {}
                self.records["audits"].append({"test": report.nodeid} | value | later)
            elif kind == CLAIM:
                repeated = self._take_claim(report.nodeid, len(attempts), value)
            elif len(attempts) < 2 and not (kind == KNOWN and repeated):
                self._take_fact(kind, value)
                if kind in SHOWN_KINDS:
                    entry["shown"] = entry.get("shown", 0) + 1

    def _take_claim(self, nodeid: str, attempt: int, value: dict[str, Any]) -> bool:
        """Add a verdict; True if the claim has one already and this is a repeat."""
        claims = self.records["claims"]
        first = next((c for c in claims if (c["id"], c["model"]) == (value["id"], value["model"])), None)
        if first is None and attempt < 2:
            claims.append(value | {"test": nodeid})
            return False
        alike = first is not None and {name: each for name, each in first.items() if name != "test"} == value
        self.records["repeats"].append(
            {name: value[name] for name in ("id", "model", "verdict", "gate", "fails")}
            | {"test": nodeid, "attempt": max(attempt, 1), "alike": alike}
        )
        return True

    def _take_fact(self, kind: str, value: Any) -> None:
        if kind in FACTS:
            self._add_once(FACTS[kind], value)
            return
        if kind == POINT:
            upsert_point_row(self.records["points"], value)
        elif kind == MODEL:
            upsert_model_row(self.records["models"], value)

    def _add_once(self, key: str, value: Any) -> None:
        if value not in self.records[key]:
            self.records[key].append(value)

    # ------------------------------------------------------------ the run as a whole

    @property
    def has_records(self) -> bool:
        return any(self.records[key] for key in RECORDS)

    @property
    def is_plugin_run(self) -> bool:
        """Whether this run uses the plugin, which ignores other runs."""
        if self.has_records or self._requested_tests or self.settings.expect_decoder:
            return True
        return any(provider[what] for provider in self._providers for what in (ANSWERED, DECLINED))

    @property
    def _requested_tests(self) -> list[str]:
        """The parts of the suites on the command line; all if it names a folder that contains them."""
        return environment.requested_suite_parts(self.config) or ([PREFIX] if self._collected else [])

    @property
    def _logs(self) -> list[dict[str, Any]]:
        """The log of each process of the run, this one first."""
        return [self._log.to_json(), *self.workers]

    @property
    def _providers(self) -> list[dict[str, Any]]:
        """Providers that were called, in this process and on workers."""
        return merge_provider_counts(log["providers"] for log in self._logs)

    @property
    def _collected(self) -> dict[str, str]:
        return {nodeid: name for log in self._logs for nodeid, name in log["collected"].items()}

    @property
    def _claims(self) -> dict[str, str]:
        return {nodeid: claim for log in self._logs for nodeid, claim in log["claims"].items()}

    def fail_on_report_inconsistencies(self, exit_status: int) -> None:
        """Fail the run if verdicts, audits and reported outcomes contradict each other, even in an incomplete run."""
        from pytest_emad.report.verification import find_contradictions  # only on demand

        self.failures += find_contradictions(self.build_report(exit_status))

    def fail_on_missing(self, exit_status: int) -> None:
        """Fail the run for what it lacks: undecided tests and claims, unless waived, and what options require."""
        from pytest_emad.report.gaps import find_missing, format_gaps, is_waived, unexcused_gaps  # only on demand

        report = self.build_report(exit_status)
        missing = find_missing(report, environment.all_shipped_test_names(), load_claims_register(self.config))
        self.failures += format_gaps(unexcused_gaps(report, missing))
        for waiver in self.waivers:
            waiver["needed"] = any(is_waived(gap, [waiver["of"]]) for gap in missing)

    def build_report(self, exit_status: int | None) -> dict[str, Any]:
        """The current content of ``report.json`` (``report.schema``). A model without a record is listed by name."""
        from emad_ref.models.fast.product_table import chosen_products  # only on demand

        done, providers, requested = exit_status is not None, self._providers, self._requested_tests
        # workers deselect equally, so each test counts once
        deselected = list({entry["nodeid"]: entry for log in self._logs for entry in log["deselected"]}.values())
        described = {facts["name"] for facts in self.records["models"]}
        left_out = {entry["nodeid"] for entry in deselected} | self.tests.keys()
        unseen = [_test_entry(n, name) for n, name in self._collected.items() if done and n not in left_out]
        claims, settings = self._claims, self.settings.to_json()
        tests = [
            entry
            | ({"claim": claims[entry["nodeid"]]} if entry["nodeid"] in claims else {})
            | known_gap_mark(entry, settings)
            for entry in (*self.tests.values(), *unseen)
        ]
        threads = self._provenance["torch_threads"] if self.torch_threads is None else self.torch_threads
        made: dict[str, Any] = {
            "state": self.state,
            "run": {
                "started": self._began.isoformat(timespec="seconds"),
                "duration_s": round(time.monotonic() - self._clock, 3) if done else None,
                "command": ["pytest", *map(str, self.config.invocation_params.args)],
                "addopts": os.environ.get("PYTEST_ADDOPTS", ""),
                "exit_status": exit_status,
                "failures": self.failures,
                "asked": requested,
                "partial": environment.describe_typed_selection(self.config),
                "replay": self._replay,
                "claims_file": self._claims_file,
                "project": self._project,
            },
            "decoder": {
                "name": format_judged_decoder_names(providers),
                "foreign": any(provider["foreign"] for provider in providers),
                "providers": providers,
                "overlooked": self._unloaded_providers if requested else [],
            },
            "deselected": deselected,
            "waivers": self.waivers,
            "models": [
                *self.records["models"],
                *({"name": name} for name in self.settings.models if name not in described),
            ],
            "settings": settings,
            **{key: self.records[key] for key in ("points", "claims", "tables", "goldens")},
            "notes": [*self.records["notes"], *describe_deselections(deselected, settings)],
            "known": self.records["known"],
            "tests": tests,
            **{key: self.records[key] for key in ("audits", "repeats")},
            "provenance": self._provenance
            | {"torch_threads": threads}
            | ({"products": products} if (products := chosen_products()) else {}),
        }
        made["run"]["earlier"] = _count_earlier_runs(made, self.kept)
        return made | {"tier": build_tier_entry(made)}

    @cached_property
    def _provenance(self) -> dict[str, Any]:
        return collect_provenance(self.settings.study)

    @cached_property
    def _replay(self) -> dict[str, Any]:
        return replayed.build_replay_entry(self.config)

    @cached_property
    def _project(self) -> dict[str, Any]:
        return describe_tested_project(self.config.rootpath)

    @cached_property
    def _claims_file(self) -> dict[str, str] | None:
        """Path and digest of the user's register as read at the start of the run."""
        path = self.settings.register
        if path is None:
            return None
        return {"path": str(path), "sha256": hashlib.sha256(read_bytes(path, "--emad-register")).hexdigest()}

    @cached_property
    def _unloaded_providers(self) -> list[str]:
        return decoder_providers.unloaded_providers(self.config)


def _count_earlier_runs(report: Report, kept: Report | None) -> int:
    """How often the tests of ``report`` ran before, at its options, on its weights and its project, by ``kept``."""

    def experiment(of: Report) -> str:
        models = {model["name"]: model.get("fingerprint") for model in of["models"]}
        return json.dumps([of["settings"], of["run"]["asked"], of["run"]["project"], models], sort_keys=True)

    return 0 if kept is None or experiment(kept) != experiment(report) else 1 + int(kept["run"]["earlier"])


def _test_entry(nodeid: str, shipped: str | None) -> dict[str, Any]:
    """The entry of ``report.json`` for a test that has not run."""
    return {
        "nodeid": nodeid,
        "shipped": shipped,
        "outcome": NOT_REPORTED,
        "kind": "",
        "reason": "",
        "duration_s": 0.0,
    }


def _crash_place(report: pytest.TestReport | pytest.CollectReport) -> dict[str, str]:
    """``{"crash": "file:line"}``, where a failed phase raised; empty if it failed without a traceback."""
    crash = getattr(report.longrepr, "reprcrash", None) if report.failed else None
    return {} if crash is None else {"crash": f"{crash.path}:{crash.lineno}"}


def _phase_outcome(report: pytest.TestReport | pytest.CollectReport) -> tuple[Outcome, str]:
    """The outcome of one phase, and the reason if it did not pass."""
    expected = getattr(report, "wasxfail", None)
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        return "failed" if report.when == "call" else "error", str(report.longrepr if crash is None else crash.message)
    if report.skipped and expected is not None:
        return "xfailed", str(expected)
    if report.skipped:
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        return "skipped", said.removeprefix("Skipped: ")
    if (
        report.when != "call" or not report.passed
    ):  # after another plugin's outcome, such as a rerun, another report follows
        return NOT_REPORTED, ""
    return ("xpassed", str(expected)) if expected is not None else ("passed", "")


JOB_SUMMARY = "GITHUB_STEP_SUMMARY"  # the file to which a step of a GitHub workflow appends Markdown
USAGE_ERROR_NODE = "emad usage error"  # node id of a worker's usage error
# pytest's options (names of their values) that run no test; those of ``FIXTURES_ONLY`` still run fixtures
FIXTURES_ONLY = {"setupplan": "--setup-plan", "setuponly": "--setup-only"}
NO_TEST_OPTIONS = FIXTURES_ONLY | {
    "collectonly": "--collect-only",
    "showfixtures": "--fixtures",
    "show_fixtures_per_test": "--fixtures-per-test",
    "cacheshow": "--cache-show",
}


class ReportPlugin:
    """Collects results on the controller, prints the summary and writes ``report.json``. Not registered on workers."""

    def __init__(self, config: pytest.Config, log: collection_log.CollectionLog) -> None:
        self.config, self.settings = config, get_run_settings(config)
        self.run = RunRecord(config, log)
        self.report: Path | None = None
        self._pages: WrittenPages | None = None  # the readable pages, once written
        self._started = self._stopped = self._stays = False
        self._without_tests = next((name for name in NO_TEST_OPTIONS if config.getoption(name, False)), None)
        self._last: dict[str, Any] | None = None  # the report at the end of the run

    # ------------------------------------------------------------ during the run

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.nodeid == USAGE_ERROR_NODE:
            pytest.exit(str(report.longrepr), returncode=int(pytest.ExitCode.USAGE_ERROR))
        if report.skipped and isinstance(getattr(report, SHIPPED, None), str):
            self.run.add_outcome(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Begin the report before the first test."""
        self._begin()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Begin the report under xdist, whose controller otherwise learns of a test only once it runs."""
        if ids:
            self._begin()

    def _begin(self) -> None:
        if self._started or self._without_tests:
            return
        self._started = True
        if self.settings.report is None:
            return
        try:
            self.run.kept = _finished_report(self.settings.report)
            write_report(self.settings.report, self.run.build_report(None))
        except OSError as error:
            self.run.failures.append(f"--emad-report: {error}")

    @pytest.hookimpl(tryfirst=True)  # before JUnit writes the properties
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a report; end the run with one error if no further test can succeed."""
        if (stop := getattr(report, STOP, None)) is not None:
            pytest.exit(stop, returncode=int(pytest.ExitCode.USAGE_ERROR))
        self.run.add_outcome(report)
        if report.when == "teardown":
            replace_records_with_junit_properties(report)
            self._name_class(report)

    def _name_class(self, report: pytest.TestReport) -> None:
        """Set JUnit's class name of a shipped test to ``suites.claims.test_model``, also in an installed package."""
        xml, shipped = self.config.stash.get(xml_key, None), getattr(report, SHIPPED, None)
        if xml is not None and shipped is not None:
            file = shipped.partition("::")[0]
            xml.node_reporter(report).add_attribute("classname", file.removesuffix(".py").replace("/", "."))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """Print a verdict in place of the test's dot, as soon as it is decided."""
        if report.when != "call" or report.skipped or hasattr(report, "wasxfail") or self.config.get_verbosity() != 0:
            return None
        records = list(iterate_records(report.user_properties))
        if (ATTEMPT, 2) in records:
            return None
        claims = [value for kind, value in records if kind == CLAIM]
        writer = self.config.get_terminal_writer()
        said = format_claims(claims, writer.fullwidth)
        if not said:
            return None
        start = "\n" if writer.width_of_current_line else ""
        return report.outcome, f"{start}{said}\n", (report.outcome.upper(), worst_verdict_markup(claims))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        output = getattr(node, "workeroutput", {})
        if self.run.torch_threads is None:
            self.run.torch_threads = output.get("emad.torch_threads")
        if collection_log.WORKER_OUTPUT_KEY in output:
            self.run.workers.append(output[collection_log.WORKER_OUTPUT_KEY])

    def pytest_keyboard_interrupt(self) -> None:
        """Record an interrupt by a person, or by ``pytest.exit`` from any code, including a decoder's."""
        self._stopped = True

    # ------------------------------------------------------------ at the end

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._without_tests:
            if (
                self._without_tests in FIXTURES_ONLY
                and session.exitstatus == pytest.ExitCode.OK
                and self.run.is_plugin_run
            ):
                session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED  # pytest's status for a run without tests
            return
        self.run.state = self._ended(session)
        if self.run.state == "interrupted" and session.exitstatus == pytest.ExitCode.OK and self.run.is_plugin_run:
            # pytest.exit(returncode=0) from any code: a stopped run has not passed
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        if self.run.state != "usage error" and self.run.is_plugin_run:
            self.run.fail_on_report_inconsistencies(int(session.exitstatus))
        if self.run.state != "usage error" and (self.run.is_plugin_run or self.settings.gating.require):
            self.run.fail_on_missing(int(session.exitstatus))
        status = int(session.exitstatus)
        if self.run.failures and status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.run.is_plugin_run or self.run.failures or self.run.waivers:
            self._last = self.run.build_report(int(session.exitstatus))
        self._write(session)
        self._append_job_summary(session)
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None and self.config.get_verbosity() < 1:
            drop_own_warnings(terminal)

    def _ended(self, session: pytest.Session) -> State:
        if session.exitstatus == pytest.ExitCode.USAGE_ERROR:
            return "usage error"
        broken = session.exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
        return "interrupted" if self._stopped or broken or session.shouldfail or session.shouldstop else "complete"

    def _write(self, session: pytest.Session) -> None:
        """Write the report and its pages; keep or restore a finished report if this run did not start."""
        folder = self.settings.report
        if folder is None:
            return
        try:
            if self.run.state == "usage error" and self.run.kept is not None and not self.run.tests:
                write_report(folder, self.run.kept)
                self._stays = True
            elif not self._started and _finished_report(folder) is not None:
                self._stays = True
            else:
                self._last = self._last or self.run.build_report(int(session.exitstatus))
                write_report(folder, self._last)
                from pytest_emad.report.page import write_pages  # imports tabulate, so only on demand

                self._pages = write_pages([self._last], folder)
                self.report = folder / REPORT_FILE
        except OSError as error:
            self.run.failures.append(f"--emad-report: {error}")
            session.exitstatus = int(session.exitstatus) or pytest.ExitCode.TESTS_FAILED

    def _append_job_summary(self, session: pytest.Session) -> None:
        """Append the summary as Markdown to the file that a GitHub job names."""
        path = os.environ.get(JOB_SUMMARY)
        if not path or not self._last or not self.run.is_plugin_run:
            return
        from pytest_emad.report.summary import build_run_summary
        from pytest_emad.report.summary_layout import format_ci_job_summary

        try:
            append_text(
                Path(path), format_ci_job_summary(build_run_summary(self._last), list(self._places())), JOB_SUMMARY
            )
        except BadFile as error:
            self.run.failures.append(str(error))
            session.exitstatus = int(session.exitstatus) or pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, None, None]:
        """Print the summary after pytest's own failures, so that verdicts are last on the screen."""
        yield
        if self._without_tests:
            if self.run.is_plugin_run and (self._without_tests in FIXTURES_ONLY or self.config.get_verbosity() >= 0):
                said = f"emad: {NO_TEST_OPTIONS[self._without_tests]} runs no test: nothing was decided"
                terminalreporter.line(f"{said}, and no report is written")
        elif self._last is None:
            for place in self._places():
                terminalreporter.line(f"emad: {place}")
        else:
            self._print_summary(terminalreporter, self._last)

    def _print_summary(self, terminal: pytest.TerminalReporter, report: Mapping[str, Any]) -> None:
        """Print at most forty lines of summary. ``-v`` adds every row before it; ``-vv`` adds legs and tables."""
        from emad_ref.console import set_stream_ascii_fallback
        from pytest_emad.report.summary import build_run_summary
        from pytest_emad.report.summary_layout import format_summary_lines_with_tones  # imports tabulate

        writer = self.config.get_terminal_writer()
        set_stream_ascii_fallback(writer._file)
        for title, text in _verbose_sections(report, writer.fullwidth, self.config.get_verbosity()):
            terminal.section(title)
            terminal.line(escape_unsafe(text))
        lines = format_summary_lines_with_tones(build_run_summary(report), writer.fullwidth, list(self._places()))
        if report["claims"]:
            terminal.section(f"emad: {', '.join(report['settings']['models'])}")
        for line, tone in lines:
            terminal.line(escape_unsafe(line), **COLOURS.get(tone, {}))

    def _places(self) -> Iterator[str]:
        """A sentence per file of the report; paths are relative to the folder of the call if below it."""
        if self.report is not None:
            yield f"report written to {_display_path(self.report, self.config)}"
        elif self._stays and self.settings.report is not None:
            folder = _display_path(self.settings.report, self.config)
            yield f"the finished report in {folder} stays: this run did not start"
        if self._pages is not None:
            yield f"beside it {self._pages}"


def _verbose_sections(report: Mapping[str, Any], width: int, verbosity: int) -> Iterator[tuple[str, str]]:
    """(title, text) of each section before the summary."""
    from pytest_emad.report.tables import (
        format_note_list_item,
        format_section_titles_and_texts,
        format_text_table,
        leg_rows,
    )

    updated = [entry for entry in report["goldens"] if entry["outcome"] in ("added", "changed")]
    if updated:  # shown at every verbosity, since the user requested this update
        yield "emad goldens updated", "\n".join(f"{entry['outcome']}: {entry['id']}" for entry in updated)
    if verbosity < 1:
        return
    tables = report["tables"] if verbosity > 1 else []
    yield from format_section_titles_and_texts(report["points"], tables, report["claims"], report["notes"], width)
    for claim in report["claims"] if verbosity > 1 else []:
        if claim["legs"]:
            yield f"{claim['id']} on {claim['model']}", format_text_table(leg_rows(claim["legs"]), width)
    if report["run"]["failures"]:
        yield (
            "emad: why the run fails",
            "\n".join(format_note_list_item(reason, width) for reason in report["run"]["failures"]),
        )


def _display_path(path: Path, config: pytest.Config) -> Path:
    start = config.invocation_params.dir
    return path.relative_to(start) if path.is_relative_to(start) else path


def _finished_report(folder: Path) -> Report | None:
    """The report in ``folder`` if its run is complete, else None."""
    try:
        report = read_report(folder)
    except BadReport:
        return None
    return report if report["state"] == "complete" else None


def replace_records_with_junit_properties(report: pytest.TestReport) -> None:
    """Replace plugin records among the properties of ``report`` by their short form; call it after their last use."""
    claims = [value for kind, value in first_attempt_records(report.user_properties) if kind == CLAIM]
    others = [entry for entry in report.user_properties if not is_record(entry)]
    short = [entry for number, claim in enumerate(claims, start=1) for entry in _short_properties(number, claim)]
    report.user_properties = [*others, *short]


def _short_properties(number: int, claim: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    prefix = "emad" if number == 1 else f"emad.{number}"
    low, high = claim["interval"] or (None, None)
    found = {**claim, "low": low, "high": high, "n": claim["n"] or None}
    yield f"{prefix}.claim", claim["id"]
    yield f"{prefix}.model", claim["model"]
    yield f"{prefix}.verdict", claim["verdict"]
    yield f"{prefix}.gate", str(claim["gate"]).lower()
    for name in ("estimate", "low", "high", "threshold", "n"):
        if found[name] is not None:
            yield f"{prefix}.{name}", f"{found[name]:.10g}"
    if claim["estimate"] is not None:
        yield f"{prefix}.unit", claim["unit"]
