"""Command-line options, their ini twins, and the validated ``RunSettings`` that all other modules read.

Precedence: command line, then ini file, then default. Relative paths start in the folder of the call, or of the ini
file that names them. Every value is validated before a model is loaded; a bad one is a ``pytest.UsageError`` (exit
status 4).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from emad_ref.errors import BadArgument, EmadError, call_all, suggest_nearest
from emad_ref.models.bundled import BUNDLED_PAIR
from emad_ref.models.families import BACKENDS, FAST
from pytest_emad.measurements import option_values
from pytest_emad.measurements.study import (
    BUDGETS,
    FLOP_EVIDENCE,
    START_S,
    Budget,
    Study,
    resolve_pair_names_from_options,
)
from pytest_emad.remote.address import ADDRESS_FORMS, Address, parse_address
from pytest_emad.report.tiers import STATED_CLAIM, TIERS
from pytest_emad.statistics.gate import GATES, INCONCLUSIVE, METHOD_ROWS, REQUIREMENTS, GateOptions
from pytest_emad.statistics.verdicts import Claim, load_register, match_id_patterns
from pytest_emad.tasks.sandbox import CODE_EXECUTION


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
    decoder_timeout: float | None
    tier: str | None
    process_timeout: float
    expect_decoder: str | None
    waive: tuple[tuple[str, str], ...]  # (test or claim that may stay undecided, the reason)
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
    if isinstance(value, Path | Address):
        return str(value)
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


DEFAULT_MODEL = "emad-tiny"
REMOTE_TIMEOUT_S, HOOK_TIMEOUT_S = 120.0, 600.0  # seconds; a plugin's decoder may compile in its first call


@dataclass(frozen=True)
class PluginOption:
    """One row: ``--emad-<name>`` and its ini twin ``emad_<name>``.

    ``read(text, base, where)`` turns the text into a value or raises BadArgument naming ``where``; ``base`` is the
    folder that relative paths start from. ``many`` collects repetitions (ini: words) into a tuple; ``switch`` takes
    no value on the command line; ``bare`` is the value of a flag without one, None if it needs one. ``choices`` are
    the only values, empty if ``read`` takes others. A verb of ``emad`` with the option ``--<name>`` takes it from here
    (``cli.arguments.add_suite_option``).
    """

    name: str
    read: Callable[[str, Path, str], Any]
    default: Any
    help: str
    metavar: str = "VALUE"
    many: bool = False
    switch: bool = False
    bare: str | None = None
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return f"--emad-{self.name}"

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def ini(self) -> str:
        return f"emad_{self.field}"

    @property
    def value_settings(self) -> dict[str, Any]:
        """Keywords of ``add_argument`` that say how the option takes values, which stay text."""
        if self.switch:
            return {"action": "store_const", "const": "true"}
        bare = {} if self.bare is None else {"nargs": "?", "const": self.bare}
        return {"action": "append" if self.many else "store", "metavar": self.metavar, **bare}


def _choice_option(
    name: str,
    choices: tuple[str, ...],
    default: str | None,
    help: str,
    metavar: str = "VALUE",
    bare: str | None = None,
) -> PluginOption:
    read = option_values.make_choice_parser(choices)
    return PluginOption(name, read, default, help, metavar, bare=bare, choices=choices)


OPTIONS: tuple[PluginOption, ...] = (
    PluginOption(
        "model",
        option_values.parse_model_name,
        (DEFAULT_MODEL,),
        "model to judge: bundled name, folder or hub name; NAME@REVISION for a branch, tag or commit of a hub model; "
        "repeatable",
        "NAME[@REVISION]",
        many=True,
    ),
    PluginOption(
        "only",
        option_values.parse_claim_patterns,
        (),
        "judge only these claims, by id or pattern, e.g. EMAD-F1,EMAD-R*; no other test of the suites runs; repeatable",
        "IDS",
        many=True,
    ),
    PluginOption(
        "pair",
        option_values.parse_model_pair,
        None,
        "small and large model for the claims about a pair; they share a tokenizer (default: "
        f"{','.join(BUNDLED_PAIR)} if both are installed and every --emad-model is bundled; else none, and no claim "
        "about a pair is judged)",
        "SMALL,LARGE",
    ),
    PluginOption(
        "small-model",
        option_values.parse_model_name,
        None,
        "small model of a pair, in place of --emad-pair where a name contains a comma",
    ),
    PluginOption(
        "large-model",
        option_values.parse_model_name,
        None,
        "large model of a pair, in place of --emad-pair where a name contains a comma",
    ),
    PluginOption(
        "corpus",
        option_values.parse_corpus,
        None,
        f"text to read: {', '.join(option_values.CORPORA)}, or a path (default: by model)",
    ),
    PluginOption("device", option_values.parse_device_name, "cpu", "torch device, or auto (default: cpu)"),
    _choice_option(
        "dtype",
        option_values.DTYPES,
        "float32",
        f"dtype of the weights: {', '.join(option_values.DTYPES)} (default: float32)",
    ),
    PluginOption(
        "backend",
        option_values.parse_name,
        None,
        "plugin that makes the decoder under test (default: the installed one, else the reference decoder). The "
        "reference decoder has three variants: fast uses fused blocks, and CUDA graphs on a GPU (its default); eager "
        "uses fused blocks without CUDA graphs; walked runs the model's own modules",
    ),
    PluginOption(
        "decoder",
        parse_address,
        None,
        f"decoder in another process instead of a plugin: {ADDRESS_FORMS} (docs/wire.md)",
        "ADDRESS",
    ),
    PluginOption(
        "decoder-timeout",
        option_values.parse_seconds,
        None,
        "time limit of each call to a decoder under test that is not ours (default: "
        f"{REMOTE_TIMEOUT_S:.0f} for --emad-decoder, {HOOK_TIMEOUT_S:.0f} for a plugin's)",
        "SECONDS",
    ),
    _choice_option(
        "decoder-dtype",
        option_values.DTYPES,
        None,
        "precision that the server of --emad-decoder http(s)://… states, whose noise is allowed (default: that of "
        "--emad-dtype)",
        "DTYPE",
    ),
    _choice_option(
        "tier",
        tuple(TIERS),
        None,
        f"fail unless the decoder keeps what this tier promises, one of {', '.join(TIERS)}; the run has "
        "its tests alone, under --emad-gate decoder unless given (docs/engines.md)",
        "TIER",
    ),
    PluginOption(
        "process-timeout",
        option_values.parse_seconds,
        START_S,
        "time limit for a fresh process to start and load the model; its timed requests get ten times their own time "
        f"on top (default: {START_S:.0f})",
        "SECONDS",
    ),
    PluginOption(
        "expect-decoder",
        option_values.parse_name,
        None,
        "fail unless the run judged this decoder: foreign, ours or the name of a plugin",
        "WHOSE",
    ),
    PluginOption(
        "waive",
        option_values.parse_name_and_reason,
        (),
        "allow NAME to stay undecided, with a reason that the report shows. NAME: EMAD-E2, E5, F1 or F2, a shipped "
        "test or its file, or the word decoder; repeatable",
        "NAME=REASON",
        many=True,
    ),
    PluginOption(
        "profile",
        option_values.parse_existing_file,
        None,
        "calibration profile of emad calibrate, instead of calibrating",
        "FILE",
    ),
    PluginOption(
        "margin",
        option_values.make_unicode_minus_parser(option_values.parse_nats),
        None,
        "margin of EMAD in nats: judge it there, too; U+2212 counts as a minus sign",
        "NATS",
    ),
    PluginOption(
        "exit",
        option_values.parse_existing_file,
        None,
        "exit of emad screen, made for this model: the run judges EMAD-X1 to X6 on it at every budget, audits its "
        "points, and searches no exit itself",
        "FILE",
    ),
    PluginOption(
        "report",
        option_values.prepare_report_folder,
        None,
        "folder for report.json, report.md, index.html and figures",
        "DIR",
    ),
    _choice_option(
        "gate",
        GATES,
        "paper",
        "which results fail the run. paper: the papers' falsifiers and the identities. decoder: the identities and "
        "every audit, so a correct decoder passes even where exits lose quality. known: a verdict that differs from "
        "the recorded one (default: paper)",
    ),
    PluginOption(
        "gate-claims",
        option_values.split_claim_ids,
        frozenset(),
        "further claims that fail the run when falsified, e.g. EMAD-E1,EMAD-E3",
    ),
    PluginOption(
        "register",
        option_values.parse_existing_file,
        None,
        "TOML file that changes thresholds or gates of claims",
        "FILE",
    ),
    _choice_option(
        "inconclusive",
        INCONCLUSIVE,
        "warn",
        "what an inconclusive verdict does: warn, or fail the run if the claim gates (default: warn)",
    ),
    PluginOption(
        "require",
        option_values.make_subset_parser(REQUIREMENTS),
        frozenset(),
        f"fail the run unless these are decided: {', '.join(REQUIREMENTS)}",
    ),
    _choice_option(
        "evidence",
        FLOP_EVIDENCE,
        FLOP_EVIDENCE[0],
        f"weakest accepted source of FLOP counts: {', '.join(FLOP_EVIDENCE)} (default: {FLOP_EVIDENCE[0]})",
    ),
    _choice_option(
        "budget",
        tuple(BUDGETS),
        "smoke",
        f"how much text and time a run takes: {', '.join(BUDGETS)} (default: smoke)",
    ),
    PluginOption(
        "all-claims",
        option_values.parse_boolean,
        False,
        "also judge slow claims that gate nothing; without this option they need a larger --emad-budget",
        switch=True,
    ),
    PluginOption("seed", option_values.parse_seed, 0, "seed of all random draws (default: 0)", "N"),
    PluginOption(
        "golden",
        option_values.parse_existing_folder,
        None,
        "folder of golden data, read before the shipped one; --emad-update-golden writes here",
        "DIR",
    ),
    PluginOption(
        "update-golden",
        option_values.parse_boolean,
        False,
        "write goldens and verdicts to --emad-golden; the run fails if anything changed",
        switch=True,
    ),
    PluginOption(
        "data", option_values.parse_existing_folder, None, "folder of data sets, searched before the hub", "DIR"
    ),
    PluginOption(
        "tasks",
        option_values.parse_task_names,
        frozenset(),
        "lm-eval tasks to score, e.g. wikitext,gsm8k: this project's own, lm-eval's, or those of --emad-task-path",
        "NAMES",
    ),
    PluginOption(
        "task-path",
        option_values.parse_existing_folder,
        None,
        "folder of task definitions of your own (lm-eval's YAML), for --emad-tasks (docs/own-task.md)",
        "DIR",
    ),
    PluginOption("limit", option_values.parse_count, None, "documents per task (default: all)", "N"),
    _choice_option(
        "allow-code-execution",
        CODE_EXECUTION,
        None,
        "run generated programs. confined (the value without one): by bubblewrap, without your files and network. "
        "unconfined: as any program of yours",
        "confined|unconfined",
        bare=CODE_EXECUTION[0],
    ),
)


REPLAY = "--emad-replay"  # of `emad replay`: a file with the test to repeat, and the report of its run
DEMANDS = frozenset({"report", "update_golden", "tier", "expect_decoder", "require"})  # settings that a replay lacks
OPTION_FLAGS = tuple(option.flag for option in OPTIONS)


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
            lambda: _require_valid_provider(given["backend"], given["decoder"]),
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


def _require_valid_provider(backend: str | None, decoder: Address | None) -> None:
    """A run judges one decoder, so ``--emad-backend`` and ``--emad-decoder`` exclude each other."""
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


__all__ = [
    "DEMANDS",
    "OPTIONS",
    "OPTION_FLAGS",
    "REPLAY",
    "RunSettings",
    "add_options",
    "get_run_settings",
    "load_claims_register",
]
