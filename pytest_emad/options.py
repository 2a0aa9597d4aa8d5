"""Command-line options, their ini twins, and the one frozen ``Settings`` that everything else reads.

``OPTIONS`` is the table; ``settings(config)`` turns it into ``Settings``, once per run. Precedence: command line, then
ini file, then default. Relative paths start where the command was typed, or beside the ini file that names them.
Every value is validated before a model is loaded; a bad one is a ``pytest.UsageError`` (exit status 4).
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from emad_ref.errors import BadArgument
from emad_ref.verdict.claims import Claim, load_register

Gate = Literal["paper", "known"]
Inconclusive = Literal["warn", "fail"]

GATES: tuple[str, ...] = ("paper", "known")
INCONCLUSIVE: tuple[str, ...] = ("warn", "fail")
REQUIREMENTS: tuple[str, ...] = ("energy", "speed", "quality", "golden")
DTYPES: tuple[str, ...] = ("float32", "float64", "bfloat16", "float16")
CORPORA: tuple[str, ...] = ("world:premise", "world:mixed", "wikitext", "pile", "self")
DEFAULT_MODEL = "emad-tiny"
DEFAULT_PAIR = ("emad-nano", "emad-tiny")  # small, large
MARGINS = 33  # margins in a sweep, 0 and the highest target included


@dataclass(frozen=True)
class Budget:
    """How much one run may spend; larger budgets run more tests on more data.

    ``examples``       Hypothesis examples per property.
    ``calibrate``, ``validate``, ``evaluate``  documents per split; 30 evaluated documents are METHODS' minimum.
    ``items``          scored examples per task; 100 are METHODS' minimum.
    ``pairs``          timed pairs per batch size, warm-up not counted; 30 are METHODS' minimum.
    ``batch_sizes``    legs of the timing rows.
    ``prompt_tokens``, ``new_tokens``  length of a timed request; ``new_tokens`` also bounds generation elsewhere.
    """

    name: str
    examples: int
    calibrate: int
    validate: int
    evaluate: int
    items: int
    pairs: int
    batch_sizes: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int

    @property
    def rank(self) -> int:
        """0 for the smallest budget; a test runs when its own budget's rank does not exceed the run's."""
        return list(BUDGETS).index(self.name)


BUDGETS: dict[str, Budget] = {
    budget.name: budget
    for budget in (
        Budget("smoke", 10, 100, 60, 200, 800, 30, (1, 4), 64, 32),
        Budget("standard", 50, 300, 150, 400, 1000, 60, (1, 4, 16), 128, 128),
        Budget("full", 200, 1000, 500, 2000, 2400, 200, (1, 8, 32), 256, 256),
    )
}


@dataclass(frozen=True)
class Settings:
    """What this run was asked to do, validated. Plain data: comparable, printable, free of torch."""

    models: tuple[str, ...]
    small_model: str
    large_model: str
    corpus: str | None  # None: chosen per model (METHODS, "Corpus")
    device: str
    dtype: str
    backend: str | None
    profile: Path | None
    margin: float | None  # nats; judged beside the calibrated default and the margin selected on validation
    report: Path | None
    gate: Gate
    gate_claims: frozenset[str]
    claims: Path | None
    inconclusive: Inconclusive
    require: frozenset[str]
    budget: Budget
    seed: int
    golden: Path | None
    update_golden: bool
    data: Path | None
    tasks: frozenset[str]
    limit: int | None
    allow_code_execution: bool

    def to_json(self) -> dict[str, Any]:
        """Built-in types only, sets sorted: the ``settings`` entry of ``report.json``."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: _plain(value) for name, value in plain.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Budget):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Option:
    """One row: ``--emad-<name>`` and its ini twin ``emad_<name>``.

    ``read(text, base, where)`` turns the text into a value or raises BadArgument naming ``where``; ``base`` is the
    folder that relative paths start from. ``many`` collects repetitions (ini: words) into a tuple; ``switch`` takes
    no value on the command line.
    """

    name: str
    read: Callable[[str, Path, str], Any]
    default: Any
    help: str
    metavar: str = "VALUE"
    many: bool = False
    switch: bool = False

    @property
    def flag(self) -> str:
        return f"--emad-{self.name}"

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def ini(self) -> str:
        return f"emad_{self.field}"


def _text(text: str, base: Path, where: str) -> str:
    if not text.strip():
        raise BadArgument(where, text, "a name", "leave the option out to get its default")
    return text.strip()


def _model(text: str, base: Path, where: str) -> str:
    """A name as ``models.loading`` reads it; what it leads to is known once the model is loaded."""
    name = _text(text, base, where)
    if name.startswith("@") or name.endswith("@"):
        raise BadArgument(where, text, "NAME or NAME@REVISION", "e.g. pythia-410m@step3000")
    return name


def _one_of(known: tuple[str, ...]) -> Callable[[str, Path, str], str]:
    def read(text: str, base: Path, where: str) -> str:
        if text not in known:
            raise BadArgument(where, text, f"one of {', '.join(known)}")
        return text

    return read


def _some_of(known: tuple[str, ...]) -> Callable[[str, Path, str], frozenset[str]]:
    def read(text: str, base: Path, where: str) -> frozenset[str]:
        words = _words(text)
        for word in sorted(words):
            if word not in known:
                raise BadArgument(where, word, f"a comma list of {', '.join(known)}")
        return words

    return read


def _words(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(",") if word.strip())


def _device(text: str, base: Path, where: str) -> str:
    kind, _, index = text.partition(":")
    if not kind.isidentifier() or (":" in text and not index.isdigit()):
        raise BadArgument(where, text, "a torch device such as cpu, cuda, cuda:1, mps")
    return text


def _number(text: str, base: Path, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadArgument(where, text, "a number of nats", "e.g. 0.2") from None
    if not math.isfinite(value):
        raise BadArgument(where, text, "a finite number of nats", "e.g. 0.2")
    return value


def _seed(text: str, base: Path, where: str) -> int:
    if not text.strip().isdecimal():
        raise BadArgument(where, text, "a whole number ≥ 0")
    return int(text)


def _switch(text: str, base: Path, where: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.strip().lower() not in words:
        raise BadArgument(where, text, "true or false")
    return words[text.strip().lower()]


def _file(text: str, base: Path, where: str) -> Path:
    path = base / text
    if not path.is_file():
        raise BadArgument(where, text, "an existing file", f"looked at {path}")
    return path


def _folder(text: str, base: Path, where: str) -> Path:
    path = base / text
    if not path.is_dir():
        raise BadArgument(where, text, "an existing folder", f"looked at {path}")
    return path


def _writable_folder(text: str, base: Path, where: str) -> Path:
    """Made if missing, and tried by writing: access bits say nothing about a full or read-only file system."""
    path = base / text
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise BadArgument(where, text, "a folder that can be written", error.strerror or str(error)) from error
    return path


def _corpus(text: str, base: Path, where: str) -> str:
    if text in CORPORA:
        return text
    path = base / text
    if not path.exists():
        raise BadArgument(where, text, f"one of {', '.join(CORPORA)}, or an existing file", f"looked at {path}")
    return str(path)


def _claim_ids(text: str, base: Path, where: str) -> frozenset[str]:
    return _words(text)  # known ids depend on --emad-claims: checked in ``settings``


def _task_names(text: str, base: Path, where: str) -> frozenset[str]:
    words = _words(text)
    if not words:
        raise BadArgument(where, text, "a comma list of task names", "leave the option out to score none")
    return words  # which exist is known to lm-eval, an extra: checked when the first is asked for


def _count(text: str, base: Path, where: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise BadArgument(where, text, "a whole number ≥ 1")
    return int(text)


OPTIONS: tuple[Option, ...] = (
    Option(
        "model",
        _model,
        (DEFAULT_MODEL,),
        "model to judge: bundled name, folder or hub name; NAME@REVISION for a branch, tag or commit of a hub model; "
        "repeatable",
        "NAME[@REVISION]",
        many=True,
    ),
    Option("small-model", _model, DEFAULT_PAIR[0], "small model of the pair EAD is judged on (default: emad-nano)"),
    Option("large-model", _model, DEFAULT_PAIR[1], "large model of that pair, same tokenizer (default: emad-tiny)"),
    Option("corpus", _corpus, None, f"text to read: {', '.join(CORPORA)}, or a path (default: by model)"),
    Option("device", _device, "cpu", "torch device (default: cpu)"),
    Option("dtype", _one_of(DTYPES), "float32", f"one of {', '.join(DTYPES)} (default: float32)"),
    Option("backend", _text, None, "plugin that makes the decoder under test (default: the one installed, else ours)"),
    Option("profile", _file, None, "calibration profile (JSON) to use instead of calibrating", "FILE"),
    Option("margin", _number, None, "also judge EMAD at this margin, in nats", "NATS"),
    Option("report", _writable_folder, None, "folder for report.json, report.md, index.html and figures", "DIR"),
    Option("gate", _one_of(GATES), "paper", "paper: falsifiers fail the run; known: a change of a known verdict does"),
    Option("gate-claims", _claim_ids, frozenset(), "comma list of further claims that gate, e.g. EMAD-E1,EMAD-E3"),
    Option("claims", _file, None, "TOML file with other thresholds or gates for rows of the register", "FILE"),
    Option("inconclusive", _one_of(INCONCLUSIVE), "warn", "what an inconclusive gating claim does: warn or fail"),
    Option("require", _some_of(REQUIREMENTS), frozenset(), f"what must be decided: {', '.join(REQUIREMENTS)}"),
    Option("budget", _one_of(tuple(BUDGETS)), "smoke", f"one of {', '.join(BUDGETS)} (default: smoke)"),
    Option("seed", _seed, 0, "seed of all sampling (default: 0)", "N"),
    Option("golden", _folder, None, "golden data read before the shipped; where updates are written", "DIR"),
    Option("update-golden", _switch, False, "write goldens and known verdicts to --emad-golden; fails", switch=True),
    Option("data", _folder, None, "folder with data sets, for machines without a network", "DIR"),
    Option("tasks", _task_names, frozenset(), "comma list of lm-eval tasks to score, e.g. wikitext,gsm8k", "NAMES"),
    Option("limit", _count, None, "documents per task (default: all)", "N"),
    Option("allow-code-execution", _switch, False, "run generated programs, in a sandbox", switch=True),
)


def add_options(parser: pytest.Parser) -> None:
    """Register every row of ``OPTIONS`` twice: as a flag and as an ini value."""
    group = parser.getgroup("emad", "adaptive-depth decoding (pytest-emad)")
    for option in OPTIONS:
        kind: Literal["args", "string"] = "args" if option.many else "string"
        if option.switch:
            group.addoption(option.flag, action="store_const", const="true", default=None, help=option.help)
        else:
            action = "append" if option.many else "store"
            group.addoption(option.flag, action=action, default=None, metavar=option.metavar, help=option.help)
        parser.addini(option.ini, option.help, type=kind, default=None)


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
            config.stash[_REGISTER] = load_register(settings(config).claims)
        except BadArgument as error:
            raise pytest.UsageError(f"--emad-claims: {error}") from error
    return config.stash[_REGISTER]


def _build(config: pytest.Config) -> Settings:
    values = {option.field: _value(config, option) for option in OPTIONS}
    values["budget"] = BUDGETS[values["budget"]]
    values["models"] = models = values.pop("model")
    if len(set(models)) != len(models):
        raise BadArgument("--emad-model", models, "each model once")
    built = Settings(**values)
    _check_claims(built)
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
            raise BadArgument("--emad-gate-claims", name, f"ids of the register: {', '.join(known)}")


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
