"""Provenance of a result: versions, commit, machine, and the decoder that was judged.

Standard library and plain data; torch is read only if something else has imported it.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pytest_emad.extensions import collect_extension_reported_provenance
from pytest_emad.measurements.study import Study
from pytest_emad.report.deselection import HOME

DISTRIBUTION = "pytest-emad"
NEWEST_TESTED = {"torch": "2.13", "transformers": "5.24", "numpy": "2.4", "hypothesis": "6.170", "pytest": "9.2"}
REPORTED_PACKAGES = ("torch", "transformers", "numpy", "scipy", "scikit-learn", "hypothesis", "pytest")


def collect_provenance(study: Study) -> dict[str, Any]:
    """Provenance of a run of ``study`` in this process. Built-in types only."""
    return (
        {
            "versions": {name: installed_version(name) for name in (DISTRIBUTION, *REPORTED_PACKAGES)}
            | {"python": platform.python_version()},
            "commit": package_git_commit(),
            "platform": platform.platform(),
            "machine": platform.processor() or platform.machine(),
            "torch_threads": torch_thread_count(),
            "device": study.device,
            "dtype": study.dtype,
            "seed": study.seed,
        }
        | ({} if study.exit is None else {"exit": study.exit_file_digest})
        | ({"extensions": added} if (added := collect_extension_reported_provenance()) else {})
    )


def describe_tested_project(root: Path) -> dict[str, Any]:
    """The tested project: its root, and its commit if it is a repository other than ours."""
    return {"root": str(root), "commit": None if root.resolve().is_relative_to(HOME) else git_describe(root)}


def package_git_commit() -> str | None:
    """Commit of pytest-emad, if it runs from a checkout."""
    return git_describe(HOME) if (HOME / ".git").exists() else None


def torch_thread_count() -> int | None:
    """Intra-op threads of torch in this process; None without torch, e.g. on an xdist controller."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def installed_version(distribution: str) -> str | None:
    """Version in the distribution's metadata; None if it is not installed."""
    from importlib import metadata  # slow, and `emad --help` needs no version

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def describe_untested_versions() -> str:
    """Libraries that are newer than the newest ones that these suites were run with; "" without any."""
    from packaging.version import Version  # only for a run of the suites

    found = {name: version for name in NEWEST_TESTED if (version := installed_version(name)) is not None}
    newer = [
        f"{name} {version} (tested up to {NEWEST_TESTED[name]})"
        for name, version in found.items()
        if Version(version).release[:2] > Version(NEWEST_TESTED[name]).release
    ]
    return ", ".join(newer)


def git_describe(folder: Path) -> str | None:
    """The commit of a checkout, ``-dirty`` if the tree differs from it; None without a repository or git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None


ANSWERED, DECLINED, NONE = "answered", "declined", "none"
PROVIDER_OUTCOMES = (ANSWERED, DECLINED, NONE)
FEATURES = "features"  # feature (anything beyond greedy requests at full depth) → [answered, declined]
SERVED = "served"  # a server's description of its model: path, model, window, vocabulary
# of a server: requested completions, and repeated ones, with their number by reason
REQUESTS, RETRIES, RETRY_REASONS = "requests", "retries", "retry_reasons"
EXITS, SAMPLING, SESSIONS, FORCED_DEPTHS = "exits", "sampling", "sessions", "forced depths"
LOG_PROBS, OWN_RULE = "log-probabilities", "a rule of its own"
STREAMING, CONCURRENCY = "streaming", "requests at once"


SERVER_COUNTS = (REQUESTS, RETRIES, RETRY_REASONS)


def merge_provider_counts(parts: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Sum the request counts of several processes."""
    merged: dict[str, dict[str, Any]] = {}
    for part in parts:
        for provider in part:
            empty = {**dict.fromkeys(PROVIDER_OUTCOMES, 0), FEATURES: {}}
            entry = merged.setdefault(
                provider["plugin"],
                {name: value for name, value in provider.items() if name not in SERVER_COUNTS} | empty,
            )
            for what in PROVIDER_OUTCOMES:
                entry[what] += provider[what]
            for what in {REQUESTS, RETRIES} & provider.keys():
                entry[what] = entry.get(what, 0) + provider[what]
            if SERVED in provider:  # the controller of several processes queries no server
                entry[SERVED] = provider[SERVED]
            if RETRY_REASONS in provider:
                entry[RETRY_REASONS] = dict(Counter(entry.get(RETRY_REASONS, {})) + Counter(provider[RETRY_REASONS]))
            for feature, counts in provider.get(FEATURES, {}).items():
                before = entry[FEATURES].get(feature, (0, 0))
                entry[FEATURES][feature] = [one + other for one, other in zip(before, counts, strict=True)]
    return list(merged.values())


def format_request_counts(provider: Mapping[str, Any]) -> str:
    """``412 requests, 3 retried (2 status 503, 1 connection reset); it serves …``, of a server."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(provider.get(RETRY_REASONS, {}).items()))
    facts = [f"{name} {value}" for name, value in provider.get(SERVED, {}).items() if name != "path"]
    served = f"; it serves {', '.join(facts)}" if facts else ""
    sent_again = f"{provider.get(RETRIES, 0)} retried" + (f" ({reasons})" if reasons else "")
    return f"{provider[REQUESTS]} requests, {sent_again}{served}"


def declined_features(providers: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Features that the foreign providers declined each time.

    A feature that is answered once is offered, so that a decoder cannot decline only its hard cases.
    """
    features = [provider[FEATURES] for provider in providers if provider["foreign"]]
    answered = {name for each in features for name, (answers, _) in each.items() if answers}
    return frozenset(name for each in features for name in each) - answered


def offered_features(providers: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Features that the judged decoder answered at least once; the reference decoder offers sessions and exits."""
    judged = [provider for provider in providers if provider[ANSWERED]]
    if judged and not any(provider["foreign"] for provider in judged):
        return frozenset({EXITS, SAMPLING, SESSIONS, FORCED_DEPTHS, LOG_PROBS})
    features = [provider[FEATURES] for provider in judged if provider["foreign"]]
    return frozenset(name for each in features for name, (answers, _) in each.items() if answers)


def format_judged_decoder_names(providers: Iterable[Mapping[str, Any]]) -> str:
    """Name of the decoder under test: the providers that answered, or the first provider in line."""
    providers = list(providers)
    names = [provider["name"] for provider in providers if provider[ANSWERED] or provider[DECLINED]]
    return " and ".join(names or [provider["name"] for provider in providers[:1]])
