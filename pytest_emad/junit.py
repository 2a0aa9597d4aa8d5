"""What JUnit keeps of a test of ours: short flat properties, and a class name that does not depend on where we lie.

Records travel as JSON in ``user_properties``, whole tables among them. Once they are taken, the properties that JUnit
writes are replaced: ``emad.claim``, ``emad.model``, ``emad.verdict``, ``emad.gate`` and, where there is such a number,
``emad.estimate``, ``emad.low``, ``emad.high``, ``emad.threshold``, ``emad.n``, ``emad.unit``; a further claim of the
same test has ``emad.2.claim`` and so on. Whatever others have put there stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from _pytest.junitxml import xml_key  # pytest offers class names to no hook

from pytest_emad.recorder import CLAIM, first_attempt_records, is_record

NUMERIC_FIELDS = ("estimate", "low", "high", "threshold", "n")


def shorten_properties(report: pytest.TestReport) -> None:
    """Replace our records among the properties of ``report`` by the short form, once nobody needs them any more."""
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
    for name in NUMERIC_FIELDS:
        if found[name] is not None:
            yield f"{prefix}.{name}", f"{found[name]:.10g}"
    if claim["estimate"] is not None:
        yield f"{prefix}.unit", claim["unit"]


def set_class_name(config: pytest.Config, report: pytest.TestReport, shipped: str | None) -> None:
    """``suites.claims.test_model`` for a test of ours, also where it was collected from an installed package."""
    xml = config.stash.get(xml_key, None)
    if xml is not None and shipped is not None:
        file = shipped.partition("::")[0]
        xml.node_reporter(report).add_attribute("classname", file.removesuffix(".py").replace("/", "."))
