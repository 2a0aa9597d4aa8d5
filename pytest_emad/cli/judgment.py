"""``emad judge`` is ``pytest`` on the shipped suites: each ``--NAME`` is pytest's ``--emad-NAME``.

    emad judge emad-tiny                                  # pytest --pyargs pytest_emad.suites --emad-model emad-tiny
    emad judge ./folder --data ./data --only EMAD-F1 -- -x   # the words after -- are pytest's own

It prints the command of pytest first. What pytest prints and its exit status follow.

``emad same`` decides one claim, ENG-1: whether another model, or an engine, still is the model of a folder.

    emad same ./llama ./llama-int8
    emad same ./llama http://localhost:8000 --decoder-dtype bfloat16

Its exit status is 0 if ENG-1 survives, 1 if it does not, and 4 after an error.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.errors import BadArgument, stop_run_on_error
from emad_ref.models.names import require_weights_available
from pytest_emad.cli.arguments import add_examples, add_suite_option, make_option_parser
from pytest_emad.measurements.option_values import parse_model_name
from pytest_emad.measurements.study import Study
from pytest_emad.remote.address import ADDRESS_FORMS, is_address, parse_address
from pytest_emad.report.deselection import SUITES
from pytest_emad.run.option_table import OPTIONS, REMOTE_TIMEOUT_S
from pytest_emad.statistics.verdicts import load_register

if TYPE_CHECKING:  # these import torch, which is slow, so bad arguments are rejected before
    from pytest_emad.measurements.run_resources import RunResources
    from pytest_emad.statistics.verdicts import Verdict

SAME_MODEL = "ENG-1"
NOT_SAME = 1  # exit status


def judge(args: argparse.Namespace) -> int:
    """Run pytest on the shipped suites. Each --NAME is pytest's --emad-NAME; the words after -- are pytest's own."""
    words = build_pytest_arguments(args)
    print(f"pytest {shlex.join(words)}", flush=True)
    return run_pytest(words).returncode


def run_pytest(words: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run pytest with the arguments ``words`` in another process; ``settings`` of ``subprocess.run``."""
    return subprocess.run([sys.executable, "-m", "pytest", *words], check=False, **settings)


def build_pytest_arguments(args: argparse.Namespace) -> list[str]:
    """The suites' folder, every given option under pytest's name, and the words after ``--``.

    Raises:
        BadArgument: the suites are not installed.
    """
    suites = next((folder for folder in SUITES if folder.is_dir()), None)
    if suites is None:
        raise BadArgument("suites", str(SUITES[-1]), "an existing folder", "install pytest-emad from a wheel")
    words = [str(suites)]
    for option in OPTIONS:
        given = getattr(args, option.field)
        if option.switch and given is not None:
            words.append(option.flag)
        elif given is not None:
            words += [f"{option.flag}={value}" for value in (given if option.many else [given])]
    return [*words, *args.pytest_arguments]


def compare_models(args: argparse.Namespace) -> int:
    """Compare a model with another one, or with an engine: KL, top-1 agreement, perplexity (claim ENG-1)."""
    for name in (args.model, args.other):
        if not is_address(name):  # before torch is imported
            require_weights_available(name)

    from pytest_emad.claims.base import RunPlan
    from pytest_emad.measurements.model_measurements import ModelMeasurements
    from pytest_emad.measurements.model_under_test import open_model

    study = Study(
        corpus=args.corpus,
        corpus_group=args.corpus_group,
        device=args.device,
        dtype=args.dtype,
        seed=args.seed,
        data=args.data,
        decoder_dtype=args.decoder_dtype,
    )
    with ExitStack() as stack:
        resources = _other_decoders(args, stack)
        with stop_run_on_error():
            evidence = ModelMeasurements(stack.enter_context(open_model(args.model, study)), study, resources)
            evidence.require_prerequisites_of_all_claims()
        plan = RunPlan(load_register(None), study, frozenset({SAME_MODEL}))
        verdict = plan.answer_claim(SAME_MODEL, evidence, evidence.subject.stepper.layers).verdict
    return _print_comparison(verdict, args.other)


def _other_decoders(args: argparse.Namespace, stack: ExitStack) -> RunResources:
    """Makes decoders of the other model, or of the engine, which ``stack`` disconnects."""
    from pytest_emad.measurements.run_resources import RemoteDecoders, RunResources, make_decoder_factory_over

    if is_address(args.other):
        address = parse_address(args.other, Path.cwd(), "OTHER")
        timeout = args.decoder_timeout or REMOTE_TIMEOUT_S
        return RunResources(stack.enter_context(closing(RemoteDecoders(address, timeout, args.decoder_dtype))).make)
    import torch

    from emad_ref.models.loading import load

    dtype = getattr(torch, args.decoder_dtype or args.dtype)
    return RunResources(make_decoder_factory_over(load(args.other, device=args.device, dtype=dtype)))


def _print_comparison(verdict: Verdict, other: str) -> int:
    """Print the legs and the verdict of ENG-1; return the exit status, 1 unless the models are shown to be the same."""
    from pytest_emad.report.tables import format_plain_table, leg_rows

    columns = ("leg", "outcome", "estimate", "[95 %]", "threshold", "unit")
    rows = leg_rows(verdict.to_json()["legs"])
    print(format_plain_table([{name: row[name].text for name in columns} for row in rows]))
    answer = {"survived": "the same model", "falsified": "NOT the same model"}.get(verdict.verdict, verdict.verdict)
    print(f"{verdict.model} and {other}: {answer} ({verdict.reason})")
    return 0 if verdict.verdict == "survived" else NOT_SAME


def add_judge_arguments(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(pytest_arguments=[])
    sub.add_argument(
        "model",
        nargs="+",
        type=make_option_parser(parse_model_name, "MODEL"),
        metavar="MODEL",
        help="bundled name, folder or hub name",
    )
    for option in OPTIONS:
        if option.name != "model":
            add_suite_option(sub, option.name, as_text=True)
    add_examples(
        sub,
        "emad judge emad-tiny --only EMAD-F1,EMAD-R* -- -x -q",
        "emad judge emad-tiny --gate known --golden golden --seed 1 --report report",
        "emad judge emad-tiny --golden golden --update-golden --all-claims",
        "emad judge ./llama --corpus wikitext --data ./data --budget standard --device cuda --dtype bfloat16",
        "emad judge emad-tiny --profile profile.json --margin 0.2 --inconclusive fail --require quality",
        "emad judge emad-tiny --exit tiny.exit --only EMAD-X*",
        "emad judge emad-tiny --backend walked --evidence timed --process-timeout 1800",
        "emad judge emad-tiny --decoder 'exec:emad serve emad-tiny' --decoder-timeout 30 --gate-claims EMAD-E10",
        "emad judge ./llama --decoder http://localhost:8000 --decoder-dtype float16 --tier logprobs",
        "emad judge ./llama --expect-decoder foreign --waive EMAD-F2='no sessions yet'",
        "emad judge ./llama --tasks gsm8k --limit 50 --allow-code-execution --register mine.toml",
        "emad judge ./llama --tasks colours --task-path .",
        "emad judge ./llama --corpus texts.jsonl --corpus-group author",
        "emad judge ./llama --decoder http://localhost:8000 --decoder-baseline http://localhost:8001 --only ENG-7",
        "emad judge ./llama --decoder http://localhost:8000 --known-gaps gaps.toml",
        "emad judge ./llama --decoder http://localhost:8000 --acceptance-record curve.yaml,llama,thinking_off,3",
        "emad judge emad-tiny --only EAD-F1 --pair emad-nano,emad-tiny",
        "emad judge emad-tiny --only EAD-F1 --small-model emad-nano --large-model emad-tiny",
    )


def add_same_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("model", type=make_option_parser(parse_model_name, "MODEL"), metavar="MODEL",
        help="bundled name, folder or hub name")  # fmt: skip
    add("other", metavar="OTHER", help=f"another model, or an engine: {ADDRESS_FORMS}")
    for name in ("corpus", "corpus-group", "data", "seed", "device", "dtype", "decoder-dtype", "decoder-timeout"):
        add_suite_option(sub, name)
    add_examples(
        sub,
        "emad same ./llama ./llama-int8 --corpus wikitext --data ./data",
        "emad same emad-tiny 'exec:emad serve emad-tiny'",
        "emad same emad-tiny emad-tiny --decoder-dtype bfloat16 --seed 1",
        "emad same ./llama http://localhost:8000 --decoder-dtype bfloat16 --decoder-timeout 60",
        "emad same ./llama ./llama-merged --device cuda --dtype bfloat16",
        "emad same ./llama ./llama-merged --corpus texts.jsonl --corpus-group author",
    )
