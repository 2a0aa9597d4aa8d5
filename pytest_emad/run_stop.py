"""One clear error: what makes every test of a run impossible ends the run, once, with exit status 4.

A model that cannot be loaded, a corpus without text or a profile of another model would otherwise fail each test with
the same traceback. Under xdist a worker cannot end the run: the error travels on the test's report, and whoever
collects reports ends the run. Other errors of ours, raised inside a test, are shown as their message: it names value,
expectation and remedy, which frames of our own code do not (``--tb=long`` and the like still show them).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from emad_ref.errors import EmadError, RunStopped

STOP_ATTRIBUTE = "emad_stop"  # attribute of a report: why the run ends; xdist carries attributes across
OUR_FIXTURES = frozenset({"emad_evidence", "emad_model", "emad_pair", "emad_record"})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, RunStopped):
        vars(report)[STOP_ATTRIBUTE] = report.longrepr = str(error)
    elif isinstance(error, EmadError) and report.failed and _shows_message_only(item):
        notes = getattr(error, "__notes__", [])  # Hypothesis puts the falsifying example there
        report.longrepr = "\n".join([f"{type(error).__name__}: {error}", *notes])
    return report


def _shows_message_only(item: pytest.Item) -> bool:
    """Whether a message is enough: a test of a suite, and no style of traceback asked for."""
    return item.config.option.tbstyle == "auto" and not OUR_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


class RunStopper:
    """Ends the run where reports are collected. Not registered on workers."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Before the terminal counts the failure: the run has one error, not one per test."""
        stop = getattr(report, STOP_ATTRIBUTE, None)
        if stop is not None:
            pytest.exit(stop, returncode=int(pytest.ExitCode.USAGE_ERROR))
