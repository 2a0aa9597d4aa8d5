"""Known gaps: shipped tests that the author of a decoder expects to fail, each with a reason.

``--emad-known-gaps FILE`` names a TOML file with a table ``[[gap]]`` for each:

    [[gap]]
    test = "suites/fidelity/test_full_depth.py::test_without_exits_tokens_are_the_models_own_greedy_continuation"
    reason = "GELU by its tanh form: log-probabilities are off by 0.0013"

``test`` is the name of a shipped test, alone or with its parameters in brackets. A listed test that fails is reported
as an expected failure; one that passes fails the run, since the gap has closed. The settings of a report hold the
list, and the entry of each such test the name by which it is listed. Both are written once, and ``emad verify`` holds
them against each other: a mark or hook cannot add a gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from emad_ref.errors import BadArgument, suggest_nearest
from emad_ref.files import BadFile, read_toml

KNOWN_GAPS = "known_gaps"  # the setting: name of a test → reason
KNOWN_GAP = "known_gap"  # of a test's entry: the listed name of a test that failed as expected
FIELDS = ("test", "reason")


def read_known_gaps(path: Path, where: str) -> dict[str, str]:
    """The name of each listed test → its reason.

    Raises:
        BadFile: no TOML; other content than ``[[gap]]`` with a test and a reason; one test twice.
    """
    table = read_toml(path, where)
    gaps = table.get("gap", [])
    if set(table) - {"gap"} or not isinstance(gaps, list):
        raise BadFile(where, path, "tables [[gap]] alone", f"it holds {', '.join(table)}", "mend the file")
    reasons: dict[str, str] = {}
    for gap in gaps:
        texts = [gap.get(name) if isinstance(gap, dict) else None for name in FIELDS]
        if set(gap) != set(FIELDS) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise BadFile(where, path, "a test and a reason, both texts, in each [[gap]]", f"one is {gap}", "mend it")
        test, reason = (" ".join(str(text).split()) for text in texts)
        if test in reasons:
            raise BadFile(where, path, "each test once", f"{test} stands twice", "remove one of them")
        reasons[test] = reason
    return reasons


def shipped_case_name(shipped: str, nodeid: str) -> str:
    """``suites/…/test_x.py::test_y[model-case]``, the same under any root folder of pytest."""
    return f"{shipped}{''.join(nodeid.rpartition('::')[2].partition('[')[1:])}"


def find_listed_gap(shipped: str | None, nodeid: str, gaps: Collection[str]) -> str:
    """The entry of ``gaps`` that names a test, with or without its parameters; "" if none does."""
    if shipped is None:
        return ""
    return next((name for name in (shipped_case_name(shipped, nodeid), shipped) if name in gaps), "")


def known_gap_mark(entry: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """``{"known_gap": name}`` for the entry of a test that is listed, ran, and failed as expected; else empty."""
    has_failed = any(attempt["outcome"] == "failed" for attempt in entry.get("attempts", ())[:1])
    if entry["outcome"] != "xfailed" or not has_failed:
        return {}
    name = find_listed_gap(entry["shipped"], entry["nodeid"], settings.get(KNOWN_GAPS) or ())
    return {KNOWN_GAP: name} if name else {}


def count_known_gaps(report: Mapping[str, Any]) -> dict[str, int]:
    """Each listed gap that stood in this run → number of its failed tests."""
    return Counter(entry[KNOWN_GAP] for entry in report["tests"] if KNOWN_GAP in entry)


def describe_known_gaps(report: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each known gap that stood in this run: its test, the number of failed cases, and the reason."""
    for name, count in count_known_gaps(report).items():
        cases = f" ({count} cases)" if count > 1 else ""
        yield f"known gap {name}{cases}: {report['settings'][KNOWN_GAPS][name]}"


def require_tests_of_run(
    gaps: Collection[str], collected: Collection[tuple[str, str]], shipped: Collection[str], partial: bool, where: str
) -> None:
    """Require that each gap names a test of the run.

    Parameters
    ----------
    collected : (shipped name, node id) of each test, deselected ones included
    shipped : names of all shipped tests; one of a file that was not collected is no mistake
    partial : whether the user typed a part of the suites, so that a case may be absent

    Raises
    ------
    BadArgument
        A name that is no shipped test, or parameters that no test of the run has.
    """
    functions = {name for name, _ in collected}
    cases = {shipped_case_name(name, nodeid) for name, nodeid in collected}
    for gap in gaps:
        function, bracket, _ = gap.partition("[")
        absent = function in shipped and (partial or function not in functions)
        if gap in cases or absent or (not bracket and function in functions):
            continue
        expected = "the name of a shipped test of this run, alone or with its parameters"
        raise BadArgument(where, gap, expected, suggest_nearest(gap, [*shipped, *cases]))
