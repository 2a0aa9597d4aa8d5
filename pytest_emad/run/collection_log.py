"""Log of collected, deselected, skipped and attempted tests; registered in every process of a run.

A run of the suites must not lose a test silently. To pytest, a keyword in an environment variable, a mark from a
conftest or a ``pytest.skip`` inside a decoder looks like success. Each process keeps a log, which travels on test
reports and with a worker's output. ``pytest_emad.report.gaps`` decides which entries are faults.

A plugin may rerun a test until it passes, and a hook may turn a failure into a pass. So ``AttemptLog`` records each
attempt directly, and ``pytest_emad.report.verification`` compares the attempts with the reported outcomes.

An error that makes every test impossible (a model that cannot be loaded, a corpus without text) travels on a report as
``STOP``. The process that collects reports then ends the run once, with exit status 4.
"""

from __future__ import annotations

import json
import os
import unittest
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from emad_ref.errors import EmadError, RunStopped
from pytest_emad.report.deselection import HOME
from pytest_emad.report.known_gaps import find_listed_gap
from pytest_emad.report.schema import Outcome, SkipKind
from pytest_emad.run import decoder_providers, environment, selection
from pytest_emad.run.options import get_run_settings
from pytest_emad.run.recorder import ATTEMPT, RAISED

FEATURES = "emad_features"  # attribute of a report: features of the request that the decoder declined
SHIPPED, KIND = "emad_shipped", "emad_kind"  # attributes of a report, which xdist transfers
WORKER_OUTPUT_KEY = "emad.attendance"  # entry of a worker's output
STOP = "emad_stop"  # attribute of a report: reason why the run ends
DESELECTED = "deselected"
NOT_THE_USERS = (HOME / "emad_ref", HOME / "pytest_emad", Path(os.__file__).parent)
OUR_FIXTURES = frozenset({"emad_evidence", "emad_model", "emad_pair", "emad_record"})
MAX_REASON_LENGTH = 300  # most characters of an attempt's error
SKIP_EXCEPTIONS = (pytest.skip.Exception, unittest.SkipTest)
ABORT_EXCEPTIONS = (pytest.exit.Exception, KeyboardInterrupt, SystemExit)

_REFUSED = pytest.StashKey[list[str] | None]()
_ATTEMPTS = pytest.StashKey[int]()
_BODIES = pytest.StashKey[int]()  # number of runs of the body in this attempt


def record_refusal(item: pytest.Item, features: tuple[str, ...] | None) -> None:
    """Note that the decoder declined a request of ``item`` with these ``features``, or a call of a method (None)."""
    item.stash[_REFUSED] = None if features is None else [*features]


class CollectionLog:
    """``collected``: node id → name of each shipped test; ``claims``: node id → claim, for tests of a claim.

    ``deselected``: entries of ``report.json``.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._not_asked: dict[str, str] = {}
        self.collected: dict[str, str] = {}
        self.claims: dict[str, str] = {}
        self.deselected: list[dict[str, Any]] = []

    def log_items(self, items: Iterable[pytest.Item], not_asked: Mapping[str, str]) -> None:
        """Log all ``items`` before any deselection; ``not_asked``: node id → reason for deselecting it."""
        self._not_asked |= not_asked
        named = {item.nodeid: environment.shipped_test_name(item) for item in items}
        self.collected |= {nodeid: name for nodeid, name in named.items() if name is not None}
        claims = {
            item.nodeid: selection.emad_marker_arguments(item)["claim"]
            for item in items
            if item.nodeid in self.collected
        }
        self.claims |= {nodeid: claim for nodeid, claim in claims.items() if claim is not None}

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self.deselected += [
            {
                "nodeid": item.nodeid,
                "shipped": environment.shipped_test_name(item),
                "claim": selection.emad_marker_arguments(item)["claim"],
                "why": self._not_asked.get(item.nodeid, DESELECTED),
            }
            for item in items
        ]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        raised_by = _raising_file(call)  # before pytest replaces unittest's exception by its own
        report = yield
        _shorten_error(item, call, report)
        name = environment.shipped_test_name(item)
        vars(report)[SHIPPED] = name
        _expect_known_gap(item, name, call, report)
        if report.skipped and not hasattr(report, "wasxfail"):
            kind = _skip_kind(item, report.when, raised_by)
            vars(report)[KIND] = kind
            vars(report)[FEATURES] = item.stash.get(_REFUSED, None)
            if name is not None and kind == "left out" and report.when == "call":
                report.outcome = "failed"
                report.longrepr = (
                    f"{raised_by} skipped this test. Only the test's own file may skip it; a decoder that declines a "
                    "request must raise emad_ref.protocol.Unsupported(reason)"
                )
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Log a shipped file that skips itself as a whole because an extra is absent."""
        report = yield
        if report.skipped and isinstance(collector, pytest.File):
            vars(report)[SHIPPED] = environment.shipped_file_name(collector.path)
            at = report.longrepr[0] if isinstance(report.longrepr, tuple) else ""
            own = Path(at).resolve() == collector.path.resolve()
            vars(report)[KIND] = "not applicable" if own else "left out"
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send a worker's log to the controller."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[WORKER_OUTPUT_KEY] = self.to_json()

    def to_json(self) -> dict[str, Any]:
        return {
            "collected": self.collected,
            "claims": self.claims,
            "deselected": self.deselected,
            "providers": decoder_providers.provider_answer_counts(self._config),
        }


def _expect_known_gap(
    item: pytest.Item, shipped: str | None, call: pytest.CallInfo[Any], report: pytest.TestReport
) -> None:
    """Report a listed test that failed as an expected failure with its reason, and fail one that passed.

    A failure of setup or teardown is not the test's own, and stays one.
    """
    gaps = get_run_settings(item.config).known_gaps
    gap = find_listed_gap(shipped, item.nodeid, gaps) if gaps and call.when == "call" else ""
    if not gap or getattr(report, STOP, None) is not None:
        return
    if report.failed and call.excinfo is not None:
        report.outcome = "skipped"
        vars(report)["wasxfail"] = gaps[gap]
    elif report.passed:
        report.outcome = "failed"
        report.longrepr = f"known gap closed: the test passes; remove {gap} from the file of --emad-known-gaps"


def _shorten_error(item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
    """Show a project's error by its message, another below a shipped test by frames from the user's first file on."""
    if call.excinfo is None:
        return
    error = call.excinfo.value
    if isinstance(error, RunStopped):
        vars(report)[STOP] = report.longrepr = str(error)
    elif not (report.failed and item.config.getoption("tbstyle", "auto") == "auto" and _uses_ours(item)):
        return
    elif isinstance(error, EmadError):
        notes = getattr(error, "__notes__", [])  # Hypothesis puts the falsifying example there
        report.longrepr = "\n".join([f"{type(error).__name__}: {error}", *notes])
    elif environment.is_shipped_test(item):
        first = next((place for place, entry in enumerate(call.excinfo.traceback) if _is_users(entry)), None)
        if first is not None:
            report.longrepr = call.excinfo.getrepr(style="short", tbfilter=lambda error: error.traceback[first:])


def _is_users(entry: Any) -> bool:
    """Whether a frame is in a user's file, outside this package and installed ones."""
    path = Path(entry.path)
    if "site-packages" in path.parts or any(path.is_relative_to(folder) for folder in NOT_THE_USERS):
        return False
    return environment.shipped_file_name(path) is None


def _uses_ours(item: pytest.Item) -> bool:
    return not OUR_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def _raising_file(call: pytest.CallInfo[Any]) -> Path | None:
    """The file whose code raised the exception of ``call``; for ``pytest.skip`` and the like, the calling file."""
    if call.excinfo is None:
        return None
    files = [entry.path for entry in call.excinfo.traceback if isinstance(entry.path, Path)]
    outside = [file for file in files if "_pytest" not in file.parts]
    return outside[-1].resolve() if outside else None


def _skip_kind(item: pytest.Item, when: str | None, raised_in: Path | None) -> SkipKind:
    if _REFUSED in item.stash:
        return "refused"
    return "not applicable" if when == "call" and raised_in == item.path.resolve() else "left out"


class AttemptLog:
    """Records the number of attempts of each shipped test, and the outcome of each attempt."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if selection.is_plugin_test(item):
            _start_attempt(item)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        if _ATTEMPTS not in pyfuncitem.stash:
            return (yield)
        if pyfuncitem.stash[_BODIES]:
            _start_attempt(pyfuncitem)
        pyfuncitem.stash[_BODIES] += 1
        outcome: Outcome = "passed"
        reason = ""
        try:
            return (yield)
        except ABORT_EXCEPTIONS:
            outcome = "not reported"
            raise
        except BaseException as error:
            outcome, reason = ("skipped" if _is_skip(error) else "failed"), _error_text(error)
            raise
        finally:
            _add_record(pyfuncitem, RAISED, {"outcome": outcome, "reason": reason})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record errors of setup and teardown, which wrappers of the call do not see."""
        error = None if call.excinfo is None else call.excinfo.value
        not_run = isinstance(error, (*ABORT_EXCEPTIONS, pytest.xfail.Exception))  # pytest raises ``xfail(run=False)``
        if _ATTEMPTS in item.stash and call.when != "call" and error is not None and not not_run:
            outcome = "skipped" if _is_skip(error) else "error"
            _add_record(item, RAISED, {"outcome": outcome, "reason": _error_text(error)})
        return (yield)


def _start_attempt(item: pytest.Item) -> None:
    item.stash[_ATTEMPTS] = item.stash.get(_ATTEMPTS, 0) + 1
    item.stash[_BODIES] = 0
    _add_record(item, ATTEMPT, item.stash[_ATTEMPTS])


def _is_skip(error: BaseException) -> bool:
    if isinstance(error, SKIP_EXCEPTIONS):
        return True
    if not isinstance(error, EmadError):
        return False
    from emad_ref.protocol import Unsupported  # imports NumPy

    return isinstance(error, Unsupported)


def _error_text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as other:  # also records an error without a readable text
        text = f"its text raises {type(other).__name__}"
    return f"{type(error).__name__}: {text}"[:MAX_REASON_LENGTH]


def _add_record(item: pytest.Item, kind: str, value: object) -> None:
    item.user_properties.append((kind, json.dumps(value)))
