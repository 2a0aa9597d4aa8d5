"""The table of options: ``--emad-<name>`` of pytest, its ini twin, and ``--<name>`` of the verbs of ``emad``.

It imports neither pytest nor NumPy, so that ``emad --help`` is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emad_ref.models.bundled import BUNDLED_PAIR
from pytest_emad.measurements import option_values
from pytest_emad.measurements.study import BUDGETS, FLOP_EVIDENCE, START_S
from pytest_emad.remote.address import ADDRESS_FORMS, parse_address, parse_url
from pytest_emad.report.acceptance import read_acceptance_record
from pytest_emad.report.tiers import TIERS
from pytest_emad.statistics.gate import GATES, INCONCLUSIVE, REQUIREMENTS
from pytest_emad.tasks.sandbox import CODE_EXECUTION

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
    PluginOption(
        "corpus-group",
        option_values.parse_name,
        None,
        "field of the corpus' .jsonl lines that names the group of each document (its author, its template); documents "
        "of one group depend on each other, count as one, and never fall into two splits (default: each document is "
        "its own group)",
        "FIELD",
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
        "decoder-baseline",
        parse_url,
        None,
        "server of the same engine without its exit rule: it answers requests at full depth, the server of "
        "--emad-decoder those under its rule, and ENG-7 compares the two, also under load (docs/engines.md)",
        "URL",
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
        "known-gaps",
        option_values.parse_existing_file,
        None,
        "TOML file of tests that are expected to fail: tables [[gap]] with test and reason. Such a failure "
        "is reported and does not fail the run; a listed test that passes does (docs/engines.md)",
        "FILE",
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
        "acceptance-record",
        read_acceptance_record,
        None,
        "acceptance length on record for ENG-5: the report folder of an earlier run, a second sample; or a golden "
        "curve in YAML, taken as exact: model, thinking mode and number of drafted tokens, as InferenceX writes it. A "
        "level with one entry need not be named",
        "FILE[,MODEL,MODE,DRAFTED]",
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

OPTION_FLAGS = tuple(option.flag for option in OPTIONS)
