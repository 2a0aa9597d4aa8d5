"""Plugin that puts a mutant, or a plugin that interferes as a conftest could, into a run of pytest.

``pytest suites/invariants -p tests.mutants.provider --emad-backend tests.mutants.provider --mutant NAME`` runs one
entry of the catalogue by hand.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from emad_ref.protocol import Decoder, Request
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.mutant import Mutant

OPTION = "--mutant"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, metavar="NAME", choices=list(CATALOGUE), required=True, help="one of tests.mutants")


def pytest_configure(config: pytest.Config) -> None:
    if bystander := _mutant(config).bystander:
        config.pluginmanager.register(BYSTANDERS[bystander](), f"bystander-{bystander}")


def pytest_emad_make_decoder(config: pytest.Config, request: Request) -> Decoder:
    return _mutant(config).make(request)


def _mutant(config: pytest.Config) -> Mutant:
    return CATALOGUE[config.getoption(OPTION)]


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
