"""How often each test was attempted, and how each attempt ended, whatever is reported of it.

A plugin may run a test again until it passes, a mark or a hook may turn a failure into a pass. So what happened is put
on the record of the test where it happens: that an attempt began, in ``pytest_runtest_setup`` or with a second run of
the body; what its body raised, in the innermost wrapper of ``pytest_pyfunc_call``; what setup and teardown raised; and
which parts of ours were replaced meanwhile. ``emad_ref.report.verification`` compares it with what is reported.

One such plugin in every process of a run; tests that have nothing to do with us are left alone.
"""

from __future__ import annotations

import json
import unittest
from collections.abc import Generator
from typing import Any

import pytest

from emad_ref.errors import EmadError
from emad_ref.report.schema import Outcome
from pytest_emad import environment, integrity, selection
from pytest_emad.recorder import ATTEMPT, RAISED, REPLACED

MAX_REASON_LENGTH = 300  # letters of a reason
SKIP_EXCEPTIONS = (pytest.skip.Exception, unittest.SkipTest)
ABORT_EXCEPTIONS = (pytest.exit.Exception, KeyboardInterrupt, SystemExit)

_ATTEMPTS = pytest.StashKey[int]()
_BODIES = pytest.StashKey[int]()  # how often the body ran in this attempt


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if selection.is_related(item):
        _start_attempt(item)


def _start_attempt(item: pytest.Item) -> None:
    item.stash[_ATTEMPTS] = item.stash.get(_ATTEMPTS, 0) + 1
    item.stash[_BODIES] = 0
    _add_record(item, ATTEMPT, item.stash[_ATTEMPTS])


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
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
            for part in integrity.find_replacements(pyfuncitem):
                _add_record(pyfuncitem, REPLACED, part)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Of setup and teardown: where no body runs, no wrapper of its call sees what was raised."""
    error = None if call.excinfo is None else call.excinfo.value
    not_run = isinstance(error, (*ABORT_EXCEPTIONS, pytest.xfail.Exception))  # ``xfail(run=False)`` is raised by pytest
    if _ATTEMPTS in item.stash and call.when != "call" and error is not None and not not_run:
        _add_record(item, RAISED, {"outcome": "skipped" if _is_skip(error) else "error", "reason": _error_text(error)})
    return (yield)


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
