"""Read ``report.json``: one object per run, checked before display.

Schema 1 has the results:

    models      [{"name", facts …}]                        settings    {option: value}
    points      [{"name", …}], see ``tables.operating_point_rows``   goldens     [{"id", "outcome"}]
    claims      [``Verdict.to_json()``]                    notes       [sentence]
    tables      [{"title", "model", "rows": [{column: value}], "figure"?: what ``plots`` draws of the rows}]
    provenance  {versions, commit, platform, device, …}

Schema 2 adds the conditions of the results, from the first test on:

    state       ``running`` | ``complete`` | ``interrupted`` | ``usage error``
    run         {"started" UTC, "duration_s", "command", "addopts" of the environment, "exit_status", "failures" of the
                run as a whole, "asked": the selected shipped tests, "claims_file" with its hash, "project" with its
                root and commit, "replay": {"folder", "arguments" that decide a test, "left_out", "environment"}}
    decoder     {"name", "foreign", "providers": [provider with its counts], "overlooked": [provider not loaded]}; a
                server has "requests", "retries" with "retry_reasons" where some were sent again, and "served": what it
                says of its model
    tests       [{"nodeid", "shipped" name or null, "outcome", "kind", "reason", "duration_s"}] as pytest reported;
                "claim" of a test of one;
                "attempts": [{"outcome", "reason"}] as each one ended, whatever a mark, hook or plugin made of it;
                "shown": how many tables, points and notes the first attempt recorded; "features": those of a request
                that the decoder declined as a whole
    audits      [{"test", "check", "passed", "detail", "n", "ties"}], "attempt" if it is not the first;
                "sample": {"point", "row", "tokens", "first", "depths", "forced"} of a failed one, its shortest input
    repeats     [{"id", "model", "verdict", "gate", "fails", "test", "attempt", "alike"}]: further verdicts of claims
                that have one, which decide nothing; "alike": the same fact, recorded once more
    deselected  [{"nodeid", "shipped", "claim"? of the test, or null, "why"}]
    waivers     [{"of", "reason", "needed"}]
    known       [{"claim", "model", "expected", "changed", "why"}]: the verdicts beside the record
    claims      may say "refused": why the decoder, not the model or the text, left the claim undecided; "title": the
                claim in plain words; "good": which way its estimate is better, ``lower``, ``higher`` or neither; "why":
                what would decide an open row, else its reason; "enough": about how much of what is counted would;
                "test": the node id of the test that gave it; "fails": whether gate and options make it fail that test.
                Legs have "good", "remedy" and "enough"

Other keys are kept and not shown. This module needs no model, torch or extra.

The start mark guards against stale reports. A finished report stays until another run writes its own. A process that
dies while importing writes none, and a later reader would mistake the older report for its result. So each run writes a
mark next to the report, and removes it at a regular end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from emad_ref.errors import BadArgument, EmadError, is_number, is_whole
from emad_ref.files import (
    BadFile,
    is_file,
    parse_json,
    read_bytes,
    read_text,
    remove_file,
    resolve_path,
    write_atomically,
)
from pytest_emad.statistics.verdicts import OUTCOMES, Good

SCHEMA = 2
READABLE_SCHEMAS = (1, SCHEMA)
REPORT_FILE = "report.json"

State = Literal["running", "complete", "interrupted", "usage error"]
STATES: tuple[State, ...] = get_args(State)
# outcomes of a test; a later one overrules an earlier one
Outcome = Literal["not reported", "passed", "xpassed", "skipped", "xfailed", "failed", "error"]
TEST_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
# kinds of a skip: absent premise; declined by the decoder; skipped by another hook or mark
SkipKind = Literal["", "not applicable", "refused", "left out"]

Report = Mapping[str, Any]


class BadReport(EmadError):
    """A report that is missing, foreign or damaged; the message names the file and the place in it."""


@dataclass(frozen=True)
class FieldFormatCheck:
    """Form of a value: in words, and as a check."""

    words: str
    fits: Callable[[Any], bool]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(part is None or is_number(part) for part in value)


def _is_interval(value: Any) -> bool:
    return _is_pair(value) and (None in value or value[0] <= value[1])


TEXT = FieldFormatCheck("a text", lambda value: isinstance(value, str))
TEXTS = FieldFormatCheck(
    "a list of texts", lambda value: isinstance(value, list) and all(isinstance(part, str) for part in value)
)
FLAG = FieldFormatCheck("true or false", lambda value: isinstance(value, bool))
COUNT = FieldFormatCheck("a whole number ≥ 0", lambda value: is_whole(value) and value >= 0)
AMOUNT = FieldFormatCheck("a number ≥ 0, or null", lambda value: value is None or (is_number(value) and value >= 0))
PROBABILITY = FieldFormatCheck("a number from 0 to 1, or null", lambda value: AMOUNT.fits(value) and (value or 0) <= 1)
POSITIVE = FieldFormatCheck("a number > 0, or null", lambda value: value is None or (is_number(value) and value > 0))
NUMBER = FieldFormatCheck("a number or null", lambda value: value is None or is_number(value))
INTERVAL = FieldFormatCheck("[low, high], low ≤ high, or null", lambda value: value is None or _is_interval(value))
STATE = FieldFormatCheck(f"one of {', '.join(STATES)}", lambda value: value in STATES)
TEST_OUTCOME = FieldFormatCheck(f"one of {', '.join(TEST_OUTCOMES)}", lambda value: value in TEST_OUTCOMES)
KIND = FieldFormatCheck("a kind of skip, or nothing", lambda value: value in get_args(SkipKind))
TEXT_OR_NULL = FieldFormatCheck("a text or null", lambda value: value is None or isinstance(value, str))
FLAG_OR_NULL = FieldFormatCheck("true, false or null", lambda value: value is None or isinstance(value, bool))
COUNT_OR_NULL = FieldFormatCheck("a whole number ≥ 0, or null", lambda value: value is None or COUNT.fits(value))
GOOD = FieldFormatCheck("lower, higher, or nothing", lambda value: value in get_args(Good))
OUTCOME = FieldFormatCheck(f"one of {', '.join(OUTCOMES)}", lambda value: value in OUTCOMES)
ROWS = FieldFormatCheck(
    "a list of objects that share their keys",
    lambda value: (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(row, dict) and row and list(row) == list(value[0]) for row in value)
    ),
)
LIST = FieldFormatCheck("a list", lambda value: isinstance(value, list))
OBJECT = FieldFormatCheck("an object", lambda value: isinstance(value, dict))
OBJECT_OR_NULL = FieldFormatCheck("an object or null", lambda value: value is None or isinstance(value, dict))
SCORES = FieldFormatCheck(
    "task → [reference, candidate], or null",
    lambda value: value is None or (isinstance(value, dict) and all(map(_is_pair, value.values()))),
)
REASONS = FieldFormatCheck(
    "task → reason, or null",
    lambda value: value is None or (isinstance(value, dict) and all(isinstance(why, str) for why in value.values())),
)
RATIOS = FieldFormatCheck(
    "batch size → ratio, or null",
    lambda value: value is None or (isinstance(value, dict) and all(map(is_number, value.values()))),
)
ATTEMPTS = FieldFormatCheck(
    "a list of {outcome, reason}",
    lambda value: (
        isinstance(value, list)
        and all(isinstance(each, dict) and TEST_OUTCOME.fits(each.get("outcome")) for each in value)
        and all(TEXT.fits(each.get("reason")) for each in value)
    ),
)
FEATURES = FieldFormatCheck(
    "feature → [answered, declined]",
    lambda value: (
        isinstance(value, dict)
        and all(isinstance(pair, list) and len(pair) == 2 and all(map(COUNT.fits, pair)) for pair in value.values())
    ),
)
COUNTS = FieldFormatCheck(
    "reason → a whole number", lambda value: isinstance(value, dict) and all(map(COUNT.fits, value.values()))
)

PROMPT_LENGTHS = "prompt_lengths"  # the only list in ``live``
LIVE = FieldFormatCheck(
    f"name → a whole number ≥ 0, and {PROMPT_LENGTHS} → a list of them",
    lambda value: (
        isinstance(value, dict)
        and all(
            isinstance(each, list) and all(map(COUNT.fits, each)) if name == PROMPT_LENGTHS else COUNT.fits(each)
            for name, each in value.items()
        )
    ),
)

PARTS: dict[str, FieldFormatCheck] = dict.fromkeys(
    ("models", "points", "claims", "tables", "goldens", "notes"), LIST
) | {
    "settings": OBJECT,
    "provenance": OBJECT,
}
SCHEMA_2_PARTS: dict[str, FieldFormatCheck] = dict.fromkeys(("tests", "audits", "deselected", "waivers"), LIST) | {
    "state": STATE,
    "run": OBJECT,
    "decoder": OBJECT,
}
OPTIONAL_PARTS = ("repeats",)  # parts of schema 2 that reports of earlier versions lack
PARTS_OF_SCHEMA = {1: PARTS, 2: PARTS | SCHEMA_2_PARTS}
ESTIMATE_KEYS = {
    "estimate": NUMBER,
    "interval": INTERVAL,
    "n": COUNT,
    "threshold": NUMBER,
    "unit": TEXT,
    "reason": TEXT,
}
LEG = {"name": TEXT, "outcome": OUTCOME, **ESTIMATE_KEYS, "p_falsify": PROBABILITY, "p_survive": PROBABILITY}
# part → keys that each of its entries must have
REQUIRED_KEYS: dict[str, dict[str, FieldFormatCheck]] = {
    "models": {"name": TEXT},
    "points": {"name": TEXT},
    "claims": {"id": TEXT, "model": TEXT, "verdict": OUTCOME, **ESTIMATE_KEYS, "gate": FLAG, "legs": LIST},
    "tables": {"title": TEXT, "model": TEXT, "rows": ROWS},
    "goldens": {"id": TEXT, "outcome": TEXT},
    "tests": {
        "nodeid": TEXT,
        "shipped": TEXT_OR_NULL,
        "outcome": TEST_OUTCOME,
        "kind": KIND,
        "reason": TEXT,
        "duration_s": AMOUNT,
    },
    "audits": {"test": TEXT, "check": TEXT, "passed": FLAG_OR_NULL, "detail": TEXT, "n": COUNT, "ties": COUNT},
    "deselected": {"nodeid": TEXT, "shipped": TEXT_OR_NULL, "why": TEXT},
    "waivers": {"of": TEXT, "reason": TEXT, "needed": FLAG},
    "repeats": {
        "id": TEXT,
        "model": TEXT,
        "verdict": OUTCOME,
        "fails": FLAG,
        "test": TEXT,
        "attempt": COUNT,
        "alike": FLAG,
    },
}
# part → keys of a part that is one object
OBJECT_KEYS: dict[str, dict[str, FieldFormatCheck]] = {
    "run": {
        "started": TEXT,
        "duration_s": AMOUNT,
        "command": TEXTS,
        "addopts": TEXT,
        "exit_status": COUNT_OR_NULL,
        "failures": TEXTS,
        "asked": TEXTS,
        "claims_file": OBJECT_OR_NULL,
        "project": OBJECT,
    },
    "decoder": {"name": TEXT, "foreign": FLAG, "providers": LIST, "overlooked": TEXTS},
}
PROVIDER = {"name": TEXT, "plugin": TEXT, "foreign": FLAG, "answered": COUNT, "declined": COUNT, "none": COUNT}
# optional keys of a provider
PROVIDER_COUNTS = {"features": FEATURES, "requests": COUNT, "retries": COUNT, "retry_reasons": COUNTS, "served": OBJECT}
# optional settings for failures and display of a run
SETTINGS = {
    "models": TEXTS,
    "only": TEXTS,
    "budget": TEXT,
    "gate": TEXT,
    "gate_claims": TEXTS,
    "inconclusive": TEXT,
    "tier": TEXT_OR_NULL,
    "expect_decoder": TEXT_OR_NULL,
}
# part → optional keys of an entry
OPTIONAL_KEYS: dict[str, dict[str, FieldFormatCheck]] = {
    "models": {"vocabulary": COUNT_OR_NULL},
    "deselected": {"claim": TEXT_OR_NULL},
    "points": dict.fromkeys(
        (
            *("mean_depth", "depth_p50", "depth_p90", "gross_reduction", "net_reduction", "end_to_end_reduction"),
            "perplexity_rise",
        ),
        NUMBER,
    )
    | {
        "perplexity_reference": POSITIVE,
        "perplexity": POSITIVE,
        "model": TEXT,
        "roles": TEXTS,
        "interval": INTERVAL,
        "accuracy": SCORES,
        "not_counted": REASONS,
        "time_ratio": RATIOS,
    },
    "tables": {"figure": TEXT},
    "claims": {
        "refused": TEXT,
        "title": TEXT,
        "good": GOOD,
        "why": TEXT,
        "enough": COUNT_OR_NULL,
        "test": TEXT,
        "fails": FLAG,
    },
    "tests": {"claim": TEXT, "attempts": ATTEMPTS, "shown": COUNT, "features": TEXTS},
    "audits": {"attempt": COUNT, "model": TEXT, "live": LIVE, "sample": OBJECT},
}


def read_report(place: Path) -> Report:
    """Read the report of the run that wrote into the folder ``place``, or the report in the file ``place``.

    Raises:
        BadReport: no such folder or file; no JSON; no report of this plugin; another schema; an entry that does not
            match its schema. The message names the place.
    """
    path = place if is_file(place) else place / REPORT_FILE
    try:
        text = read_bytes(path, "report")
    except BadFile as error:
        raise BadReport(
            f"{path} cannot be read ({error.reason}); name a folder that `pytest --emad-report DIR` wrote"
        ) from error
    try:
        data = parse_json(text)
    except ValueError as error:
        raise BadReport(f"{path} is no JSON text ({error}); the file is damaged, run the suites again") from error
    _require_ours(path, data)
    optional = {part: LIST for part in OPTIONAL_PARTS if part in data}
    for part, form in (PARTS_OF_SCHEMA[data["schema"]] | optional).items():
        _require(path, "", data, {part: form})
        if form is LIST:
            for number, entry in enumerate(data[part]):
                _require_entry(path, part, number, entry)
        _require(path, part, data[part], OBJECT_KEYS.get(part, {}))
    _require(path, "settings", data["settings"], _present_forms(SETTINGS, data["settings"]))
    for number, provider in enumerate(data["decoder"]["providers"] if data["schema"] > 1 else ()):
        _require_object(path, f"decoder.providers[{number}]", provider)
        _require(path, f"decoder.providers[{number}]", provider, PROVIDER | _present_forms(PROVIDER_COUNTS, provider))
    return dict(data)


def read_reports(folders: Sequence[Path]) -> list[Report]:
    """One report per folder, in order.

    Raises:
        BadArgument: no folder, or one twice.
        BadReport: as ``read_report``.
    """
    places = [resolve_path(folder) for folder in folders]
    if not places or len(set(places)) < len(places):
        raise BadArgument("folders", [str(folder) for folder in folders], "at least one, each once")
    return [read_report(folder) for folder in folders]


def _require_ours(path: Path, data: Any) -> None:
    if not isinstance(data, dict) or "schema" not in data or not set(PARTS) & set(data):
        content = ", ".join(list(data)[:6]) if isinstance(data, dict) else type(data).__name__
        raise BadReport(f"{path} is not a report of pytest-emad: expected schema, {', '.join(PARTS)}; found {content}")
    if not is_whole(data["schema"]) or data["schema"] not in READABLE_SCHEMAS:
        raise BadReport(
            f"{path}: schema={data['schema']!r}, but this version reads "
            f"{' and '.join(map(str, READABLE_SCHEMAS))}; use the "
            "version that wrote it (provenance names it), or run the suites again"
        )


def _require_entry(path: Path, part: str, number: int, entry: Any) -> None:
    where = f"{part}[{number}]"
    if part == "notes":
        _require(path, part, {number: entry}, {number: TEXT})
        return
    _require_object(path, where, entry)
    _require(path, where, entry, REQUIRED_KEYS[part])
    _require(path, where, entry, _present_forms(OPTIONAL_KEYS.get(part, {}), entry))
    for place, leg in enumerate(entry["legs"]) if part == "claims" else ():
        _require_object(path, f"{where}.legs[{place}]", leg)
        _require(path, f"{where}.legs[{place}]", leg, LEG)
    if "figure" in entry and part == "tables":
        from pytest_emad.report.figures import require_drawable  # not imported at the start of every pytest

        try:
            require_drawable(entry["figure"], entry["rows"])
        except BadArgument as error:
            raise BadReport(f"{path}: {where}: {error}") from error


def _present_forms(forms: Mapping[str, FieldFormatCheck], entry: Mapping[str, Any]) -> dict[str, FieldFormatCheck]:
    return {key: form for key, form in forms.items() if key in entry}


def _require_object(path: Path, where: str, entry: Any) -> None:
    if not isinstance(entry, dict):
        raise BadReport(f"{path}: {where}={_short_repr(entry)}, but expected an object")


def _require(path: Path, where: str, entry: Mapping[Any, Any], forms: Mapping[Any, FieldFormatCheck]) -> None:
    for key, form in forms.items():
        name = f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}".removeprefix(".")
        if key not in entry:
            raise BadReport(f"{path}: {name} is missing, but expected {form.words}")
        if not form.fits(entry[key]):
            raise BadReport(f"{path}: {name}={_short_repr(entry[key])}, but expected {form.words}")


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


STARTED_FILE = "run.begun"  # holds when


def mark_run_started(folder: Path) -> None:
    """Write the start mark, if ``folder`` holds a report that could be mistaken for the new one."""
    if (folder / REPORT_FILE).is_file():
        write_atomically(folder / STARTED_FILE, f"{datetime.now(UTC).isoformat(timespec='seconds')}\n", "--emad-report")


def remove_run_start_mark(folder: Path) -> None:
    """Remove the start mark."""
    if (folder / STARTED_FILE).exists():
        remove_file(folder / STARTED_FILE, "--emad-report")


def unfinished_run_start_time(report: Path) -> str:
    """Start time of a run that never finished; "" without one. ``report``: the file or its folder."""
    note = (report if report.is_dir() else report.parent) / STARTED_FILE
    return read_text(note, "report").strip() if note.is_file() else ""
