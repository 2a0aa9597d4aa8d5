"""``emad judge`` decides claims about a model, or a pair of models, as ``pytest suites/claims`` does, without pytest.

    emad judge emad-tiny                                  # the claims of `pytest suites/claims`
    emad judge ./folder --data ./data --claims EMAD-F1,EMAD-R1

Its tables are those of the suites. The exit status is 0 if no gate fails, 1 if one does, and 4 after an error.

``emad same`` decides one claim, ENG-1: whether another model, or an engine, still is the model of a folder.

    emad same ./llama ./llama-int8
    emad same ./llama http://localhost:8000 --other-dtype bfloat16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.console import print_error
from emad_ref.errors import BadArgument, stop_run_on_error
from emad_ref.models.names import require_weights_available
from pytest_emad.cli.arguments import add_examples, pytest_to_verb_option_names
from pytest_emad.measurements import option_values
from pytest_emad.measurements.study import BUDGETS, PairNames, Study, resolve_pair_names_from_options
from pytest_emad.remote.address import ADDRESS_FORMS, is_address, parse_address
from pytest_emad.report.deselection import NO_PAIR
from pytest_emad.statistics.gate import (
    GATES,
    INCONCLUSIVE,
    REQUIREMENTS,
    GateOptions,
    build_gate_messages,
    format_claim_names,
)
from pytest_emad.statistics.goldens import (
    KnownVerdicts,
    VerdictConditions,
    absent_comparison,
    compare_verdict_with_record,
    find_golden_folder,
    format_comparison_summary,
    list_changes_from_shipped_register,
    load_known_verdicts_from_folders,
    require_known_verdicts_file,
    verdict_key_fields,
)
from pytest_emad.statistics.verdicts import Claim, load_register, match_id_patterns
from pytest_emad.tasks.sandbox import CODE_EXECUTION

if TYPE_CHECKING:  # these import torch, which is slow, so bad arguments are rejected before
    from pytest_emad.claims.base import Answer, ModelOrPairMeasurements, RunPlan
    from pytest_emad.measurements.pair_measurements import PairMeasurements
    from pytest_emad.measurements.run_resources import RunResources

SAME_MODEL = "ENG-1"
SUBJECTS = ("model", "names", "pair")  # subjects of claims, in the order of the suites
GATE_FAILED = 1  # exit status


def judge(args: argparse.Namespace) -> int:
    """Judge the claims about a model and a pair, and print the verdicts; exit status 1 if a gate fails."""
    from pytest_emad.report.summary import build_run_summary
    from pytest_emad.report.tables import format_section_titles_and_texts

    run = rename_judgment_options_for_verb(compute_judgment_result(args), add_judge_arguments)
    report = run.report
    print(build_run_summary(report).headline)
    for message in run.warnings:
        print_error(f"warning: {message}")
    tables = report["tables"] if args.with_tables else []
    for title, text in format_section_titles_and_texts(report["points"], tables, report["claims"], report["notes"]):
        print(f"\n{title}\n\n{text}")
    if args.gate == "known":
        print(f"\nemad known verdicts\n\n{format_comparison_summary(report['known'])}")
    for failure in run.failures:
        print_error(f"FAILED: {failure}")
    return GATE_FAILED if run.failures else 0


def compare_models(args: argparse.Namespace) -> int:
    """Compare a model with another one, or with an engine: KL, top-1 agreement, perplexity (claim ENG-1)."""
    parser = argparse.ArgumentParser()
    add_judge_arguments(parser)
    request = parser.parse_args([args.model, "--claims", SAME_MODEL, "--gate-claims", SAME_MODEL])
    for name in ("corpus", "data", "seed", "device", "dtype", "decoder_timeout"):
        setattr(request, name, getattr(args, name))
    request.decoder_dtype = args.other_dtype
    if is_address(args.other):
        request.decoder = parse_address(args.other, Path.cwd(), "OTHER")
    else:
        require_weights_available(args.other)
        request.other = args.other
    return _print_comparison(
        rename_judgment_options_for_verb(compute_judgment_result(request), add_same_arguments), args.other
    )


def _print_comparison(run: JudgmentResult, other: str) -> int:
    """Print the legs and the verdict of ENG-1; return the exit status, 1 unless the models are shown to be the same."""
    from pytest_emad.report.tables import format_plain_table, leg_rows

    (claim,) = run.report["claims"]
    columns = ("leg", "outcome", "estimate", "[95 %]", "threshold", "unit")
    print(format_plain_table([{name: row[name].text for name in columns} for row in leg_rows(claim["legs"])]))
    answer = {"survived": "the same model", "falsified": "NOT the same model"}.get(claim["verdict"], claim["verdict"])
    print(f"{claim['model']} and {other}: {answer} ({claim['reason']})")
    return 0 if claim["verdict"] == "survived" else GATE_FAILED


@dataclass(frozen=True)
class JudgmentResult:
    """Result of ``compute_judgment_result``: a report, and messages of gates that fail or warn."""

    report: dict[str, Any]
    failures: list[str]
    warnings: list[str]


def rename_judgment_options_for_verb(
    run: JudgmentResult, arguments: Callable[[argparse.ArgumentParser], None]
) -> JudgmentResult:
    """``run``, whose texts name the options of the verb that ``arguments`` declares."""
    return JudgmentResult(
        *(pytest_to_verb_option_names(part, arguments) for part in (run.report, run.failures, run.warnings))
    )


def compute_judgment_result(args: argparse.Namespace) -> JudgmentResult:
    """Decide the claims that the parsed arguments of ``emad judge`` select.

    Raises:
        EmadError: a model that cannot be loaded, an unknown claim, a text that cannot be read.
    """
    from pytest_emad.measurements.attachments import Attachments

    register = load_register(args.register)
    plan = _run_plan(args, register)
    gating = GateOptions(gate=args.gate, inconclusive=args.inconclusive, require=args.require)
    known, run = _known_verdicts(args), _run_conditions(args, plan)
    attachments, claims, failures, warnings, comparisons = Attachments(), [], [], [], []
    tables: list[dict[str, Any]] = []
    pair = resolve_pair_names_from_options(args.pair, args.small_model, args.large_model, [args.model])
    for answer in _answer_claims(args, plan, _choose_claims(args, plan, pair), pair):
        row, verdict = register[answer.verdict.id], answer.verdict
        key = verdict_key_fields(row.id, answer.fingerprint or verdict.model, answer.corpus, run)
        expected, is_gating = None, plan.is_gating(row.id)
        if known is not None:
            comparison = compare_verdict_with_record(row, verdict, known.find_outcome(key, run.seed))
            comparisons.append(comparison.to_json())
            expected, is_gating = comparison.expected, comparison.expected is not None
        attachments += answer.attachments
        tables += [
            {"model": verdict.model, "title": table.title, "rows": table.rows}
            | ({"figure": table.figure} if table.figure else {})
            for table in answer.attachments.tables
        ]
        result = build_gate_messages(verdict, row, is_gating, gating, expected)
        failures += [result.failure] if result.failure else []
        warnings += [result.warning] if result.warning else []
        told = {"title": row.display_title, "gate": is_gating, "fails": bool(result.failure), "test": ""}
        claims.append(verdict.to_json() | told)
    run_failures = [f"gate known: {absent.reason}"] if (absent := absent_comparison(comparisons)) else []
    settings = {"models": [args.model], "gate": args.gate, "gate_claims": [*args.gate_claims], "budget": args.budget}
    settings |= {"only": [], "report": None, "update_golden": False}
    report = {
        "state": "complete",
        "settings": settings,
        "run": {"exit_status": int(bool(failures or run_failures)), "failures": run_failures},
        "models": [{"name": args.model}],
        "points": [dict(point) for point in attachments.points],
        "claims": claims,
        "tables": tables,
        "notes": list(dict.fromkeys(attachments.notes)),
        "known": comparisons,
        "decoder": {"name": "", "foreign": False, "providers": [], "overlooked": []},
        **{part: [] for part in ("goldens", "tests", "audits", "deselected", "waivers")},
    }
    return JudgmentResult(report, [*failures, *run_failures], warnings)


def _run_plan(args: argparse.Namespace, register: dict[str, Claim]) -> RunPlan:
    from pytest_emad.claims.base import RunPlan

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
        task_path=args.task_path,
        limit=args.limit,
        allow_code_execution=args.allow_code_execution,
        decoder_dtype=args.decoder_dtype,
    )
    for name in sorted(args.gate_claims):
        if name not in register:
            raise BadArgument("--gate-claims", name, f"ids of the register: {', '.join(register)}")
    return RunPlan(register, study, args.gate_claims)


def _known_verdicts(args: argparse.Namespace) -> KnownVerdicts | None:
    """Recorded verdicts for ``--gate known``; None for other gates, which read no record.

    Raises:
        DamagedGolden: no record, or one that cannot be read.
    """
    if args.gate != "known":
        return None
    folders = [folder for folder in (args.golden, find_golden_folder()) if folder is not None]
    require_known_verdicts_file(folders)
    return load_known_verdicts_from_folders(folders)


def _run_conditions(args: argparse.Namespace, plan: RunPlan) -> VerdictConditions:
    options = [
        *plan.study.non_default_setting_lines,
        *list_changes_from_shipped_register(plan.register, args.gate_claims),
    ]
    return VerdictConditions(args.seed, args.budget, ", ".join(options))


def _choose_claims(args: argparse.Namespace, plan: RunPlan, pair: tuple[str, str] | None) -> list[str]:
    """Ids of the claims to judge: those of ``--claims``, by default those of ``suites/claims``.

    Claims about the model come first, each group in the order of the register. Without a pair, claims about one are
    skipped with a message.

    Raises:
        BadArgument: an unknown claim, or only claims about a pair without a pair.
    """
    from pytest_emad.claims.base import find_questions_by_claim

    requested = match_id_patterns(args.claims, plan.register, "--claims")
    pair_named = bool(args.pair or args.small_model)
    questions = {
        name: question
        for name, question in find_questions_by_claim(plan.register).items()
        if (
            name in requested
            if requested
            else question.suite == "claims" and plan.should_ask(name, pair_named=pair_named)
        )
    }
    skipped = [name for name, question in questions.items() if pair is None and question.about != "model"]
    if skipped and len(skipped) == len(questions):
        verb = "need" if len(skipped) > 1 else "needs"
        raise BadArgument("--pair", None, "SMALL,LARGE", f"{', '.join(skipped)} {verb} a pair of models")
    if skipped:
        print_error(f"skipped {format_claim_names(skipped, plan.register)}: {NO_PAIR}; name one by --pair SMALL,LARGE")
    names = [name for name in questions if name not in skipped]
    return sorted(names, key=lambda name: SUBJECTS.index(questions[name].about))


def _answer_claims(
    args: argparse.Namespace, plan: RunPlan, claims: list[str], pair: tuple[str, str] | None
) -> Iterator[Answer]:
    """Decide ``claims`` one by one. A model is loaded for the first claim that needs it.

    ``pair``: names of the small and the large model; None if no claim is about a pair.
    """
    from pytest_emad.claims.base import find_question_of_claim
    from pytest_emad.measurements.model_measurements import ModelMeasurements
    from pytest_emad.measurements.model_under_test import open_model

    with ExitStack() as stack:
        host = _decoder_host(args, stack)

        def measure_model() -> tuple[ModelOrPairMeasurements, int]:
            with stop_run_on_error():
                evidence = ModelMeasurements(stack.enter_context(open_model(args.model, plan.study)), plan.study, host)
                evidence.require_prerequisites_of_all_claims()
            return evidence, evidence.subject.stepper.layers

        def name_pair() -> tuple[ModelOrPairMeasurements, int]:
            assert pair is not None
            return PairNames(*pair), 0

        def measure_pair() -> tuple[ModelOrPairMeasurements, int]:
            assert pair is not None
            with stop_run_on_error():
                evidence = _open_pair(stack, plan, host, pair)
            return evidence, evidence.large.subject.stepper.layers

        openers: dict[str, Callable[[], tuple[ModelOrPairMeasurements, int]]] = {
            "model": measure_model,
            "names": name_pair,
            "pair": measure_pair,
        }
        opened: dict[str, tuple[ModelOrPairMeasurements, int]] = {}
        for claim in claims:
            subject = find_question_of_claim(claim).about
            if subject not in opened:
                opened[subject] = openers[subject]()
            yield plan.answer_claim(claim, *opened[subject])


def _decoder_host(args: argparse.Namespace, stack: ExitStack) -> RunResources:
    """Maker of decoders: the reference, those of another model, or those of ``--decoder``, closed by ``stack``."""
    from pytest_emad.measurements.run_resources import RemoteDecoders, RunResources, make_decoder_factory_over

    if args.other is not None:
        import torch

        from emad_ref.models.loading import load

        other = load(args.other, device=args.device, dtype=getattr(torch, args.decoder_dtype or args.dtype))
        return RunResources(make_decoder_factory_over(other))
    if args.decoder is None:
        return RunResources()
    remote = RemoteDecoders(args.decoder, args.decoder_timeout, args.decoder_dtype)
    return RunResources(stack.enter_context(closing(remote)).make)


def _open_pair(stack: ExitStack, plan: RunPlan, host: Any, names: tuple[str, str]) -> PairMeasurements:
    from pytest_emad.claims.switching import get_reported_savings
    from pytest_emad.measurements.model_under_test import open_model
    from pytest_emad.measurements.pair_measurements import PairMeasurements

    small, large = (stack.enter_context(open_model(name, plan.study)) for name in names)
    return PairMeasurements(
        small, large, plan.study, host, names=names, savings=get_reported_savings(plan.register["EAD-F1"])
    )


def add_same_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add(
        "model",
        type=_reader(option_values.parse_model_name, "MODEL"),
        metavar="MODEL",
        help="bundled name, folder or hub name",
    )
    add("other", metavar="OTHER", help=f"another model, or an engine: {ADDRESS_FORMS}")
    _add_text_arguments(add)
    add("--other-dtype", choices=option_values.DTYPES, metavar="DTYPE",
        help="precision of the other model, or that the engine states (default: --dtype)")  # fmt: skip
    add_examples(
        sub,
        "emad same ./llama ./llama-int8 --corpus wikitext --data ./data",
        "emad same emad-tiny 'exec:emad serve emad-tiny'",
        "emad same emad-tiny emad-tiny --other-dtype bfloat16 --seed 1",
        "emad same ./llama http://localhost:8000 --other-dtype bfloat16 --decoder-timeout 60",
        "emad same ./llama ./llama-merged --device cuda --dtype bfloat16",
    )


def _reader(reader: Callable[[str, Path, str], Any], where: str) -> Callable[[str], Any]:
    return partial(_read_argument, reader, where)


def _add_text_arguments(add: Callable[..., Any]) -> None:
    """Arguments of both verbs: the text, and how models and decoders run."""
    add("--corpus", type=_reader(option_values.parse_corpus, "--corpus"),
        help=f"text to read: {', '.join(option_values.CORPORA)}, or a path (default: by model)")  # fmt: skip
    add("--data", type=_reader(option_values.parse_existing_folder, "--data"), metavar="DIR",
        help="folder with data sets, searched before the hub")  # fmt: skip
    add("--seed", type=_reader(option_values.parse_seed, "--seed"), default=0, metavar="N",
        help="seed of texts and resampling (default: 0)")  # fmt: skip
    add("--device", type=_reader(option_values.parse_device_name, "--device"), default="cpu", metavar="DEVICE",
        help="torch device, or auto (default: cpu)")  # fmt: skip
    add("--dtype", choices=option_values.DTYPES, default="float32", help="dtype of the weights (default: float32)")
    add("--decoder-timeout", type=_reader(option_values.parse_seconds, "--decoder-timeout"), default=120.0,
        metavar="SECONDS", help="time limit of each call to a decoder in another process (default: 120)")  # fmt: skip


def add_judge_arguments(sub: argparse.ArgumentParser) -> None:
    read = _reader
    add = sub.add_argument
    sub.set_defaults(other=None)
    add(
        "model",
        type=read(option_values.parse_model_name, "MODEL"),
        metavar="MODEL",
        help="bundled name, folder or hub name",
    )
    add("--claims", "--only", type=read(option_values.parse_claim_patterns, "--claims"), default=frozenset(),
        metavar="IDS",
        help="claims to judge, by id or pattern, e.g. EMAD-F1,EMAD-R* (default: those of suites/claims)")  # fmt: skip
    _add_text_arguments(add)
    add("--budget", choices=tuple(BUDGETS), default="smoke", help="how much text a run reads (default: smoke)")
    add("--decoder", type=read(parse_address, "--decoder"), metavar="ADDRESS",
        help=f"judge a decoder in another process instead of the reference decoder: {ADDRESS_FORMS}")  # fmt: skip
    add("--decoder-dtype", choices=option_values.DTYPES, metavar="DTYPE",
        help="precision that the decoder states, for ENG-1 and ENG-4 (default: --dtype)")  # fmt: skip
    add("--profile", type=read(option_values.parse_existing_file, "--profile"), metavar="FILE",
        help="calibration profile of emad calibrate (default: calibrate)")  # fmt: skip
    add("--margin", type=read(option_values.make_unicode_minus_parser(option_values.parse_nats), "--margin"),
    metavar="NATS",
        help="also judge EMAD at this margin")  # fmt: skip
    add("--exit", type=read(option_values.parse_existing_file, "--exit"), metavar="FILE",
        help="exit of emad screen; also judge EMAD-X1, X2, X5 and X6 on it")  # fmt: skip
    add("--lm-eval-tasks", dest="tasks", type=read(option_values.parse_task_names, "--lm-eval-tasks"),
        default=frozenset(), metavar="NAMES", help="lm-eval tasks to score, e.g. wikitext,gsm8k")  # fmt: skip
    add("--task-path", type=read(option_values.parse_existing_folder, "--task-path"), metavar="DIR",
        help="folder of task definitions of your own (lm-eval's YAML)")  # fmt: skip
    add("--limit", type=read(option_values.parse_count, "--limit"), metavar="N",
        help="documents per lm-eval task (default: all)")  # fmt: skip
    add("--allow-code-execution", nargs="?", const=CODE_EXECUTION[0], choices=CODE_EXECUTION,
        help="run generated programs, confined by bubblewrap (the value without one), or with your files and "
             "network")  # fmt: skip
    add("--pair", type=read(option_values.parse_model_pair, "--pair"), metavar="SMALL,LARGE",
        help="models for the claims about a pair (default: none, or the bundled pair for a bundled model)")  # fmt: skip
    add("--small-model", type=read(option_values.parse_model_name, "--small-model"),
        help="small model of --pair, if a name contains a comma")  # fmt: skip
    add("--large-model", type=read(option_values.parse_model_name, "--large-model"),
        help="large model of --pair, if a name contains a comma")  # fmt: skip
    add("--register", type=read(option_values.parse_existing_file, "--register"), metavar="FILE",
        help="TOML file that changes thresholds or gates of claims")  # fmt: skip
    add("--gate-claims", type=read(option_values.split_claim_ids, "--gate-claims"), default=frozenset(), metavar="IDS",
        help="further claims that fail the run when falsified")  # fmt: skip
    add("--gate", choices=[gate for gate in GATES if gate != "decoder"], default="paper",
        help="what fails the run: a falsified gating claim (paper), or a verdict that differs from the recorded one "
             "(known) (default: paper)")  # fmt: skip
    add("--golden", type=read(option_values.parse_existing_folder, "--golden"), metavar="DIR",
        help="folder of recorded verdicts, searched before the shipped ones")  # fmt: skip
    add("--inconclusive", choices=INCONCLUSIVE, default="warn",
        help="what an inconclusive gating claim does (default: warn)")  # fmt: skip
    add("--require", type=read(option_values.make_subset_parser(REQUIREMENTS), "--require"), default=frozenset(),
        metavar="KINDS", help=f"fail the run unless these are decided: {', '.join(REQUIREMENTS)}")  # fmt: skip
    add("--tables", dest="with_tables", action="store_true", help="also print the tables behind the verdicts")
    add_examples(
        sub,
        "emad judge emad-tiny --only EMAD-F1,EMAD-R*",
        "emad judge emad-tiny --gate known --golden golden --seed 1 --tables",
        "emad judge ./llama --corpus wikitext --data ./data --budget standard --device cuda --dtype bfloat16",
        "emad judge emad-tiny --profile profile.json --margin 0.2 --inconclusive fail --require quality",
        "emad judge emad-tiny --exit tiny.exit --claims EMAD-X*",
        "emad judge emad-tiny --decoder 'exec:emad serve emad-tiny' --decoder-timeout 30 --gate-claims EMAD-E10",
        "emad judge ./llama --decoder http://localhost:8000 --decoder-dtype float16 --claims ENG-*",
        "emad judge ./llama --lm-eval-tasks gsm8k --limit 50 --allow-code-execution --register mine.toml",
        "emad judge ./llama --lm-eval-tasks colours --task-path .",
        "emad judge emad-tiny --claims EAD-F1 --pair emad-nano,emad-tiny",
        "emad judge emad-tiny --claims EAD-F1 --small-model emad-nano --large-model emad-tiny",
    )


def _read_argument(reader: Callable[[str, Path, str], Any], where: str, text: str) -> Any:
    """Value of an argument; converts BadArgument into the exception that argparse expects."""
    try:
        return reader(text, Path.cwd(), where)
    except BadArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from error
