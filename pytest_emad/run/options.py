"""Command-line options, their ini twins, and the validated ``RunSettings`` that all other modules read.

Precedence: command line, then ini file, then default. Relative paths start in the folder of the call, or of the ini
file that names them. Every value is validated before a model is loaded; a bad one is a ``pytest.UsageError`` (exit
status 4).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from emad_ref.errors import BadArgument, EmadError, call_all, suggest_nearest
from emad_ref.models.families import BACKENDS, FAST
from pytest_emad.measurements.acceptance_record import AcceptanceRecord
from pytest_emad.measurements.study import (
    BUDGETS,
    Budget,
    Study,
    resolve_pair_names_from_options,
)
from pytest_emad.remote.address import Address, UrlAddress
from pytest_emad.report.known_gaps import read_known_gaps
from pytest_emad.report.tiers import STATED_CLAIM
from pytest_emad.run.option_table import OPTIONS, PluginOption
from pytest_emad.statistics.gate import METHOD_ROWS, GateOptions
from pytest_emad.statistics.verdicts import Claim, load_register, match_id_patterns


@dataclass(frozen=True)
class RunSettings:
    """The validated options of this run, as plain data without torch.

    ``study`` holds the options of the measurements; the other fields select tests and configure failures of the run.
    """

    study: Study
    models: tuple[str, ...]
    only: frozenset[str]  # ids of the only claims to judge; empty: all
    pair: tuple[str, str] | None  # small, large; None: the user's models, without a named pair
    pair_named: bool  # named by the user, so that its claims are judged at every budget
    all_claims: bool
    backend: str | None
    decoder: Address | None
    decoder_baseline: UrlAddress | None  # the same engine without its exit rule
    decoder_timeout: float | None
    tier: str | None
    process_timeout: float
    expect_decoder: str | None
    waive: tuple[tuple[str, str], ...]  # (test or claim that may stay undecided, the reason)
    known_gaps: Mapping[str, str]  # shipped test that is expected to fail → the reason
    report: Path | None
    gating: GateOptions
    gate_claims: frozenset[str]
    register: Path | None
    golden: Path | None
    update_golden: bool
    evidence: str

    @property
    def budget(self) -> Budget:
        return self.study.budget

    def to_json(self) -> dict[str, Any]:
        """Built-in types only, sets sorted, by the names of the options: the ``settings`` entry of ``report.json``."""
        parts = (self, self.study, self.gating)
        named = {field.name: getattr(part, field.name) for part in parts for field in fields(part)}
        return {name: _json_value(value) for name, value in named.items() if name not in ("study", "gating")}


def _json_value(value: Any) -> Any:
    if isinstance(value, Budget):
        return value.name
    if isinstance(value, Path | Address | AcceptanceRecord):
        return str(value)
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


REPLAY = "--emad-replay"  # of `emad replay`: a file with the test to repeat, and the report of its run
DEMANDS = frozenset({"report", "update_golden", "tier", "expect_decoder", "require"})  # settings that a replay lacks


def add_options(parser: pytest.Parser) -> None:
    """Register every row of ``OPTIONS`` twice, as a flag and as an ini value."""
    group = parser.getgroup("emad", "adaptive-depth decoding (pytest-emad)")
    for option in OPTIONS:
        kind: Literal["args", "string"] = "args" if option.many else "string"
        group.addoption(option.flag, default=None, help=option.help, **option.value_settings)
        parser.addini(option.ini, option.help, type=kind, default=None)
    group.addoption(REPLAY, metavar="FILE", default=None, help=argparse.SUPPRESS)


_SETTINGS = pytest.StashKey[RunSettings]()
_REGISTER = pytest.StashKey[dict[str, Claim]]()


def get_run_settings(config: pytest.Config) -> RunSettings:
    """The run's settings, built and validated on the first call.

    Raises:
        pytest.UsageError: an invalid value; the message names option, value, expectation and remedy.
    """
    if _SETTINGS not in config.stash:
        try:
            config.stash[_SETTINGS] = _read_settings(config)
        except EmadError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_SETTINGS]


def load_claims_register(config: pytest.Config) -> dict[str, Claim]:
    """The claims register with ``--emad-register`` applied. Raises pytest.UsageError if that file is invalid."""
    if _REGISTER not in config.stash:
        try:
            config.stash[_REGISTER] = _register_under_gate(
                load_register(get_run_settings(config).register), get_run_settings(config).gating.gate
            )
        except BadArgument as error:
            raise pytest.UsageError(f"--emad-register: {error}") from error
    return config.stash[_REGISTER]


def _register_under_gate(rows: dict[str, Claim], gate: str) -> dict[str, Claim]:
    """``rows`` with the gates of ``gate``; ``--emad-gate-claims`` adds to them under every gate."""
    if gate != "decoder":
        return rows
    return {name: replace(row, gate=row.gate and name not in METHOD_ROWS) for name, row in rows.items()}


def _read_settings(config: pytest.Config) -> RunSettings:
    """The settings of ``config``.

    Raises:
        EmadError: values that an option refuses, all of them in one message; else choices that contradict each other.
    """
    values = call_all(partial(_option_value, config, option) for option in OPTIONS)
    given = {option.field: value for option, value in zip(OPTIONS, values, strict=True)}
    if given["tier"] and not any((config.getoption("--emad-gate"), config.getini("emad_gate"))):
        given["gate"] = "decoder"
    if given["tier"] == "claims":
        given["gate_claims"] |= {STATED_CLAIM}
    if config.getoption(REPLAY) is not None:  # a run of one test cannot meet demands on all, and records nothing
        given |= {"update_golden": False, "tier": None, "expect_decoder": None, "require": frozenset()}
    given["budget"] = BUDGETS[given["budget"]]
    given["walk"] = given["backend"] if given["backend"] in BACKENDS else FAST
    given["models"] = given.pop("model")
    named = (given.pop("pair"), given.pop("small_model"), given.pop("large_model"))
    given["pair_named"] = any(named)
    known_gaps = given["known_gaps"]
    given["known_gaps"] = {} if known_gaps is None else read_known_gaps(known_gaps, "--emad-known-gaps")
    patterns = frozenset(pattern for words in given["only"] for pattern in words)
    needs_register = given["register"] or patterns or given["gate_claims"]  # other runs of pytest read no file
    register = load_register(given["register"]) if needs_register else {}
    given["pair"], given["only"], *_ = call_all(
        (
            lambda: resolve_pair_names_from_options(*named, given["models"]),
            lambda: match_id_patterns(patterns, register, "--emad-only"),
            lambda: _require_each_once("--emad-model", given["models"], "each model once"),
            lambda: _require_each_once("--emad-waive", [of for of, _ in given["waive"]], "each name once"),
            lambda: _require_known_claims(given["gate_claims"], register),
            lambda: _require_valid_provider(given["backend"], given["decoder"], given["decoder_baseline"]),
            lambda: _require_valid_update(given["update_golden"], given["golden"], config, os.environ),
        )
    )
    study = Study(**{field.name: given.pop(field.name) for field in fields(Study)})
    gating = GateOptions(**{field.name: given.pop(field.name) for field in fields(GateOptions)})
    return RunSettings(study=study, gating=gating, **given)


def _require_each_once(option: str, values: Sequence[str], expected: str) -> None:
    if len(set(values)) != len(values):
        raise BadArgument(option, values, expected)


def _option_value(config: pytest.Config, option: PluginOption) -> Any:
    given = config.getoption(option.flag)
    if given not in (None, []):
        return _parse_option(option, given, config.invocation_params.dir, option.flag)
    written = config.getini(option.ini)
    if written not in (None, [], ""):
        folder = config.inipath.parent if config.inipath else config.rootpath
        return _parse_option(option, written, folder, f"ini {option.ini}")
    return option.default


def _parse_option(option: PluginOption, value: Any, base: Path, where: str) -> Any:
    if option.many:
        return tuple(option.read(text, base, where) for text in value)
    return option.read(value, base, where)


def _require_known_claims(names: frozenset[str], register: Mapping[str, Claim]) -> None:
    for name in sorted(names):
        if name not in register:
            expected = f"ids of the register: {', '.join(register)}"
            raise BadArgument("--emad-gate-claims", name, expected, suggest_nearest(name, register))


def _require_valid_provider(backend: str | None, decoder: Address | None, baseline: UrlAddress | None) -> None:
    """A run judges one decoder, so ``--emad-backend`` and ``--emad-decoder`` exclude each other.

    The baseline of a server is another server.
    """
    if baseline is not None and (not isinstance(decoder, UrlAddress) or baseline == decoder):
        expected, remedy = "another URL than that of --emad-decoder", "name the server with the rule there"
        raise BadArgument("--emad-decoder-baseline", str(baseline), expected, remedy)
    if decoder is not None and backend is not None:
        raise BadArgument("--emad-backend", backend, "no --emad-backend beside --emad-decoder", "leave one of them out")


def _require_valid_update(
    update: bool, golden: Path | None, config: pytest.Config, environment: Mapping[str, str]
) -> None:
    """Refuse an update in CI, by several processes, or into the installed package: a person decides on updates."""
    if not update:
        return
    where = "--emad-update-golden"
    if environment.get("CI"):
        raise BadArgument(where, True, "a run outside CI", "update on your machine, read the diff and commit it")
    if hasattr(config, "workerinput") or config.getoption("numprocesses", None) or config.getoption("tx", None):
        raise BadArgument(where, True, "one process", "run again with -n 0")
    if golden is None:
        raise BadArgument(
            where, True, "a folder to write to", "add --emad-golden DIR (in a checkout: --emad-golden golden)"
        )
