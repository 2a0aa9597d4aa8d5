"""``emad screen`` searches an exit for a model; ``emad sweep`` compares families of exit rules on a model.

``emad screen`` prints the saving of an oracle, the savings of this project's rules, and a recommendation, and writes an
exit file for ``emad generate --exit``. ``emad sweep`` prints the Pareto tables of the plugin, computed by replay: it
calibrates on one split, chooses the front of each family on a second, and evaluates it on a third.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from emad_ref.console import print_error
from emad_ref.errors import BadArgument
from emad_ref.files import require_replaceable_file, write_atomically
from emad_ref.text.documents import DEFAULT_CORPUS
from pytest_emad.cli.arguments import (
    add_examples,
    add_suite_option,
    add_worker_executor_argument,
    parse_float_argument,
    parse_path,
    parse_whole_number,
)
from pytest_emad.measurements.study import BUDGETS, Budget, Study
from pytest_emad.screening.settings import DOCUMENTS

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_emad.measurements.model_measurements import ModelMeasurements
    from pytest_emad.screening.exit import Exit


LOWER_THAN_FULL_DEPTH = (
    "a decoded point has a lower perplexity than full depth: its lens has learned this text, and full depth has not; "
    "the model itself may gain as much from training on it"
)
WORDS = (
    "words: net: after the cost of deciding; free depth: each token may leave at any layer, and K and V above it are "
    "filled in; monotone: never deeper than the token before; tuned lens: a fitted readout of each layer; gate: its "
    "estimate of how far that readout is from the last one"
)
SWEEP_KEYS = 2  # leading columns that identify a row of a sweep: FLOPs saved and family


def screen_and_save_best_exit(args: argparse.Namespace) -> None:
    """Measure how much any exit could save on a model and what our rules save, and write the best exit to a file."""
    import torch

    from emad_ref.models.downloads import cache_folder
    from emad_ref.models.loading import load
    from emad_ref.models.threads import one_thread_for_steps
    from pytest_emad.report.tables import DEFAULT_WIDTH, format_plain_table
    from pytest_emad.screening.exit import EXIT, save_exit
    from pytest_emad.screening.phases import PhaseRunner
    from pytest_emad.screening.screen import screen as screen_model
    from pytest_emad.screening.settings import ScreeningSettings

    require_replaceable_file(args.out, "out", "an exit", EXIT.start)  # reject bad input before the long passes
    documents = DOCUMENTS if args.documents is None else args.documents
    settings = ScreeningSettings(
        args.corpus, args.data, documents, args.rise, args.seed, args.window, args.corpus_group
    )  # checks them
    loaded = load(args.model, device=args.device, dtype=getattr(torch, args.dtype))
    settings = settings.for_model(loaded.geometry, args.documents, args.window)
    if args.threads is not None:
        if args.threads < 1:
            raise BadArgument("threads", args.threads, "a whole number ≥ 1")
        torch.set_num_threads(args.threads)
    with one_thread_for_steps(loaded.geometry.parameter_count()) if args.threads is None else nullcontext():
        run = PhaseRunner(progress=True, kept_in=cache_folder() / "screenings")
        try:
            learned = screen_model(loaded, settings, run)
        except KeyboardInterrupt:
            if run.finished:
                print_error(f"kept: {', '.join(run.finished)}; the same command goes on from there")
            raise
    save_exit(args.out, learned)
    run.forget()
    width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    exits, drafts, *about = describe_screening(learned.screened)
    for line in (exits, drafts, _command_of_advice(learned, args.model, args.out)):
        print(textwrap.fill(line, width, subsequent_indent="  "))
    print()
    for title, rows in build_screening_tables(learned.screened, every_row=args.verbose):
        print(f"{title}\n{format_plain_table(rows, width)}\n")
    for line in about:
        print(textwrap.fill(line, width, subsequent_indent="  "))
    print(f"written to {args.out}")


def _command_of_advice(learned: Exit, model: str, out: Path) -> str:
    """The command that follows the advice."""
    if learned.leave_early or learned.drafting is not None:
        return f'follow it: emad generate {model} "…" --exit {out}'
    return f'neither pays here: emad generate {model} "…" runs the model as it is'


def build_screening_tables(
    record: Mapping[str, Any], *, every_row: bool = False
) -> list[tuple[str, Sequence[Mapping[str, str]]]]:
    """Title and rows of each table about a screening. ``record``: as ``Exit.screened``.

    ``every_row``: also of families without a point at a level.
    """
    from pytest_emad.report.tables import ABSENT
    from pytest_emad.statistics.number_format import format_peak_memory

    def share(value: float | None) -> str:
        return ABSENT if value is None else f"{value:.1%}"

    def interval(value: list[float | None] | None, spec: str) -> str:
        if value is None:
            return ABSENT
        number, low, high = (ABSENT if each is None else f"{each:{spec}}" for each in value)
        return f"{number} [{low}, {high}]"

    levels = sorted({row["level"] for row in record["slack"]})
    oracles = list(dict.fromkeys((row["oracle"], row["readout"], row["depth"]) for row in record["slack"]))
    cells = {(row["oracle"], row["readout"], row["depth"], row["level"]): row for row in record["slack"]}
    headroom = [
        {"oracle": oracle[0], "readout": oracle[1], "depth": oracle[2]}
        | {f"{level:.1%}: blocks": share(cells[*oracle, level]["blocks"]) for level in levels}
        | {f"{level:.1%}: net": share(cells[*oracle, level]["net"]) for level in levels}
        for oracle in oracles
    ]
    selected = [
        {
            "rise ≤": share(row["level"]),
            "net [95 %]": interval(row["net"], ".1%"),
            "rise [95 %]": interval(row["rise"], "+.2%"),
            "family": row["family"],
            "readout": row["readout"],
            "depth": row["depth"],
            "how": row["how"],
            "point": row["point"] or "none",
            "probes": " ".join(map(str, row["probes"] or [])) or ABSENT,
            "blocks": share(row["blocks"][0] if row["blocks"] else None),
        }
        for row in sorted([*record["decoded"], *record["reached"]], key=lambda row: row["level"])
        if every_row or row["point"] is not None
    ]
    hidden = len(record["reached"]) + len(record["decoded"]) - len(selected)
    times = [
        {
            "point": row["name"],
            "ms per token": f"{1000 * row['seconds']:.3g}",
            "tokens per s": f"{1 / row['seconds']:.3g}",
            "× as fast [95 %]": interval([row["fast"], row["low"], row["high"]], ".2f"),
        }
        for row in record["time"]
    ]
    peak = record["peak_memory"]
    memory = format_peak_memory(peak["bytes"], peak["of"]) if "bytes" in peak else "no peak memory"
    return [
        (
            "slack, an upper bound: saving of an oracle that knows each layer's divergence from the final output",
            headroom,
        ),
        (
            "net saving of each family: chosen on validation text, measured on evaluation text"
            + (f" ({hidden} rows without a point: -v)" if hidden else ""),
            selected,
        ),
        *(
            [(f"time on this machine: batch 1, threads {record['threads']}; {memory} of the whole screening", times)]
            if times
            else []
        ),
    ]


def describe_screening(record: Mapping[str, Any]) -> list[str]:
    """Sentences: the recommendation, first, drafts, the text and the fit behind the tables, what depends on times."""
    documents, tokens, rank = record["documents"], record["tokens"], record["lens"]["rank"]
    duplicates = _near_duplicate_counts(record["near_duplicates"])
    seconds = ", ".join(f"{phase} {spent:.0f} s" for phase, spent in record["seconds"].items())
    return [
        record["recommendation"],
        record["drafts"]["sentence"],
        WORDS,
        f"{record['model']} on {record['corpus']}: perplexity {record['perplexity']:.4g} at full depth on "
        f"{tokens['evaluate']:,} tokens of {documents['evaluate']} documents in windows of at most {record['window']} "
        "tokens; replayed rows use exact K/V, and those of free depth are charged for copying K/V above the exit",
        *([f"skipped near-duplicates of documents that were read: {duplicates}"] if duplicates else []),
        f"lens of {'full rank' if rank is None else f'rank {rank}'}, {record['lens']['steps']} steps; time: {seconds}",
        *([LOWER_THAN_FULL_DEPTH] if any(row["rise"] and row["rise"][2] < 0 for row in record["decoded"]) else []),
        "times, and the advice and drafts that follow from them, depend on this machine; everything else is the same "
        f"on every machine with seed {record['seed']}",
    ]


def _near_duplicate_counts(counts: Mapping[str, int]) -> str:
    """``12 to choose on, 9 to judge on``; "" without near-duplicates. Choosing and certifying share a split."""
    purposes = {"calibrate": "to calibrate on", "choose": "to choose and certify on", "evaluate": "to judge on"}
    return ", ".join(f"{counts[split]:,} {purpose}" for split, purpose in purposes.items() if counts.get(split))


def add_screen_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("model", metavar="MODEL", help="bundled name, folder or hub name of a decoder-only model")
    add("out", type=parse_path, metavar="OUT", help=".safetensors file to write the exit to, for emad generate --exit")
    add_suite_option(sub, "corpus", as_text=True, default=DEFAULT_CORPUS)
    add_suite_option(sub, "corpus-group")
    add_suite_option(sub, "data")
    add("--documents", type=parse_whole_number, metavar="N",
        help="how much text to read: documents to certify and to judge on, each, "
             "and as many or half as many to choose on "
             f"(default: {DOCUMENTS}, fewer for models above about 50M parameters)")  # fmt: skip
    add("--window", type=parse_whole_number, metavar="N",
        help="most tokens of a window of text "
             "(default: 512, or 128 where the head costs more than a block)")  # fmt: skip
    add("--rise", type=parse_float_argument, default=0.01, metavar="SHARE",
        help="largest allowed relative rise of perplexity (default: 0.01)")  # fmt: skip
    add("--threads", type=parse_whole_number, metavar="N", help="threads of torch (default: 1 for a small model)")
    add_suite_option(sub, "device")
    add_suite_option(sub, "dtype")
    add("-v", "--verbose", action="store_true", help="list every row, also of families that reach no point")
    add_suite_option(sub, "seed")
    add_examples(
        sub,
        "emad screen emad-tiny-plain exit.safetensors",
        "emad screen emad-tiny-plain exit.safetensors --corpus world:mixed --documents 400 --window 128",
        "emad screen ./llama exit.safetensors --corpus wikitext --data ./data --rise 0.02 --threads 2 --seed 1 -v",
        "emad screen ./llama exit.safetensors --device cuda --dtype bfloat16",
        "emad screen ./llama exit.safetensors --corpus texts.jsonl --corpus-group author",
    )


def sweep_exit_rules(args: argparse.Namespace) -> None:
    """Compare the families of exit rules at equal net FLOPs, by replay: chosen on one split, judged on another."""
    from emad_ref.models.fast.product_table import share_product_table
    from emad_ref.models.loading import require_decoder_only
    from emad_ref.workers.dispatch import open_workers
    from pytest_emad.measurements.model_measurements import ModelMeasurements
    from pytest_emad.measurements.model_under_test import open_model
    from pytest_emad.measurements.run_resources import RunResources
    from pytest_emad.report.tables import DEFAULT_WIDTH, format_plain_table

    if args.out is not None:  # reject bad input before the long passes
        if args.out.suffix not in WRITERS:
            raise BadArgument("out", str(args.out), f"a file name that ends in {' or '.join(WRITERS)}")
        require_replaceable_file(args.out, "out", "a table of emad sweep", WRITERS[args.out.suffix][1])
    study = Study(corpus=args.corpus, corpus_group=args.corpus_group, data=args.data, budget=resolve_text_budget(args))
    with share_product_table(), open_model(args.model, study) as loaded, open_workers(args.executor) as workers:
        if not loaded.trained:
            raise BadArgument("model", loaded.name, "trained weights", "random weights have no meaningful perplexity")
        require_decoder_only(loaded)
        evidence = ModelMeasurements(loaded, study, RunResources(workers=workers))
        evidence.require_prerequisites_of_all_claims()
        result = build_sweep_result(evidence)
    width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    for title in dict.fromkeys(row["table"] for row in result["rows"]):
        rows = [
            {column: value for column, value in row.items() if column != "table"}
            for row in result["rows"]
            if row["table"] == title
        ]
        print(f"{title}\n{format_plain_table(rows, width, SWEEP_KEYS)}")
    for note in result["notes"]:
        print(note)
    tokens = result["tokens"]["evaluate"]
    print(f"full depth: perplexity {result['full depth perplexity']:.4g} on {tokens:,} tokens of {result['corpus']}")
    if args.out is not None:
        write_atomically(args.out, WRITERS[args.out.suffix][0](result), "out")
        print(f"written to {args.out}")


def resolve_text_budget(args: argparse.Namespace) -> Budget:
    """The budget of ``--budget``, with ``--documents`` windows per split if given.

    Raises:
        BadArgument: less than one window.
    """
    budget, count = BUDGETS[args.budget], args.documents
    if count is None:
        return budget
    if count < 1:
        raise BadArgument("documents", count, "at least one window of each split")
    return replace(budget, calibrate=count, validate=count, evaluate=count)


def build_sweep_result(evidence: ModelMeasurements) -> dict[str, Any]:
    """The Pareto tables, their notes and their provenance as JSON values; ``table`` of a row is its table's title."""
    from emad_ref import __version__

    pareto, traces = evidence.baseline_comparison.make_pareto_tables(), evidence.traces
    splits = {"calibrate": traces.calibration, "validate": traces.validation, "evaluate": traces.evaluation}
    return {
        "model": evidence.name,
        "fingerprint": evidence.fingerprint,
        "corpus": evidence.corpus,
        "dtype": evidence.subject.dtype,
        "version": __version__,
        "window": evidence.subject.window_size,
        "tokens": {split: len(trace) for split, trace in splits.items()},
        "full depth perplexity": evidence.points.full_loss.perplexity,
        "rows": [{"table": table.title, **row} for table in pareto.tables for row in table.rows],
        "notes": list(pareto.notes),
    }


def format_result_json(result: Mapping[str, Any]) -> str:
    return json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def format_result_csv(result: Mapping[str, Any]) -> str:
    """The rows of all tables as CSV; shares are fractions, as in every data file."""
    file = io.StringIO()
    rows = result["rows"]
    columns = dict.fromkeys(column for row in rows for column in row)  # a table may lack columns of another
    writer = csv.DictWriter(file, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


# suffix → writer, and how its files begin
WRITERS = {".csv": (format_result_csv, rb"^table,"), ".json": (format_result_json, rb'^\{\s*"model":[^{}]*"version"')}


def add_sweep_arguments(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("model", metavar="MODEL", help="bundled name, folder or hub name of a decoder-only model")
    add_suite_option(sub, "corpus", as_text=True)
    add_suite_option(sub, "corpus-group")
    add_suite_option(sub, "data")
    add_suite_option(sub, "budget")
    add(
        "--documents",
        type=parse_whole_number,
        metavar="N",
        help="how much text to read: windows of each split (default: by --budget)",
    )
    add(
        "--out",
        type=parse_path,
        metavar="PATH",
        help="where to write: a file that ends in .json or .csv (default: nowhere)",
    )
    add_worker_executor_argument(sub)
    add_examples(
        sub,
        "emad sweep emad-tiny --documents 40",
        "emad sweep ./llama --corpus texts.jsonl --corpus-group author",
        "emad sweep ./llama --corpus wikitext --data ./data --budget standard --out sweep.csv",
        "emad sweep ./llama --corpus wikitext --data ./data --executor processes:4x2",
    )
