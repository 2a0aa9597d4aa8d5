"""Comparison of two reports: changed verdicts, numbers that moved beyond chance, and differences of the settings.

``old`` and ``new`` may come from two commits, decoders, models or machines. A comparison is
like for like if only the decoder, the model or the commit differs; the labels name these. Compared are:

claims    by id and model. If each report has one row left of a claim, these two are compared whatever their models.
points    by model and digest, else by role.
tests     of the suites by node id, if both reports list them: invariants and fidelity give no verdicts.

The result is one table: what a row is about, before, after, a mark of ``MARKS``, and the reason. Terminal, Markdown and
page print its rows.

A **verdict** got worse if a claim had survived and no longer does, or if it is newly falsified. A gating claim that had
survived and is missing from the new report got worse too. Other rows that only one report has got neither better nor
worse.

A **number** moved if ``significant_change_sign`` finds the two intervals different. It moved for worse if it
moved to the side on which its claim fails, read from the outcomes and p-values of the legs. The number of a claim is
that of its deciding leg. If another leg decided, the old report's value of that leg is used; without one, no move is
reported. Numbers without intervals are only compared bit by bit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from pytest_emad.report.provenance import DISTRIBUTION
from pytest_emad.report.schema import BadReport, Report
from pytest_emad.report.tables import ABSENT, claim_rows, operating_point_rows
from pytest_emad.statistics import number_format
from pytest_emad.statistics.gate import UNDECIDED, claim_title, find_deciding_leg
from pytest_emad.statistics.verdicts import Claim, load_register

# options for selection, output and gates, which do not affect measurements
NOT_MEASUREMENT_OPTIONS = frozenset(
    {"models", "backend", "decoder", "decoder_timeout", "expect_decoder", "waive", "report", "golden", "update_golden"}
    | {"process_timeout", "gate", "gate_claims", "inconclusive", "require"}
)
SURROUNDINGS = ("platform", "machine", "torch_threads", "extensions")
PLUGIN_RELEASE = re.compile(
    r"hook of plugin \S+ \((?:.*, )?(.+)\)"
)  # of ``hook of plugin mylib (mylib.hooks, mylib 1.2)``
NOT_SET = "not set"
COMMIT_DIGITS = 7  # hexadecimal digits of a commit


BARS = "▁▂▃▄▅▆▇█"


def claim_history_rows(reports: Sequence[Report]) -> list[dict[str, str]]:
    """One row per claim of ``reports``, oldest first: a bar per report, first and last number, verdicts.

    A bar's height is the estimate between the claim's smallest and largest; "·" marks a missing estimate. It omits
    estimates in another unit than the last one, and claims that no report decides.
    """
    by_claim: dict[tuple[str, str], list[Mapping[str, Any] | None]] = {}
    for place, report in enumerate(reports):
        for claim in report["claims"]:
            by_claim.setdefault((claim["id"], claim["model"]), [None] * len(reports))[place] = claim
    decided = {
        key: found for key, found in by_claim.items() if any(one and one["verdict"] not in UNDECIDED for one in found)
    }
    ids = [id for id, _ in decided]
    register = load_register()
    return [
        {"claim": f"{id} on {shorten_path_name(model)}" if ids.count(id) > 1 else id} | _history_cells(found, register)
        for (id, model), found in decided.items()
    ]


def _history_cells(found: Sequence[Mapping[str, Any] | None], register: Mapping[str, Claim]) -> dict[str, str]:
    newest = next(claim for claim in reversed(found) if claim is not None)
    unit, words = str(newest["unit"]), claim_title(newest, register)
    numbers = [None if claim is None or claim["unit"] != unit else claim["estimate"] for claim in found]
    known = [number for number in numbers if number is not None]
    ends = " → ".join(
        number_format.format_value(number, unit) for number in dict.fromkeys((known[:1] + known[-1:]) or [None])
    )
    verdicts = ["–" if claim is None else str(claim["verdict"]) for claim in found]
    runs = " → ".join(verdict for place, verdict in enumerate(verdicts) if place == 0 or verdict != verdicts[place - 1])
    return {
        "in words": words,
        "history": _sparkline(numbers),
        "verdicts": runs,
        "first → last": ends,
        "unit": unit,
    }


def _sparkline(numbers: Sequence[float | None]) -> str:
    known = [number for number in numbers if number is not None]
    low, width = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    top = len(BARS) - 1
    return "".join("·" if n is None else BARS[round(top * (n - low) / width) if width else 0] for n in numbers)


def format_run_label(report: Report) -> str:
    """Label of a run, ``emad-tiny · mylib 1.2 · myproject 3f2a91c · 2026-11-22 16:58``: models, decoder, commit, start.

    Unknown parts are left out.
    """
    models = [shorten_path_name(model["name"]) for model in report["models"]]
    named = ", ".join(models[:2]) + (f" and {len(models) - 2} more" if len(models) > 2 else "")
    started = report["run"]["started"][: len("2026-11-22T16:58")].replace("T", " ")
    parts = [named or "no model", _decoder_label(report["decoder"]["name"]), _commit_label(report), started]
    return " · ".join(part for part in parts if part)


def shorten_path_name(name: str) -> str:
    """The last part of an absolute path; a hub name unchanged."""
    return PurePath(name).name if PurePath(name).is_absolute() else name


def _decoder_label(name: str) -> str:
    release = PLUGIN_RELEASE.fullmatch(name)
    return release[1] if release else shorten_path_name(name.removeprefix("hook of ").removesuffix(" (ours)"))


def _commit_label(report: Report) -> str:
    """Commit of the tested project, else of pytest-emad, else its version."""
    project, ours = report["run"]["project"], report["provenance"]
    if project["commit"]:
        return f"{PurePath(project['root']).name} {_short_commit(project['commit'])}"
    commit, version = ours["commit"], ours["versions"][DISTRIBUTION]
    return f"{DISTRIBUTION} {_short_commit(commit) if commit else version}" if commit or version else ""


def _short_commit(commit: str) -> str:
    digits, dash, dirty = commit.partition("-")
    return f"{digits[:COMMIT_DIGITS]}{dash}{dirty}"


def describe_setting_changes(old: Report, new: Report) -> list[str]:
    """One phrase for each difference of conditions, ``seed 0 → 1``; measurement settings first."""
    return [
        f"{name} {_value_text(before)} → {_value_text(after)}"
        for name, before, after in _compared_facts(old, new)
        if before is not None and after is not None and before != after
    ] + _one_sided_settings(old, new)


def _compared_facts(old: Report, new: Report) -> Iterator[tuple[str, Any, Any]]:
    """(name, old, new) of each setting and condition; None if only the other report knows it."""
    prints = [
        {
            model["name"]: str(model["fingerprint"])[:COMMIT_DIGITS]
            for model in report["models"]
            if model.get("fingerprint")
        }
        for report in (old, new)
    ]
    theirs, ours = prints
    if theirs and ours and not (theirs.keys() & ours.keys() or {*theirs.values()} & {*ours.values()}):
        yield "models", list(map(shorten_path_name, theirs)), list(map(shorten_path_name, ours))
    for name in dict.fromkeys([*old["settings"], *new["settings"]]):
        if name not in NOT_MEASUREMENT_OPTIONS:
            yield name, _setting_value(old, name), _setting_value(new, name)
    yield "asked", old["run"]["asked"], new["run"]["asked"]
    yield "claims file", _claims_file(old), _claims_file(new)
    for name in prints[0]:
        yield f"weights of {shorten_path_name(name)}", prints[0][name], prints[1].get(name)
    releases = [report["provenance"]["versions"] for report in (old, new)]
    for name in dict.fromkeys([*releases[0], *releases[1]]):
        yield name, releases[0].get(name), releases[1].get(name)
    for name in SURROUNDINGS:
        yield name.replace("_", " "), old["provenance"].get(name), new["provenance"].get(name)


def _setting_value(report: Report, name: str) -> Any:
    """Value of an option; ``NOT_SET`` if it was not given, None if the report does not know it."""
    if name not in report["settings"]:
        return None
    value = report["settings"][name]
    return NOT_SET if value is None else value


def _claims_file(report: Report) -> Any:
    """The first digits of the hash of the claims file."""
    file: Mapping[str, Any] | None = report["run"]["claims_file"]
    return NOT_SET if file is None else file["sha256"][:COMMIT_DIGITS]


def _one_sided_settings(old: Report, new: Report) -> list[str]:
    names = [name for name in old["settings"] | new["settings"] if name not in NOT_MEASUREMENT_OPTIONS]
    once = [name for name in names if (name in old["settings"]) != (name in new["settings"])]
    return [f"only one of them knows {', '.join(once)}"] if once else []


def _value_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value_text, value)) or NOT_SET
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


RowKind = Literal["claim", "point", "test"]
Mark = Literal[
    "worse", "moved for worse", "better", "changed", "moved", "moved for the better",
    "only new", "only old", "another leg", "within chance", "another number", "as before",
]  # fmt: skip
# How a report shows the rows of a mark: each of them, only their names, or only their number.
MarkDisplay = Literal["listed", "named", "counted"]
# mark → heading and display, worst first
MARKS: Mapping[Mark, tuple[str, MarkDisplay]] = {
    "worse": ("Worse", "listed"),
    "moved for worse": ("Moved for worse", "listed"),
    "better": ("Better", "listed"),
    "changed": ("Another verdict", "listed"),
    "moved": ("Moved", "listed"),
    "moved for the better": ("Moved for the better", "listed"),
    "only new": ("Only in the new report", "named"),
    "only old": ("Only in the old report", "named"),
    "another leg": ("The number of another leg", "counted"),
    "within chance": ("Another number, within chance", "counted"),
    "another number": ("Another number, without intervals", "counted"),
    "as before": ("As before", "counted"),
}

Entry = Mapping[str, Any]
BROKEN = ("failed", "error")
CLAIM_TEST = "::test_claim"


@dataclass(frozen=True)
class ComparedReportRow:
    """One row of both reports.

    ``name``     id of the claim, name of the point, node id of the test.
    ``model``    of both reports; "" for a test.
    ``title``    of a claim, in plain words.
    ``outcome``  of a claim in the new report, "" without one.
    ``before``   verdict and number in the old report, "" without one; ``after`` in the new report.
    ``reason``   of the new verdict, and what qualifies the numbers.
    """

    kind: RowKind
    name: str
    model: str
    title: str
    gate: bool
    outcome: str
    before: str
    after: str
    mark: Mark
    reason: str

    @property
    def what(self) -> str:
        """``EMAD-F1* on m: Saving 15 % of FLOPs …``; the ``*`` marks a gating claim."""
        star = "*" if self.gate and self.kind == "claim" else ""
        on = f" on {self.model}" if self.model else ""
        return f"{self.name}{star}{on}{self.title and ': '}{self.title}"

    @property
    def difference(self) -> str:
        """``survived, +0.20 % → falsified, +0.50 %``, one text if both agree."""
        return " → ".join(text or ABSENT for text in dict.fromkeys((self.before, self.after)))

    def to_row(self) -> dict[str, str]:
        """Texts by column, as tables print them."""
        return {key: getattr(self, key) for key in ("mark", "what", "before", "after", "reason")}


@dataclass(frozen=True)
class ReportComparison:
    """Comparison of two runs. ``old`` and ``new`` are labels of the runs; ``unlike`` lists differences of conditions.

    ``rows`` are in the order of their marks, worst first. ``tests`` counts the tests without a claim with equal
    outcomes; the others are among ``rows``.
    """

    old: str
    new: str
    unlike: list[str]
    rows: list[ComparedReportRow]
    tests: int

    @property
    def has_common_rows(self) -> bool:
        """Whether both reports share any row."""
        return self.tests > 0 or any(row.before and row.after for row in self.rows)


def compare_reports(old: Report, new: Report) -> ReportComparison:
    """Compare all claims and operating points, and the tests that changed; of a mark in the order of ``new``.

    Raises:
        BadReport: a report of an unfinished run; ``require_complete`` also names its file.
    """
    for name, report in (("old", old), ("new", new)):
        require_complete(report, name)
    pairs_of_points = list(_pair_rows(old["points"], new["points"], "digest", ("roles",)))
    alike = {before["digest"]: after["digest"] for before, after in pairs_of_points if before and after}
    rows = [
        _compare_claim(_with_points_of(before, after, alike), after)
        for before, after in _pair_rows(old["claims"], new["claims"], "id", ())
    ]
    rows += [_compare_point(*pair) for pair in pairs_of_points]
    pairs = list(_test_pairs(old, new))
    tests = [_compare_test(*pair) for pair in pairs if pair[0]["outcome"] != pair[1]["outcome"]]
    rows = sorted([*rows, *tests], key=lambda row: list(MARKS).index(row.mark))
    return ReportComparison(
        format_run_label(old), format_run_label(new), describe_setting_changes(old, new), rows, len(pairs) - len(tests)
    )


def changed_rows(old: Report, new: Report) -> list[dict[str, str]]:
    """Changed rows of ``compare_reports``, worst first, as a page prints them. Raises BadReport as it does."""
    return [row.to_row() for row in compare_reports(old, new).rows if row.mark != "as before"]


def require_complete(report: Report, where: object) -> None:
    """Raise BadReport unless the run finished."""
    if report["state"] != "complete":
        raise BadReport(
            f"{where}: state={report['state']!r}, but expected 'complete': let the run come to its end, or run again"
        )


# ---------------------------------------------------------------- change of one number


@dataclass(frozen=True)
class BoundedNumber:
    """An estimate with its interval; ``low`` and ``high`` are ±inf on an unknown side."""

    value: float
    low: float
    high: float

    @property
    def _inside(self) -> bool:
        return self.low <= self.value <= self.high


def significant_change_sign(old: BoundedNumber, new: BoundedNumber) -> int:
    """+1 if ``new`` is shown to be above ``old``, −1 if below, 0 if neither.

    MOVER, the method of variance estimates recovery (Zou & Donner 2008, Statistics in Medicine 27:1693; for proportions
    Newcombe 1998): with d = x₂ − x₁ and intervals [l₁, u₁] and [l₂, u₂] of one level,

        d − √((x₂ − l₂)² + (u₁ − x₁)²)  ≤  θ₂ − θ₁  ≤  d + √((u₂ − x₂)² + (x₁ − l₁)²)

    at that level, for independent estimates; bounds need not be symmetric. A number moved if this excludes 0: then each
    estimate lies outside the other's interval, though the intervals may overlap. Requiring disjoint intervals would
    find too few changes (Schenker & Gentleman 2001). Runs on the same documents are positively dependent, which makes
    the interval too wide: fewer moves are reported than there are, never more. Reports do not hold the value of each
    document, so no paired test is possible. Numbers are judged without correction: of 20 unchanged numbers in
    independent runs, one is expected to seem moved.

    An estimate outside its own interval (a jackknife's, about a less biased centre) has no distances to its bounds;
    then the intervals must be disjoint.
    """
    if not (old._inside and new._inside):
        return int(new.low > old.high) - int(new.high < old.low)
    apart = new.value - old.value
    low = apart - math.hypot(new.value - new.low, old.high - old.value)
    high = apart + math.hypot(new.high - new.value, old.value - old.low)
    return int(low > 0) - int(high < 0)


# ---------------------------------------------------------------- pairing of rows


def _pair_rows(
    old: Sequence[Entry], new: Sequence[Entry], name: str, roles: Sequence[str]
) -> Iterator[tuple[Entry | None, Entry | None]]:
    """Pair rows by name and model, else the only remaining rows of one name (or, for points, of one role)."""
    left = list(old)
    pairs: list[tuple[Entry | None, Entry]] = []
    for entry in new:
        same = next((o for o in left if (o[name], o.get("model")) == (entry[name], entry.get("model"))), None)
        if same is not None:
            left.remove(same)
        pairs.append((same, entry))
    for key in (name, *roles):
        lone = [entry for before, entry in pairs if before is None]
        for number, (before, entry) in enumerate(pairs):
            if before is None and entry.get(key) and _count(lone, key, entry) == _count(left, key, entry) == 1:
                same = next(o for o in left if o.get(key) == entry[key])
                left.remove(same)
                pairs[number] = (same, entry)
    yield from pairs
    yield from ((entry, None) for entry in left)


def _count(entries: Iterable[Entry], key: str, sample: Entry) -> int:
    return sum(entry.get(key) == sample[key] for entry in entries)


def _model(old: Entry | None, new: Entry | None) -> str:
    names = [shorten_path_name(str(entry.get("model") or ABSENT)) for entry in (old, new) if entry is not None]
    return " → ".join(dict.fromkeys(names))


# ---------------------------------------------------------------- claims


def _compare_claim(old: Entry | None, new: Entry | None) -> ComparedReportRow:
    row = new if new is not None else old
    assert row is not None
    gate = any(entry is not None and entry["gate"] for entry in (old, new))
    return ComparedReportRow(
        kind="claim",
        name=row["id"],
        model=_model(old, new),
        title=claim_title(row, load_register()),
        gate=gate,
        outcome="" if new is None else new["verdict"],
        before=_claim_text(old),
        after=_claim_text(new),
        mark=_claim_mark(old, new, gate),
        reason="; ".join(_claim_reasons(old, new)),
    )


def _claim_text(entry: Entry | None) -> str:
    if entry is None:
        return ""
    if entry["estimate"] is None:
        return str(entry["verdict"])
    return f"{entry['verdict']}, {number_format.format_quantity(entry['estimate'], entry['unit'], entry['interval'])}"


def _claim_mark(old: Entry | None, new: Entry | None, gate: bool) -> Mark:
    if old is None:
        return "only new"
    if new is None:
        return "worse" if gate and old["verdict"] == "survived" else "only old"
    before, after, move = old["verdict"], new["verdict"], _claim_move(old, new)
    if before == after:
        return move
    if before == "survived" or after == "falsified":
        return "worse"
    if after == "survived" or (before, after) == ("falsified", "inconclusive"):
        return "better"
    return move if move == "moved for worse" else "changed"


def _claim_move(old: Entry, new: Entry) -> Mark:
    """Move of the number that decides in ``new``."""
    if old["unit"] != new["unit"]:
        return "as before"
    before, after = (find_deciding_leg(entry) for entry in (old, new))
    if before is None or after is None or _identity(before) == _identity(after):
        return _move(old, new, _bad_side(old, new))
    same = _same_leg(old, after)
    return "another leg" if same is None else _move(same, after, _bad_side(new, old))


def _with_points_of(old: Entry | None, new: Entry | None, alike: Mapping[str, str]) -> Entry | None:
    """``old`` with legs about the points of ``new``, since other thresholds make another digest.

    ``alike``: digest of a listed point → that of the point with its role. A point that no table lists is the one of the
    only leg of its kind.
    """
    if old is None or new is None:
        return old
    olds, news = ([_identity(leg)[1:] for leg in entry["legs"]] for entry in (old, new))
    lone = {key: new["legs"][news.index(key)]["point"] for key in news if olds.count(key) == news.count(key) == 1}
    legs = [
        leg | {"point": alike.get(leg["point"], lone.get(_identity(leg)[1:], leg["point"])) if leg["point"] else ""}
        for leg in old["legs"]
    ]
    return {**old, "legs": legs}


def _same_leg(entry: Entry, leg: Entry) -> Entry | None:
    """The leg of ``entry`` that is about the same as ``leg``, in the same unit."""
    wanted = (_identity(leg), leg["unit"])
    return next((one for one in entry["legs"] if (_identity(one), one["unit"]) == wanted), None)


def _identity(leg: Entry) -> tuple[str, str, str]:
    """What a leg is about, apart from its unit."""
    return leg["point"], leg["kind"], leg["on"]


def _move(old: Entry, new: Entry, bad: int) -> Mark:
    """Move of a number. ``bad``: side on which larger values are worse, +1, −1, or 0 if unknown."""
    if None in (old["estimate"], new["estimate"]):
        return "as before"
    is_bounded = None not in (old["interval"], new["interval"])
    where = significant_change_sign(_estimate_bounds(old), _estimate_bounds(new)) if is_bounded else 0
    if where:
        return "moved" if bad == 0 else "moved for worse" if where == bad else "moved for the better"
    if (old["estimate"], old["interval"]) == (new["estimate"], new["interval"]):
        return "as before"
    return "within chance" if is_bounded else "another number"


def _estimate_bounds(entry: Entry) -> BoundedNumber:
    low, high = entry["interval"]
    return BoundedNumber(entry["estimate"], -math.inf if low is None else low, math.inf if high is None else high)


def _bad_side(*entries: Entry | None) -> int:
    """Side of the threshold on which a claim fails: +1 above, −1 below, 0 if no leg in this unit shows it."""
    for entry in entries:
        if entry is not None:
            legs = [leg for leg in (find_deciding_leg(entry), *entry["legs"]) if leg and leg["unit"] == entry["unit"]]
            for one in ({**entry, "outcome": entry["verdict"]}, *legs):
                if side := _bad_side_of_leg(one):
                    return side
    return 0


def _bad_side_of_leg(leg: Entry) -> int:
    """Side on which a leg fails: from its outcome and estimate, else from the smaller of its p-values."""
    if leg["estimate"] is None or leg["threshold"] is None or leg["estimate"] == leg["threshold"]:
        return 0
    side = 1 if leg["estimate"] > leg["threshold"] else -1
    if leg["outcome"] in ("falsified", "survived"):
        return side if leg["outcome"] == "falsified" else -side
    falsify, survive = leg.get("p_falsify"), leg.get("p_survive")  # a claim has none of its own
    if falsify is None or survive is None or falsify == survive:
        return 0
    return side if falsify < survive else -side


def _claim_reasons(old: Entry | None, new: Entry | None) -> Iterator[str]:
    if old is None or new is None:
        return
    if old["gate"] != new["gate"]:
        yield "gates only in the new report" if new["gate"] else "gated only in the old report"
    if old["verdict"] != new["verdict"] and (why := new.get("refused") or new["reason"]):
        yield str(why).partition("\n")[0]
    if old["unit"] != new["unit"]:
        if None in (old["estimate"], new["estimate"]):
            return  # a row without a number has no quantity
        yield f"another quantity: {old['unit']} → {new['unit']}"
        return
    if None not in (old["threshold"], new["threshold"]) and old["threshold"] != new["threshold"]:
        yield f"another threshold: {_threshold(old)} → {_threshold(new)}"
    before, after = (find_deciding_leg(entry) for entry in (old, new))
    if before and after and _identity(before) != _identity(after):
        same = _same_leg(old, after)
        was = "" if same is None else f" (before {claim_rows([{**old, **_numbers_of(same)}])[0]['estimate'].text})"
        yield f"another leg decides: {before['name']} → {after['name']}{was}"


def _numbers_of(leg: Entry) -> dict[str, Any]:
    return {key: leg[key] for key in ("estimate", "interval", "n", "unit")}


def _threshold(entry: Entry) -> str:
    return claim_rows([entry])[0]["threshold"].text


# ---------------------------------------------------------------- operating points


def _compare_point(old: Entry | None, new: Entry | None) -> ComparedReportRow:
    """Compare a point by its rise of perplexity, its only number with an interval; other differences are the reason."""
    row = new if new is not None else old
    assert row is not None
    cells = [{} if entry is None else operating_point_rows([entry])[0] for entry in (old, new)]
    before, after = (f"perplexity {cell['rise [95 %]'].text}" if cell else "" for cell in cells)
    differing = [
        column
        for column, cell in cells[1].items()
        if column in cells[0] and column not in ("model", "rise [95 %]") and cell.text != cells[0][column].text
    ]
    mark: Mark = "only new" if old is None else "only old"
    if old is not None and new is not None:
        mark = _move(_rise_estimate(old), _rise_estimate(new), 1)
    reasons = [f"{column} {_cell_difference(cells[0][column].text, cells[1][column].text)}" for column in differing]
    return ComparedReportRow(
        kind="point",
        name=row["name"],
        model=_model(old, new),
        title="",
        gate=False,
        outcome="",
        before=before,
        after=after,
        mark="another number" if differing and mark == "as before" else mark,
        reason="; ".join(reasons),
    )


def _cell_difference(old: str, new: str) -> str:
    """``new, before old``; for cells with equally many lines, only the lines that differ."""
    lines = [text.split("\n") for text in (old, new)]
    if len(lines[0]) == len(lines[1]):
        differ = [place for place, (before, after) in enumerate(zip(*lines, strict=True)) if before != after]
        lines = [[side[place] for place in differ] for side in lines]
    return f"{', '.join(lines[1])} (before {', '.join(lines[0])})"


def _rise_estimate(entry: Entry) -> Entry:
    return {"estimate": entry.get("perplexity_rise"), "interval": entry.get("interval")}


# ---------------------------------------------------------------- tests


def _test_pairs(old: Report, new: Report) -> Iterator[tuple[Entry, Entry]]:
    """Pairs of shipped tests without a claim; the verdicts of claims are rows already."""
    tests = [entry for entry in old["tests"] if entry["shipped"] and CLAIM_TEST not in entry["shipped"]]
    before = {entry["nodeid"]: entry for entry in tests}
    yield from ((before[entry["nodeid"]], entry) for entry in new["tests"] if entry["nodeid"] in before)


def _compare_test(old: Entry, new: Entry) -> ComparedReportRow:
    return ComparedReportRow(
        kind="test",
        name=new["nodeid"],
        model="",
        title="",
        gate=True,
        outcome="",
        before=old["outcome"],
        after=new["outcome"],
        mark=_test_mark(old, new),
        reason=str(new["reason"]).partition("\n")[0],
    )


def _test_mark(old: Entry, new: Entry) -> Mark:
    """Mark of a test: worse if it fails now, or had passed and is now undecided with its premise present."""
    if new["outcome"] in BROKEN:
        return "changed" if old["outcome"] in BROKEN else "worse"
    if new["outcome"] in ("passed", "xpassed"):
        return "better"
    return "worse" if old["outcome"] == "passed" and new["kind"] != "not applicable" else "changed"
