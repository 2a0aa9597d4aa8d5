"""What a run is called by people, and in what two runs differ besides what was found: their settings and surroundings.

A comparison is like for like where nothing but the decoder, the model or the commit differs, which the labels name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from emad_ref.report.reading import Report

# options that say whom a run judges, where it writes and what fails it, not how anything is measured
NOT_MEASURING = frozenset(
    {"models", "backend", "decoder", "decoder_timeout", "expect_decoder", "waive", "report", "golden", "update_golden"}
    | {"process_timeout", "gate", "gate_claims", "inconclusive", "require"}
)
SURROUNDINGS = ("platform", "machine", "torch_threads", "extensions")
RELEASE = re.compile(r"hook of plugin \S+ \((?:.*, )?(.+)\)")  # of ``hook of plugin mylib (mylib.hooks, mylib 1.2)``
NOT_SET = "not set"
SHORT = 7  # hexadecimal digits of a commit


def label(report: Report) -> str:
    """``emad-tiny · mylib 1.2 · myproject 3f2a91c · 2026-11-22 16:58``: models, decoder, commit, begin, where known."""
    models = [short_name(model["name"]) for model in report["models"]]
    named = ", ".join(models[:2]) + (f" and {len(models) - 2} more" if len(models) > 2 else "")
    parts = [named or "no model"]
    if report["schema"] > 1:
        parts.append(_decoder(report["decoder"]["name"]))
    parts.append(_commit(report))
    if report["schema"] > 1:
        parts.append(report["run"]["started"][: len("2026-11-22T16:58")].replace("T", " "))
    return " · ".join(part for part in parts if part)


def short_name(name: str) -> str:
    """The last part of a folder's path; a name of the hub as it stands."""
    return PurePath(name).name if PurePath(name).is_absolute() else name


def _decoder(name: str) -> str:
    release = RELEASE.fullmatch(name)
    return release[1] if release else short_name(name.removeprefix("hook of ").removesuffix(" (ours)"))


def _commit(report: Report) -> str:
    """Of the project that was tested with us, else ours, else our version."""
    project = report["run"]["project"] if report["schema"] > 1 else {}
    if project.get("commit"):
        return f"{PurePath(str(project.get('root') or '')).name} {_short(str(project['commit']))}".strip()
    ours = report["provenance"].get("commit")
    version = _versions(report).get("pytest-emad")
    return f"pytest-emad {_short(str(ours)) if ours else version}" if ours or version else ""


def _versions(report: Report) -> Mapping[str, Any]:
    """Of packages; none where the report says it in another form."""
    versions = report["provenance"].get("versions")
    return versions if isinstance(versions, dict) else {}


def _short(commit: str) -> str:
    digits, dash, dirty = commit.partition("-")
    return f"{digits[:SHORT]}{dash}{dirty}"


def unlike(old: Report, new: Report) -> list[str]:
    """One phrase for everything that makes the comparison unlike, ``seed 0 → 1``; what measures stands first."""
    return [
        f"{name} {_text(before)} → {_text(after)}"
        for name, before, after in _facts(old, new)
        if before is not None and after is not None and before != after
    ] + _given_once(old, new)


def _facts(old: Report, new: Report) -> Iterator[tuple[str, Any, Any]]:
    """(name, old, new), None where a report of an earlier version does not say."""
    for name in dict.fromkeys([*old["settings"], *new["settings"]]):
        if name not in NOT_MEASURING:
            yield name, _setting(old, name), _setting(new, name)
    before, after = (_asked(report) for report in (old, new))
    yield "asked", before, after
    before, after = (_claims_file(report) for report in (old, new))
    yield "claims file", before, after
    prints = [
        {model["name"]: str(model["fingerprint"])[:SHORT] for model in report["models"] if model.get("fingerprint")}
        for report in (old, new)
    ]
    for name in prints[0]:
        yield f"weights of {short_name(name)}", prints[0][name], prints[1].get(name)
    releases = [_versions(report) for report in (old, new)]
    for name in dict.fromkeys([*releases[0], *releases[1]]):
        yield name, releases[0].get(name), releases[1].get(name)
    for name in SURROUNDINGS:
        yield name.replace("_", " "), old["provenance"].get(name), new["provenance"].get(name)


def _setting(report: Report, name: str) -> Any:
    """None where the report knows no such option; an option that was not given is a value like others."""
    return (NOT_SET if report["settings"][name] is None else report["settings"][name]) if _has(report, name) else None


def _has(report: Report, name: str) -> bool:
    return name in report["settings"]


def _asked(report: Report) -> Any:
    return None if report["schema"] == 1 else report["run"]["asked"]


def _claims_file(report: Report) -> Any:
    """The beginning of its hash."""
    if report["schema"] == 1:
        return None
    file: Mapping[str, Any] | None = report["run"]["claims_file"]
    return NOT_SET if file is None else str(file.get("sha256"))[:SHORT]


def _given_once(old: Report, new: Report) -> list[str]:
    names = [name for name in old["settings"] | new["settings"] if name not in NOT_MEASURING]
    once = [name for name in names if _has(old, name) != _has(new, name)]
    return [f"only one of them knows {', '.join(once)}"] if once else []


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or NOT_SET
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
