"""``OPTIONS``: one row per option, its flag and its ini twin alike. Reads nothing: a row says how its text is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from emad_ref.evidence import values
from emad_ref.evidence.study import BUDGETS, FLOP_EVIDENCE, START_S
from emad_ref.models.bundled import PAIR
from emad_ref.verdict.gating import GATES, INCONCLUSIVE, REQUIREMENTS
from emad_ref.wire.address import FORMS, address

DEFAULT_MODEL = "emad-tiny"


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


OPTIONS: tuple[Option, ...] = (
    Option(
        "model",
        values.model,
        (DEFAULT_MODEL,),
        "model to judge: bundled name, folder or hub name; NAME@REVISION for a branch, tag or commit of a hub model; "
        "repeatable",
        "NAME[@REVISION]",
        many=True,
    ),
    Option(
        "only",
        values.patterns,
        (),
        "ask these claims alone, by id or pattern, e.g. EMAD-F1,EMAD-R*: nothing else of the suites runs; repeatable",
        "IDS",
        many=True,
    ),
    Option(
        "pair",
        values.two_models,
        None,
        "small and large model, with one tokenizer, that the claims about a pair are judged on (default: "
        f"{','.join(PAIR)} beside bundled models; none beside a model of yours, and those claims are not asked)",
        "SMALL,LARGE",
    ),
    Option("small-model", values.model, None, "the small model of --emad-pair alone, for names with a comma"),
    Option("large-model", values.model, None, "the large one"),
    Option("corpus", values.corpus, None, f"text to read: {', '.join(values.CORPORA)}, or a path (default: by model)"),
    Option("device", values.device, "cpu", "torch device (default: cpu)"),
    Option("dtype", values.one_of(values.DTYPES), "float32", f"one of {', '.join(values.DTYPES)} (default: float32)"),
    Option(
        "backend",
        values.name,
        None,
        "plugin that makes the decoder under test (default: the one installed, else ours); fast, eager or walked: "
        "ours, by fused steps where a block has one, on CUDA as captured graphs, as by default, by such steps with "
        "nothing captured, or by the model's modules alone",
    ),
    Option(
        "decoder",
        address,
        None,
        f"decoder in another process: {FORMS} (docs/wire.md), in place of any plugin",
        "ADDRESS",
    ),
    Option(
        "decoder-timeout", values.seconds, 120.0, "time limit of each call to --emad-decoder (default: 120)", "SECONDS"
    ),
    Option(
        "process-timeout",
        values.seconds,
        START_S,
        "seconds that a fresh process of a race may take to start and load, beside ten times those of its requests "
        f"(default: {START_S:.0f})",
        "SECONDS",
    ),
    Option(
        "expect-decoder",
        values.name,
        None,
        "whose decoder must have been judged, else the run fails: foreign, ours or the name of a plugin",
        "WHOSE",
    ),
    Option(
        "waive",
        values.reasoned,
        (),
        "let EMAD-E2, E5, F1 or F2, a shipped test or its file, or the word decoder stay undecided, for a reason; "
        "repeatable",
        "NAME=REASON",
        many=True,
    ),
    Option("profile", values.file, None, "calibration profile (JSON) to use instead of calibrating", "FILE"),
    Option(
        "margin",
        values.pasted(values.nats),
        None,
        "also judge EMAD at this margin, in nats; a pasted minus sign (U+2212) will do",
        "NATS",
    ),
    Option(
        "exit",
        values.file,
        None,
        "exit that `emad screen` wrote for this model, in place of one found in the run: EMAD-X1 to X6 are asked of it "
        "at any budget, and audits of its points",
        "FILE",
    ),
    Option("report", values.report_folder, None, "folder for report.json, report.md, index.html and figures", "DIR"),
    Option(
        "gate",
        values.one_of(GATES),
        "paper",
        "which rows fail the run: paper, the papers' falsifiers and the identities; decoder, the identities and every "
        "audit, so that a right decoder passes whatever exits cost on the model; known, a change of a known verdict",
    ),
    Option("gate-claims", values.names, frozenset(), "comma list of further claims that gate, e.g. EMAD-E1,EMAD-E3"),
    Option("claims", values.file, None, "TOML file with other thresholds or gates for rows of the register", "FILE"),
    Option("inconclusive", values.one_of(INCONCLUSIVE), "warn", "what an inconclusive gating claim does: warn or fail"),
    Option("require", values.some_of(REQUIREMENTS), frozenset(), f"what must be decided: {', '.join(REQUIREMENTS)}"),
    Option(
        "evidence",
        values.one_of(FLOP_EVIDENCE),
        FLOP_EVIDENCE[0],
        f"what FLOP counts must stand on at least: {', '.join(FLOP_EVIDENCE)} (default: {FLOP_EVIDENCE[0]})",
    ),
    Option("budget", values.one_of(tuple(BUDGETS)), "smoke", f"one of {', '.join(BUDGETS)} (default: smoke)"),
    Option(
        "all-claims",
        values.switch,
        False,
        "also ask the claims that take long, gate nothing and else wait for a larger --emad-budget",
        switch=True,
    ),
    Option("seed", values.seed, 0, "seed of all sampling (default: 0)", "N"),
    Option("golden", values.folder, None, "golden data read before the shipped; where updates are written", "DIR"),
    Option(
        "update-golden", values.switch, False, "write goldens and known verdicts to --emad-golden; fails", switch=True
    ),
    Option("data", values.folder, None, "folder with data sets, for machines without a network", "DIR"),
    Option(
        "tasks", values.task_names, frozenset(), "comma list of lm-eval tasks to score, e.g. wikitext,gsm8k", "NAMES"
    ),
    Option("limit", values.count, None, "documents per task (default: all)", "N"),
    Option("allow-code-execution", values.switch, False, "run generated programs, in a sandbox", switch=True),
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
