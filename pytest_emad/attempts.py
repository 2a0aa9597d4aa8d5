"""How often each test was attempted, and how each attempt ended, whatever is reported of it.

A plugin may run a test again until it passes, a mark or a hook may turn a failure into a pass. So what happened is put
on the record of the test where it happens: that an attempt began, in ``pytest_runtest_setup`` or with a second run of
the body; what its body raised, in the innermost wrapper of ``pytest_pyfunc_call``; what setup and teardown raised; and
which parts of ours were replaced meanwhile. ``emad_ref.report.consistency`` compares it with what is reported.

One such plugin in every process of a run; tests that have nothing to do with us are left alone.
"""

from __future__ import annotations

import json
import unittest
from collections.abc import Generator
from typing import Any

import pytest

from emad_ref.errors import EmadError
from emad_ref.report.reading import Outcome
from pytest_emad import choosing, installed, integrity
from pytest_emad.recording import ATTEMPT, RAISED, REPLACED

LONGEST = 300  # letters of a reason
NO_FAILURE = (pytest.skip.Exception, unittest.SkipTest)
NO_OUTCOME = (pytest.exit.Exception, KeyboardInterrupt, SystemExit)

_ATTEMPTS = pytest.StashKey[int]()
_BODIES = pytest.StashKey[int]()  # how often the body ran in this attempt


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if choosing.judges(item):
        _begin(item)


def _begin(item: pytest.Item) -> None:
    item.stash[_ATTEMPTS] = item.stash.get(_ATTEMPTS, 0) + 1
    item.stash[_BODIES] = 0
    _put(item, ATTEMPT, item.stash[_ATTEMPTS])


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    if _ATTEMPTS not in pyfuncitem.stash:
        return (yield)
    if pyfuncitem.stash[_BODIES]:
        _begin(pyfuncitem)
    pyfuncitem.stash[_BODIES] += 1
    outcome: Outcome = "passed"
    reason = ""
    try:
        return (yield)
    except NO_OUTCOME:
        outcome = "not reported"
        raise
    except BaseException as error:
        outcome, reason = ("skipped" if _declines(error) else "failed"), _said(error)
        raise
    finally:
        _put(pyfuncitem, RAISED, {"outcome": outcome, "reason": reason})
        if installed.is_ours(pyfuncitem):
            for part in integrity.replaced(pyfuncitem):
                _put(pyfuncitem, REPLACED, part)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Of setup and teardown: where no body runs, no wrapper of its call sees what was raised."""
    error = None if call.excinfo is None else call.excinfo.value
    not_run = isinstance(error, (*NO_OUTCOME, pytest.xfail.Exception))  # ``xfail(run=False)`` is raised by pytest
    if _ATTEMPTS in item.stash and call.when != "call" and error is not None and not not_run:
        _put(item, RAISED, {"outcome": "skipped" if _declines(error) else "error", "reason": _said(error)})
    return (yield)


def _declines(error: BaseException) -> bool:
    if isinstance(error, NO_FAILURE):
        return True
    if not isinstance(error, EmadError):
        return False
    from emad_ref.protocol import Unsupported  # it brings NumPy

    return isinstance(error, Unsupported)


def _said(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as other:  # a text that raises must not keep the attempt off the record
        text = f"its text raises {type(other).__name__}"
    return f"{type(error).__name__}: {text}"[:LONGEST]


def _put(item: pytest.Item, kind: str, value: object) -> None:
    item.user_properties.append((kind, json.dumps(value)))
