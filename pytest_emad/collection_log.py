"""Which tests there were: collected, deselected, skipped and by whom. One such plugin in every process of a run.

A run of our suites must not lose a test in silence: a keyword in an environment variable, a mark from a conftest or a
``pytest.skip`` inside a decoder look like success to pytest. What a process saw goes home on test reports and, when a
worker ends, with its output; ``emad_ref.report.gaps`` says what of it is a fault.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from emad_ref.report.schema import SkipKind
from pytest_emad import decoder_providers, environment, selection

FEATURES = "emad_features"  # attribute of a report: what was asked for when the decoder declined it
SHIPPED, KIND = "emad_shipped", "emad_kind"  # attributes of a report; xdist carries attributes across
WORKER_OUTPUT_KEY = "emad.attendance"  # entry of a worker's output
DESELECTED = "deselected"

_REFUSED = pytest.StashKey[list[str] | None]()


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
