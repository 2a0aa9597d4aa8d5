"""From the command line and the ini file to ``Settings``, once per run, and to the register that it names.

Precedence: command line, then ini file, then default. Relative paths start where the command was typed, or beside the
ini file that names them. Every value is validated before a model is loaded; a bad one is a ``pytest.UsageError`` (exit
status 4).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from emad_ref.errors import BadArgument, nearest
from emad_ref.evidence.pair.names import pair_asked
from emad_ref.evidence.study import BUDGETS, Study
from emad_ref.models.anatomy import BACKENDS, FAST
from emad_ref.verdict.choosing import chosen
from emad_ref.verdict.claims import Claim, load_register
from emad_ref.verdict.gating import OF_THE_METHOD, Gating
from pytest_emad.options.asked import Settings
from pytest_emad.options.table import OPTIONS, Option

_SETTINGS = pytest.StashKey[Settings]()
_REGISTER = pytest.StashKey[dict[str, Claim]]()


def settings(config: pytest.Config) -> Settings:
    """The run's settings, built and validated on the first call.

    Raises:
        pytest.UsageError: a value that cannot be accepted; the message names option, value, expectation and remedy.
    """
    if _SETTINGS not in config.stash:
        try:
            config.stash[_SETTINGS] = _build(config)
        except BadArgument as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_SETTINGS]


def register(config: pytest.Config) -> dict[str, Claim]:
    """The claims register with ``--emad-claims`` applied. Raises pytest.UsageError if that file cannot be accepted."""
    if _REGISTER not in config.stash:
        try:
            config.stash[_REGISTER] = _gated(load_register(settings(config).claims), settings(config).gating.gate)
        except BadArgument as error:
            raise pytest.UsageError(f"--emad-claims: {error}") from error
    return config.stash[_REGISTER]


def _gated(rows: dict[str, Claim], gate: str) -> dict[str, Claim]:
    """``rows`` as they gate under ``gate``; what ``--emad-gate-claims`` names gates in any case."""
    if gate != "decoder":
        return rows
    return {name: replace(row, gate=row.gate and name not in OF_THE_METHOD) for name, row in rows.items()}


def _build(config: pytest.Config) -> Settings:
    given = {option.field: _value(config, option) for option in OPTIONS}
    given["budget"] = BUDGETS[given["budget"]]
    given["walk"] = given["backend"] if given["backend"] in BACKENDS else FAST
    given["models"] = models = given.pop("model")
    named = (given.pop("pair"), given.pop("small_model"), given.pop("large_model"))
    given["pair"], given["pair_named"] = pair_asked(*named, models, "--emad-"), any(named)
    if len(set(models)) != len(models):
        raise BadArgument("--emad-model", models, "each model once")
    waived = [of for of, _ in given["waive"]]
    if len(set(waived)) != len(waived):
        raise BadArgument("--emad-waive", waived, "each name once")
    report = given["report"]
    given["journal"] = None if report is None else report / "journal"
    patterns = frozenset(pattern for words in given["only"] for pattern in words)
    given["only"] = chosen(patterns, load_register(given["claims"]), "--emad-only") if patterns else patterns
    study = Study(**{field.name: given.pop(field.name) for field in fields(Study)})
    gating = Gating(**{field.name: given.pop(field.name) for field in fields(Gating)})
    built = Settings(study=study, gating=gating, **given)
    _check_claims(built)
    _check_provider(built)
    _check_update(built, config, os.environ)
    return built


def _value(config: pytest.Config, option: Option) -> Any:
    given = config.getoption(option.flag)
    if given not in (None, []):
        return _read(option, given, config.invocation_params.dir, option.flag)
    written = config.getini(option.ini)
    if written not in (None, [], ""):
        folder = config.inipath.parent if config.inipath else config.rootpath
        return _read(option, written, folder, f"ini {option.ini}")
    return option.default


def _read(option: Option, value: Any, base: Path, where: str) -> Any:
    if option.many:
        return tuple(option.read(text, base, where) for text in value)
    return option.read(value, base, where)


def _check_claims(built: Settings) -> None:
    if built.claims is None and not built.gate_claims:
        return
    known = load_register(built.claims)
    for name in sorted(built.gate_claims):
        if name not in known:
            expected = f"ids of the register: {', '.join(known)}"
            raise BadArgument("--emad-gate-claims", name, expected, nearest(name, known))


def _check_provider(built: Settings) -> None:
    """One decoder is judged: there or here."""
    if built.decoder is not None and built.backend is not None:
        raise BadArgument("--emad-backend", built.backend, "none beside --emad-decoder", "leave one of them out")


def _check_update(built: Settings, config: pytest.Config, environment: Mapping[str, str]) -> None:
    """An update is a person's decision: never in CI, never by several processes, never into the installed package."""
    if not built.update_golden:
        return
    where = "--emad-update-golden"
    if environment.get("CI"):
        raise BadArgument(where, True, "a run outside CI", "update on your machine, read the diff, commit it")
    if hasattr(config, "workerinput") or config.getoption("numprocesses", None) or config.getoption("tx", None):
        raise BadArgument(where, True, "one process", "run it again with -n 0")
    if built.golden is None:
        raise BadArgument(
            where, True, "a place to write", "add --emad-golden DIR (in a checkout: --emad-golden golden)"
        )
