"""The provider of mutants, and plugins that interfere like a hostile conftest; loaded only by ``--emad-selfcheck``.

``pytest suites/invariants -p pytest_emad.run.mutants --emad-backend pytest_emad.run.mutants --emad-planted NAME``
runs one entry of the catalogue by hand.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from emad_ref.protocol import Decoder, Request
from pytest_emad.mutants.catalogue import select_mutants


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emad-planted", metavar="NAME", help="a decoder of pytest_emad.mutants")


def pytest_configure(config: pytest.Config) -> None:
    (planted,) = select_mutants([config.getoption("--emad-planted")])
    if planted.bystander:
        config.pluginmanager.register(BYSTANDERS[planted.bystander](), f"emad-bystander-{planted.bystander}")


def pytest_emad_make_decoder(config: pytest.Config, request: Request) -> Decoder:
    (planted,) = select_mutants([config.getoption("--emad-planted")])
    return planted.make(request)


class MarkingPlugin:
    """Puts a mark on every test."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.add_marker(getattr(pytest.mark, self._mark)(reason="flaky"))


class DeselectingPlugin:
    """Silently removes every test but the last."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[1:]


class OutcomeForgingPlugin:
    """Turns failures into passes."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            report.outcome, report.longrepr = "passed", None
        return report


BYSTANDERS: dict[str, Any] = {
    "xfail": lambda: MarkingPlugin("xfail"),
    "skip": lambda: MarkingPlugin("skip"),
    "deselect": DeselectingPlugin,
    "outcomes": OutcomeForgingPlugin,
}
