"""``emad screen``: what would work on a model, and a file to decode with.

``emad sweep``: every family of rules on one model and corpus, by replay: the plugin's Pareto tables.

calibrate on one split → choose the front of each family on a second → show it on a third
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.cli.arguments import add_examples, add_executor
from emad_ref.errors import BadArgument
from emad_ref.files import require_writable, write_atomically
from emad_ref.measurements.study import BUDGETS, Budget, Study
from emad_ref.models.tokenizers import require_decoder_only
from emad_ref.screening.settings import DOCUMENTS
from emad_ref.text.documents import DEFAULT_CORPUS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from emad_ref.measurements.model import ModelMeasurements


SINGLE_THREADED = 50_000_000  # parameters: below, waking a second thread takes longer than it helps


def screen(args: argparse.Namespace) -> None:
    """Find out what would work on a model: how much any exit could save, what ours do, and what to decode with."""
    import torch

    from emad_ref.measurements.model_under_test import traced_token_flops
    from emad_ref.models.loading import load
    from emad_ref.report.tables import DEFAULT_WIDTH, plain_table
    from emad_ref.screening.exit import save_exit
    from emad_ref.screening.screen import screen as screened
    from emad_ref.screening.settings import ScreeningSettings, default_documents

    require_writable(args.out, "out")  # bad input is refused before the long passes, not after them
    given = DOCUMENTS if args.documents is None else args.documents
    settings = ScreeningSettings(args.corpus, args.data, given, args.rise, args.seed)  # refused before loading
    loaded = load(args.model)
    if args.documents is None:
        settings = replace(settings, documents=default_documents(traced_token_flops(loaded.geometry)))
    if args.threads is not None:
        if args.threads < 1:
            raise BadArgument("threads", args.threads, "a whole number ≥ 1")
        torch.set_num_threads(args.threads)
    elif loaded.geometry.parameters() < SINGLE_THREADED and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    found = screened(loaded, settings, progress=True)
    save_exit(args.out, found)
    width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    for title, rows in screening_tables(found.screened):
        print(title)
        print(plain_table(rows, width))
        print()
    for line in closing_lines(found.screened):
        print(textwrap.fill(line, width, subsequent_indent="  "))
    print(f"written to {args.out}")


def screening_tables(found: Mapping[str, Any]) -> list[tuple[str, Sequence[Mapping[str, str]]]]:
    """Titles and rows of a screening's record."""
    from emad_ref.report.tables import ABSENT

    def share(value: float | None) -> str:
        return ABSENT if value is None else f"{value:.1%}"

    def interval(value: list[float | None] | None, spelt: str) -> str:
        if value is None:
            return ABSENT
        number, low, high = (ABSENT if each is None else f"{each:{spelt}}" for each in value)
        return f"{number} [{low}, {high}]"

    levels = sorted({row["level"] for row in found["slack"]})
    kinds = list(dict.fromkeys((row["oracle"], row["readout"], row["depth"]) for row in found["slack"]))
    at = {(row["oracle"], row["readout"], row["depth"], row["level"]): row for row in found["slack"]}
    slack = [
        {"oracle": kind[0], "readout": kind[1], "depth": kind[2]}
        | {f"{level:.1%}: blocks": share(at[*kind, level]["blocks"]) for level in levels}
        | {f"{level:.1%}: net": share(at[*kind, level]["net"]) for level in levels}
        for kind in kinds
    ]
    reached = [
        {
            "rise ≤": share(row["level"]),
            "family": row["family"],
            "readout": row["readout"],
            "depth": row["depth"],
            "how": row["how"],
            "point": row["point"] or "none",
            "after": " ".join(map(str, row["probes"] or [])) or ABSENT,
            "blocks": share(row["blocks"][0] if row["blocks"] else None),
            "net [95 %]": interval(row["net"], ".1%"),
            "rise [95 %]": interval(row["rise"], "+.2%"),
        }
        for row in sorted([*found["reached"], *found["decoded"]], key=lambda row: row["level"])
    ]
    timed = [
        {"point": row["name"], "ms a token": f"{1000 * row['seconds']:.3g}", "as fast": f"{row['fast']:.2f}×"}
        for row in found["time"]
    ]
    return [
        ("slack: the most that a rule could save which knew how far every readout is from the end", slack),
        ("what families reach net of everything: chosen on validation text, shown on evaluation text", reached),
        *([(f"time on this machine, batch 1, threads {found['threads']}", timed)] if timed else []),
    ]


def closing_lines(found: Mapping[str, Any]) -> list[str]:
    """What the tables stand on, and what to do."""
    documents, tokens = found["documents"], found["tokens"]
    alike = {name: count for name, count in found.get("near_duplicates", {}).items() if count}
    seconds = ", ".join(f"{name} {spent:.0f} s" for name, spent in found["seconds"].items())
    return [
        f"{found['model']} on {found['corpus']}: perplexity {found['perplexity']:.4g} at full depth on "
        f"{tokens['evaluate']:,} tokens of {documents['evaluate']} documents; replayed rows have exact K and V, and of "
        "free depth are charged for copies",
        *(
            [f"near-duplicates left out, each for a document that was read: {_near_duplicate_counts(alike)}"]
            if alike
            else []
        ),
        f"lens of {'full rank' if found['lens']['rank'] is None else 'rank ' + str(found['lens']['rank'])}, "
        f"{found['lens']['steps']} steps; {seconds}",
        found["recommendation"],
        found["drafts"]["sentence"],
        "times, and with them whether and how it should draft for itself, belong to this machine; all else is the same "
        f"wherever it is screened with seed {found['seed']}",
    ]


def _near_duplicate_counts(found: Mapping[str, int]) -> str:
    """``12 to choose on, 9 to judge on``; choosing and certifying share a split."""
    words = {"calibrate": "to calibrate on", "choose": "to choose and certify on", "evaluate": "to judge on"}
    return ", ".join(f"{found[name]:,} {said}" for name, said in words.items() if name in found)


def screen_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="bundled name, folder or hub name")
    sub.add_argument("out", type=Path, metavar="OUT", help="a .safetensors file to write, for emad generate --exit")
    sub.add_argument(
        "--corpus", default=DEFAULT_CORPUS, metavar="CORPUS", help=f"text to screen on; {DEFAULT_CORPUS} by default"
    )
    sub.add_argument("--data", type=Path, metavar="DIR", help="folder with data sets, read before the hub")
    sub.add_argument("--documents", type=int, metavar="N", help="to choose on, to certify on and to judge on, each; "
                     f"{DOCUMENTS} by default, fewer for a model of more than about 50M parameters")  # fmt: skip
    sub.add_argument("--rise", type=float, default=0.01, metavar="SHARE",
                     help="of perplexity that may be lost at most; 0.01 by default")  # fmt: skip
    sub.add_argument("--threads", type=int, metavar="N", help="of torch; default: one for small models")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of what is held out and resampled; 0 by default")
    add_examples(
        sub,
        "emad screen emad-tiny-plain exit.safetensors",
        "emad screen emad-tiny-plain exit.safetensors --corpus world:mixed --documents 400",
        "emad screen ./llama exit.safetensors --corpus wikitext --data ./data --rise 0.02 --threads 2 --seed 1",
    )


OUT_SUFFIXES = (".csv", ".json")


SWEEP_KEYS = 2  # columns that name a row: the FLOPs saved and the family


def sweep(args: argparse.Namespace) -> None:
    """Print what every family does at the same net FLOPs, by replay: chosen on one split, judged on another."""
    from emad_ref.measurements.model import ModelMeasurements
    from emad_ref.measurements.model_under_test import open_model
    from emad_ref.measurements.run_resources import RunResources
    from emad_ref.report.tables import DEFAULT_WIDTH, plain_table
    from emad_ref.workers.dispatch import open_workers

    if args.out is not None and args.out.suffix not in OUT_SUFFIXES:  # refused before the long passes, not after them
        raise BadArgument("out", str(args.out), f"a file name that ends in {' or '.join(OUT_SUFFIXES)}")
    if args.out is not None:
        require_writable(args.out, "out")
    study = Study(corpus=args.corpus, data=args.data, budget=requested_budget(args))
    with open_model(args.model, study) as loaded, open_workers(args.executor) as crew:
        if not loaded.trained:
            raise BadArgument("model", loaded.name, "trained weights", "perplexity of noise says nothing")
        require_decoder_only(loaded)
        evidence = ModelMeasurements(loaded, study, RunResources(workers=crew))
        evidence.check()
        found = sweep_result(evidence)
    for title in dict.fromkeys(row["table"] for row in found["rows"]):
        print(title)
        width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
        rows = [_without_table(row) for row in found["rows"] if row["table"] == title]
        print(plain_table(rows, width, SWEEP_KEYS))
    for note in found["notes"]:
        print(note)
    tokens = found["tokens"]["evaluate"]
    print(f"full depth: perplexity {found['full depth perplexity']:.4g} on {tokens:,} tokens of {found['corpus']}")
    if args.out is not None:
        write_atomically(args.out, WRITERS[args.out.suffix](found), "out")
        print(f"written to {args.out}")


def requested_budget(args: argparse.Namespace) -> Budget:
    """The budget named, its splits cut to ``--documents`` windows each where that is given.

    Raises:
        BadArgument: no window at all.
    """
    budget, count = BUDGETS[args.budget], args.documents
    if count is None:
        return budget
    if count < 1:
        raise BadArgument("documents", count, "at least one window of each split")
    return replace(budget, calibrate=count, validate=count, evaluate=count)


def sweep_result(evidence: ModelMeasurements) -> dict[str, Any]:
    """The Pareto tables, their notes, and what they were made from. JSON values only; ``table`` names each row's."""
    from emad_ref import __version__

    shown, traces = evidence.rivals.exhibits(), evidence.traces
    splits = {"calibrate": traces.calibration, "validate": traces.validation, "evaluate": traces.evaluation}
    return {
        "model": evidence.name,
        "fingerprint": evidence.fingerprint,
        "corpus": evidence.corpus,
        "dtype": evidence.subject.dtype,
        "version": __version__,
        "window": evidence.subject.window,
        "tokens": {split: len(trace) for split, trace in splits.items()},
        "full depth perplexity": evidence.points.full_loss.perplexity,
        "rows": [{"table": table.title, **row} for table in shown.tables for row in table.rows],
        "notes": list(shown.notes),
    }


def _without_table(row: Mapping[str, Any]) -> dict[str, Any]:
    return {column: value for column, value in row.items() if column != "table"}


def result_json(found: Mapping[str, Any]) -> str:
    return json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def result_csv(found: Mapping[str, Any]) -> str:
    """The rows alone; shares are fractions, as everywhere in data."""
    file = io.StringIO()
    rows = found["rows"]
    columns = dict.fromkeys(column for row in rows for column in row)  # tables may differ in what they have no use for
    writer = csv.DictWriter(file, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


WRITERS = {".csv": result_csv, ".json": result_json}


def sweep_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="bundled name, folder or hub name of a decoder-only model")
    sub.add_argument("--corpus", metavar="CORPUS", help="as emad world takes it; chosen by model by default")
    sub.add_argument("--data", type=Path, metavar="DIR", help="folder with data sets, read before the hub")
    sub.add_argument("--budget", choices=tuple(BUDGETS), default="smoke", help="how much text; smoke by default")
    sub.add_argument(
        "--documents", type=int, metavar="N", help="windows to read of each split; the budget's by default"
    )
    sub.add_argument("--out", type=Path, metavar="FILE", help="FILE.json or FILE.csv")
    add_executor(sub)
    add_examples(
        sub,
        "emad sweep emad-tiny --documents 40",
        "emad sweep ./llama --corpus wikitext --data ./data --budget standard --out sweep.csv",
        "emad sweep ./llama --corpus wikitext --data ./data --executor processes:4x2",
    )
