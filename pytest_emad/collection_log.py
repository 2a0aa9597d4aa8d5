"""Which tests were collected, deselected, skipped and attempted; registered in every process of a run.

A run of our suites must not lose a test in silence: a keyword in an environment variable, a mark from a conftest or a
``pytest.skip`` inside a decoder look like success to pytest. What a process saw travels on test reports and, when a
worker ends, with its output; ``emad_ref.report.gaps`` says what of it is a fault.

A plugin may run a test again until it passes, and a hook may turn a failure into a pass. So ``AttemptLog`` records each
attempt where it happens, and ``emad_ref.report.verification`` compares that with what is reported.

An error that makes every test impossible (a model that cannot be loaded, a corpus without text) travels on a report as
``STOP``: the process that collects reports ends the run, once, with exit status 4.
"""

from __future__ import annotations

import json
import unittest
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from emad_ref.errors import EmadError, RunStopped
from emad_ref.report.schema import Outcome, SkipKind
from pytest_emad import decoder_providers, environment, selection
from pytest_emad.recorder import ATTEMPT, RAISED, REPLACED

FEATURES = "emad_features"  # attribute of a report: what was asked for when the decoder declined it
SHIPPED, KIND = "emad_shipped", "emad_kind"  # attributes of a report; xdist carries attributes across
WORKER_OUTPUT_KEY = "emad.attendance"  # entry of a worker's output
STOP = "emad_stop"  # attribute of a report: why the run ends
DESELECTED = "deselected"
OUR_FIXTURES = frozenset({"emad_evidence", "emad_model", "emad_pair", "emad_record"})
MAX_REASON_LENGTH = 300  # letters of what an attempt raised
SKIP_EXCEPTIONS = (pytest.skip.Exception, unittest.SkipTest)
ABORT_EXCEPTIONS = (pytest.exit.Exception, KeyboardInterrupt, SystemExit)

_REFUSED = pytest.StashKey[list[str] | None]()
_ATTEMPTS = pytest.StashKey[int]()
_BODIES = pytest.StashKey[int]()  # how often the body ran in this attempt


def note_refusal(item: pytest.Item, features: tuple[str, ...] | None) -> None:
    """The decoder under test declined what ``item`` asked: a request with these ``features``, or a call (None)."""
    item.stash[_REFUSED] = None if features is None else [*features]


class CollectionLog:
    """``collected``: node id → name of each shipped test. ``deselected``: as ``report.json`` has it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._not_asked: dict[str, str] = {}
        self.collected: dict[str, str] = {}
        self.deselected: list[dict[str, Any]] = []

    def take(self, items: Iterable[pytest.Item], not_asked: Mapping[str, str]) -> None:
        """All ``items`` there are, before anybody leaves some out; of those ``not_asked``, by node id, why."""
        self._not_asked |= not_asked
        named = {item.nodeid: environment.shipped_test_name(item) for item in items}
        self.collected |= {nodeid: name for nodeid, name in named.items() if name is not None}

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self.deselected += [
            {
                "nodeid": item.nodeid,
                "shipped": environment.shipped_test_name(item),
                "claim": selection.marker_arguments(item)["claim"],
                "why": self._not_asked.get(item.nodeid, DESELECTED),
            }
            for item in items
        ]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        raised_by = _raising_file(call)  # before pytest puts an exception of its own in the place of unittest's
        report = yield
        _shorten_error(item, call, report)
        name = environment.shipped_test_name(item)
        vars(report)[SHIPPED] = name
        if report.skipped and not hasattr(report, "wasxfail"):
            kind = _skip_kind(item, report.when, raised_by)
            vars(report)[KIND] = kind
            vars(report)[FEATURES] = item.stash.get(_REFUSED, None)
            if name is not None and kind == "left out" and report.when == "call":
                report.outcome = "failed"
                report.longrepr = (
                    f"{raised_by} skipped this test: expected the test's own file to, or the decoder to raise "
                    "emad_ref.protocol.Unsupported(reason) where it declines"
                )
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """A file of ours that skips itself as a whole: an extra is absent."""
        report = yield
        if report.skipped and isinstance(collector, pytest.File):
            vars(report)[SHIPPED] = environment.shipped_file(collector.path)
            at = report.longrepr[0] if isinstance(report.longrepr, tuple) else ""
            own = Path(at).resolve() == collector.path.resolve()
            vars(report)[KIND] = "not applicable" if own else "left out"
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker sends home what only it saw."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[WORKER_OUTPUT_KEY] = self.to_json()

    def to_json(self) -> dict[str, Any]:
        return {
            "collected": self.collected,
            "deselected": self.deselected,
            "providers": decoder_providers.provider_counts(self._config),
        }


def _shorten_error(item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
    """Show an error of ours as its message, which names value, expectation and remedy; ``--tb`` shows its frames."""
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, RunStopped):
        vars(report)[STOP] = report.longrepr = str(error)
    elif isinstance(error, EmadError) and report.failed and item.config.option.tbstyle == "auto" and _uses_ours(item):
        notes = getattr(error, "__notes__", [])  # Hypothesis puts the falsifying example there
        report.longrepr = "\n".join([f"{type(error).__name__}: {error}", *notes])


def _uses_ours(item: pytest.Item) -> bool:
    return not OUR_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def _raising_file(call: pytest.CallInfo[Any]) -> Path | None:
    """The file whose code raised what ended ``call``; of ``pytest.skip`` and its like, the file that called it."""
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
    """Records how often each of our tests was attempted, and how each attempt ended."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if selection.is_related(item):
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
            if environment.is_shipped(pyfuncitem):
                from pytest_emad import integrity  # it parses our own source

                for part in integrity.find_replacements(pyfuncitem):
                    _add_record(pyfuncitem, REPLACED, part)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Of setup and teardown: where no body runs, no wrapper of its call sees what was raised."""
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
    from emad_ref.protocol import Unsupported  # it brings NumPy

    return isinstance(error, Unsupported)


def _error_text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as other:  # a text that raises must not keep the attempt off the record
        text = f"its text raises {type(other).__name__}"
    return f"{type(error).__name__}: {text}"[:MAX_REASON_LENGTH]


def _add_record(item: pytest.Item, kind: str, value: object) -> None:
    item.user_properties.append((kind, json.dumps(value)))
