"""``-p pytest_emad.cutting``: the parts that suites come in, and one part of them asked. Nobody's to type.

    --emad-cut FILE       say what this run would be asked, as JSON, and ask nothing (with --collect-only)
    --emad-part measuring | rest     ask what takes time or energy alone, or all but that

Suites are cut by folder. A folder in which some tests measure and others do not is cut in two: what measures nothing
need not wait for a machine of its own. What a marker or a budget leaves out is known to a collection alone, so that
one is made.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest

from emad_ref.files import write_atomically
from emad_ref.report.shipped import PREFIX
from pytest_emad import choosing, installed, order
from pytest_emad.attendance import Attendance

MEASURING, REST = "measuring", "rest"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emad")
    group.addoption("--emad-cut", metavar="FILE", type=Path)
    group.addoption("--emad-part", choices=(MEASURING, REST))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--emad-part")
    if part is not None:
        left = [item for item in items if choosing.measures(item) is (part == REST)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def pytest_collection_finish(session: pytest.Session) -> None:
    file = session.config.getoption("--emad-cut")
    if file is None:
        return
    attended = cast(Attendance, session.config.pluginmanager.get_plugin("emad-attendance"))
    measuring: dict[str, set[bool]] = {}  # folder → whether tests of it measure
    for item, folder in zip(session.items, _folders(session), strict=True):
        measuring.setdefault(folder, set()).add(choosing.measures(item))
    found = {
        "tests": installed.asked_tests(session.config) or ([PREFIX] if attended.collected else []),
        "deselected": attended.deselected,
        "parts": [
            {"folder": folder, "measures": each, "only": [REST, MEASURING][each] if len(kinds) > 1 else None}
            for folder, kinds in sorted(measuring.items(), key=lambda each: order.rank(each[0]))
            for each in sorted(kinds)
        ],
    }
    write_atomically(file, json.dumps(found, indent=1) + "\n", "--emad-cut")


def _folders(session: pytest.Session) -> list[str]:
    """Of each test the folder of the suites that it is in; "" for all where some test is in none."""
    config, (suites, *_) = session.config, session.config.args
    spec = find_spec(suites) if config.getoption("pyargs") else None
    root = Path(spec.origin).parent if spec and spec.origin else config.invocation_params.dir / suites
    inside = [item.path.resolve().relative_to(root.resolve()).parts for item in session.items]
    return [parts[0] if all(len(each) > 1 for each in inside) else "" for parts in inside]
