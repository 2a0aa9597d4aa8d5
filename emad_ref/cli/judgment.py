"""``emad judge``: the claims about a model, or a pair, without pytest: the same questions, table and exit status.

emad judge emad-tiny                                  # what `pytest suites/claims` asks
emad judge ./folder --data ./data --claims EMAD-F1,EMAD-R1
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.cli.arguments import add_examples
from emad_ref.console import print_error
from emad_ref.errors import BadArgument, EmadError, stop_run_on_error
from emad_ref.measurements import option_values
from emad_ref.measurements.study import BUDGETS, PairNames, Study, select_pair
from emad_ref.report.deselection import NO_PAIR
from emad_ref.report.schema import SCHEMA
from emad_ref.statistics.gate import GATES, INCONCLUSIVE, REQUIREMENTS, GateOptions, gate_result
from emad_ref.statistics.goldens import (
    KnownVerdicts,
    RunConditions,
    compare_with_record,
    comparison_summary,
    departures,
    golden_folder,
    key_of,
    known_verdicts,
    no_comparison_reason,
    require_known_verdicts,
)
from emad_ref.statistics.verdicts import Claim, load_register, select_ids
from emad_ref.wire.address import ADDRESS_FORMS, parse_address

if TYPE_CHECKING:  # they bring torch, which bad arguments need not wait for
    from emad_ref.claims.base import Answer, NamedMeasurements, RunPlan
    from emad_ref.measurements.pair import PairMeasurements
    from emad_ref.measurements.run_resources import RunResources

ABOUT = ("model", "names", "pair")  # in this order, as the files of suites/claims
GATE_FAILED, USAGE_ERROR = 1, 4  # exit status: a gate says no; the question could not be put


def judge(args: argparse.Namespace) -> int:
    """Ask the claims about a model and its pair, print operating points, tables and verdicts; 1 where a gate fails."""
    try:
        return _judge(args)
    except EmadError as error:
        print_error(error)
        return USAGE_ERROR


def _judge(args: argparse.Namespace) -> int:
    from emad_ref.report.tables import sections

    run = judge_claims(args)
    report = run.report
    for message in run.warnings:
        print_error(f"warning: {message}")
    tables = report["tables"] if args.with_tables else []
    for title, text in sections(report["points"], tables, report["claims"], report["notes"]):
        print(f"\n{title}\n\n{text}")
    if args.gate == "known":
        print(f"\nemad known verdicts\n\n{comparison_summary(report['known'])}")
    for failure in run.failures:
        print_error(f"FAILED: {failure}")
    return GATE_FAILED if run.failures else 0


@dataclass(frozen=True)
class ClaimRun:
    """What ``judge_claims`` found: a report as ``read_report`` gives it, and messages of gates that fail or warn."""

    report: dict[str, Any]
    failures: list[str]
    warnings: list[str]


def judge_claims(args: argparse.Namespace) -> ClaimRun:
    """Ask the claims that ``args`` of ``emad judge`` name.

    Raises:
        EmadError: a model that cannot be loaded, an unknown claim, a text that cannot be read.
    """
    from emad_ref.measurements.attachments import Attachments

    register = load_register(args.register)
    docket = _run_plan(args, register)
    gating = GateOptions(gate=args.gate, inconclusive=args.inconclusive, require=args.require)
    known, run = _known_verdicts(args), _circumstances(args, docket)
    shown, claims, failures, warnings, beside = Attachments(), [], [], [], []
    tables: list[dict[str, Any]] = []
    named = select_pair(args.pair, args.small_model, args.large_model, [args.model])
    for answer in _answer_claims(args, docket, _choose_claims(args, docket, named), named):
        row, verdict = register[answer.verdict.id], answer.verdict
        key = key_of(row.id, answer.fingerprint or verdict.model, answer.corpus, run)
        record = compare_with_record(row, verdict, known.expected(key, run.seed))
        gates = record.expected is not None if args.gate == "known" else docket.gates(row.id)
        verdict = replace(verdict, gate=gates)
        beside.append(record.to_json())
        shown += answer.exhibits
        tables += [
            {"model": verdict.model, "title": table.title, "rows": table.rows}
            | ({"figure": table.figure} if table.figure else {})
            for table in answer.exhibits.tables
        ]
        found = gate_result(verdict, row, gating, record.expected)
        failures += [found.failure] if found.failure else []
        warnings += [found.warning] if found.warning else []
        claims.append(verdict.to_json() | {"title": row.plain or row.title, "fails": bool(found.failure)})
    conditions = [reason] if args.gate == "known" and (reason := no_comparison_reason(beside)) else []
    settings = {"models": [args.model], "gate": args.gate, "gate_claims": [*args.gate_claims], "budget": args.budget}
    report = {
        "schema": SCHEMA,
        "state": "complete",
        "settings": settings,
        "run": {"exit_status": int(bool(failures or conditions)), "failures": conditions},
        "models": [{"name": args.model}],
        "points": [dict(point) for point in shown.points],
        "claims": claims,
        "tables": tables,
        "notes": list(dict.fromkeys(shown.notes)),
        "known": beside,
        **{part: [] for part in ("goldens", "tests", "audits")},
    }
    return ClaimRun(report, [*failures, *conditions], warnings)


def _run_plan(args: argparse.Namespace, register: dict[str, Claim]) -> RunPlan:
    from emad_ref.claims.base import RunPlan

    study = Study(
        corpus=args.corpus,
        device=args.device,
        dtype=args.dtype,
        budget=BUDGETS[args.budget],
        seed=args.seed,
        data=args.data,
        profile=args.profile,
        margin=args.margin,
        exit=args.exit,
        tasks=args.tasks,
        limit=args.limit,
        allow_code_execution=args.allow_code_execution,
    )
    for name in sorted(args.gate_claims):
        _require_row("--gate-claims", name, register)
    return RunPlan(register, study, args.gate_claims)


def _known_verdicts(args: argparse.Namespace) -> KnownVerdicts:
    """Verdicts on record where the run is held against them, else none. Raises DamagedGolden."""
    if args.gate != "known":
        return KnownVerdicts()
    folders = [folder for folder in (args.golden, golden_folder()) if folder is not None]
    require_known_verdicts(folders)
    return known_verdicts(folders)


def _circumstances(args: argparse.Namespace, docket: RunPlan) -> RunConditions:
    options = [*docket.study.departures, *departures(docket.register, args.gate_claims)]
    return RunConditions(args.seed, args.budget, ", ".join(options))


def _choose_claims(args: argparse.Namespace, docket: RunPlan, pair: tuple[str, str] | None) -> list[str]:
    """The claims asked for, by default those of ``suites/claims``: of the model first, each in the register's order.

    Those about a pair only where there is one; what is not asked for its want is said once.
    """
    from emad_ref.claims.base import questions_of

    wanted = select_ids(args.claims, docket.register, "--claims")
    asked = [
        (name, question)
        for name, question in questions_of(docket.register).items()
        if (
            name in wanted if wanted else question.suite == "claims" and docket.asks(name, pair_named=_pair_named(args))
        )
    ]
    left = [name for name, question in asked if pair is None and question.about != "model"]
    if left and len(left) == len(asked):
        raise BadArgument("--pair", None, "SMALL,LARGE", f"{', '.join(left)}: about a pair")
    if left:
        print_error(f"skipped {', '.join(left)}: {NO_PAIR}; name one by --pair SMALL,LARGE")
    return [name for name, _ in sorted(asked, key=lambda row: ABOUT.index(row[1].about)) if name not in left]


def _require_row(where: str, name: str, register: Mapping[str, Claim]) -> None:
    if name not in register:
        raise BadArgument(where, name, f"ids of the register: {', '.join(register)}")


def _pair_named(args: argparse.Namespace) -> bool:
    return bool(args.pair or args.small_model)


def _answer_claims(
    args: argparse.Namespace, docket: RunPlan, claims: list[str], named: tuple[str, str] | None
) -> Iterator[Answer]:
    """One claim after the other; models are loaded when the first that needs them is asked.

    ``named``: the pair; None where no claim asks about one.
    """
    from emad_ref.claims.base import question_of
    from emad_ref.measurements.model import ModelMeasurements
    from emad_ref.measurements.model_under_test import open_model

    with ExitStack() as stack:
        host = _decoder_host(args, stack)

        def model() -> tuple[NamedMeasurements, int]:
            with stop_run_on_error():
                evidence = ModelMeasurements(
                    stack.enter_context(open_model(args.model, docket.study)), docket.study, host
                )
                evidence.check()
            return evidence, evidence.subject.stepper.layers

        def names() -> tuple[NamedMeasurements, int]:
            assert named is not None
            return PairNames(*named), 0

        def pair() -> tuple[NamedMeasurements, int]:
            assert named is not None
            with stop_run_on_error():
                both = _open_pair(stack, docket, host, named)
            return both, both.large.subject.stepper.layers

        made: dict[str, tuple[NamedMeasurements, int]] = {}
        makers: dict[str, Callable[[], tuple[NamedMeasurements, int]]] = {"model": model, "names": names, "pair": pair}
        for claim in claims:
            question = question_of(claim)
            if question.about not in made:
                made[question.about] = makers[question.about]()
            evidence, layers = made[question.about]
            yield docket.answer(claim, evidence, layers)


def _decoder_host(args: argparse.Namespace, stack: ExitStack) -> RunResources:
    """Our decoder, or the one of another process, which ends with ``stack``."""
    from emad_ref.measurements.run_resources import RemoteDecoders, RunResources

    if args.decoder is None:
        return RunResources()
    return RunResources(stack.enter_context(closing(RemoteDecoders(args.decoder, args.decoder_timeout))).make)


def _open_pair(stack: ExitStack, docket: RunPlan, host: Any, names: tuple[str, str]) -> PairMeasurements:
    from emad_ref.claims.switching import savings
    from emad_ref.measurements.model_under_test import open_model
    from emad_ref.measurements.pair import PairMeasurements

    small, large = (stack.enter_context(open_model(name, docket.study)) for name in names)
    return PairMeasurements(small, large, docket.study, host, names=names, savings=savings(docket.register["EAD-F1"]))


def judge_arguments(sub: argparse.ArgumentParser) -> None:
    def read(reader: Callable[[str, Path, str], Any], where: str) -> Callable[[str], Any]:
        return partial(_read_argument, reader, where)

    sub.add_argument("model", type=read(option_values.model, "MODEL"), help="bundled name, folder or hub name")
    sub.add_argument("--claims", "--only", type=option_values.words, default=frozenset(), metavar="IDS",
                     help="as --emad-only: ids or patterns, e.g. EMAD-F1,EMAD-R*")  # fmt: skip
    sub.add_argument(
        "--corpus", type=read(option_values.corpus, "--corpus"), help="as --emad-corpus; by model by default"
    )
    sub.add_argument("--data", type=read(option_values.folder, "--data"), metavar="DIR", help="folder with data sets")
    sub.add_argument("--budget", choices=tuple(BUDGETS), default="smoke", help="how much text; smoke by default")
    sub.add_argument("--seed", type=read(option_values.seed, "--seed"), default=0, metavar="N",
                     help="of texts and resampling; 0 by default")  # fmt: skip
    sub.add_argument("--device", type=read(option_values.device, "--device"), default="cpu", metavar="DEVICE",
                     help="as torch names it, or auto; cpu by default")  # fmt: skip
    sub.add_argument(
        "--dtype", choices=option_values.DTYPES, default="float32", help="of the weights; float32 by default"
    )
    sub.add_argument("--decoder", type=read(parse_address, "--decoder"), metavar="ADDRESS",
                     help=f"as --emad-decoder: {ADDRESS_FORMS}, in place of ours")  # fmt: skip
    sub.add_argument("--decoder-timeout", type=read(option_values.seconds, "--decoder-timeout"), default=120.0,
                     metavar="SECONDS", help="time limit of each call to it")  # fmt: skip
    sub.add_argument(
        "--profile", type=read(option_values.file, "--profile"), metavar="FILE", help="instead of calibrating"
    )
    sub.add_argument(
        "--margin",
        type=read(option_values.pasted(option_values.nats), "--margin"),
        metavar="NATS",
        help="also judge EMAD at it",
    )
    sub.add_argument("--exit", type=read(option_values.file, "--exit"), metavar="FILE",
                     help="as --emad-exit: also ask EMAD-X1, X2, X5 and X6 of it")  # fmt: skip
    sub.add_argument("--lm-eval-tasks", dest="tasks", type=read(option_values.task_names, "--lm-eval-tasks"),
                     default=frozenset(), metavar="NAMES", help="e.g. wikitext,gsm8k")  # fmt: skip
    sub.add_argument(
        "--limit", type=read(option_values.count, "--limit"), metavar="N", help="documents per lm-eval task"
    )
    sub.add_argument("--allow-code-execution", action="store_true", help="run generated programs, in a sandbox")
    sub.add_argument("--pair", type=read(option_values.two_models, "--pair"), metavar="SMALL,LARGE",
                     help="as --emad-pair: what the claims about a pair are judged on")  # fmt: skip
    sub.add_argument(
        "--small-model", type=read(option_values.model, "--small-model"), help="of --pair, for names with a comma"
    )
    sub.add_argument("--large-model", type=read(option_values.model, "--large-model"), help="the same")
    sub.add_argument("--register", type=read(option_values.file, "--register"), metavar="FILE",
                     help="TOML file with other thresholds or gates")  # fmt: skip
    sub.add_argument(
        "--gate-claims", type=option_values.words, default=frozenset(), metavar="IDS", help="more rows that gate"
    )
    sub.add_argument(
        "--gate", choices=[gate for gate in GATES if gate != "decoder"], default="paper", help="as --emad-gate"
    )
    sub.add_argument("--golden", type=read(option_values.folder, "--golden"), metavar="DIR",
                     help="known verdicts read before the shipped")  # fmt: skip
    sub.add_argument("--inconclusive", choices=INCONCLUSIVE, default="warn", help="what such a gating row does")
    sub.add_argument("--require", type=read(option_values.some_of(REQUIREMENTS), "--require"), default=frozenset(),
                     metavar="KINDS", help=f"what must be decided, of {', '.join(REQUIREMENTS)}")  # fmt: skip
    sub.add_argument(
        "--tables", dest="with_tables", action="store_true", help="also print what stands beside the verdicts"
    )
    add_examples(
        sub,
        "emad judge emad-tiny --only EMAD-F1,EMAD-R*",
        "emad judge emad-tiny --gate known --golden golden --seed 1 --tables",
        "emad judge ./llama --corpus wikitext --data ./data --budget standard --device cuda --dtype bfloat16",
        "emad judge emad-tiny --profile profile.json --margin 0.2 --inconclusive fail --require quality",
        "emad judge emad-tiny --exit tiny.exit --claims EMAD-X*",
        "emad judge emad-tiny --decoder 'exec:emad serve emad-tiny' --decoder-timeout 30 --gate-claims EMAD-E10",
        "emad judge ./llama --lm-eval-tasks gsm8k --limit 50 --allow-code-execution --register mine.toml",
        "emad judge emad-tiny --claims EAD-F1 --pair emad-nano,emad-tiny",
        "emad judge emad-tiny --claims EAD-F1 --small-model emad-nano --large-model emad-tiny",
    )


def _read_argument(reader: Callable[[str, Path, str], Any], where: str, text: str) -> Any:
    """What argparse calls: a refusal of ours in argparse's words."""
    try:
        return reader(text, Path.cwd(), where)
    except BadArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from error
